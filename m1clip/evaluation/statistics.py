"""A measured number that carries its n, its 95% interval and the level of pure chance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from m1clip.runlog import MEAN_RECALL, SELECTION, TOP1

__all__ = ["MEAN_RECALL", "TOP1", "Interval", "Metric", "Scores", "selection_metric"]


@dataclass(frozen=True, slots=True)
class Interval:
    """The two ends of a 95% interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One result. `kind` says how to read it: a share between 0 and 1, or a rank from 1."""

    name: str
    value: float
    chance: float
    interval: Interval
    n: int
    kind: Literal["share", "rank"] = "share"

    @property
    def label(self) -> str:
        """The name as users see it."""
        return SELECTION.get(self.name, self.name)

    def as_row(self) -> dict[str, str | float | int]:
        """One flat record, as a table or a line of the run log takes it."""
        return {
            "name": self.name,
            "value": self.value,
            "low": self.interval.low,
            "high": self.interval.high,
            "chance": self.chance,
            "n": self.n,
        }


@dataclass(frozen=True, slots=True)
class Scores:
    """What one evaluation found, in the order in which it is shown."""

    metrics: tuple[Metric, ...]

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Yield (name, value), as every evaluator does."""
        return ((metric.name, metric.value) for metric in self.metrics)

    def __getitem__(self, name: str) -> Metric:
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise KeyError(f"no metric {name!r}; there are: {', '.join(m.name for m in self.metrics)}")

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.metrics + other.metrics)

    def as_rows(self) -> list[dict[str, str | float | int]]:
        """One record a metric: name, value, low, high, chance, n."""
        return [metric.as_row() for metric in self.metrics]

    def as_dict(self) -> dict[str, float]:
        """Flat and ready for JSON: `name` is the value, `name/chance`, `/low`, `/high`, `/n` the rest."""
        flat: dict[str, float] = {}
        for metric in self.metrics:
            flat[metric.name] = metric.value
            flat[f"{metric.name}/chance"] = metric.chance
            flat[f"{metric.name}/low"] = metric.interval.low
            flat[f"{metric.name}/high"] = metric.interval.high
            flat[f"{metric.name}/n"] = metric.n
        return flat


def selection_metric(scores: Scores) -> Metric:
    """The figure that chooses the best model: top-1 accuracy for class folders, else mean recall."""
    return next(metric for name in SELECTION for metric in scores.metrics if metric.name == name)


Z95 = 1.959964
RESAMPLES = 1000
# With fewer images than this on one side, resampling sees too little of that side: Wilson is used.
FEW_IMAGES = 5
# Resampled images held at once: 2^22 indices are 32 MiB.
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
    """One interval for each column of hits (n, metrics) bool; cluster (n,) names each row's image.

    Whole images are resampled, because the captions of one image succeed and fail together.
    """
    inverse, n_clusters = _compact(cluster)
    size = torch.bincount(inverse, minlength=n_clusters).double()
    sums = torch.zeros(n_clusters, hits.shape[1], dtype=torch.float64)
    sums.index_add_(0, inverse, hits.cpu().double())
    share = (sums.sum(dim=0) / size.sum()).tolist()
    with_hit, with_miss = (sums > 0).sum(dim=0), (sums < size[:, None]).sum(dim=0)
    # n is the number of images and not of captions: the careful choice when captions agree.
    intervals = [wilson(value, n_clusters) for value in share]
    scarce = torch.minimum(with_hit, with_miss) < FEW_IMAGES
    # One row an image is plain independent trials, where Wilson covers better than resampling.
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
    """Shares (RESAMPLES, metrics) of sets of images drawn with replacement; a function of the seed."""
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


if TYPE_CHECKING:
    from rich.table import Table


def scores_table(scores: Scores, title: str | None = None) -> Table:
    """A rich table: each metric with its 95% interval, the level of chance and n."""
    # Imported here: a training run without a terminal needs the scores and not the table.
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True, style="bold")
    table.add_column("95% interval", justify="right", no_wrap=True)
    table.add_column("chance", justify="right", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    group = None
    for metric in scores.metrics:
        head = metric.name.split("/")[0]
        if group is not None and head != group:
            table.add_section()
        group = head
        # Text and not markup: a label such as "[red]" from a person's data is shown as it is.
        table.add_row(*(Text(cell) for cell in (metric.label, *cells(metric))))
    return table


def cells(metric: Metric) -> tuple[str, str, str, str]:
    """Value, interval, chance and n in words."""
    low, high = metric.interval.low, metric.interval.high
    if metric.kind == "rank":
        return f"{metric.value:g}", f"{low:g} - {high:g}", f"{metric.chance:g}", f"{metric.n:,}"
    interval = f"{100 * low:.1f} - {100 * high:.1f}%"
    # Chance needs more digits than the value: 1 of 5,000 must not read as 0.0%.
    return f"{100 * metric.value:.1f}%", interval, f"{100 * metric.chance:.3g}%", f"{metric.n:,}"
