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
from m1clip.evaluation.statistics import Metric, Scores, metrics_of
from m1clip.formatting import percent, table

Fraction = list[float]

MAX_CAPTIONS = 256  # compared with each other by `difficulty_by_similarity`
MAX_POINTS = 1024  # compared with each other by `uniformity`
HARD, MEDIUM = 0.9, 0.5  # quantiles of similarity: the top tenth is hard, the lower half easy
DIFFICULTIES = ("easy", "medium", "hard")
LENGTHS = ("short", "middle", "long")


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
    groups = (similarity < medium, (similarity >= medium) & (similarity < hard), similarity >= hard)
    return fraction_by_group(wins, dict(zip(DIFFICULTIES, groups, strict=True)))


def fraction_by_group(hits: Tensor, groups: Mapping[str, Tensor]) -> dict[str, Fraction]:
    """Fraction of hits (n,) bool in each group, a mask (n,); empty groups are left out."""
    return {
        name: [round(float(hits[group].float().mean()), 5), int(group.sum())]
        for name, group in groups.items()
        if bool(group.any())
    }


def recall_by_length(rank: Tensor, lengths: Tensor) -> dict[str, Fraction]:
    """recall@1 of the shortest, the middle and the longest third of the captions."""
    low, high = lengths.float().quantile(torch.tensor([1 / 3, 2 / 3])).tolist()
    if low == high:
        return fraction_by_group(rank == 1, {"all": torch.ones_like(rank, dtype=torch.bool)})
    thirds = (lengths <= low, (lengths > low) & (lengths <= high), lengths > high)
    return fraction_by_group(rank == 1, dict(zip(LENGTHS, thirds, strict=True)))


def group_masks(labels: Sequence[Mapping[str, Sequence[str]]], image_index: Tensor) -> dict[str, Tensor]:
    """From the labels of each image, {"color": ["red", "blue"]}, a mask over captions for "color/red" and so on."""
    members: dict[str, list[int]] = {}
    for image, attributes in enumerate(labels):
        for attribute, values in attributes.items():
            for value in values:
                members.setdefault(f"{attribute}/{value}", []).append(image)
    return {name: torch.isin(image_index, torch.tensor(images)) for name, images in sorted(members.items())}


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
    image: Tensor,
    caption: Tensor,
    negative: Tensor,
    image_index: Tensor,
    difficulty: Sequence[str],
    changed: Sequence[str | None],
) -> Scores:
    """How often an image scores its true caption above a negative one; chance is 1/2.

    image: (n, d); caption, negative: (m, d), the true and the negative caption of image image_index[j], with the
    negative's difficulty and the attribute it changes (None: not counted by attribute).
    """
    with torch.autocast(image.device.type, enabled=False):
        own = image.float()[image_index]
        true, false = ((own * each.float()).sum(dim=1) for each in (caption, negative))
    hits = true > false + TIE  # a tie or a NaN is a miss
    groups = {f"negatives/{name}": [each == name for each in difficulty] for name in DIFFICULTIES}
    attributes = sorted({name for name in changed if name is not None})
    groups |= {f"negatives/changed_{name}": [each == name for each in changed] for name in attributes}
    metrics: list[Metric] = []
    for name, members in groups.items():
        mask = torch.tensor(members)
        if bool(mask.any()):
            metrics += metrics_of([name], hits[mask][:, None], [0.5], image_index[mask])
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
TITLES = {
    "difficulty": "Accuracy against other captions, by similarity (easy: lower half, hard: top tenth)",
    "length": "Recall@1 text to image, by length of the caption (thirds)",
    "groups": "Recall@1 text to image, by content of the image, weakest first",
}


def analysis_tables(analysis: dict[str, Any]) -> str:
    """Tables of the geometry of the embedding space and of each breakdown."""
    geometry = [(name.replace("_", " "), f"{analysis[name]:.3f}", meaning) for name, meaning in GEOMETRY.items()]
    tables = [f"Embedding space\n\n{table(('figure', 'value', 'meaning'), geometry)}"]
    for key, title in TITLES.items():
        rows = list(analysis.get(key, {}).items())
        if key == "groups":
            rows.sort(key=lambda row: (row[0].partition("/")[0], row[1][0]))
        cells = [(name.replace("_", " ").replace("/", ": "), percent(value), f"{n:,}") for name, (value, n) in rows]
        if cells:
            tables.append(f"{title}\n\n{table(('group', 'fraction', 'n'), cells)}")
    return "\n\n".join(tables)
