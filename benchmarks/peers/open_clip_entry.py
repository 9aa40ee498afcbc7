"""open_clip's training command as an entry of the speedrun: python open_clip_entry.py probe|train|encode JOB.json.

Runs in a Python that has open_clip and timm, and does not import m1clip.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import random
import re
import subprocess
import sys
import time
import types
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

MODEL = "ViT-256x6-16-112"
SHAPE = {
    "embed_dim": 256,
    "vision_cfg": {
        "image_size": 112,
        "layers": 6,
        "width": 256,
        "head_width": 64,
        "patch_size": 16,
    },
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 4},
}
# One worker keeps ahead of the step on two cores; a card needs as many as there are cores.
SETTINGS: dict[str, Any] = {
    "precision": "amp_bf16",
    "batch-size": 256,
    "beta1": "0.9",
    "beta2": "0.98",
    "eps": "1e-6",
    "grad-clip-norm": "1.0",
    "save-frequency": "0",
    "log-every-n-steps": "5",
    "epochs": "1",
    "dataset-type": "csv",
    "csv-separator": "\t",
    "csv-img-key": "filepath",
    "csv-caption-key": "title",
}
PROBE_SAMPLES = 2048
RESERVE = 0.03  # of the clock: the number of samples is fixed in advance, by the speed of the probe
LINE = re.compile(r"(\S+,\S+) \| INFO \|.* Train Epoch: \d+ \[\s*(\d+)/")
ENCODE_BATCH = 250


def probe(job: dict[str, Any]) -> dict[str, float]:
    """Samples per second, and the seconds before the first step and after the last."""
    begin, samples = time.time(), 8 * batch_size(job) if job["quick"] else PROBE_SAMPLES
    rate = run_training(job, "probe", samples)["images_per_second"]
    return {
        "images_per_second": rate,
        "around_seconds": max(time.time() - begin - samples / rate, 0.0),
    }


def train(job: dict[str, Any]) -> dict[str, Any]:
    """One epoch over as many samples as fit into the clock, so that the cosine ends in time."""
    speed, batch = job["probe"], batch_size(job)
    fits = (job["seconds"] * (1 - RESERVE) - speed["around_seconds"]) * speed["images_per_second"]
    samples = int(8 * batch if job["quick"] else fits) // batch * batch
    if samples < 2 * batch:
        raise SystemExit(
            f"open_clip: set-up takes {speed['around_seconds']:.0f} s; no two batches fit into the"
            " clock"
        )
    return run_training(job, "run", samples)


def batch_size(job: dict[str, Any]) -> int:
    """The batch size; the last option counts, as in open_clip."""
    values = [value for name, value in pairwise(job["options"]) if name == "--batch-size"]
    return int((values or [SETTINGS["batch-size"]])[-1])


def run_training(job: dict[str, Any], name: str, samples: int) -> dict[str, Any]:
    """open_clip_train.main on a table of `samples` rows; what it saw and how fast, from its log."""
    out, steps = Path(job["out"]), samples // batch_size(job)
    table = out / f"{name}.tsv"
    write_rows(Path(job["data"]), table, samples, job["seed"])
    (out / f"{MODEL}.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    workers = 1 if job["device"] == "cpu" else min(os.cpu_count() or 1, 16)
    settings = SETTINGS | {
        "model": MODEL,
        "train-data": table,
        "name": name,
        "warmup": max(1, steps // 10),
    }
    settings |= {"device": job["device"], "seed": job["seed"], "logs": out, "workers": workers}
    if job["device"] == "cpu" and not bf16_is_fast():
        settings["precision"] = "fp32"
    words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    command = [sys.executable, __file__, "cli", str(out), *words, *job["options"]]
    with (out / f"{name}.txt").open("w+", encoding="utf-8") as output:
        code = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
        output.seek(0)
        text = output.read()
    lines = [
        (datetime.strptime(when, "%Y-%m-%d,%H:%M:%S"), int(images_seen))
        for when, images_seen in LINE.findall(text)
    ]
    if code or len(lines) < 2:
        raise SystemExit(f"open_clip ended with {code}:\n{text[-3000:]}")
    # The first line is written after one batch, which also starts the loader.
    seconds = (lines[-1][0] - lines[0][0]).total_seconds()
    return {
        "steps": steps,
        "images_seen": samples,
        "images_per_second": (lines[-1][1] - lines[0][1]) / max(seconds, 1.0),
        "captions_per_image": 1,
        "curve": [],
    }


def bf16_is_fast() -> bool:
    """Whether this processor has instructions for bf16.

    Without them it is many times slower than fp32.
    """
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def write_rows(data: Path, path: Path, count: int, seed: int) -> None:
    """`count` training samples as open_clip reads them: shuffled passes over all captions, the last one cut."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    samples = [
        (row["image"], text) for row in rows if row["split"] == "train" for text in row["captions"]
    ]
    draw, chosen = random.Random(seed), []
    while len(chosen) < count:
        draw.shuffle(samples)
        chosen += samples[: count - len(chosen)]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t").writerows([("filepath", "title"), *chosen])


