"""What a model has learned and what it confuses: functions of features, cheap enough for every evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m1clip.evaluation.retrieval import TIE, check_features, is_match, nearest
from m1clip.evaluation.statistics import Metric, Scores, share_intervals

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
    """Mean squared distance of a caption and its image; 0 is perfect, 2 is unrelated."""
    return float((image[owner].float() - text.float()).square().sum(dim=1).mean())


def uniformity(points: Tensor, limit: int = UNIFORM) -> float:
    """log mean exp(-2 d^2) over samples of unit vectors: 0 = all in one place, about -4 = spread out evenly."""
    points = even_rows(points, limit).float()
    if len(points) < 2:
        return 0.0
    return float(torch.pdist(points).square().mul(-2).exp().mean().log())


def modality_gap(image: Tensor, text: Tensor) -> float:
    """Distance between the mean image and the mean caption."""
    return float((image.float().mean(dim=0) - text.float().mean(dim=0)).norm())


def difficulty_by_similarity(
    image: Tensor, text: Tensor, owner: Tensor, keys: Tensor | None = None
) -> dict[str, Share]:
    """How often an image scores its caption above another image's, by how similar the two captions are."""
    chosen = even_indices(len(text), SAMPLE)
    words, mine = text[chosen].float(), owner[chosen]
    scores = image[mine].float() @ words.T  # (m, m): row i is the image of caption i
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
    """A caption that found another image than its own, and by how much that one scored higher."""

    caption: int
    found: int
    right: int
    margin: float


def confusions(image: Tensor, text: Tensor, owner: Tensor, keys: Tensor | None = None, *, most: int) -> list[Confusion]:
    """The captions whose wrong image leads by most: one for each sample of images."""
    best, found = nearest(text, image, 1)
    own = (image[owner].float() * text.float()).sum(dim=1)
    key = torch.arange(len(text)) if keys is None else keys
    margin = torch.where(is_match(found[:, 0], key, owner, keys), -torch.inf, best[:, 0] - own)
    seen: set[tuple[int, int]] = set()
    worst: list[Confusion] = []
    for caption in margin.argsort(descending=True).tolist():
        if len(worst) == most or not margin[caption] > -torch.inf:
            break
        sample = (int(found[caption, 0]), int(owner[caption]))
        if sample not in seen:
            seen.add(sample)
            worst.append(Confusion(caption, *sample, float(margin[caption])))
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
    """From the labels of each image, {"colour": ["red", "blue"]}, a mask over captions for "colour/red" and so on."""
    members: dict[str, list[int]] = {}
    for image, values in enumerate(labels):
        for attribute, words in values.items():
            for word in dict.fromkeys(words):
                members.setdefault(f"{attribute}/{word}", []).append(image)
    masks = {}
    for name in sorted(members):
        inside = torch.zeros(len(labels), dtype=torch.bool)
        inside[members[name]] = True
        masks[name] = inside[owner]
    return masks


if TYPE_CHECKING:
    from rich.table import Table

GEOMETRY = {
    "alignment": "0 = caption and image in one place, 2 = unrelated",
    "uniformity_image": "0 = all images in one place; lower is more spread out",
    "uniformity_text": "the same for captions",
    "modality_gap": "distance of the mean image and the mean caption",
}


def analysis_tables(analysis: dict[str, Any]) -> list[tuple[str, Table]]:
    """Titles and tables: geometry first, then each way of dividing the captions, the weakest of a group first."""
    from rich import box
    from rich.table import Table

    tables: list[tuple[str, Table]] = []

    def table(title: str, *columns: str) -> Table:
        made = Table(box=box.SIMPLE_HEAD)
        tables.append((title, made))
        for place, column in enumerate(columns):
            made.add_column(column, justify="left" if place == 0 else "right", no_wrap=place < 2)
        return made

    geometry = table("the space of vectors", "what", "value", "how to read it")
    for name, words in GEOMETRY.items():
        if name in analysis:
            geometry.add_row(name.replace("_", " "), f"{analysis[name]:.3f}", words)
    titles = {
        "difficulty": "accuracy against other captions, by similarity (easy: lower half, hard: top tenth)",
        "negatives": "accuracy against made-up negatives of known difficulty",
        "length": "recall@1 by length of the caption (thirds)",
    }
    for key, title in titles.items():
        if analysis.get(key):
            made = table(title, key, "share", "n")
            for name, (value, n) in analysis[key].items():
                made.add_row(name, f"{100 * value:.1f}%", f"{n:,}")
    if analysis.get("groups"):
        made = table("recall@1 text to image, by what the image shows; the weakest first", "group", "recall@1", "n")
        for attribute, rows in by_attribute(analysis["groups"]).items():
            for name, (value, n) in rows:
                made.add_row(f"{attribute}: {name}", f"{100 * value:.1f}%", f"{n:,}")
            made.add_section()
    return tables


def by_attribute(groups: dict[str, list[float]]) -> dict[str, list[tuple[str, list[float]]]]:
    """{"colour/red": [0.9, 20]} as {"colour": [("red", [0.9, 20])]}, each sorted from the lowest."""
    found: dict[str, list[tuple[str, list[float]]]] = {}
    for name, share in groups.items():
        attribute, _, word = name.partition("/")
        found.setdefault(attribute, []).append((word, share))
    return {attribute: sorted(rows, key=lambda row: row[1][0]) for attribute, rows in found.items()}


LABELS = ("easy", "medium", "hard")


def negatives_accuracy(
    image: Tensor,
    caption: Tensor,
    negative: Tensor,
    owner: Tensor,
    label: Sequence[str],
    changed: Sequence[str | None] | None = None,
    seed: int = 0,
) -> Scores:
    """How often an image scores its true caption above a negative one; chance is one half.

    image: (n, d); caption, negative: (m, d), the true and the wrong caption of image owner[j],
    with its difficulty label[j] and, where it is one alone, the attribute changed[j].
    """
    check_features(image, negative, owner)
    if caption.shape != negative.shape:
        raise ValueError(f"one true caption a negative: {tuple(caption.shape)} for {tuple(negative.shape)}")
    for name, words in (("label", label), ("changed", changed)):
        if words is not None and len(words) != len(negative):
            raise ValueError(f"{name} has {len(words)} entries for {len(negative)} negative captions")
    hits = _beats(image, caption, negative, owner.to(image.device))
    owner = owner.cpu()
    known = [word for word in LABELS if word in label]
    words = known + sorted(set(label) - set(LABELS))
    metrics = [_accuracy(f"negatives/{word}", hits, owner, label, word, seed) for word in words]
    if changed is not None:
        metrics += [
            _accuracy(f"negatives/changed/{word}", hits, owner, changed, word, seed)
            for word in sorted({word for word in changed if word is not None})
        ]
    return Scores(tuple(metrics))


def _beats(image: Tensor, caption: Tensor, negative: Tensor, owner: Tensor) -> Tensor:
    """(m,) bool on the CPU: the true caption scores higher; a tie or a NaN is a miss."""
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        of_caption = image.float()[owner]
        true = (of_caption * caption.float()).sum(dim=1)
        false = (of_caption * negative.float()).sum(dim=1)
        return (true > false + TIE).cpu()


def _accuracy(name: str, hits: Tensor, owner: Tensor, words: Sequence[str | None], word: str, seed: int) -> Metric:
    chosen = torch.tensor([each == word for each in words])
    hit = hits[chosen]
    # Wilson where each image has one such negative; by image where several share it.
    interval = share_intervals(hit[:, None], owner[chosen], seed)[0]
    return Metric(name, float(hit.double().mean()), 0.5, interval, len(hit))
