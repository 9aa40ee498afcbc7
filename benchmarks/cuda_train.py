"""Milliseconds of `m1clip train`'s own step on CUDA, feed included: eager, as a CUDA graph, compiled.

    python benchmarks/cuda_train.py DATA --json docs/results/cuda_train.json
    python benchmarks/cuda_train.py synthetic --models tiny --batches 64

Each line is the product's TrainStep with its defaults (Muon, bf16, several captions, augmentation on the device, images
resident there). The loop runs as in training: the host never waits for the device inside a block of 20 steps; a block's
mean is one sample. `host` is what the host itself needs to hand a step over.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from sides import machine, set_up, training_step, write

from m1clip.config import from_dict
from m1clip.data.loader import batches
from m1clip.hardware.timing import timing

VARIANTS: dict[str, dict[str, bool]] = {
    "eager": {"cuda_graph": False},
    "CUDA graph": {"cuda_graph": True},
    "compiled CUDA graph": {"cuda_graph": True, "compile": True},
}
WARM, BLOCK = 60, 20  # steps: texts grow until their lengths have all been seen


def line(options: argparse.Namespace, model: str, batch: int, variant: str) -> dict[str, Any]:
    """One variant of one model at one batch size."""
    config = from_dict(
        {
            "model": {"name": model, **VARIANTS[variant]},
            "data": {"source": [options.data], **({"cache_dir": options.cache} if options.cache else {})},
            "train": {"device": options.device, "precision": "bf16", "batch_size": batch, "steps": 10_000},
            "transfer": {"recipe": "scratch"},
        },
        "cuda_train.py",
    )
    job = set_up(config)
    update = training_step(job)
    gc.collect()  # the line before, which hangs in a circle
    job.device.reset_peak()
    warm, block = (2, 2) if options.quick else (WARM, BLOCK)
    total = warm + block * options.blocks
    feed = enumerate(batches(job.training, 0, total, 0, "fork", pin=options.device == "cuda"))
    begin = time.perf_counter()
    for step, batch_ in itertools.islice(feed, warm):
        update(batch_, step)
    job.device.synchronize()
    ready = time.perf_counter() - begin
    samples, host = [], []
    for _ in range(options.blocks):
        begin = time.perf_counter()
        for step, batch_ in itertools.islice(feed, block):
            loss, _ = update(batch_, step)
        host.append((time.perf_counter() - begin) / block)
        job.device.synchronize()
        samples.append((time.perf_counter() - begin) / block)
    taken, captured, peak = timing(samples), update.cuda_graph, job.device.peak_bytes()
    update.reset_graph()
    return {
        "model": model,
        "batch": batch,
        "variant": variant,
        "captions": job.training.captions_per_image,
        "seconds": dataclasses.asdict(taken),
        "host_seconds": timing(host).median,
        "images_per_second": batch / taken.median,
        "first_60_steps_seconds": ready,
        "loss": float(loss),
        "recordings": captured.captures if captured else 0,
        "not_replayed": captured.disabled if captured else "",
        "peak_bytes": peak,
    }


def rows(lines: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What tools/results_table.py shows: each variant against the eager step."""
    found = []
    plain = {(one["model"], one["batch"]): one["seconds"]["median"] for one in lines if one["variant"] == "eager"}
    for one in lines:
        before, t = plain.get((one["model"], one["batch"])), one["seconds"]
        if before is None or one["variant"] == "eager":
            continue
        figure = f"**{before / t['median']:.1f}** times; {before * 1e3:.1f} ms against {t['median'] * 1e3:.2f} ms "
        figure += f"[{t['low'] * 1e3:.2f}, {t['high'] * 1e3:.2f}], {one['images_per_second']:,.0f} images/s"
        found.append(
            {
                "what": f"`m1clip train` on a GPU, {one['model']}, batch {one['batch']}: eager step / {one['variant']}",
                "figure": figure,
                "n": f"{t['n']} x {BLOCK} steps",
                "command": "python benchmarks/cuda_train.py DATA",
            }
        )
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="what m1clip train --data takes")
    parser.add_argument("--models", nargs="+", default=["tiny", "small"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--blocks", type=int, default=7, help="of 20 steps")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few steps: a smoke test")
    parser.add_argument("--cache", help="folder for decoded images")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "command": " ".join(sys.argv[1:]), "lines": []}
    for model, batch, variant in itertools.product(options.models, options.batches, options.variants):
        found = line(options, model, batch, variant)
        result["lines"].append(found)
        result["rows"] = rows(result["lines"])
        t = found["seconds"]
        print(
            f"{model} batch {batch} {variant:20} {t['median'] * 1e3:7.2f} ms "
            f"[{t['low'] * 1e3:.2f}, {t['high'] * 1e3:.2f}] n={t['n']} x {BLOCK} steps, "
            f"host {found['host_seconds'] * 1e3:.2f} ms, "
            f"{found['images_per_second']:,.0f} images/s x {found['captions']} captions, loss {found['loss']:.3f}"
            f"{', not replayed: ' + found['not_replayed'] if found['not_replayed'] else ''}",
            flush=True,
        )
        if options.json:
            write(options.json, result)
    if not options.json:
        print(json.dumps(result["machine"]))


if __name__ == "__main__":
    main()
