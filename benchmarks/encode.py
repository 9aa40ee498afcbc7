"""How fast a trained model encodes JPEG files and captions, compared with onnxruntime in fp32 on the exported graph.

    python benchmarks/encode.py runs/lite0 DATA --also runs/frozen --json docs/results/encode.json

Both sides answer in turn, each in its own process with all cores, and go from files and strings to
float32 unit vectors. onnxruntime gets the same decoder with threads that decode ahead; it is also
measured on decoded images. Then the seconds of `m1clip eval`, the peak memory, and recall in bf16
against fp32. Takes 5 minutes on 2 idle cores. Without onnxruntime (m1clip[export]) the figures of
m1clip alone are printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from sides import Side, figures, in_turn, machine, spread, write

BATCH, CONTEXT_TOKENS, SINGLES, MEMORY_IMAGES, TEST_IMAGES = 16, 30, 25, 10_000, 1000


def decoded_ahead(model: Any, paths: list[str]) -> Iterator[np.ndarray]:
    """Batches of decoded images; threads decode the next ones meanwhile."""
    from m1clip.data.images import map_with_timeout

    squares = iter(map_with_timeout(paths, model.square, threads=os.cpu_count() or 1))
    while batch := list(itertools.islice(squares, BATCH)):
        yield np.stack(batch)


def own_jobs(model: Any, images: list[str], texts: list[str]) -> dict[str, Callable[[], object]]:
    """What m1clip is timed with."""
    return {
        "images": lambda: model.encode_image(images),
        "texts": lambda: model.encode_text(texts),
        "image": lambda: [model.encode_image(path) for path in images[:SINGLES]],
        "text": lambda: [model.encode_text(text) for text in texts[:SINGLES]],
    }


def onnx_jobs(model: Any, images: list[str], texts: list[str]) -> dict[str, Callable[[], object]]:
    """What onnxruntime is timed with, and two variants: images that are ready, texts padded to one length."""
    ready = list(decoded_ahead(model, images))
    padded = model.tokenizer.tokenize(texts, CONTEXT_TOKENS)
    same = np.full(len(texts), CONTEXT_TOKENS)
    return {
        "images": lambda: [model.pixels(batch) for batch in decoded_ahead(model, images)],
        "texts": lambda: model.encode_text(texts, 64),
        "image": lambda: [model.encode_image(path) for path in images[:SINGLES]],
        "text": lambda: [model.encode_text(text) for text in texts[:SINGLES]],
        "ready images": lambda: [model.pixels(batch) for batch in ready],
        "padded texts": lambda: model.tokens(padded, same, 64),
    }


def answer(path: str, inputs: Path) -> None:
    """One side: a job's name in, its seconds out."""
    from m1clip.inference import load

    model, values = load(path), json.loads(inputs.read_text())
    jobs = (onnx_jobs if (Path(path) / "image.onnx").is_file() else own_jobs)(model, **values)
    for line in sys.stdin:
        job = jobs[line.strip()]
        start = time.perf_counter()
        job()
        print(json.dumps({"answer": time.perf_counter() - start}), flush=True)


def peak_memory(model: str, images: list[str]) -> None:
    """Encode many images and print the process's peak memory in bytes."""
    import m1clip

    m1clip.load(model).encode_image([images[index % len(images)] for index in range(MEMORY_IMAGES)])
    # Not getrusage: its peak includes that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    print(1024 * int(status.partition("VmHWM:")[2].split()[0]))


