"""How many examples does `m1clip teach` need? Ten words of the captions are concepts, taught by 3 to 20 images.

    python benchmarks/search_teach.py runs/frozen flickr8k --json docs/results/search_teach.json

Examples and ranked images are of the validation and test splits together, which the model has not
seen. In each draw, 20 images of a word are set aside, the first 3, 5, 10 or 20 of them are the
examples, and all images that are not set aside are ranked; an image is right if at least three of
its captions contain the word. Compared with the word as a text query, the prototype (mean of the
examples) and a linear probe (logistic regression against 200 other images). The intervals are 95%,
by resampling words and, of each word, draws. Nothing is tuned here.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

import m1clip
from m1clip.data.sources import open_source
from m1clip.formatting import percent, table
from m1clip.search.concepts import fit_concept

# Of 50 images or more.
WORDS = ("dog", "boy", "girl", "woman", "water", "ball", "snow", "beach", "grass", "children")
COUNTS = (3, 5, 10, 20)
DRAWS = 20
RESAMPLES = 2000


def average_precision(scores: np.ndarray, right: np.ndarray) -> float:
    """Mean precision at each right image of a ranking."""
    hits = right[np.argsort(-scores)]
    return float((np.cumsum(hits)[hits] / (np.flatnonzero(hits) + 1)).mean())


def linear_probe(positive: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(dim,) weights of logistic regression with weight decay, both sides weighted equally."""
    inputs = (
        torch.tensor(np.concatenate([positive, others]), dtype=torch.float64)
        * positive.shape[1] ** 0.5
    )
    labels = (torch.arange(len(inputs)) < len(positive)).double()
    counts = torch.where(labels > 0, len(others) / len(positive), 1.0)
    weight, bias = (
        torch.zeros(inputs.shape[1], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
    )
    optimizer = torch.optim.LBFGS([weight.requires_grad_(), bias.requires_grad_()], max_iter=100)

    def loss() -> Any:
        optimizer.zero_grad()
        logits = inputs @ weight + bias
        value = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, labels, counts, reduction="sum"
        )
        value = value + weight.square().sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach().numpy()


def interval(values: np.ndarray) -> list[list[float]]:
    """For each number of examples [mean, low, high] of (words, draws, counts)."""
    rng, (words, draws, _) = np.random.default_rng(1), values.shape
    rows = rng.integers(0, words, (RESAMPLES, words, 1))
    means = values[rows, rng.integers(0, draws, (RESAMPLES, words, draws))].mean(axis=(1, 2))
    return np.stack(
        [values.mean(axis=(0, 1)), *np.quantile(means, (0.025, 0.975), axis=0)], axis=1
    ).tolist()


def main() -> None:
    """Teach each word from each number of examples."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("data")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, source = m1clip.load(options.model), open_source(options.data)
    samples = [sample for split in ("val", "test") for sample in source.samples(split)]
    images = np.asarray(model.encode_image([sample.image.open() for sample in samples]))
    captions = [
        [set(re.findall("[a-z]+", text.lower())) for text in sample.captions] for sample in samples
    ]
    mean = images.mean(axis=0)
    library_stats = mean, (images - mean).T @ (images - mean) / len(images)
    rng, shape = np.random.default_rng(0), (len(WORDS), DRAWS, len(COUNTS))
    precision_of = {
        name: np.zeros(shape)
        for name in ("the word as text", "prototype", "linear probe", "m1clip teach")
    }
    sizes = []
    for row, word in enumerate(WORDS):
        text = np.asarray(model.encode_text(word))[0]
        right = np.array([sum(word in caption for caption in group) >= 3 for group in captions])
        sizes.append(int(right.sum()))
        for draw in range(DRAWS):
            chosen = rng.permutation(np.flatnonzero(right))[: max(COUNTS)]
            others = images[rng.permutation(np.flatnonzero(~right))[:200]]
            ranked = np.setdiff1d(np.arange(len(images)), chosen)
            for column, count in enumerate(COUNTS):
                positive = images[chosen[:count]]
                taught = fit_concept(positive, positive[:0], library_stats, text, images)[0]
                directions = (text, positive.mean(axis=0), linear_probe(positive, others), taught)
                for values, direction in zip(precision_of.values(), directions, strict=True):
                    values[row, draw, column] = average_precision(
                        images[ranked] @ direction, right[ranked]
                    )
    print(f"images of the words: {dict(zip(WORDS, sizes, strict=True))}, {DRAWS} draws\n")
    precision_of["teach - text"] = precision_of["m1clip teach"] - precision_of["the word as text"]
    record = {name: interval(values) for name, values in precision_of.items()}
    cells = [
        (name, *(f"{percent(v)} [{percent(a)}, {percent(b)}]" for v, a, b in rows))
        for name, rows in record.items()
    ]
    print(table(("mean average precision", *(f"{count} examples" for count in COUNTS)), cells))
    if options.json:
        options.json.write_text(json.dumps({"counts": COUNTS, **record}, indent=2) + "\n")


if __name__ == "__main__":
    main()
