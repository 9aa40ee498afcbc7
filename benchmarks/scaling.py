"""How the cost grows: images per second of the real training step against batch, resolution, tokens, model and threads.

    python benchmarks/scaling.py                 # about 10 minutes; docs/results/scaling.json
    python benchmarks/scaling.py --quick         # a few small points: a smoke test
    python tools/scaling_plot.py                 # docs/results/scaling.png

Each point is the median of several updates (the product's own `TrainStep`) on random images and token ids, beside the
limit that the measured rate of a large matrix product sets. Points that fit neither memory nor time are named.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from sides import RESULTS, machine, write

from m1clip.config import Config, ModelConfig, TrainConfig
from m1clip.data.augment import Augmentation, draw_views
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.hardware.device import Device, Precision, choose_precision
from m1clip.hardware.facts import read_facts
from m1clip.hardware.memory import return_freed_memory
from m1clip.hardware.timing import bf16_speedup, gemm_rate, timing
from m1clip.model.clip import build_clip
from m1clip.model.presets import CLIPConfig, flops_per_pair, preset, with_fields
from m1clip.training.autotune import choose_attention
from m1clip.training.step import TrainStep
from m1clip.training.transfer import Start

BATCH, MODEL_BATCH = 64, 16  # where another thing varies; where the model does
VOCABULARY = 5_000  # about what `bpe-cut` keeps of a set of photographs
LEAST_STEPS, MOST_STEPS, POINT_SECONDS = 3, 9, 2.0
EXPECTED_SHARE = 0.5  # of the matrix product rate, to foresee how long a point takes
MEMORY_SHARE = 0.7  # of what is free
GRID: dict[str, tuple[Any, ...]] = {
    "tokens": (8, 16, 24, 32, 48, 64, 77),
    "resolution": (64, 96, 128, 160, 192, 224),
    "model": ("tiny", "small", "ViT-S-16", "ViT-B-32", "ViT-B-16"),
    "batch": (8, 16, 32, 64, 128, 256, 512, 1024),
}
QUICK: dict[str, tuple[Any, ...]] = {"tokens": (8, 16), "resolution": (64, 96), "model": ("tiny",), "batch": (8, 16)}


@dataclass(frozen=True)
class Point:
    """One training step to be timed."""

    panel: str
    x: int | str
    threads: int
    shape: CLIPConfig
    batch: int

    @property
    def flops(self) -> float:
        """Of one sample, forward and backward."""
        return flops_per_pair(self.shape, self.shape.context_length)

    @property
    def pair_bytes(self) -> float:
        """What the backward pass keeps for one sample: 16 bf16 rows of the width a token and layer, and scores."""

        def tower(tokens: int, width: int, heads: int, layers: int) -> float:
            return tokens * layers * (2 * 18 * width + 6 * heads * tokens)

        vision, text = self.shape.own_towers
        image = tower(vision.tokens, vision.width, vision.heads, vision.layers)
        return image + tower(text.context_length, text.width, text.heads, text.layers)


def points(grid: dict[str, tuple[Any, ...]], threads: tuple[int, ...], quick: bool = False) -> Iterator[Point]:
    """All points, those of all threads first: they are what people ask for when time runs out."""
    base = with_fields(preset("tiny"), vocab_size=VOCABULARY)
    batch = 8 if quick else BATCH
    for count in sorted(threads, reverse=True):
        for panel, values in grid.items():
            for x in values:
                if panel == "tokens":
                    shape, size = with_fields(base, context_length=x), batch
                elif panel == "resolution":
                    shape, size = with_fields(base, image_size=x), batch
                elif panel == "model":
                    shape, size = with_fields(preset(x), vocab_size=VOCABULARY), min(batch, MODEL_BATCH)
                else:
                    shape, size = base, x
                yield Point(panel, x, count, shape, size)


def chunk_for(point: Point, free_bytes: float) -> int | None:
    """0 where the batch fits at once, else the largest power of two that does; None where not even 8 samples fit."""
    fits = int(MEMORY_SHARE * free_bytes / point.pair_bytes)
    if fits >= point.batch:
        return 0
    return 2 ** int(math.log2(fits)) if fits >= 8 else None


def random_batch(point: Point, draw: np.random.Generator) -> Batch:
    """Random bytes and token ids of full length, the EOT token last."""
    n, size, context = point.batch, point.shape.image_size, point.shape.context_length
    tokens = draw.integers(3, point.shape.vocab_size, (n, context))
    tokens[:, -1] = 2
    members = torch.arange(n)
    return Batch(
        images=torch.from_numpy(draw.integers(0, 256, (n, size, size, 3), dtype=np.uint8)),
        tokens=torch.from_numpy(tokens),
        sample_ids=members,
        caption_ids=members,
        image_index=members,
        views=draw_views(Augmentation(crop_min=0.6, flip=0.5, color_jitter=0.2), 0, 0, np.arange(n)),
    )


class Bench:
    """Times points on one device, in the precision that training would choose there."""

    def __init__(self) -> None:
        facts = read_facts()
        self.device = Device("cpu", facts)
        self.precision: Precision = choose_precision("auto", "cpu", facts, bf16_speedup(self.device))
        self.rates: dict[int, list[float]] = {}

    def rate(self, threads: int) -> float:
        """The matrix product rate, measured once more; the median of all so far is the limit that is drawn."""
        torch.set_num_threads(threads)
        self.rates.setdefault(threads, []).append(gemm_rate(self.device, self.precision))
        return statistics.median(self.rates[threads])

    def update(self, point: Point, chunk: int) -> TrainStep:
        """The product's training step for this point."""
        shape = point.shape
        _, text = shape.own_towers
        model = build_clip(with_fields(shape, eot_id=2))
        kind, _ = choose_attention(Start(shape), self.device, self.precision, point.batch, text.context_length)
        model.set_attention(kind)
        train = TrainConfig(
            batch_size=point.batch, micro_batch=chunk, device="cpu", precision=self.precision, steps=1000
        )
        config = Config(model=ModelConfig(), train=train)
        preprocess = Preprocess(image_size=shape.image_size)
        return TrainStep(model, config, self.device, self.precision, preprocess)

    def measure(self, point: Point, chunk: int) -> dict[str, Any]:
        """Images per second: median and quartiles of several updates after one or two that warm up."""
        torch.set_num_threads(point.threads)
        torch.manual_seed(0)
        update, batch = self.update(point, chunk), random_batch(point, np.random.default_rng(0))
        seconds: list[float] = []
        begin = time.perf_counter()
        while len(seconds) < LEAST_STEPS + 1 or (
            time.perf_counter() - begin < POINT_SECONDS and len(seconds) < MOST_STEPS + 1
        ):
            start = time.perf_counter()
            update(batch, len(seconds) + 1)[0].item()
            seconds.append(time.perf_counter() - start)
        found = timing([point.batch / value for value in seconds[1:]])
        return {"images_per_second": dataclasses.asdict(found), "step_seconds": statistics.median(seconds[1:])}


