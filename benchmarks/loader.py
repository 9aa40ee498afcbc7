"""Images per second that loaders deliver from the same files, in turn in one run: ours, plain torch, open_clip.

    python benchmarks/loader.py DATA --peer-python PEERS/bin/python

Everything up to a normalized float batch counts. What the `tiny` training step consumes is printed
with it.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image
from sides import Side, set_up, training_step
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from m1clip.config import Config, DataConfig, TrainConfig
from m1clip.data.augment import render
from m1clip.data.decoding import LazyImages
from m1clip.data.loader import TrainingSet, batches
from m1clip.hardware.timing import Timing, timing
from m1clip.training.inputs import RunInputs

SIZE, PREFETCH = 112, 2
PEER = Path(__file__).parent / "peers" / "open_clip_csv.py"
Round = Callable[[], float]  # images per second


def batch_seconds(
    feed: Iterator[Any], count: int, ready: int, finish: Callable[[Any], object] | None = None
) -> float:
    """Seconds of one of `count` batches, after the `ready` ones that were prefetched."""
    for _ in range(ready):
        next(feed)
    start = time.perf_counter()
    for _ in range(count):
        batch = next(feed)
        if finish is not None:
            finish(batch)
    return (time.perf_counter() - start) / count


def ours(job: RunInputs, data: TrainingSet, workers: int, count: int, rendered: bool) -> Round:
    """Our loader, with or without the rendering that the training step does."""
    feed = batches(data, 0, 10**6, workers, job.device.capabilities.worker_start, False)
    finish = (lambda b: render(b.pixels(), b.views, job.model.preprocess)) if rendered else None
    next(feed)
    return lambda: data.plan.batch / batch_seconds(feed, count, PREFETCH * workers, finish)


class PerSample(Dataset[tuple[Tensor, Tensor]]):
    """Pillow and transforms sample by sample, as in most training scripts: random crop, resize, flip, normalize."""

    def __init__(self, job: RunInputs) -> None:
        self.paths = [str(sample.image) for sample in job.splits["train"].samples]
        self.captions, self.size = job.splits["train"].captions, job.model.preprocess.image_size
        self.mean = torch.tensor(job.model.preprocess.mean).view(3, 1, 1)
        self.std = torch.tensor(job.model.preprocess.std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        area, x, y, flip, caption = torch.rand(5).tolist()
        image = Image.open(self.paths[index]).convert("RGB")
        side = round(min(image.size) * (0.6 + 0.4 * area) ** 0.5)
        left, top = round(x * (image.width - side)), round(y * (image.height - side))
        box = (left, top, left + side, top + side)
        image = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        if flip < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        first, end = self.captions.first[index], self.captions.first[index + 1]
        tokens = self.captions.tokens[first + int(caption * (end - first))]
        return (pixels - self.mean) / self.std, torch.from_numpy(tokens.astype(np.int64))


def plain_torch(job: RunInputs, workers: int, count: int) -> Round:
    """torch's DataLoader, without an end of the epoch, where it would start its workers again."""
    data = PerSample(job)
    sampler = RandomSampler(data, replacement=True, num_samples=10**7)
    batch_size = job.training.plan.batch
    feed = iter(DataLoader(data, batch_size, sampler=sampler, num_workers=workers))
    next(feed)
    return lambda: batch_size / batch_seconds(feed, count, PREFETCH * workers)


def tiny_step(job: RunInputs, count: int) -> Round:
    """What the step consumes: forward, backward and update on batches that lie ready."""
    update = training_step(job)
    ready = list(batches(job.training, 0, count, 0, "fork", False))
    update.run(ready[0], 0)

    def steps() -> float:
        start = time.perf_counter()
        for step, batch in enumerate(ready):
            update.run(batch, step)
        job.device.synchronize()
        return sum(map(len, ready)) / (time.perf_counter() - start)

    return steps


