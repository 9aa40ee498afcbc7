"""How honest is the cut-off of `m1clip search`? Each caption of a split is a query, and half have their image removed.

    python benchmarks/search_cutoff.py runs/frozen flickr8k --json docs/results/search_cutoff.json

The weights and cut-offs are fitted on the validation split; the table and the reliability diagram show the test split.
A listed result is right if it is the image that the caption was written for. Compared with a threshold on the cosine
similarity, and one on the standard score among the library's images.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import m1clip
from m1clip.data.sources import open_source
from m1clip.formatting import percent, table
from m1clip.search.calibration import CAPTIONS, CUTOFF, WEIGHTS, fit_weights, probabilities, standard_scores

LISTED = 20  # results that a search lists at most
RESAMPLES = 1000
BINS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 1.0)


class Queries:
    """The nearest images of every caption of a split, where every second image is removed for its own captions."""

    def __init__(self, model: Any, samples: Any, captions: np.ndarray) -> None:
        images = np.asarray(model.encode_image([sample.image.open() for sample in samples]))
        texts = np.asarray(model.encode_text([text for sample in samples for text in sample.captions]))
        self.own = np.repeat(np.arange(len(samples)), [len(sample.captions) for sample in samples])
        self.present = self.own % 2 == 0
        self.library = len(images)
        mean = images.mean(axis=0)
        moments = mean, (images - mean).T @ (images - mean) / len(images)
        scores = texts @ images.T
        scores[~self.present, self.own[~self.present]] = -np.inf
        nearest = np.argsort(-scores, axis=1)[:, :LISTED]
        self.cosine = np.take_along_axis(scores, nearest, axis=1)
        self.right = nearest == self.own[:, None]
        self.standard = np.stack(
            [
                standard_scores(row, text, images[rows], moments, captions)
                for row, text, rows in zip(self.cosine, texts, nearest, strict=True)
            ]
        )

    def scores(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """(queries, LISTED) score of each result by each rule."""
        chance = probabilities(self.standard, self.library, weights)
        return {"cosine": self.cosine, "standard score": self.standard[..., 1], "probability": chance}

    def rates(self, score: np.ndarray, cut: float, queries: np.ndarray) -> dict[str, float]:
        """Precision, recall, false-positive rate and F1 of the results above a cut-off, for some of the queries."""
        listed = score[queries] >= cut
        found, present = listed & self.right[queries], self.present[queries]
        precision, recall = found.sum() / max(1, listed.sum()), found.sum() / max(1, present.sum())
        return {
            "precision": precision,
            "recall": recall,
            "false positives": listed[~present].any(axis=1).mean(),
            "F1": 2 * precision * recall / max(1e-9, precision + recall),
        }


def best_cut(queries: Queries, score: np.ndarray) -> float:
    """The cut-off with the best F1."""
    every = np.arange(len(score))
    cuts = np.quantile(score, np.linspace(0.5, 0.9995, 400))
    return float(max(cuts, key=lambda cut: queries.rates(score, cut, every)["F1"]))


def with_intervals(queries: Queries, score: np.ndarray, cut: float) -> dict[str, list[float]]:
    """{rate: [value, low, high]}: 95% by resampling images with their captions."""
    rng, every = np.random.default_rng(0), np.arange(len(score))
    rows = [np.flatnonzero(queries.own == image) for image in range(queries.library)]
    samples = [
        queries.rates(score, cut, np.concatenate([rows[i] for i in rng.integers(0, len(rows), len(rows))]))
        for _ in range(RESAMPLES)
    ]
    value = queries.rates(score, cut, every)
    return {name: [value[name], *np.quantile([s[name] for s in samples], [0.025, 0.975])] for name in value}


def reliability(chance: np.ndarray, right: np.ndarray) -> list[dict[str, float]]:
    """For each bin of predicted probability: its mean, the fraction that is right, and the number of results."""
    places = np.digitize(chance, BINS[1:-1])
    bins = [(chance[places == place], right[places == place]) for place in range(len(BINS) - 1)]
    return [{"predicted": p.mean(), "right": r.mean(), "results": len(p)} for p, r in bins if len(p)]


def diagram(bins: list[dict[str, float]], path: Path) -> None:
    """Save the reliability diagram."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(4.2, 4.2), layout="constrained")
    low, high = 0.002, 1.0
    axes.plot([low, high], [low, high], color="0.6", linestyle="--", linewidth=1)
    predicted, right = (np.array([each[name] for each in bins]) for name in ("predicted", "right"))
    error = 1.96 * np.sqrt(right * (1 - right) / np.array([each["results"] for each in bins]))
    axes.errorbar(predicted, right, yerr=np.minimum(error, right * 0.99), marker="o", capsize=2)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(
        xlabel="predicted probability", ylabel="fraction that is right", title="Flickr8k test, results of a search"
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    """Fit on validation, report on test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    model, source = m1clip.load(options.model), open_source(options.data)
    captions = np.asarray(model.encode_text(list(CAPTIONS)))
    val, test = (Queries(model, source.samples(split), captions) for split in ("val", "test"))
    rows, ones = val.standard.reshape(-1, 3), np.ones(val.right.size)
    weights = fit_weights(rows, val.right.ravel().astype(float), val.library, ones)
    fitted, tested = val.scores(weights), test.scores(weights)
    cuts = {name: best_cut(val, score) for name, score in fitted.items()}
    found = {name: with_intervals(test, score, cuts[name]) for name, score in tested.items()}
    bins = reliability(tested["probability"].ravel(), test.right.ravel())
    print(
        f"weights {np.round(weights, 3).tolist()} (in use: {WEIGHTS}), cut-off {cuts['probability']:.3f} ({CUTOFF})\n"
    )
    columns = ("precision", "recall", "false positives", "F1")
    cells = [
        (name, f"{cuts[name]:.3f}", *(f"{percent(v)} [{percent(a)}, {percent(b)}]" for v, a, b in rates.values()))
        for name, rates in found.items()
    ]
    print(table(("rule", "cut-off", *columns), cells), "\n")
    shown = [(percent(b["predicted"]), percent(b["right"]), f"{b['results']:,}") for b in bins]
    print(table(("predicted", "right", "results"), shown))
    if options.figure:
        diagram(bins, options.figure)
    if options.json:
        record = {"weights": weights.tolist(), "cutoffs": cuts, "test": found, "reliability": bins}
        options.json.write_text(json.dumps(record, indent=2, default=float) + "\n")


if __name__ == "__main__":
    main()