def run(grid: dict[str, tuple[Any, ...]], threads: tuple[int, ...], budget: float, quick: bool) -> dict[str, Any]:
    """Every point that fits memory and time; the others with the reason."""
    bench, begin = Bench(), time.perf_counter()
    measured: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for point in points(grid, threads, quick):
        place = {"panel": point.panel, "x": point.x, "threads": point.threads, "batch": point.batch}
        free = psutil.virtual_memory().available
        chunk = chunk_for(point, free)
        expected = (LEAST_STEPS + 1) * point.batch * point.flops / (EXPECTED_SHARE * bench.rate(point.threads))
        left = budget - (time.perf_counter() - begin)
        if chunk is None:
            reason = f"memory: a sample keeps about {point.pair_bytes / 1e9:.2f} GB, {free / 1e9:.1f} GB are free"
        elif expected > left:
            reason = f"time: about {expected:.0f} s wanted, {max(left, 0):.0f} s left of --minutes"
        else:
            found = bench.measure(point, chunk)
            measured.append({**place, "chunk": chunk, "flops_per_pair": point.flops, **found})
            speed = found["images_per_second"]["median"]
            print(
                f"{point.panel:>10} {point.x:>9}  {point.threads} threads  {speed:9.1f} images/s"
                f"{'  in chunks' if chunk else ''}",
                flush=True,
            )
            gc.collect()
            return_freed_memory()
            continue
        skipped.append({**place, "reason": reason})
        print(f"{point.panel:>10} {point.x:>9}  {point.threads} threads  not measured ({reason})", flush=True)
    rates = {str(count): dataclasses.asdict(timing(values)) for count, values in bench.rates.items()}
    return {
        "machine": machine(),
        "precision": bench.precision,
        "gemm_rate": rates,
        "points": measured,
        "skipped": skipped,
        "quick": quick,
        "vocabulary": VOCABULARY,
        "batch": BATCH,
        "model_batch": MODEL_BATCH,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="points that would not fit are left out")
    parser.add_argument("--threads", help="numbers with commas between; default: one, and one for each core")
    parser.add_argument("--quick", action="store_true", help="few small points: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling.json", help="write the figures there")
    options = parser.parse_args()
    cores = read_facts().cores
    threads = tuple(int(part) for part in options.threads.split(",")) if options.threads else (1, cores)
    result = run(QUICK if options.quick else GRID, tuple(set(threads)), 60 * options.minutes, options.quick)
    write(options.out, result)


if __name__ == "__main__":
    main()
