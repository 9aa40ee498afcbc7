"""Everything that is measured on a held-out set from its features alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.evaluate.inbatch import BATCH, in_batch_accuracy
from m1clip.evaluate.interval import wilson
from m1clip.evaluate.metric import TOP1, Metric, Scores
from m1clip.evaluate.ranks import match_ranks
from m1clip.evaluate.retrieval import retrieval


def held_out(
    image: Tensor,
    text: Tensor,
    owner: Tensor,
    keys: Tensor | None = None,
    labels: Tensor | None = None,
    seed: int = 0,
) -> Scores:
    """Top-1 accuracy where images have class `labels`, retrieval both ways, and in-batch accuracy."""
    scores = retrieval(image, text, owner, keys, seed=seed)
    if labels is not None:
        scores = Scores((top1_accuracy(image, text, owner, labels),)) + scores
    if len(owner.unique()) >= BATCH:
        scores += Scores((in_batch_accuracy(image, text, owner, keys, seed=seed),))
    return scores


def top1_accuracy(image: Tensor, text: Tensor, owner: Tensor, labels: Tensor) -> Metric:
    """How often an image is closest to its own class; a class is the mean of its captions, and a tie is a miss."""
    classes = int(labels.max()) + 1
    sums = text.new_zeros(classes, text.shape[1], dtype=torch.float32).index_add_(
        0, labels[owner], text.float()
    )
    hits = match_ranks(image, F.normalize(sums, dim=-1), torch.arange(len(image)), labels) == 1
    value = float(hits.double().mean())
    return Metric(TOP1, value, 1 / classes, wilson(value, len(image)), len(image))