def timed(command: list[str], folder: Path) -> tuple[float, str]:
    """Wall seconds of a command that is run in a folder, and its output."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=folder
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - start, done.stdout


def tiny_folder(folder: Path) -> str:
    """A `tiny` model with random weights."""
    from m1clip.data.images import Preprocess
    from m1clip.inference.model import Model
    from m1clip.inference.torch_encoder import TorchEncoder
    from m1clip.model.clip import build_clip
    from m1clip.model.presets import preset, with_fields
    from m1clip.text.bpe import BpeTokenizer

    tokenizer = BpeTokenizer()
    config = with_fields(preset("tiny"), vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id)
    Model(
        TorchEncoder(build_clip(config), tokenizer, Preprocess(image_size=config.image_size))
    ).save(folder / "tiny")
    return str(folder / "tiny")


def recall_change(model: str, data: str) -> dict[str, Any]:
    """Recall on the test split in bf16 against fp32: for each k, both values and the change with its interval."""
    from m1clip.evaluation.evaluate import open_split
    from m1clip.export.parity import recall_changes
    from m1clip.inference import load

    loaded = load(model, precision="fp32")
    split = open_split(loaded, (data,), "test", "cpu")
    exact = split.encode()
    loaded.encoder.precision = "bf16"
    return {
        "images": len(exact.image),
        "captions": len(exact.text),
        **recall_changes(exact, split.encode()),
    }


# (model, m1clip's job, onnxruntime's job or None, what it is, the goal)
FIGURES = (
    (
        "",
        "images",
        "images",
        "JPEG files to vectors, images per second",
        "1.2 times; 240 per second",
    ),
    (
        "",
        "images",
        "ready images",
        "images per second, onnxruntime on images that are already decoded",
        "",
    ),
    ("", "texts", "texts", "captions to vectors, texts per second", "1,200 per second"),
    (
        "",
        "texts",
        "padded texts",
        f"texts per second, onnxruntime on texts padded to {CONTEXT_TOKENS} tokens",
        "5 times",
    ),
    ("", "image", "image", "one image at a time, per second", "0.83 times"),
    ("", "text", "text", "one text at a time, per second", "0.83 times"),
    ("also", "images", "images", "JPEG files to vectors, images per second", "1.2 times"),
    ("also", "image", "image", "one image at a time, per second", "0.83 times"),
    ("tiny", "images", None, "JPEG files to vectors, images per second", "600 per second"),
)


def rates(options: argparse.Namespace, folder: Path, inputs: Path) -> dict[str, list[float]]:
    """Items per second of each side and job, such as "onnxruntime also: images", measured in turn."""
    from m1clip.export.onnx import write_onnx
    from m1clip.model.folder import read_model

    inputs_of_all = json.loads(inputs.read_text())
    images, texts = len(inputs_of_all["images"]), len(inputs_of_all["texts"])
    counts = {"images": images, "ready images": images, "texts": texts, "padded texts": texts}
    models = {"m1clip ": options.model, "m1clip tiny": tiny_folder(folder)}
    if options.also:
        models["m1clip also"] = options.also
    if find_spec("onnxruntime") is not None:
        for name in ("", *(["also"] if options.also else [])):
            path = folder / f"onnx-{name}"
            path.mkdir()
            write_onnx(path, read_model(Path(models[f"m1clip {name}"])))
            models[f"onnxruntime {name}"] = str(path)
    turns = dict.fromkeys(
        (f"{side} {name}", job)
        for name, own, theirs, *_ in FIGURES
        for side, job in (("m1clip", own), ("onnxruntime", theirs))
        if f"{side} {name}" in models
    )
    sides = {
        name: Side([sys.executable, __file__, path, str(inputs), "--side"])
        for name, path in models.items()
    }
    asks = {
        f"{side}: {job}": lambda side=side, job=str(job): (
            counts.get(job, SINGLES) / sides[side].ask(job)
        )
        for side, job in turns
    }
    rounds = in_turn(asks, options.rounds, warmup=1)
    for session in sides.values():
        session.__exit__()
    return {name: [answers[name] for answers in rounds] for name in asks}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The result: rates of all sides, ratios, seconds of evaluations, peak memory, change of recall."""
    from m1clip.data.sources import open_source

    result: dict[str, Any] = {
        "machine": machine(),
        "per_second": {},
        "ratios": {},
        "evaluation_seconds": {},
    }
    samples = open_source(options.data).samples("test")[:TEST_IMAGES]
    inputs = folder / "inputs.json"
    texts = [caption for sample in samples for caption in sample.captions][: options.texts]
    inputs.write_text(
        json.dumps(
            {"images": [str(item.image) for item in samples[: options.images]], "texts": texts}
        )
    )
    measured = rates(options, folder, inputs)
    result["per_second"] = {name: figures(values) for name, values in measured.items()}
    for name, own, theirs, *_ in FIGURES:
        if (peer := f"onnxruntime {name}: {theirs}") in measured:
            pairs = zip(measured[f"m1clip {name}: {own}"], measured[peer], strict=True)
            result["ratios"][peer] = figures(ours / other for ours, other in pairs)
    for model in filter(None, (options.model, options.also)):
        evaluate = ["-m", "m1clip", "eval", model, "--data", options.data]
        seconds = [timed(evaluate, folder)[0] for _ in range(options.evaluations + 1)]
        result["evaluation_seconds"]["also" if model == options.also else ""] = figures(seconds[1:])
        print("  evaluated", file=sys.stderr)  # the first time decodes the images into the cache
    memory = timed([str(Path(__file__).resolve()), options.model, str(inputs), "--memory"], folder)
    return result | {
        "peak_bytes": int(memory[1]),
        "recall": recall_change(options.model, options.data),
    }


