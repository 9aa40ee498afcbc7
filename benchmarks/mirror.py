"""What it costs to index photos with their mirror images: `m1clip index` of the same folder, with and without.

    python benchmarks/mirror.py runs/tiny --json docs/results/mirror.json

Makes JPEG files of two sizes, and indexes each folder by a copy of the model that encodes mirror
images and by one that does not, in turn. Ratios of processor seconds are little affected by what
else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from photo_set import CANVAS, HEIGHT, QUALITY, WIDTH, canvas
from sides import machine, write

from m1clip.model.folder import read_model, write_model_files

SIZES = {f"{WIDTH} x {HEIGHT}": (WIDTH, HEIGHT), f"{CANVAS[0]} x {CANVAS[1]}": CANVAS}


def write_photos(folder: Path, size: tuple[int, int], count: int) -> None:
    """Write JPEG files that are all different."""
    folder.mkdir()
    for number in range(count):
        image = canvas(number % 4)
        room = (image.width - size[0], image.height - size[1])
        left, top = (number * 37 % (space + 1) for space in room)
        image = image.crop((left, top, left + size[0], top + size[1]))
        image.putpixel((0, 0), (number % 256, number // 256 % 256, 0))
        image.save(folder / f"{number:05}.jpg", quality=QUALITY)


def models(path: Path, folder: Path) -> dict[str, Path]:
    """Copies of a model with mirror images and without."""
    saved = read_model(path)
    made = {}
    for name, mirror in (("mirror", True), ("plain", False)):
        made[name] = folder / name
        made[name].mkdir()
        config = replace(saved.config, mirror=mirror)
        weights = saved.build().state_dict()
        write_model_files(made[name], config, weights, saved.tokenizer, saved.preprocess)
    return made


def index(photos: Path, model: Path) -> tuple[float, float]:
    """(seconds, processor seconds) of one `m1clip index`, from nothing."""
    shutil.rmtree(photos / ".m1clip-index", ignore_errors=True)
    before, begin = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "m1clip", "index", str(photos), "--model", str(model)]
    subprocess.run(command, check=True, capture_output=True)
    seconds, after = time.perf_counter() - begin, os.times()
    return seconds, sum(after[2:4]) - sum(before[2:4])


def measure(path: Path, count: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of each model and size, and the ratio of each round."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        both = models(path, folder)
        for label, size in SIZES.items():
            photos = folder / label.replace(" ", "")
            write_photos(photos, size, count)
            for model in both.values():
                index(photos, model)  # reads the files once
            values = [
                {key: index(photos, model) for key, model in both.items()} for _ in range(rounds)
            ]
            ratios = [value["mirror"][1] / value["plain"][1] for value in values]
            row = {"photos": label, "count": count, "processor_ratio": statistics.median(ratios)}
            row |= {"ratios": ratios}
            for key in both:
                row[f"{key}_images_per_second"] = count / statistics.median(
                    v[key][0] for v in values
                )
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def table_rows(sizes: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What tools/results_table.py shows."""
    rows = []
    for size in sizes:
        low, high = min(size["ratios"]), max(size["ratios"])
        rows.append(
            {
                "what": f"`m1clip index` of {size['count']} JPEG files of {size['photos']} with"
                " `tiny`: processor time with mirror images / without",
                "figure": f"{size['processor_ratio']:.2f} [{low:.2f}, {high:.2f}] times",
                "n": str(len(size["ratios"])),
                "command": "python benchmarks/mirror.py runs/tiny",
            }
        )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.model, options.count, options.rounds)
    if options.json is not None:
        write(options.json, {"machine": machine(), "sizes": rows, "rows": table_rows(rows)})


if __name__ == "__main__":
    main()
