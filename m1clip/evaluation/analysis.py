"""Analysis of what a model has learned, as functions of features, cheap enough for every evaluation.

A fraction is reported as [value, n].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m1clip.evaluation.retrieval import TIE, is_match, nearest
from m1clip.evaluation.statistics import Scores, metrics_of
from m1clip.formatting import percent, table

Fraction = list[float]

MAX_CAPTIONS = 256  # compared with each other by `difficulty_by_similarity`
MAX_POINTS = 1024  # compared with each other by `uniformity`
HARD, MEDIUM = 0.9, 0.5  # quantiles of similarity
DIFFICULTIES = ("easy", "medium", "hard")


def analyze(
    image: np.ndarray, text: np.ndarray, image_index: np.ndarray, keys: np.ndarray
) -> dict[str, Any]:
    """The analysis for the run log; nothing is encoded for it."""
    return {
        "alignment": round(alignment(image, text, image_index), 5),
        "uniformity_image": round(uniformity(image), 5),
        "uniformity_text": round(uniformity(text), 5),
        "modality_gap": round(modality_gap(image, text), 5),
        "difficulty": difficulty_by_similarity(image, text, image_index, keys),
    }


def alignment(image: np.ndarray, text: np.ndarray, image_index: np.ndarray) -> float:
    """Mean squared distance between a caption and its image: 0 is perfect, 2 unrelated."""
    return float(np.square(image[image_index] - text).sum(axis=1).mean())


def uniformity(points: np.ndarray) -> float:
    """log mean exp(-2 d^2) over pairs of unit vectors: 0 means collapsed, about -4 evenly spread."""
    points = points[even_indices(len(points), MAX_POINTS)].astype(np.float64)
    if len(points) < 2:
        return 0.0
    squares = np.square(points).sum(axis=1)
    distances = squares[:, None] + squares - 2 * points @ points.T  # (n, n) squared
    pairs = np.triu_indices(len(points), k=1)
    return float(np.log(np.exp(-2 * distances[pairs].clip(0)).mean()))


def modality_gap(image: np.ndarray, text: np.ndarray) -> float:
    """Distance between the mean image and the mean caption."""
    return float(np.linalg.norm(image.mean(axis=0) - text.mean(axis=0)))


def difficulty_by_similarity(
    image: np.ndarray, text: np.ndarray, image_index: np.ndarray, keys: np.ndarray | None = None
) -> dict[str, Fraction]:
    """How often an image scores its caption above another image's, by how similar the two captions are."""
    chosen = even_indices(len(text), MAX_CAPTIONS)
    captions, own = text[chosen], image_index[chosen]
    scores = image[own] @ captions.T  # (m, m): row i is the image of caption i
    key = chosen if keys is None else keys[chosen]
    negative = ~is_match(own[:, None], key[None, :], image_index, keys)
    similarity = (captions @ captions.T)[negative]
    if not len(similarity):
        return {}
    wins = (scores.diagonal()[:, None] > scores + TIE)[negative]
    medium, hard = np.quantile(similarity, [MEDIUM, HARD])
    level = (similarity >= medium).astype(int) + (similarity >= hard)
    parts = [(name, wins[level == number]) for number, name in enumerate(DIFFICULTIES)]
    return {name: [round(float(part.mean()), 5), len(part)] for name, part in parts if len(part)}


@dataclass(frozen=True, slots=True)
class Confusion:
    """A caption that retrieved another image than its own, and by how much that image scored higher."""

    caption: int
    found: int
    right: int
    margin: float


def confusions(
    image: np.ndarray,
    text: np.ndarray,
    image_index: np.ndarray,
    keys: np.ndarray | None = None,
    *,
    limit: int,
) -> list[Confusion]:
    """The captions whose wrong image leads by the largest margin, each pair of images once."""
    best, found = nearest(text, image, 1)
    own = (image[image_index] * text).sum(axis=1)
    key = np.arange(len(text)) if keys is None else keys
    margin = np.where(is_match(found[:, 0], key, image_index, keys), -np.inf, best[:, 0] - own)
    worst: dict[tuple[int, int], Confusion] = {}
    for caption in np.argsort(-margin, kind="stable").tolist():
        if len(worst) == limit or not margin[caption] > -np.inf:
            break
        pair = (int(found[caption, 0]), int(image_index[caption]))
        worst.setdefault(pair, Confusion(caption, *pair, float(margin[caption])))
    return list(worst.values())


def negatives_accuracy(
    image: np.ndarray,
    caption: np.ndarray,
    negative: np.ndarray,
    image_index: np.ndarray,
    changed: Sequence[str],
) -> Scores:
    """How often an image scores its true caption above a negative one; chance is 1/2.

    image: (n, d); caption, negative: (m, d), the true and the negative caption of image image_index[j], which differ
    in the attribute changed[j].
    """
    own = image[image_index]
    true, false = ((own * each).sum(axis=1) for each in (caption, negative))
    hits = true > false + TIE  # a tie or a NaN is a miss
    metrics = metrics_of(["negatives"], hits[:, None], [0.5], image_index)
    for name in sorted(set(changed)):
        mask = np.array([each == name for each in changed])
        metrics += metrics_of(
            [f"negatives/changed_{name}"], hits[mask][:, None], [0.5], image_index[mask]
        )
    return Scores(tuple(metrics))


def even_indices(count: int, limit: int) -> np.ndarray:
    """At most `limit` indices below `count`, evenly spaced."""
    return np.arange(min(count, limit)) * count // max(1, min(count, limit))


GEOMETRY = {
    "alignment": "distance between a caption and its image: 0 is perfect, 2 unrelated",
    "uniformity_image": "how evenly images spread: 0 means collapsed, lower is better",
    "uniformity_text": "how evenly captions spread",
    "modality_gap": "distance between the mean image and the mean caption",
}
SIMILARITY = {
    "easy": "the lower half by similarity",
    "medium": "the middle",
    "hard": "the top tenth",
}


def analysis_table(analysis: Mapping[str, Any]) -> str:
    """The geometry of the embedding space, and the accuracy by similarity of the wrong caption."""
    rows = [
        (name.replace("_", " "), f"{analysis[name]:.3f}", meaning)
        for name, meaning in GEOMETRY.items()
    ]
    for name, (value, n) in analysis["difficulty"].items():
        rows.append(
            (
                f"accuracy, {name}",
                percent(value),
                f"against {n:,} other captions, {SIMILARITY[name]}",
            )
        )
    return table(("figure", "value", "meaning"), rows)
