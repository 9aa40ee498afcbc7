"""Retrieval over the whole held-out set: recall@k and median rank, both ways, with chance and interval."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m1clip.evaluate.chance import median_rank_chance, recall_chance
from m1clip.evaluate.interval import median, median_interval, share_intervals, wilson
from m1clip.evaluate.metric import MEAN_RECALL, Metric, Scores
from m1clip.evaluate.ranks import ranks

RECALL_AT = (1, 5, 10)


def retrieval(
    image: Tensor,
    text: Tensor,
    owner: Tensor,
    keys: Tensor | None = None,
    at: Sequence[int] = RECALL_AT,
    seed: int = 0,
    chunk: int | None = None,
) -> Scores:
    """Recall and median rank of normalised image (n_images, d) and text (n_texts, d), both ways.

    owner[t] is the image that text t describes; captions with equal `keys` are equally right. An image is found when
    any of its captions is, and a caption when any image that has it is.
    """
    found = ranks(image, text, owner, keys, chunk)
    asking = found.captioned.nonzero()[:, 0]
    there = (found.text_to_image, owner.cpu(), found.right_images, len(image))
    back = (found.image_to_text[asking], asking, found.right_texts[asking], found.distinct_texts)
    both = (*_direction("text_to_image", *there, at, seed), *_direction("image_to_text", *back, at, seed))
    return Scores((_mean_recall(both), *both))


def _mean_recall(metrics: Sequence[Metric]) -> Metric:
    """The mean of recall@1, @5 and @10 both ways."""
    recalls = [metric for metric in metrics if metric.kind == "share"]
    value = sum(metric.value for metric in recalls) / len(recalls)
    n_images = recalls[-1].n
    # Wilson over images: never too narrow, because a mean of hits varies less than a single hit.
    level = sum(metric.chance for metric in recalls) / len(recalls)
    return Metric(MEAN_RECALL, value, level, wilson(value, n_images), n_images)


def recall_hits(rank: Tensor, at: Sequence[int], n_candidates: int) -> Tensor:
    """(n, len(at)) bool: was the right one among the first k. A NaN's rank is never among them."""
    # The cap keeps rank n + 1 (never found) a miss when k exceeds the number of candidates.
    limit = torch.tensor([min(k, n_candidates) for k in at])
    return rank[:, None] <= limit


def _direction(
    name: str, rank: Tensor, picture: Tensor, right: Tensor, n_candidates: int, at: Sequence[int], seed: int
) -> list[Metric]:
    hits = recall_hits(rank, at, n_candidates)
    shares = hits.double().mean(dim=0).tolist()
    intervals = share_intervals(hits, picture, seed)
    recalls = [
        Metric(f"{name}/recall@{k}", share, recall_chance(k, right, n_candidates), interval, len(rank))
        for k, share, interval in zip(at, shares, intervals, strict=True)
    ]
    level = median_rank_chance(right, n_candidates)
    middle = Metric(
        f"{name}/median_rank", median(rank), level, median_interval(rank, picture), len(rank), "rank"
    )
    return [*recalls, middle]
