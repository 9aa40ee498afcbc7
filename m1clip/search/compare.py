"""What training on labels gained: recall of two models on the labels that were held out, among the
same photos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import m1clip
from m1clip.data.images import FileImage
from m1clip.errors import UserError
from m1clip.evaluation.retrieval import ranks, retrieval
from m1clip.formatting import plural
from m1clip.inference.model import Model
from m1clip.search.labels import Label
from m1clip.search.query import Index
from m1clip.search.results import Photo

MAX_UNLABELLED = 500  # photos without a label among which those with one must be found
SHOWN_METRICS = ("mean_recall", "text_to_image/recall@1", "text_to_image/recall@10")
ENOUGH_TO_COMPARE = 20  # held-out photos; the interval of a difference is too narrow with fewer
GAIN_AT = 10  # the rank up to which a photo counts as found in the gain
RESAMPLES = 2000
COMPARE_SEED = 0


@dataclass(frozen=True)
class MetricPair:
    """A recall of both models, with 95% intervals: (value, low, high)."""

    name: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]


@dataclass(frozen=True)
class Verdict:
    """Which model to search with: the new one only if it is better by more than chance."""

    use_new: bool
    reason: str


@dataclass(frozen=True)
class ModelComparison:
    """Recall before and after training on labels, on held-out labels."""

    metrics: tuple[MetricPair, ...]
    photos: int  # held-out photos whose captions were searched for
    captions: int
    candidates: int  # photos among which they were searched
    # Points of recall@10 of captions, with the 95% interval of the paired difference.
    gain: tuple[float, float, float]
    verdict: Verdict


def compare_models(index: Index, labels: Mapping[str, Label], new_model: Path) -> ModelComparison:
    """Compare the model of an index with a new one on the labels of the test split, which neither
    was trained on.

    Candidates are the labelled photos and up to 500 others of the index.
    """
    named = index.photos_named(labels)
    photos = list(named.values()) + _others(index, named)
    after = m1clip.load(new_model)
    vectors, readable = _encode(after, index, photos)
    photos = [photos[number] for number in readable]
    before_images = index.vectors[[photo.row for photo in photos]].astype(np.float32)
    texts: list[str] = []
    image_index: list[int] = []
    for number, photo in enumerate(photos):
        label = labels.get(photo.path)
        if label is not None and label.split == "test":
            texts += label.captions
            image_index += [number] * len(label.captions)
    if not texts:
        raise UserError(
            "no label was held out, so the models cannot be compared; label more photos"
        )
    images = np.array(image_index)
    _, keys = np.unique([text.lower() for text in texts], return_inverse=True)
    sides = (
        (before_images, index.encode_texts(texts)),
        (vectors, np.asarray(after.encode_text(texts), np.float32)),
    )
    scores = [retrieval(image, text, images, keys) for image, text in sides]
    hits = [ranks(image, text, images, keys).text_to_image <= GAIN_AT for image, text in sides]
    pairs = tuple(
        MetricPair(name, *((score[name].value, *score[name].interval) for score in scores))
        for name in SHOWN_METRICS
    )
    gain = _gain(hits[1].astype(float) - hits[0], images)
    held_out = len(set(image_index))
    verdict = judge(pairs, gain, held_out)
    return ModelComparison(pairs, held_out, len(texts), len(photos), gain, verdict)


def judge(
    metrics: Sequence[MetricPair], gain: tuple[float, float, float], held_out: int
) -> Verdict:
    """Decide between the model before and the new one."""
    _, low, high = gain
    if all(metric.before == metric.after for metric in metrics):
        return Verdict(False, "training on these labels changed nothing")
    if held_out < ENOUGH_TO_COMPARE:
        return Verdict(
            False,
            f"whether the new model is better cannot be seen on {plural(held_out, 'held-out photo')};"
            f" {ENOUGH_TO_COMPARE} are needed",
        )
    if high < 0:
        return Verdict(False, "the new model finds fewer of the held-out photos")
    if low <= 0:
        return Verdict(False, "the difference may be chance, as its interval contains 0")
    return Verdict(True, "it finds more of the held-out photos, by more than chance")


def _others(index: Index, named: Mapping[str, Photo]) -> list[Photo]:
    """Some photos without a label, drawn at random."""
    rng = np.random.default_rng(COMPARE_SEED)
    drawn = rng.permutation(len(index.vectors))[: MAX_UNLABELLED + len(named)]
    labelled_rows = {photo.row for photo in named.values()}
    return [photo for photo in index.photos_at(drawn) if photo.row not in labelled_rows][
        :MAX_UNLABELLED
    ]


def _encode(model: Model, index: Index, photos: list[Photo]) -> tuple[np.ndarray, list[int]]:
    """(vectors of the photos that can be read, their indices)."""
    refs = [FileImage(str(index.root / photo.path), inside=str(index.root)) for photo in photos]
    failures: dict[int, str] = {}
    vector_of: dict[int, np.ndarray] = {}
    for indices, vectors in model.encoder.files(refs, failures):
        vector_of |= zip(indices, np.asarray(vectors, np.float32), strict=True)
    readable = sorted(vector_of)
    if not readable:
        raise UserError("none of the labelled photos can be read")
    return np.stack([vector_of[number] for number in readable]), readable


def _gain(differences: np.ndarray, image_index: np.ndarray) -> tuple[float, float, float]:
    """(mean, low, high) of paired differences, with the 95% interval of a bootstrap over photos."""
    _, group = np.unique(image_index, return_inverse=True)
    totals = np.bincount(group, weights=differences)
    counts = np.bincount(group)
    rng = np.random.default_rng(COMPARE_SEED)
    drawn = rng.integers(0, len(totals), (RESAMPLES, len(totals)))
    means = totals[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(differences.mean()), float(low), float(high)