def rows(result: dict[str, Any], also: str = "the default model") -> list[dict[str, Any]]:
    """Lines for docs/benchmarks.md."""
    named = {"": "", "also": f"{also}, ", "tiny": "`tiny`, "}
    lines: list[dict[str, Any]] = []
    for name, own, theirs, words, goal in FIGURES:
        values, peer = (
            result["per_second"].get(f"m1clip {name}: {own}"),
            f"onnxruntime {name}: {theirs}",
        )
        if values is None or (peer not in result["ratios"] and theirs not in (own, None)):
            continue
        figure = spread(values, ".0f")
        if peer in result["ratios"]:
            ratio, other = result["ratios"][peer], result["per_second"][peer]
            figure = (
                f"**{spread(ratio)}** times; m1clip {figure}, onnxruntime {spread(other, '.0f')}"
            )
        lines.append(
            {
                "what": f"encoding: {named[name]}{words}",
                "figure": figure,
                "goal": goal,
                "n": values["n"],
            }
        )
    for name, seconds in result["evaluation_seconds"].items():
        words = f"{named[name]}`m1clip eval` of 1,000 images and 5,000 captions, start to end"
        goal = "" if name else "under 12 s"
        lines.append(
            {"what": words, "figure": spread(seconds, ".1f", " s"), "goal": goal, "n": seconds["n"]}
        )
    subject = f"peak memory of a process that encodes {MEMORY_IMAGES:,} images"
    lines.append(
        {
            "what": subject,
            "figure": f"{result['peak_bytes'] / 1e6:.0f} MB",
            "goal": "700 MB",
            "n": 1,
        }
    )
    recall = result["recall"]
    changes = [(k, recall[k]) for k in recall if k.startswith("recall@")]
    figures = (
        f"{k} {100 * c['change']:+.2f} [{100 * c['low']:+.2f}, {100 * c['high']:+.2f}]"
        for k, c in changes
    )
    subject = (
        f"bf16 instead of fp32, change in points ({recall['images']:,} images,"
        f" {recall['captions']:,} captions)"
    )
    lines.append(
        {
            "what": subject,
            "figure": ", ".join(figures),
            "goal": "0 in the interval",
            "n": recall["images"],
        }
    )
    return [
        {**row, "command": "python benchmarks/encode.py MODEL DATA --also MODEL"} for row in lines
    ]


def main() -> None:
    """Measure, print the lines, keep them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model",
        help="a run with frozen towers (goals: EfficientNet-Lite0 and MiniLM), or any model",
    )
    parser.add_argument("data", help="captioned photographs with a test split")
    parser.add_argument(
        "--also", help="a second model, of which only images and the evaluation are measured"
    )
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--evaluations", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model, options.data = (os.path.abspath(path) for path in (options.model, options.data))
    options.also = options.also and os.path.abspath(options.also)
    if options.side:
        answer(options.model, Path(options.data))
    elif options.memory:
        peak_memory(options.model, json.loads(Path(options.data).read_text())["images"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(options, Path(folder))
        result["rows"] = rows(result)
        for row in result["rows"]:
            print(f"{row['what']:90} {row['figure']}{'  goal: ' * bool(row['goal'])}{row['goal']}")
        if options.json:
            write(options.json, result)


if __name__ == "__main__":
    main()
