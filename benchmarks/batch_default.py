"""Does the batch size that `m1clip train` chooses for a card give at least the recall per minute of a small one?

    python benchmarks/batch_default.py --device cuda --json docs/results/batch_default.json

Synthetic images, whose recall means something. Each setting trains about as long as the others: its
number of steps is its measured speed times --seconds. The validation split is used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sides import machine, variables_for, write

METRICS = ("text_to_image/recall@1", "image_to_text/recall@1")


def train(
    options: argparse.Namespace, folder: Path, batch: int, factor: float, steps: int
) -> dict[str, Any]:
    """A run of `m1clip train` with synthetic images.

    Its seconds of training and recall on validation.
    """
    out = folder / f"{batch}-{factor:g}-{steps}"
    words = ["synthetic", "--synthetic-images", options.images, "--model", options.model]
    words += ["--device", options.device, "--steps", steps, "--eval-every", 0, "--out", out]
    words += ["--cache", "disk", "--cache-dir", folder / "cache"]
    words += ["--batch-size", batch] if batch else []
    words += ["--lr", options.lr * factor] if factor != 1 else []
    begin = time.perf_counter()
    command = [sys.executable, "-m", "m1clip", "train", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=variables_for(sys.executable), check=False
    )
    if done.returncode:
        raise SystemExit(f"{words}: {done.stderr[-2000:]}")
    log = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    (end,) = [record for record in log if record["kind"] == "end"]
    recorded = [record for record in log if record["kind"] == "step"]
    return {
        "batch": batch,
        "lr_factor": factor,
        "steps": end["step"],
        "training_seconds": end["time_use"]["training"],
        "command_seconds": time.perf_counter() - begin,
        "images_per_second": sorted(r["images_per_second"] for r in recorded)[len(recorded) // 2],
        "recall": {name: end[name] for name in METRICS},
        "mean_recall_at_1": sum(end[name] for name in METRICS) / len(METRICS),
        "peak_bytes": end["peak_bytes"],
        "said": [
            line
            for line in done.stdout.splitlines()
            if line.startswith(("batch", "training", "time"))
        ],
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--lr", type=float, default=1e-3, help="of the recipe, for factors")
    parser.add_argument(
        "--settings", nargs="+", default=["64:1:1838", "512:1:7000", "512:2.83:7000"],
        help="batch size, factor of the learning rate, images per second",
    )  # fmt: skip
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "options": vars(options) | {"json": None},
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        for setting in options.settings:
            batch, factor, speed = setting.split(":")
            steps = max(10, int(options.seconds * float(speed) / int(batch)))
            run = train(options, Path(temporary), int(batch), float(factor), steps)
            result["runs"].append(run)
            print(
                f"  batch {batch}, lr x {factor}: {run['steps']} steps in {run['training_seconds']:.1f} s "
                f"({run['command_seconds']:.0f} s in all), {run['images_per_second']:,.0f} images/s, "
                f"mean recall@1 {run['mean_recall_at_1']:.1%}, {run['peak_bytes'] / 1e9:.1f} GB",
                flush=True,
            )
            if options.json:
                write(options.json, result)


if __name__ == "__main__":
    main()
