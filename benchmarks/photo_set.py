"""A set of JPEG files with the statistics of photographs, for measurements of decoding.

Nothing here is measured.
"""

from __future__ import annotations

import csv
import functools
import io
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from m1clip.hardware.machine_info import usable_cpus

WIDTH, HEIGHT = 500, 375
CANVAS = (1500, 1100)
QUALITY = 90
CHUNK = 250
WORDS = ("red", "small", "old", "quiet", "round", "wooden", "bright", "wet", "tall", "empty")
THINGS = ("dog", "house", "boat", "tree", "bicycle", "child", "market", "river", "train", "field")


@functools.cache
def canvas(number: int) -> Image.Image:
    """Noise whose amplitude falls with its frequency, as in photographs, with some edges."""
    draw = np.random.default_rng(number)
    total = np.zeros((CANVAS[1], CANVAS[0], 3))
    cell, strength = 400, 1.0
    while cell >= 2:
        size = (-(-CANVAS[1] // cell), -(-CANVAS[0] // cell), 3)
        noise = Image.fromarray(draw.integers(0, 256, size, np.uint8))
        layer = np.asarray(noise.resize(CANVAS, Image.Resampling.BICUBIC), np.float64)
        total += strength * (layer - 128)
        cell, strength = cell // 2, 0.6 * strength
    for _ in range(40):
        left, top = draw.integers(0, CANVAS[0]), draw.integers(0, CANVAS[1])
        wide, high = draw.integers(20, 300, 2)
        total[top : top + high, left : left + wide] += draw.normal(0, 50, 3)
    return Image.fromarray((total + 128).clip(0, 255).astype(np.uint8))


def write_chunk(folder: Path, start: int, count: int) -> None:
    """Write some of the images: crops of the canvases, mirrored and tinted."""
    for number in range(start, start + count):
        draw = np.random.default_rng([7, number])
        left = int(draw.integers(0, CANVAS[0] - WIDTH))
        top = int(draw.integers(0, CANVAS[1] - HEIGHT))
        image = canvas(int(draw.integers(0, 4))).crop((left, top, left + WIDTH, top + HEIGHT))
        if draw.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=QUALITY)
        (folder / f"{number:06}.jpg").write_bytes(stream.getvalue())


def caption(number: int) -> str:
    """A caption of an image."""
    draw = np.random.default_rng([8, number])
    word, other = draw.choice(WORDS, 2, replace=False)
    return f"a {word} {draw.choice(THINGS)} beside a {other} {draw.choice(THINGS)}, number {number}"


def write_set(folder: Path, train: int, val: int = 500) -> list[Path]:
    """Write a folder with captions.csv and train.tsv (for open_clip), unless it is complete.

    Its training images.
    """
    count = train + val
    names = [folder / f"{number:06}.jpg" for number in range(count)]
    table = folder / "captions.csv"
    if not table.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(usable_cpus()) as pool:
            for start in range(0, count, CHUNK):
                pool.submit(write_chunk, folder, start, min(CHUNK, count - start))
        assert all(path.exists() for path in names)
        with (folder / "train.tsv").open("w", newline="", encoding="utf-8") as file:
            rows = [(str(names[number]), caption(number)) for number in range(train)]
            csv.writer(file, delimiter="\t").writerows([("filepath", "title"), *rows])
        with table.open("w", newline="", encoding="utf-8") as file:
            split = ["train"] * train + ["val"] * val
            lines = [(names[n].name, caption(n), split[n]) for n in range(count)]
            csv.writer(file).writerows([("image", "caption", "split"), *lines])
    return names[:train]
