"""What a model that knows nothing would score, so that a number can be read against it."""

from __future__ import annotations

import torch
from torch import Tensor


def recall_chance(k: int, right: Tensor, n_candidates: int) -> float:
    """Probability that a random order of the candidates has a right one in its first k.

    right: (n_queries,) how many candidates are right; averaged over the queries that have any.
    """
    counts, weight = _counts(right)
    drawn = torch.arange(min(k, n_candidates), dtype=torch.float64)
    # Hypergeometric: draw k candidates without replacement and miss every right one, draw by draw.
    miss = ((n_candidates - counts[:, None] - drawn) / (n_candidates - drawn)).clamp(min=0).prod(dim=1)
    return float(((1 - miss) * weight).sum())


def median_rank_chance(right: Tensor, n_candidates: int) -> float:
    """Median best rank of the right candidates in a random order: the first k with chance >= 1/2."""
    low, high = 1, n_candidates
    while low < high:
        middle = (low + high) // 2
        if recall_chance(middle, right, n_candidates) >= 0.5 - 1e-9:
            high = middle
        else:
            low = middle + 1
    return float(low)


def _counts(right: Tensor) -> tuple[Tensor, Tensor]:
    """The different numbers of right candidates and the fraction of queries that have each."""
    counts, queries = right[right > 0].cpu().unique(return_counts=True)
    return counts.double(), queries.double() / queries.sum()
