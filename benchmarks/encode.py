"""How fast a trained model encodes JPEG files and captions, beside onnxruntime in fp32 on the exported graph.

    python benchmarks/encode.py runs/frozen DATA --json docs/results/encode.json

Both sides answer in turn, each in its own process with all cores, and go from files and strings to float32 unit
vectors. onnxruntime gets the same decoder with threads that decode ahead; it is also measured on decoded images.
Without onnxruntime (m1clip[export]) the figures of m1clip alone are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from sides import Side, machine, spread, write

from m1clip.hardware.timing import timing

BATCH, CONTEXT_TOKENS, SINGLES, MEMORY_IMAGES = 16, 30, 25, 10_000


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

    m1clip.load(model).encode_image([images[place % len(images)] for place in range(MEMORY_IMAGES)])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def timed(command: list[str], folder: Path) -> tuple[float, str]:
    """Wall seconds of a command that is run in a folder, and its output."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - start, done.stdout


def tiny_folder(folder: Path) -> str:
    """A `tiny` model with random weights."""
    from m1clip.data.images import Preprocess
    from m1clip.inference.encoder import Model
    from m1clip.model.clip import build_clip
    from m1clip.model.presets import preset, with_fields
    from m1clip.text.bpe import BpeTokenizer

    tokenizer = BpeTokenizer()
    config = with_fields(preset("tiny"), vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id)
    Model(build_clip(config), tokenizer, Preprocess(image_size=config.image_size)).save(folder / "tiny")
    return str(folder / "tiny")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Items per second of each side and job, measured in turn; seconds of an evaluation; peak memory."""
    from m1clip.data.sources import open_source

    samples = open_source(options.data).samples("test")[:1000]
    images = [str(sample.image) for sample in samples][: options.images]
    texts = [caption for sample in samples for caption in sample.captions][: options.texts]
    inputs = folder / "inputs.json"
    inputs.write_text(json.dumps({"images": images, "texts": texts}))
    counts = {"images": len(images), "texts": len(texts), "image": SINGLES, "text": SINGLES}
    counts |= {"ready images": len(images), "padded texts": len(texts)}
    models = {"m1clip": options.model, "tiny": tiny_folder(folder)}
    turns = [("m1clip", job) for job in ("images", "texts", "image", "text")] + [("tiny", "images")]
    if find_spec("onnxruntime") is not None:
        models["onnxruntime"] = str(folder / "onnx")
        timed(["-m", "m1clip", "export", options.model, "--to", "onnx", "--out", models["onnxruntime"]], folder)
        turns = [
            (side, job)
            for job in counts
            for side in ("m1clip", "onnxruntime")
            if (side, job) in turns or side != "m1clip"
        ]
        turns.append(("tiny", "images"))
    sides = {name: Side([sys.executable, __file__, path, str(inputs), "--side"]) for name, path in models.items()}
    rates: dict[str, list[float]] = {f"{side}: {job}": [] for side, job in turns}
    for number in range(options.rounds + 1):
        for side, job in turns:
            rate = counts[job] / sides[side].ask(job)
            if number:  # the first round warms up
                rates[f"{side}: {job}"].append(rate)
        print(f"  round {number} of {options.rounds}", file=sys.stderr)
    for each in sides.values():
        each.__exit__()
    result: dict[str, Any] = {"machine": machine(), "per_second": {}, "ratios": {}}
    for name, values in rates.items():
        result["per_second"][name] = dataclasses.asdict(timing(values))
        side, _, job = name.partition(": ")
        ours = rates["m1clip: images" if job == "ready images" else f"m1clip: {job.removeprefix('padded ')}"]
        if side == "onnxruntime":
            ratios = [own / theirs for own, theirs in zip(ours, values, strict=True)]
            result["ratios"][job] = dataclasses.asdict(timing(ratios))
    evaluate = ["-m", "m1clip", "eval", options.model, "--data", options.data]
    timed(evaluate, folder)  # decodes the images into the cache
    result["evaluation_seconds"] = dataclasses.asdict(timing([timed(evaluate, folder)[0] for _ in range(3)]))
    result["peak_bytes"] = int(
        timed([str(Path(__file__).resolve()), options.model, str(inputs), "--memory"], folder)[1]
    )
    return result


WORDS = {
    "images": "JPEG files to vectors, images per second",
    "texts": "captions to vectors, texts per second",
    "image": "one image at a time, per second",
    "text": "one text at a time, per second",
    "ready images": "images per second, onnxruntime on images that are already decoded",
    "padded texts": f"texts per second, onnxruntime on texts padded to {CONTEXT_TOKENS} tokens",
}


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines for docs/benchmarks.md."""
    found = []
    for job, words in WORDS.items():
        own = "images" if job == "ready images" else job.removeprefix("padded ")
        figure = f"m1clip {spread(result['per_second'][f'm1clip: {own}'], '.0f')}"
        if job in result["ratios"]:
            theirs = spread(result["per_second"][f"onnxruntime: {job}"], ".0f")
            figure = f"**{spread(result['ratios'][job])}** times; {figure}, onnxruntime {theirs}"
        elif own != job:
            continue
        found.append({"what": f"encoding: {words}", "figure": figure})
    tiny = spread(result["per_second"]["tiny: images"], ".0f")
    seconds = spread(result["evaluation_seconds"], ".1f", " s")
    found += [
        {"what": "encoding: `tiny`, JPEG files to vectors, images per second", "figure": tiny},
        {"what": "`m1clip eval` of 1,000 images and 5,000 captions, start to end", "figure": seconds, "n": 3},
        {
            "what": f"peak memory of a process that encodes {MEMORY_IMAGES:,} images",
            "figure": f"{result['peak_bytes'] / 1e6:.0f} MB",
            "n": 1,
        },
    ]
    n = result["per_second"]["m1clip: images"]["n"]
    return [{"n": n, "command": "python benchmarks/encode.py MODEL DATA", **row} for row in found]


def main() -> None:
    """Measure, print the lines, keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run with frozen towers, or any other model")
    parser.add_argument("data", help="captioned photographs with a test split")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model, options.data = (os.path.abspath(each) for each in (options.model, options.data))
    if options.side:
        answer(options.model, Path(options.data))
    elif options.memory:
        peak_memory(options.model, json.loads(Path(options.data).read_text())["images"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(options, Path(folder))
        result["rows"] = rows(result)
        for row in result["rows"]:
            print(f"{row['what']:75} {row['figure']}")
        if options.json:
            write(options.json, result)


if __name__ == "__main__":
    main()
