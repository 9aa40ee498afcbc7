"""What new heads on frozen towers reach with 50 to 3,000 images, and what the trials of the recipe make of it.

    python benchmarks/few_images.py flickr8k-112 --cache CACHE --json docs/results/few_images.json
    python benchmarks/few_images.py --json docs/results/few_images.json --table    # for the docs

Each run is `m1clip train --recipe frozen` on images drawn at random, scored on the complete
validation split. Before the first step it scores the closed form (CCA). Then the heads are trained
for eight epochs: with each of two learning rates, and as the trials on held-out images decide
(docs/finetune.md), which may start from the heads of `general`. `--heads cca` in the row "rule"
keeps these out. The features of the towers are computed once, into CACHE.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sides import machine, write
from speedrun import recall_at_10, write_splits

from m1clip.runlog import read_log

SIZES = (50, 100, 300, 1000)
EPOCHS = 8
GENERAL = "rule, or general"  # the heads of the model general are another start
WAYS = {
    "lr 3e-4": ("--heads", "cca", "--lr", "3e-4"),
    "lr 1e-4": ("--heads", "cca", "--lr", "1e-4"),
    "rule": ("--heads", "cca"),
    GENERAL: (),
}


def train(
    words: Sequence[str], images: int, draw: int, folder: Path, cache: Path
) -> dict[str, Any]:
    """One run on some of the training images: validation recall@10 at each evaluation, and the trial."""
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines(True)
    table = folder / f"{images}-{draw}.jsonl"
    chosen = random.Random(draw).sample(lines, images)
    validation = (folder / "val.jsonl").read_text(encoding="utf-8")
    table.write_text("".join(chosen) + validation, encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = [sys.executable, "-m", "m1clip", "train", "--data", str(table), *words]
        command += ["--recipe", "frozen", "--epochs", str(EPOCHS), "--evaluations", str(EPOCHS)]
        command += ["--seed", str(draw), "--cache-dir", str(cache), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
        log = list(read_log(out))
    curve = [
        [entry["step"], round(100 * recall_at_10(entry), 2)]
        for entry in log
        if entry["kind"] == "eval"
    ]
    choices = next(entry["choices"] for entry in log if entry["kind"] == "start")
    return {"validation": curve, "trial": choices.get("heads")}


def table(runs: list[dict[str, Any]]) -> str:
    """Recall by number of images: before training, after it, and by the rule."""
    ways = [name for name in WAYS if any(run["way"] == name for run in runs)]
    head = ["images", "closed form", *ways, "draws"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for images in sorted({run["images"] for run in runs}):
        own = [run for run in runs if run["images"] == images]
        # Of a draw, the same in all ways that start from it.
        first = {run["draw"]: run["validation"][0][1] for run in own if run["way"] != GENERAL}
        cells = [f"{images:,}", shown(list(first.values()))]
        for way in ways:
            last = [run["validation"][-1][1] for run in own if run["way"] == way]
            cells.append(shown(last))
        lines.append(f"| {' | '.join([*cells, str(len(first))])} |")
    return "\n".join(lines)


def shown(values: list[float]) -> str:
    """Mean, and the draws."""
    if not values:
        return "-"
    return f"{statistics.fmean(values):.1f} ({', '.join(f'{value:.1f}' for value in values)})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", help="a folder with train, val and test splits")
    parser.add_argument("--json", type=Path, required=True, help="runs are added to this file")
    parser.add_argument("--cache", type=Path, default=Path("few-images-cache"))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, help="begin no run after this time")
    parser.add_argument("--table", action="store_true", help="print the table of the stored runs")
    parser.add_argument(
        "--options", nargs=argparse.REMAINDER, default=[], help="last: more for m1clip train"
    )
    options = parser.parse_args()
    deadline = time.time() + (options.seconds or float("inf"))
    result: dict[str, Any] = {"runs": []}
    if options.json.exists():
        result = json.loads(options.json.read_text(encoding="utf-8"))
    if options.table:
        print(table(result["runs"]))
        return
    if options.data is None:
        parser.error("name the data")
    done = {(run["images"], run["draw"], run["way"]) for run in result["runs"]}
    with tempfile.TemporaryDirectory() as folder:
        write_splits(options.data, Path(folder))
        for draw in options.draws:
            for images in options.sizes:
                for way in options.ways:
                    if (images, draw, way) in done or time.time() > deadline:
                        continue
                    run = train(
                        (*WAYS[way], *options.options), images, draw, Path(folder), options.cache
                    )
                    here = machine()
                    facts = {"images": images, "draw": draw, "way": way, "machine": here["cpu"]}
                    facts |= {"cuda": here["cuda"], "torch": here["torch"]}
                    result["runs"].append(facts | run)
                    result |= {"data": Path(options.data).resolve().name}
                    write(options.json, result)
                    curve = " ".join(f"{value:.1f}" for _, value in run["validation"])
                    print(f"{images} images, draw {draw}, {way}: {curve}", flush=True)
    print(table(result["runs"]))


if __name__ == "__main__":
    main()
