"""Whether the interval of `m1clip data howmany` holds: what it predicts, and what more captions then add.

    python benchmarks/how_many.py flickr8k-112 --cache features --json docs/results/how_many.json
    python benchmarks/how_many.py --show docs/results/how_many.json

In each draw, some photos with one caption each are labels, and a learning curve predicts the gain
of more. Heads are then fitted with these labels and with more, and both are tested on other photos,
as many at a time as the curve has candidates. Features of the towers are computed once, in the cache
that benchmarks/label_order.py uses too. `WIDENING` was chosen on 300 -> 500.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from label_order import read_features
from sides import machine

from m1clip.formatting import table
from m1clip.io import write_json
from m1clip.training import learning_curve as curves

PHOTOS = 4_000  # of the data, of which all draws are made
TESTED = 1_200  # photos on which the gain is measured
STUDIES = ((300, 200, 20), (500, 500, 12))  # labels, more, draws


class Labels(NamedTuple):
    """Photos with one caption each."""

    images: np.ndarray
    texts: np.ndarray


def main() -> None:
    options = parse()
    if options.show is None:
        result = {"machine": machine(), "widening": curves.WIDENING, "draws": run(options)}
        write_json(options.json, result)
    else:
        result = json.loads(options.show.read_text(encoding="utf-8"))
    print(summary(result["draws"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", type=Path, help="a folder with captions.csv")
    parser.add_argument("--json", type=Path, default=Path("how_many.json"))
    parser.add_argument(
        "--cache", type=Path, default=Path("features"), help="where features are kept"
    )
    parser.add_argument("--draws", type=int, default=20, help="at most, of each study")
    parser.add_argument("--show", type=Path)
    options = parser.parse_args()
    if options.show is None and options.data is None:
        parser.error("give a dataset, or --show")
    return options


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All draws of all studies."""
    features = read_features(options.data, "train", options.cache)
    images, captions = features.images[:PHOTOS], features.captions[:PHOTOS]
    draws = []
    for labels, more, repeats in STUDIES:
        for seed in range(min(repeats, options.draws)):
            random = np.random.default_rng(1_000 + seed)
            order = random.permutation(len(images))
            texts = captions[
                np.arange(len(images)), random.integers(captions.shape[1], size=len(images))
            ]
            photos = Labels(images[order], texts[order])
            draws.append(
                {"labels": labels, "more": more, "seed": seed, **draw(photos, labels, more, seed)}
            )
            print(draws[-1], flush=True)
    return draws


def draw(photos: Labels, labels: int, more: int, seed: int) -> dict[str, float]:
    """What a curve predicts, and what is true."""
    began = time.perf_counter()
    curve = curves.learning_curve(
        photos.images[:labels], photos.texts[:labels], np.arange(labels), more=(more,), seed=seed
    )
    seconds = time.perf_counter() - began
    before, after = (
        100 * recall(photos, count, labels + more, curve.candidates)
        for count in (labels, labels + more)
    )
    gain = curve.gains[0]
    return {
        "candidates": curve.candidates,
        "now": 100 * curve.now,
        "true_now": before,
        "points": gain.points,
        "low": gain.low,
        "high": gain.high,
        "true_points": after - before,
        "seconds": seconds,
    }


def recall(photos: Labels, count: int, held_out: int, candidates: int) -> float:
    """Mean recall of heads on the first photos, on photos that no draw uses as labels."""
    tested = np.arange(held_out, held_out + TESTED)
    chosen = np.concatenate([np.arange(count), tested])
    index = np.arange(len(photos.images))
    pairs = curves.Pairs.select(photos.images, photos.texts, index, chosen)
    maps = curves._fit_heads(pairs, np.arange(count))
    groups = np.array_split(np.arange(count, count + TESTED), round(TESTED / candidates))
    return float(np.mean([curves._recall(pairs, group, *maps, None).mean() for group in groups]))


def summary(draws: list[dict[str, Any]]) -> str:
    rows = []
    for labels, more, _ in STUDIES:
        study = [row for row in draws if (row["labels"], row["more"]) == (labels, more)]
        if not study:
            continue
        mean = {key: statistics.fmean(row[key] for row in study) for key in study[0]}
        inside = sum(row["low"] <= row["true_points"] <= row["high"] for row in study)
        rows.append(
            (
                f"{labels:,} -> {labels + more:,}",
                f"{len(study)}",
                f"{mean['now']:.1f}",
                f"{mean['true_now']:.1f}",
                f"{mean['points']:+.1f} [{mean['low']:+.1f}, {mean['high']:+.1f}]",
                f"{mean['true_points']:+.1f}",
                f"{inside} of {len(study)}",
                f"{statistics.median(row['seconds'] for row in study):.1f}",
            )
        )
    head = ("labels", "draws", "now", "true", "predicted gain", "true gain", "inside", "seconds")
    return table(head, rows)


if __name__ == "__main__":
    main()
