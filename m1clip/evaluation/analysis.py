"""Analysis of what a model has learned, as functions of features, cheap enough for every evaluation.

A fraction is reported as [value, n].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m1clip.evaluation.retrieval import TIE, is_match, nearest
from m1clip.evaluation.statistics import Scores, metrics_of
from m1clip.formatting import percent, table

Fraction = list[float]

MAX_CAPTIONS = 256  # compared with each other by `difficulty_by_similarity`
MAX_POINTS = 1024  # compared with each other by `uniformity`
HARD, MEDIUM = 0.9, 0.5  # quantiles of similarity
DIFFICULTIES = ("easy", "medium", "hard")


def analyze(image: Tensor, text: Tensor, image_index: Tensor, keys: Tensor) -> dict[str, Any]:
    """The analysis for the run log; nothing is encoded for it."""
    return {
        "alignment": round(alignment(image, text, image_index), 5),
        "uniformity_image": round(uniformity(image), 5),
        "uniformity_text": round(uniformity(text), 5),
        "modality_gap": round(modality_gap(image, text), 5),
        "difficulty": difficulty_by_similarity(image, text, image_index, keys),
    }


def alignment(image: Tensor, text: Tensor, image_index: Tensor) -> float:
    """Mean squared distance between a caption and its image: 0 is perfect, 2 unrelated."""
    return float((image[image_index].float() - text.float()).square().sum(dim=1).mean())


def uniformity(points: Tensor) -> float:
    """log mean exp(-2 d^2) over pairs of unit vectors: 0 means collapsed, about -4 evenly spread."""
    points = points[even_indices(len(points), MAX_POINTS)].float()
    return float(torch.pdist(points).square().mul(-2).exp().mean().log()) if len(points) > 1 else 0.0


def modality_gap(image: Tensor, text: Tensor) -> float:
    """Distance between the mean image and the mean caption."""
    return float((image.float().mean(dim=0) - text.float().mean(dim=0)).norm())


def difficulty_by_similarity(
    image: Tensor, text: Tensor, image_index: Tensor, keys: Tensor | None = None
) -> dict[str, Fraction]:
    """How often an image scores its caption above another image's, by how similar the two captions are."""
    chosen = even_indices(len(text), MAX_CAPTIONS)
    captions, own = text[chosen].float(), image_index[chosen]
    scores = image[own].float() @ captions.T  # (m, m): row i is the image of caption i
    key = chosen if keys is None else keys[chosen]
    negative = ~is_match(own[:, None], key[None, :], image_index, keys)
    similarity = (captions @ captions.T)[negative]
    if not len(similarity):
        return {}
    wins = (scores.diagonal()[:, None] > scores + TIE)[negative]
    medium, hard = similarity.quantile(torch.tensor([MEDIUM, HARD])).tolist()
    level = (similarity >= medium).int() + (similarity >= hard)
    parts = [(name, wins[level == number]) for number, name in enumerate(DIFFICULTIES)]
    return {name: [round(float(part.float().mean()), 5), len(part)] for name, part in parts if len(part)}


@dataclass(frozen=True, slots=True)
class Confusion:
    """A caption that retrieved another image than its own, and by how much that image scored higher."""

    caption: int
    found: int
    right: int
    margin: float


def confusions(
    image: Tensor, text: Tensor, image_index: Tensor, keys: Tensor | None = None, *, limit: int
) -> list[Confusion]:
    """The captions whose wrong image leads by the largest margin, each pair of images once."""
    best, found = nearest(text, image, 1)
    own = (image[image_index].float() * text.float()).sum(dim=1)
    key = torch.arange(len(text)) if keys is None else keys
    margin = torch.where(is_match(found[:, 0], key, image_index, keys), -torch.inf, best[:, 0] - own)
    worst: dict[tuple[int, int], Confusion] = {}
    for caption in margin.argsort(descending=True).tolist():
        if len(worst) == limit or not margin[caption] > -torch.inf:
            break
        pair = (int(found[caption, 0]), int(image_index[caption]))
        worst.setdefault(pair, Confusion(caption, *pair, float(margin[caption])))
    return list(worst.values())


def negatives_accuracy(
    image: Tensor, caption: Tensor, negative: Tensor, image_index: Tensor, changed: Sequence[str]
) -> Scores:
    """How often an image scores its true caption above a negative one; chance is 1/2.

    image: (n, d); caption, negative: (m, d), the true and the negative caption of image image_index[j], which differ
    in the attribute changed[j].
    """
    with torch.autocast(image.device.type, enabled=False):
        own = image.float()[image_index]
        true, false = ((own * each.float()).sum(dim=1) for each in (caption, negative))
    hits = true > false + TIE  # a tie or a NaN is a miss
    metrics = metrics_of(["negatives"], hits[:, None], [0.5], image_index)
    for name in sorted(set(changed)):
        mask = torch.tensor([each == name for each in changed])
        metrics += metrics_of([f"negatives/changed_{name}"], hits[mask][:, None], [0.5], image_index[mask])
    return Scores(tuple(metrics))


def even_indices(count: int, limit: int) -> Tensor:
    """At most `limit` indices below `count`, evenly spaced."""
    return torch.arange(min(count, limit)) * count // max(1, min(count, limit))


GEOMETRY = {
    "alignment": "distance between a caption and its image: 0 is perfect, 2 unrelated",
    "uniformity_image": "how evenly images spread: 0 means collapsed, lower is better",
    "uniformity_text": "how evenly captions spread",
    "modality_gap": "distance between the mean image and the mean caption",
}
SIMILARITY = {"easy": "the lower half by similarity", "medium": "the middle", "hard": "the top tenth"}


def analysis_table(analysis: Mapping[str, Any]) -> str:
    """The geometry of the embedding space, and the accuracy by similarity of the wrong caption."""
    rows = [(name.replace("_", " "), f"{analysis[name]:.3f}", meaning) for name, meaning in GEOMETRY.items()]
    for name, (value, n) in analysis["difficulty"].items():
        rows.append((f"accuracy, {name}", percent(value), f"against {n:,} other captions, {SIMILARITY[name]}"))
    return table(("figure", "value", "meaning"), rows)
