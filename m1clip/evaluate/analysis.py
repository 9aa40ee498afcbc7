"""What a model has learned and what it confuses: functions of features, cheap enough for every evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m1clip.evaluate.ranks import TIE, is_match, nearest

SAMPLE = 256  # captions whose negatives are compared
UNIFORM = 1024  # points whose distances are averaged
HARD, MEDIUM = 0.9, 0.5  # quantiles of similarity: the most similar tenth is hard, the less similar half easy
DIFFICULTIES = ("easy", "medium", "hard")
LENGTHS = ("short", "middle", "long")


@dataclass(frozen=True, slots=True)
class Share:
    """A recall or an accuracy, of how many."""

    value: float
    n: int


def alignment(image: Tensor, text: Tensor, owner: Tensor) -> float:
    """Mean squared distance of a caption and its picture; 0 is perfect, 2 is unrelated."""
    return float((image[owner].float() - text.float()).square().sum(dim=1).mean())


def uniformity(points: Tensor, limit: int = UNIFORM) -> float:
    """log mean exp(-2 d^2) over pairs of unit vectors: 0 = all in one place, about -4 = spread out evenly."""
    points = even_rows(points, limit).float()
    if len(points) < 2:
        return 0.0
    return float(torch.pdist(points).square().mul(-2).exp().mean().log())


def modality_gap(image: Tensor, text: Tensor) -> float:
    """Distance between the mean picture and the mean caption."""
    return float((image.float().mean(dim=0) - text.float().mean(dim=0)).norm())


def difficulty_by_similarity(
    image: Tensor, text: Tensor, owner: Tensor, keys: Tensor | None = None
) -> dict[str, Share]:
    """How often a picture scores its caption above another picture's, by how similar the two captions are."""
    chosen = even_indices(len(text), SAMPLE)
    words, mine = text[chosen].float(), owner[chosen]
    scores = image[mine].float() @ words.T  # (m, m): row i is the picture of caption i
    key = chosen if keys is None else keys[chosen]
    other = ~is_match(mine[:, None], key[None, :], owner, keys)
    similarity = (words @ words.T)[other]
    if not len(similarity):
        return {}
    wins = (scores.diagonal()[:, None] > scores + TIE)[other]
    medium, hard = similarity.quantile(torch.tensor([MEDIUM, HARD])).tolist()
    groups = (similarity < medium, (similarity >= medium) & (similarity < hard), similarity >= hard)
    return {
        name: Share(float(wins[group].float().mean()), int(group.sum()))
        for name, group in zip(DIFFICULTIES, groups, strict=True)
        if bool(group.any())
    }


def recall_by_group(rank: Tensor, groups: Mapping[str, Tensor], k: int = 1) -> dict[str, Share]:
    """recall@k of each group; a group is a bool for each rank, and one without members is left out."""
    hits = rank <= k
    return {
        name: Share(float(hits[group].float().mean()), int(group.sum()))
        for name, group in groups.items()
        if bool(group.any())
    }


def recall_by_length(rank: Tensor, lengths: Tensor) -> dict[str, Share]:
    """recall@1 of the shortest, the middle and the longest third of the captions."""
    low, high = lengths.float().quantile(torch.tensor([1 / 3, 2 / 3])).tolist()
    if low == high:
        return recall_by_group(rank, {"all": torch.ones_like(rank, dtype=torch.bool)})
    thirds = (lengths <= low, (lengths > low) & (lengths <= high), lengths > high)
    return recall_by_group(rank, dict(zip(LENGTHS, thirds, strict=True)))


@dataclass(frozen=True, slots=True)
class Confusion:
    """A caption that found another picture than its own, and by how much that one scored higher."""

    caption: int
    found: int
    right: int
    margin: float


def confusions(
    image: Tensor, text: Tensor, owner: Tensor, keys: Tensor | None = None, *, most: int
) -> list[Confusion]:
    """The captions whose wrong picture leads by most: one for each pair of pictures."""
    best, found = nearest(text, image, 1)
    own = (image[owner].float() * text.float()).sum(dim=1)
    key = torch.arange(len(text)) if keys is None else keys
    margin = torch.where(is_match(found[:, 0], key, owner, keys), -torch.inf, best[:, 0] - own)
    seen: set[tuple[int, int]] = set()
    worst: list[Confusion] = []
    for caption in margin.argsort(descending=True).tolist():
        if len(worst) == most or not margin[caption] > -torch.inf:
            break
        pair = (int(found[caption, 0]), int(owner[caption]))
        if pair not in seen:
            seen.add(pair)
            worst.append(Confusion(caption, *pair, float(margin[caption])))
    return worst


def even_indices(count: int, most: int) -> Tensor:
    """At most `most` places among `count`, evenly spread, always the same."""
    return torch.arange(min(count, most)) * count // min(count, most) if count else torch.arange(0)


def even_rows(rows: Tensor, most: int) -> Tensor:
    """At most `most` rows, evenly spread."""
    return rows[even_indices(len(rows), most)]


def as_plain(shares: Mapping[str, Share]) -> dict[str, list[float]]:
    """Ready for JSON: name -> [value, n]."""
    return {name: [round(share.value, 5), share.n] for name, share in shares.items()}


def group_masks(labels: Sequence[Mapping[str, Sequence[str]]], owner: Tensor) -> dict[str, Tensor]:
    """From the labels of each picture, {"colour": ["red", "blue"]}, a mask over captions for "colour/red" and so on."""
    members: dict[str, list[int]] = {}
    for picture, values in enumerate(labels):
        for attribute, words in values.items():
            for word in dict.fromkeys(words):
                members.setdefault(f"{attribute}/{word}", []).append(picture)
    masks = {}
    for name in sorted(members):
        inside = torch.zeros(len(labels), dtype=torch.bool)
        inside[members[name]] = True
        masks[name] = inside[owner]
    return masks