def write_table(job: RunInputs, path: Path) -> None:
    """The train samples as open_clip reads them: one row per caption."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerow(("filepath", "title"))
        for sample in job.splits["train"].samples:
            rows.writerows(
                (str(Path(str(sample.image)).resolve()), caption) for caption in sample.captions
            )


def measure(rounds: dict[str, Round], number: int) -> dict[str, Timing]:
    """Images per second of each, in turn, so that a busy moment of the machine affects all alike."""
    seconds_of: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(number):
        for name, run_epoch in rounds.items():
            seconds_of[name].append(run_epoch())
            time.sleep(0.5)  # workers fill their queues again, and must not take time from the next
    return {name: timing(values) for name, values in seconds_of.items()}


def best(results: dict[str, Timing], start: str) -> Timing | None:
    """The fastest number of workers of one loader."""
    return max(
        (t for name, t in results.items() if name.startswith(start)),
        key=lambda t: t.median,
        default=None,
    )


def report(results: dict[str, Timing]) -> list[tuple[str, float]]:
    """Print the table; gives the ratios."""
    print(f"{'images per second':<34}{'median':>9}   quartiles")
    for name, value in results.items():
        print(
            f"{name:<34}{value.median:>9,.0f}   {value.low:,.0f} to {value.high:,.0f}, n={value.n}"
        )
    ratios = []
    step, peer, plain = (
        results["tiny training step"],
        best(results, "open_clip"),
        best(results, "torch + PIL"),
    )
    for name in ("cached, float batch", "cached, uint8 batch"):
        for other, value in (
            ("open_clip's CSV path", peer),
            ("torch + PIL", plain),
            ("the tiny step", step),
        ):
            if value is None:
                print(f"{name} / {other}: not measured")
            else:
                ratios.append((f"{name} / {other}", results[name].median / value.median))
                print(f"{ratios[-1][0]}: {ratios[-1][1]:.1f}x")
    return ratios


def main() -> None:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="a set that --data takes, images in files")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--peer-python", help="a Python with open_clip; without it that path is not measured"
    )
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = DataConfig(source=(options.data,), cache="disk", cache_dir=scratch)
        job = set_up(Config(data=data, train=TrainConfig(batch_size=options.batch_size, steps=1)))
        trained = job.training
        refs = [sample.image for sample in job.splits["train"].samples]
        images = LazyImages(refs, trained.images.read(np.array([0])).shape[1])
        lazy = TrainingSet(
            images,
            trained.captions,
            trained.plan,
            trained.augmentation,
            full_length=trained.full_length,
        )
        rounds: dict[str, Round] = {
            "cached, float batch": ours(job, trained, 0, 20, True),
            "cached, uint8 batch": ours(job, trained, 0, 200, False),
            **{f"uncached, float batch, {w} workers": ours(job, lazy, w, 5, True) for w in (0, 2)},
            **{f"torch + PIL, {w} workers": plain_torch(job, w, 8) for w in (0, 2)},
            "tiny training step": tiny_step(job, 3),
        }
        version, peers = "", []
        if options.peer_python:
            table = Path(scratch) / "samples.tsv"
            write_table(job, table)
            for workers in (0, 1, 2):
                words = [options.peer_python, PEER, table, SIZE, options.batch_size, workers]
                peers.append(Side([str(word) for word in words]))
                version = peers[-1].ask("version")
                rounds[f"open_clip CSV, {workers} workers"] = functools.partial(peers[-1].ask, "8")
        results = measure(rounds, options.rounds)
        for peer in peers:
            # Its input stays open in workers forked since, so closing it is not enough.
            peer.ask("stop")
    machine = (
        f"{job.facts.cpu}, {torch.get_num_threads()} threads, {job.precision}, torch"
        f" {torch.__version__}, "
    )
    machine += f"Pillow {PIL.__version__}, Python {platform.python_version()}"
    machine += f", open_clip {version}" if version else ""
    print(f"\n{machine}; {SIZE} px, batch {options.batch_size}")
    ratios = report(results)
    if options.json:
        figures = {
            n: {"median": t.median, "low": t.low, "high": t.high, "n": t.n}
            for n, t in results.items()
        }
        options.json.write_text(
            json.dumps({"machine": machine, "images_per_second": figures, "ratios": dict(ratios)})
        )


if __name__ == "__main__":
    sys.exit(main())
