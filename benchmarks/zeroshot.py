"""Classes without labels: zero-shot by a model trained on captions, beside a linear probe of the same towers.

    python benchmarks/zeroshot.py MODEL DATA --test

The class of an image is the only one of ten words that its captions contain. Prompts, priors and
the weight decay of the probes are chosen on validation; with --test, the default and the best
zero-shot classifier, and the probes, are scored on the test split.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sides import RESULTS, machine, write
from torch import Tensor

import m1clip
from m1clip.data.sources import open_sources
from m1clip.data.types import Sample
from m1clip.evaluation.probe import fit_classifier
from m1clip.evaluation.statistics import wilson
from m1clip.inference.inputs import TEMPLATES

WORDS = ("beach", "bike", "boat", "car", "dog", "mountain", "pool", "skateboard", "snow", "street")
PROMPTS = {
    "the name alone": ("{}",),
    "m1clip's templates": TEMPLATES,
    "sentences as in captions": (
        "a {} .",
        "a man and a {} .",
        "a girl near a {} .",
        "people with a {} .",
        "the {} is outside .",
    ),
}
DEFAULT = ("m1clip's templates", "none")
PRIORS = ("none", "word frequency", "mean similarity", "both")
WEIGHT_DECAYS = (10.0, 100.0, 1000.0, 10_000.0)
UNLABELED = 500  # training images, for the mean similarity


def labeled(samples: list[Sample]) -> tuple[list[Sample], Tensor]:
    """The samples whose captions contain exactly one of the words, and its index."""
    labeled_samples, labels = [], []
    for sample in samples:
        words = set(re.findall("[a-z]+", " ".join(sample.captions).lower())) & set(WORDS)
        if len(words) == 1:
            labeled_samples.append(sample)
            labels.append(WORDS.index(words.pop()))
    return labeled_samples, torch.tensor(labels)


def accuracy(scores: Tensor, labels: Tensor) -> dict[str, Any]:
    """Top-1 accuracy with its interval, and the mean over classes: one class has half of the images."""
    hits = (scores.argmax(dim=1) == labels).double()
    value = float(hits.mean())
    per_class = statistics.fmean(float(hits[labels == label].mean()) for label in labels.unique())
    return {
        "top1": value,
        "interval": list(wilson(value, len(labels))),
        "per_class": per_class,
        "n": len(labels),
    }


class Zeroshot:
    """Scores of classes by prompts and priors.

    Priors come from training captions and unlabeled training images.
    """

    def __init__(self, model: Any, unlabeled: Tensor, captions: list[str]) -> None:
        self.model, self.unlabeled = model, unlabeled
        self.scale = float(model.clip.scale().detach())
        words = [set(re.findall("[a-z]+", caption.lower())) for caption in captions]
        counts = [1 + sum(word in words_of_caption for words_of_caption in words) for word in WORDS]
        self.log_frequency = torch.tensor([math.log(count / sum(counts)) for count in counts])

    def __call__(self, images: Tensor, prompts: str, prior: str) -> Tensor:
        """(images, classes)."""
        classes = self.model.class_vectors(WORDS, PROMPTS[prompts])
        scores = self.scale * images @ classes.T
        if prior in ("mean similarity", "both"):
            scores = scores - self.scale * (self.unlabeled @ classes.T).mean(dim=0)
        return scores + self.log_frequency if prior in ("word frequency", "both") else scores


@torch.inference_mode()
def encode(model: Any, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """(features of the image tower as its head sees them, unit vectors of the model)."""
    towers = dataclasses.replace(model.encoder.towers(), image=model.clip.image_tower)
    squares = (model.square(str(sample.image)) for sample in samples)
    features = torch.cat(list(towers.images(squares, len(samples))))
    head = model.clip.image_head
    standardized = head.standardized(features) if hasattr(head, "standardized") else features
    return standardized.clone(), model.clip.project_image(features).clone()


def main() -> None:
    """Encode, choose on validation, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a run or model folder")
    parser.add_argument(
        "data", help="a folder that m1clip train accepts, with train, val and test splits"
    )
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS / "zeroshot.json")
    options = parser.parse_args()
    model, source = m1clip.load(options.model), open_sources((options.data,))
    splits = ("train", "val", "test") if options.test else ("train", "val")
    data = {split: labeled(list(source.samples(split))) for split in splits}
    features, vectors = {}, {}
    for split, (samples, _) in data.items():
        print(f"{split}: {len(samples)} images with one of the words", flush=True)
        features[split], vectors[split] = encode(model, samples)
    train = list(source.samples("train"))
    unlabeled = encode(model, train[:: -(-len(train) // UNLABELED)])[1]
    score = Zeroshot(model, unlabeled, [caption for sample in train for caption in sample.captions])

    def name(prompts: str, prior: str) -> str:
        return f"zero-shot, {prompts}" + (f", prior: {prior}" if prior != "none" else "")

    choices = [(prompts, prior) for prompts in PROMPTS for prior in PRIORS]
    val = {
        name(*choice): accuracy(score(vectors["val"], *choice), data["val"][1])
        for choice in choices
    }
    best = max(choices, key=lambda choice: val[name(*choice)]["top1"])
    scorers: dict[str, tuple[dict[str, Tensor], Callable[[Tensor], Tensor]]] = {
        name(*choice): (vectors, functools.partial(score, prompts=choice[0], prior=choice[1]))
        for choice in (DEFAULT, best)
    }
    # Weights of a probe are in the span of the training images: fewer dimensions give the same
    # probe.
    basis = torch.linalg.qr(features["train"].T)[0]
    tower = {split: rows @ basis for split, rows in features.items()}
    scaled = {split: rows * rows.shape[1] ** 0.5 for split, rows in vectors.items()}
    for words, inputs in (("image tower", tower), ("embeddings", scaled)):
        probes = [
            fit_classifier(inputs["train"], data["train"][1], decay) for decay in WEIGHT_DECAYS
        ]
        scored = [accuracy(probe(inputs["val"]), data["val"][1]) for probe in probes]
        best_index = max(range(len(probes)), key=lambda index: float(scored[index]["top1"]))
        key = f"linear probe of the {words} on {len(data['train'][1]):,} labeled images"
        print(f"{key}: weight decay {WEIGHT_DECAYS[best_index]:g}")
        val[key], scorers[key] = scored[best_index], (inputs, probes[best_index])
    result = {
        "machine": machine(),
        "images": {split: len(samples) for split, (samples, _) in data.items()},
        "val": val,
    }
    if options.test:
        result["test"] = {
            key: accuracy(scorer(inputs["test"]), data["test"][1])
            for key, (inputs, scorer) in scorers.items()
        }
    result["rows"] = rows(result)
    for row in result["rows"]:
        print(f"{row['what']}: {row['figure']}")
    write(options.json, result)


def rows(result: dict[str, Any]) -> list[dict[str, str]]:
    """The table, for tools/results_table.py: the test split where it was scored."""
    split = "test" if "test" in result else "val"
    return [
        {
            "what": f"{key}, {len(WORDS)} classes from words of captions: {split} top-1",
            "figure": (
                f"{100 * figures_of['top1']:.1f}% [{100 * figures_of['interval'][0]:.1f},"
                f" {100 * figures_of['interval'][1]:.1f}], mean over classes {100 * figures_of['per_class']:.1f}%"
            ),
            "n": f"{figures_of['n']} images",
            "command": "python benchmarks/zeroshot.py MODEL DATA"
            + (" --test" if split == "test" else ""),
        }
        for key, figures_of in result[split].items()
    ]


if __name__ == "__main__":
    main()
