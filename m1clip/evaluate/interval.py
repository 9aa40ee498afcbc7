"""95% intervals for shares and medians whose samples come in clusters (the captions of one picture)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from m1clip.evaluate.metric import Interval

Z95 = 1.959964
RESAMPLES = 1000
# With fewer pictures than this on one side, resampling sees too little of that side: Wilson is used.
FEW_PICTURES = 5
# Resampled pictures held at once: 2^22 indices are 32 MiB.
DRAWS_AT_ONCE = 1 << 22


def wilson(share: float, n: float) -> Interval:
    """Wilson's score interval for a share of n independent trials; never of zero width."""
    if n <= 0:
        return Interval(0.0, 1.0)
    centre = share + Z95**2 / (2 * n)
    half = Z95 * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    scale = 1 + Z95**2 / n
    # At the two edges the formula gives the edge itself, but for rounding.
    low = 0.0 if share <= 0 else (centre - half) / scale
    high = 1.0 if share >= 1 else (centre + half) / scale
    return Interval(low, high)


def share_intervals(hits: Tensor, cluster: Tensor, seed: int = 0) -> list[Interval]:
    """One interval for each column of hits (n, metrics) bool; cluster (n,) names each row's picture.

    Whole pictures are resampled, because the captions of one picture succeed and fail together.
    """
    inverse, n_clusters = _compact(cluster)
    size = torch.bincount(inverse, minlength=n_clusters).double()
    sums = torch.zeros(n_clusters, hits.shape[1], dtype=torch.float64)
    sums.index_add_(0, inverse, hits.cpu().double())
    share = (sums.sum(dim=0) / size.sum()).tolist()
    with_hit, with_miss = (sums > 0).sum(dim=0), (sums < size[:, None]).sum(dim=0)
    # n is the number of pictures and not of captions: the careful choice when captions agree.
    intervals = [wilson(value, n_clusters) for value in share]
    scarce = torch.minimum(with_hit, with_miss) < FEW_PICTURES
    # One row a picture is plain independent trials, where Wilson covers better than resampling.
    if scarce.all() or n_clusters == len(inverse):
        return intervals
    low, high = _bootstrap(sums, size, seed).quantile(torch.tensor([0.025, 0.975]).double(), dim=0).tolist()
    return [
        wilson_one if few else Interval(low[column], high[column])
        for column, (wilson_one, few) in enumerate(zip(intervals, scarce.tolist(), strict=True))
    ]


def median_interval(values: Tensor, cluster: Tensor) -> Interval:
    """Woodruff's interval: the share below the median has an interval, whose ends are read as quantiles."""
    n = len(values)
    inverse, n_clusters = _compact(cluster)
    ordered = values.cpu().double().sort().values
    below = (values.cpu() <= median(values)).double()
    residual = torch.zeros(n_clusters, dtype=torch.float64).index_add_(0, inverse, below - below.mean())
    clustered = float(residual.square().sum().sqrt()) / n
    # Where most values are equal the share below says little; independent halves are the floor.
    half = Z95 * max(clustered, 0.5 / math.sqrt(n))
    low = max(0, math.floor(n * (0.5 - half)))
    high = min(n - 1, math.ceil(n * (0.5 + half)))
    return Interval(float(ordered[low]), float(ordered[high]))


def median(values: Tensor) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered = values.cpu().double().sort().values
    n = len(ordered)
    return float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _bootstrap(sums: Tensor, size: Tensor, seed: int) -> Tensor:
    """Shares (RESAMPLES, metrics) of sets of pictures drawn with replacement; a function of the seed."""
    n_clusters = len(size)
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, min(RESAMPLES, DRAWS_AT_ONCE // n_clusters))
    shares = []
    for start in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - start)
        drawn = torch.randint(n_clusters, (rows, n_clusters), generator=generator)
        drawn += torch.arange(rows)[:, None] * n_clusters
        times = torch.bincount(drawn.flatten(), minlength=rows * n_clusters).view(rows, n_clusters).double()
        shares.append((times @ sums) / (times @ size)[:, None])
    return torch.cat(shares)


def _compact(cluster: Tensor) -> tuple[Tensor, int]:
    """Cluster numbers without holes, and how many there are."""
    names, inverse = cluster.cpu().unique(return_inverse=True)
    return inverse, len(names)
