"""Adapt a trained model to other images with few of them: gain and forgetting of each recipe, and what auto picks.

    python benchmarks/adapt.py DATA --heads --json docs/results/adapt_heads.json       # CPU: cached features
    python benchmarks/adapt.py DATA --towers --new COCO --images 50 200 1000 4000 --json docs/results/adapt_towers.json
    python benchmarks/adapt.py --show docs/results/adapt_heads.json

DATA has captions with train, val and test splits. Images with a dog (a word in at least three
captions, `--word`) are the new domain; all others are the general set, on which the model to start
from is trained. With `--new`, that dataset is the new domain, and all of DATA the general set.
`--heads` starts from `--recipe frozen` on the pretrained towers, `--towers` from `tiny` with random
weights, 64 px, which is a small model: it shows which recipe gains and forgets, not how good a
large CLIP gets. Scores are on the test images of both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sides import machine, variables_for, write
from speedrun import write_splits

from m1clip.formatting import table
from m1clip.runlog import read_log

LEAST_CAPTIONS = 3  # with the word
# What each recipe adds to `m1clip train --init START`.
RECIPES: dict[str, list[str]] = {
    "heads": ["--recipe", "frozen"],
    "lora": ["--recipe", "finetune", "--lora", "8"],
    "last": ["--recipe", "finetune", "--unfreeze-image", "1", "--unfreeze-text", "1"],
    "all": ["--recipe", "finetune"],
}
# Heads are adapted, or new ones are trained on the same images without the model to start from.
HEAD_RECIPES = ("heads", "new")
TOWER_RECIPES = ("heads", "lora", "last", "all")
START_TOWERS = ["--recipe", "scratch", "--model", "tiny", "--image-size", "64"]


def main() -> None:
    """Train the start, then every recipe, size and seed; write the figures after each run."""
    options = parse()
    if options.show:
        print(show(json.loads(options.show.read_text(encoding="utf-8"))))
        return
    folder = options.work
    folder.mkdir(parents=True, exist_ok=True)
    write_splits(options.data, folder)
    data_folder = Path(options.data).resolve()
    if options.new:
        general = all_rows(folder, data_folder)
        new_folder = folder / "new"
        new_folder.mkdir(exist_ok=True)
        write_splits(options.new, new_folder)
        new = all_rows(new_folder, Path(options.new).resolve())
    else:
        new_folder = folder
        general, new = by_word(folder, data_folder, options.word)
    new["test"] = new["test"][: options.test]
    start = folder / f"start-{options.kind}"
    cache = options.cache or folder / "cache"
    shared = ["--device", options.device, "--cache-dir", str(cache.resolve()), *options.train]
    if not (start / "model").is_dir():
        first = (
            START_TOWERS if options.kind == "towers" else ["--recipe", "frozen", "--heads", "cca"]
        )
        length = ["--epochs", str(options.start_epochs)]
        table_file = write_table(folder / "general.jsonl", general, options.limit)
        train(start, [*first, *length, "--data", str(table_file), *shared])
    result: dict[str, Any] = {
        "machine": {**machine(), "data": Path(options.data).resolve().name},
        "kind": options.kind,
        "new": Path(options.new).resolve().name if options.new else f"images of {options.word}s",
        "start_images": len(general["train"][: options.limit]),
        "runs": [],
    }
    if options.json.exists():
        result["runs"] = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
    done = {(run["recipe"], run["images"], run["seed"]) for run in result["runs"]}
    recipes = options.recipes or (TOWER_RECIPES if options.kind == "towers" else HEAD_RECIPES)
    # Its features are not cached: both models encode these images in every run.
    few = {"train": general["train"][:2], "val": [], "test": general["test"][: options.general]}
    old = write_table(folder / "old.jsonl", few, None)
    for seed in options.seeds:
        for images in options.images:
            rows = draw(new, images, seed)
            if len(rows["train"]) < images:
                continue
            data = write_table(new_folder / f"new-{images}-{seed}.jsonl", rows, None)
            for recipe in recipes:
                if (recipe, images, seed) in done:
                    continue
                run = one_run(recipe, images, seed, data, old, start, shared, folder)
                result["runs"].append(run)
                write(options.json, result)
                print(json.dumps(run), flush=True)
    print(show(result))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", help="captioned images with train, val and test splits")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--heads", dest="kind", action="store_const", const="heads")
    kind.add_argument("--towers", dest="kind", action="store_const", const="towers")
    parser.set_defaults(kind="heads")
    parser.add_argument("--word", default="dog", help="what makes an image one of the new domain")
    parser.add_argument("--new", help="a dataset that is the new domain, instead of a word")
    parser.add_argument("--images", type=int, nargs="+", default=[50, 200, 1000])
    parser.add_argument("--recipes", nargs="+", help="default: all of this kind")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--start-epochs", type=int, default=8)
    parser.add_argument("--limit", type=int, help="train the start on this many images at most")
    parser.add_argument("--general", type=int, default=200, help="test images of the general set")
    parser.add_argument("--test", type=int, help="test images of the new domain, at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache", type=Path, help="features and images that are cached already")
    parser.add_argument("--work", type=Path, default=Path("adapt-work"), help="runs and caches")
    parser.add_argument(
        "--json", type=Path, default=Path("adapt.json"), help="continued if it exists"
    )
    parser.add_argument("--show", type=Path, help="print the table of a result file")
    parser.add_argument("--train", nargs=argparse.REMAINDER, default=[], help="last: for every run")
    return parser.parse_args()


Rows = dict[str, list[str]]  # split -> lines of a table


def by_word(folder: Path, data: Path, word: str) -> tuple[Rows, Rows]:
    """(lines of the general set, lines of the new domain) by split."""
    general: Rows = {}
    new: Rows = {}
    for split, lines in all_rows(folder, data).items():
        general[split], new[split] = [], []
        for line in lines:
            hits = sum(word in caption.lower() for caption in json.loads(line)["captions"])
            side = new if hits >= LEAST_CAPTIONS else general
            side[split].append(line)
    return general, new


def all_rows(folder: Path, data: Path) -> Rows:
    """The lines by split.

    Images are named as in `data`, to which a link leads, so that features in its cache are found.
    """
    rows: Rows = {}
    for split in ("train", "val", "test"):
        rows[split] = []
        for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            name = Path(row["image"]).relative_to(data)
            link = folder / name.parts[0]
            if not link.exists():
                link.symlink_to(data / name.parts[0])
            rows[split].append(json.dumps({**row, "image": str(name)}))
    return rows


def draw(rows: Rows, images: int, seed: int) -> Rows:
    """Random training images of a domain; its validation and test images stay."""
    train = list(rows["train"])
    random.Random(seed).shuffle(train)
    return {**rows, "train": train[:images]}


def write_table(path: Path, rows: Rows, limit: int | None) -> Path:
    """One JSON line per image; at most `limit` of the training split."""
    lines = [*rows["train"][:limit], *rows["val"], *rows["test"]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def train(out: Path, words: list[str]) -> float:
    """Seconds of a run of `m1clip train`."""
    command = [sys.executable, "-m", "m1clip", "train", *words, "--out", str(out)]
    begin = time.time()
    variables = {**os.environ, **variables_for(sys.executable)}
    done = subprocess.run(command, check=False, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.time() - begin


def one_run(
    recipe: str,
    images: int,
    seed: int,
    data: Path,
    old: Path,
    start: Path,
    shared: list[str],
    folder: Path,
) -> dict[str, Any]:
    """Adapt, and return the scores of both sets before and after."""
    out = folder / f"{recipe}-{images}-{seed}"
    words = ["--data", str(data), "--seed", str(seed), *shared]
    if recipe == "new":
        seconds = train(out, [*words, "--recipe", "frozen", "--heads", "cca"])
        end = next(record for record in read_log(out) if record["kind"] == "end")
        return {
            "recipe": recipe, "images": images, "seed": seed, "seconds": seconds,
            "new_after": end["mean_recall"], "best_step": end["best_step"],
        }  # fmt: skip
    init = ["--init", str(start), "--general-data", str(old)]
    seconds = train(out, [*words, *init, *RECIPES[recipe]])
    log = list(read_log(out))
    changes = {record["role"]: record for record in log if record["kind"] == "adaptation"}
    end = next(record for record in log if record["kind"] == "end")
    result: dict[str, Any] = {"recipe": recipe, "images": images, "seed": seed, "seconds": seconds}
    for role, record in changes.items():
        result[f"{role}_before"] = record["score_before"]
        result[f"{role}_after"] = record["score_after"]
    return {**result, "best_step": end["best_step"], "peak_bytes": end["peak_bytes"]}


def show(result: dict[str, Any]) -> str:
    """Mean recall on the new domain and on the general set, before and after.

    Mean and range of the seeds.
    """
    rows = []
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in result["runs"]:
        groups.setdefault((run["images"], run["recipe"]), []).append(run)
    for (images, recipe), runs in groups.items():
        cells = [f"{images:,}", recipe]
        for name in ("new_before", "new_after", "general_before", "general_after"):
            values = [100 * run[name] for run in runs if name in run]
            spread = f" ({min(values):.1f} to {max(values):.1f})" if len(set(values)) > 1 else ""
            cells.append(f"{statistics.fmean(values):.1f}{spread}" if values else "")
        rows.append(
            (*cells, f"{statistics.fmean(run['seconds'] for run in runs):.0f}", str(len(runs)))
        )
    head = (
        "images",
        "recipe",
        "new before",
        "after",
        "general before",
        "after",
        "seconds",
        "seeds",
    )
    return table(head, rows)


if __name__ == "__main__":
    main()
