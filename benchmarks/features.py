"""Training on kept features: image-caption images per second through forward, backward and optimizer.

    python benchmarks/features.py [--batch-size 1024] [--rounds 5] [--json FILE]

A sample is an image with one of its captions: a step of 1,024 images with five captions each is 5,120 samples, each of
which is a positive of the loss. The features are random numbers in the shapes of Flickr8k under the two towers of the
extra `towers` (6,000 images of 2,024 numbers, 30,000 captions of 384), mapped from a file, so nothing but m1clip is
needed. Timed is the product's own step with its own batches, gathered from the file; one round is one epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from m1clip.hardware.facts import environment

os.environ.update(environment(platform.system(), os.environ))  # as `m1clip` does, before torch is loaded

import numpy as np
import torch
from sides import machine

from m1clip.config import Config, OptimConfig, TrainConfig
from m1clip.data.augment import Augmentation
from m1clip.data.cache import RowTable
from m1clip.data.captions import CaptionTable
from m1clip.data.images import Preprocess
from m1clip.data.loader import BatchPlan, TrainingSet
from m1clip.hardware.device import Device, Precision
from m1clip.hardware.facts import read_facts
from m1clip.model.clip import build_clip
from m1clip.model.presets import CLIPConfig, HeadConfig, PretrainedImageConfig, PretrainedTextConfig
from m1clip.training.step import TrainStep

CAPTIONS = 5
HEAD = HeadConfig(kind="adapter", hidden=512, dropout=0.3)
MODEL = CLIPConfig(  # as --recipe frozen builds it
    image_tower=PretrainedImageConfig(),
    text_tower=PretrainedTextConfig(),
    image_head=HEAD,
    text_head=HEAD,
    embed_dim=256,
)


def mapped(folder: Path, name: str, rows: int, width: int, draw: np.random.Generator) -> np.ndarray:
    """(rows, width) random float16 numbers in a file."""
    path = folder / name
    draw.standard_normal((rows, width), dtype=np.float32).astype(np.float16).tofile(path)
    return np.asarray(np.memmap(path, np.float16, "r", shape=(rows, width)))


def feature_set(folder: Path, count: int, batch: int, image_width: int, text_width: int) -> TrainingSet:
    """The batches of a run on features."""
    draw = np.random.default_rng(0)
    texts = count * CAPTIONS
    images = RowTable(mapped(folder, "image", count, image_width, draw), draw.permutation(count)[:, None])
    captions = CaptionTable(
        tokens=np.zeros((texts, 1), np.int32),
        lengths=np.ones(texts, np.int32),
        caption_ids=np.arange(texts, dtype=np.int64),
        first=np.arange(0, texts + 1, CAPTIONS),
        pad_id=0,
        features=RowTable(mapped(folder, "text", texts, text_width, draw), draw.permutation(texts)),
    )
    plan = BatchPlan(count, batch, 0)
    return TrainingSet(None, captions, plan, Augmentation(), image_features=images, captions_per_image=CAPTIONS)


def measure(images: int, batch: int, rounds: int, precision: Precision) -> dict[str, object]:
    """Images per second of each round, after one to warm up."""
    facts = read_facts()
    device = Device("cpu", facts)
    torch.manual_seed(0)
    model = build_clip(MODEL)
    for tower in (model.image_tower, model.text_tower):
        tower.requires_grad_(False)
    config = Config(train=TrainConfig(batch_size=batch), optim=OptimConfig(optimizer="adamw", lr=1e-3))
    update = TrainStep(model, config, device, precision, Preprocess(image_size=224))
    with tempfile.TemporaryDirectory() as folder:
        widths = (model.image_tower.width, model.text_tower.width)
        data = feature_set(Path(folder), images, batch, *widths)
        steps, speeds = data.plan.steps_per_epoch, []
        for number in range(rounds + 1):
            begin = time.perf_counter()
            for step in range(number * steps, (number + 1) * steps):
                update(data[step], step)
            speeds.append(steps * batch * CAPTIONS / (time.perf_counter() - begin))
    timed = speeds[1:]
    return {
        "batch": batch,
        "captions_each": CAPTIONS,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "cpu": facts.cpu,
        "torch": torch.__version__,
        "n": len(timed),
        "images_per_second": [round(s) for s in timed],
        "median": round(statistics.median(timed)),
        "slowest": round(min(timed)),
        "fastest": round(max(timed)),
    }


def main() -> None:
    """Print a line for each batch and precision; write them all as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--precision", nargs="*", default=["bf16"])
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = [
        measure(asked.images, size, asked.rounds, precision)
        for precision in asked.precision
        for size in asked.batch_size
    ]
    for row in rows:
        print(
            f"{row['precision']}  {row['batch']:>5} images x {CAPTIONS} captions: {row['median']:>7,} images/s "
            f"({row['slowest']:,} to {row['fastest']:,}, n={row['n']} epochs, {row['threads']} threads)"
        )
    if asked.json:
        kept = {"machine": machine(), "runs": rows, "rows": [table_row(row) for row in rows]}
        asked.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def table_row(row: dict[str, Any]) -> dict[str, str]:
    """The line that tools/results_table.py prints."""
    return {
        "what": f"a step on cached features, {row['batch']} images, {CAPTIONS} captions each, {row['precision']}",
        "figure": f"{row['median']:,} images/s ({row['slowest']:,} to {row['fastest']:,})",
        "n": f"{row['n']} epochs",
        "goal": "50,000",
        "command": "python benchmarks/features.py",
    }


if __name__ == "__main__":
    main()
