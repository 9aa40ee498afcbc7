"""Accuracy against captions with something changed, by difficulty and by what was changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m1clip.evaluate.interval import share_intervals
from m1clip.evaluate.metric import Metric, Scores
from m1clip.evaluate.ranks import TIE, check_features

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
    """How often a picture scores its true caption above a negative one; chance is one half.

    image: (n, d); caption, negative: (m, d), the true and the wrong caption of picture owner[j],
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
        picture = image.float()[owner]
        true = (picture * caption.float()).sum(dim=1)
        false = (picture * negative.float()).sum(dim=1)
        return (true > false + TIE).cpu()


def _accuracy(
    name: str, hits: Tensor, owner: Tensor, words: Sequence[str | None], word: str, seed: int
) -> Metric:
    chosen = torch.tensor([each == word for each in words])
    hit = hits[chosen]
    # Wilson where each picture has one such negative; by picture where several share it.
    interval = share_intervals(hit[:, None], owner[chosen], seed)[0]
    return Metric(name, float(hit.double().mean()), 0.5, interval, len(hit))
