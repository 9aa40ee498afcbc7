"""Retrieval over the whole held-out set: recall@k and median rank, both ways, with chance and interval."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m1clip.evaluate.chance import (
    image_to_text_chance,
    image_to_text_median_chance,
    text_to_image_chance,
    text_to_image_median_chance,
)
from m1clip.evaluate.interval import median, median_interval, share_intervals
from m1clip.evaluate.metric import Metric, Scores
from m1clip.evaluate.ranks import ranks

RECALL_AT = (1, 5, 10)


def retrieval(
    image: Tensor,
    text: Tensor,
    owner: Tensor,
    at: Sequence[int] = RECALL_AT,
    seed: int = 0,
    chunk: int | None = None,
) -> Scores:
    """Recall and median rank of normalised image (n_images, d) and text (n_texts, d), both ways.

    owner[t] is the image that text t describes; a picture is found when any of its captions is.
    """
    found = ranks(image, text, owner, chunk)
    owner = owner.cpu()
    captions = torch.bincount(owner, minlength=len(image))
    asking = found.captioned.nonzero()[:, 0]
    return Scores(
        (
            *_direction(
                "text_to_image",
                found.text_to_image,
                owner,
                len(image),
                at,
                [text_to_image_chance(k, len(image)) for k in at],
                text_to_image_median_chance(len(image)),
                seed,
            ),
            *_direction(
                "image_to_text",
                found.image_to_text[asking],
                asking,
                len(text),
                at,
                [image_to_text_chance(k, captions) for k in at],
                image_to_text_median_chance(captions),
                seed,
            ),
        )
    )


def recall_hits(rank: Tensor, at: Sequence[int], n_candidates: int) -> Tensor:
    """(n, len(at)) bool: was the right one among the first k. A NaN's rank is never among them."""
    # The cap keeps rank n + 1 (never found) a miss when k exceeds the number of candidates.
    limit = torch.tensor([min(k, n_candidates) for k in at])
    return rank[:, None] <= limit


def _direction(
    name: str,
    rank: Tensor,
    picture: Tensor,
    n_candidates: int,
    at: Sequence[int],
    recall_chance: Sequence[float],
    median_chance: float,
    seed: int,
) -> list[Metric]:
    hits = recall_hits(rank, at, n_candidates)
    shares = hits.double().mean(dim=0).tolist()
    intervals = share_intervals(hits, picture, seed)
    recalls = [
        Metric(f"{name}/recall@{k}", share, chance, interval, len(rank))
        for k, share, chance, interval in zip(at, shares, recall_chance, intervals, strict=True)
    ]
    middle = Metric(
        f"{name}/median_rank", median(rank), median_chance, median_interval(rank, picture), len(rank), "rank"
    )
    return [*recalls, middle]
