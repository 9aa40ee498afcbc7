"""How many examples does `m1clip teach` need? Ten words of the captions are concepts, taught by 3 to 20 images.

    python benchmarks/search_teach.py runs/frozen flickr8k --json docs/results/search_teach.json

Examples are images of the validation split whose captions contain the word at least three times; the average precision
is that of the ranking of the test split. Compared with the word as a text query, the prototype (mean of the examples)
and a linear probe (logistic regression of the examples against random images of the validation split).
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

WORDS = ("snow", "beach", "bike", "horse", "football", "baby", "swimming", "climbing", "skateboard", "grass")
COUNTS = (3, 5, 10, 20)
DRAWS = 5


def average_precision(scores: np.ndarray, right: np.ndarray) -> float:
    """Mean precision at each right image of a ranking."""
    hits = right[np.argsort(-scores)]
    return float((np.cumsum(hits)[hits] / (np.flatnonzero(hits) + 1)).mean())


def linear_probe(good: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(dim,) weights of logistic regression with weight decay, both sides weighted equally."""
    inputs = torch.tensor(np.concatenate([good, others]), dtype=torch.float64) * good.shape[1] ** 0.5
    labels = (torch.arange(len(inputs)) < len(good)).double()
    counts = torch.where(labels > 0, len(others) / len(good), 1.0)
    weight, bias = torch.zeros(inputs.shape[1], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    optimizer = torch.optim.LBFGS([weight.requires_grad_(), bias.requires_grad_()], max_iter=100)

    def loss() -> Any:
        optimizer.zero_grad()
        logits = inputs @ weight + bias
        value = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, counts, reduction="sum")
        value = value + weight.square().sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach().numpy()


def main() -> None:
    """Teach each word from each number of examples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, source = m1clip.load(options.model), open_source(options.data)
    images, shown = [], []
    for split in ("val", "test"):
        samples = source.samples(split)
        images.append(np.asarray(model.encode_image([sample.image.open() for sample in samples])))
        texts = [[set(re.findall("[a-z]+", text.lower())) for text in sample.captions] for sample in samples]
        shown.append(np.array([[sum(w in text for text in each) >= 3 for each in texts] for w in WORDS]))
    (val, test), (in_val, in_test) = images, shown
    mean = val.mean(axis=0)
    moments = mean, (val - mean).T @ (val - mean) / len(val)
    rng, found = np.random.default_rng(0), dict[str, dict[int, list[float]]]()
    for place, word in enumerate(WORDS):
        text = np.asarray(model.encode_text(word))[0]
        for count in COUNTS:
            for _ in range(DRAWS):
                rows = rng.permutation(np.flatnonzero(in_val[place]))[:count]
                others = val[rng.permutation(np.flatnonzero(~in_val[place]))[:200]]
                directions = {
                    "text": text,
                    "prototype": val[rows].mean(axis=0),
                    "linear probe": linear_probe(val[rows], others),
                    "m1clip teach": fit_concept(val[rows], val[:0], moments, text)[0],
                }
                for name, direction in directions.items():
                    score = average_precision(test @ direction, in_test[place])
                    found.setdefault(name, {}).setdefault(count, []).append(score)
    print(f"images of the words: {in_val.sum(axis=1).tolist()} in val, {in_test.sum(axis=1).tolist()} in test\n")
    cells = [(name, *(percent(float(np.mean(each[count]))) for count in COUNTS)) for name, each in found.items()]
    print(table(("mean average precision", *(f"{count} examples" for count in COUNTS)), cells))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