def encode(job: dict[str, Any]) -> dict[str, Any]:
    """Embeddings of a split by the last checkpoint, and what computed them."""
    import numpy as np
    import torch
    import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

    # isort: split
    import open_clip
    import open_clip_train
    import timm
    from PIL import Image

    torch.set_grad_enabled(False)
    out = Path(job["out"])
    open_clip.add_model_config(str(out))
    model, _, transform = open_clip.create_model_and_transforms(MODEL)
    checkpoint = torch.load(
        out / "run" / "checkpoints" / "epoch_1.pt", map_location="cpu", weights_only=True
    )["state_dict"]
    model.load_state_dict({key.removeprefix("module."): value for key, value in checkpoint.items()})
    model.eval()
    tokenizer = open_clip.get_tokenizer(MODEL)
    rows = [json.loads(line) for line in Path(job["rows"]).read_text(encoding="utf-8").splitlines()]
    texts = [text for row in rows for text in row["captions"]]
    image = [
        model.encode_image(
            torch.stack([transform(Image.open(row["image"]).convert("RGB")) for row in part])
        )
        for part in (
            rows[start : start + ENCODE_BATCH] for start in range(0, len(rows), ENCODE_BATCH)
        )
    ]
    text = [
        model.encode_text(tokenizer(texts[start : start + ENCODE_BATCH]))
        for start in range(0, len(texts), ENCODE_BATCH)
    ]
    for name, parts in (("image", image), ("text", text)):
        np.save(out / f"{name}.npy", torch.cat(parts).float().numpy())
    return {
        "version": f"open_clip {open_clip.__version__}, timm {timm.__version__}",
        "sources": [
            str(Path(str(module.__file__)).parent) for module in (open_clip, open_clip_train, timm)
        ],
    }


def stand_in(*names: str) -> None:
    """Replace modules that cannot be imported: open_clip's trainer imports them for formats that are not used here."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            top = types.ModuleType(name)
            top.__path__ = []  # type: ignore[attr-defined]
            top.read_csv = read_table  # type: ignore[attr-defined]
            for part in ("", ".filters", ".tariterators"):
                module = top if not part else types.ModuleType(name + part)
                module.__getattr__ = lambda word: type(word, (), {})  # type: ignore[method-assign]
                sys.modules[name + part] = module


def read_table(path: str, sep: str = ",") -> dict[str, Any]:
    """The columns of a table, as much of pandas as open_clip's CSV data set uses."""
    with open(path, newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file, delimiter=sep)

    class Column(list[str]):
        iloc = property(lambda self: self)

    return {name: Column(row[column] for row in rows) for column, name in enumerate(head)}


if __name__ == "__main__":
    if sys.argv[1] == "cli":  # open_clip's own command, with one more model
        import torchvision_ops  # noqa: F401  first: open_clip imports torchvision

        # isort: split
        import open_clip

        stand_in("pandas", "webdataset", "braceexpand")
        from open_clip_train.main import main

        open_clip.add_model_config(sys.argv[2])
        main(sys.argv[3:])
    else:
        job = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
        answer = {"probe": probe, "train": train, "encode": encode}[sys.argv[1]](job)
        (Path(job["out"]) / f"{sys.argv[1]}.json").write_text(json.dumps(answer), encoding="utf-8")
