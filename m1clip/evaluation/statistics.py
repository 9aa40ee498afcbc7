"""Metrics with 95% confidence interval, chance level and sample size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from m1clip.formatting import percent, table
from m1clip.runlog import SELECTION

Z95 = 1.959964
RESAMPLES = 1000
# With fewer images than this among the hits or the misses, the bootstrap is unreliable and Wilson's interval is used.
MIN_BOOTSTRAP_IMAGES = 5
MAX_DRAWS = 1 << 22  # bootstrap indices in memory at once: 32 MiB


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% confidence interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One result: a fraction between 0 and 1, or a rank from 1."""

    name: str
    value: float
    chance: float
    interval: Interval
    n: int
    kind: Literal["fraction", "rank"] = "fraction"

    @property
    def label(self) -> str:
        """The name for users: `text_to_image/recall@1` is "text to image, recall@1"."""
        return SELECTION.get(self.name, self.name.replace("_", " ").replace("/", ", "))

    def _cells(self) -> tuple[str, ...]:
        low, high = self.interval.low, self.interval.high
        if self.kind == "rank":
            return self.label, f"{self.value:g}", f"{low:g} - {high:g}", f"{self.chance:g}", f"{self.n:,}"
        interval = f"{100 * low:.1f} - {100 * high:.1f}%"
        return self.label, f"{100 * self.value:.1f}%", interval, percent(self.chance), f"{self.n:,}"


@dataclass(frozen=True, slots=True)
class Scores:
    """The metrics of one evaluation, in display order."""

    metrics: tuple[Metric, ...]

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return ((metric.name, metric.value) for metric in self.metrics)

    def __getitem__(self, name: str) -> Metric:
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise KeyError(f"no metric {name!r}; available: {', '.join(m.name for m in self.metrics)}")

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.metrics + other.metrics)

    def __str__(self) -> str:
        """A table with one row per metric."""
        rows: list[tuple[str, ...]] = []
        group = self.metrics[0].name.split("/")[0]
        for metric in self.metrics:
            prefix = metric.name.split("/")[0]
            if prefix != group:
                rows.append(())
            group = prefix
            rows.append(metric._cells())
        return table(("metric", "value", "95% interval", "chance", "n"), rows)

    def as_dict(self) -> dict[str, float]:
        """Flat, for JSON: `name` is the value, `name/chance`, `/low`, `/high` and `/n` the rest."""
        flat: dict[str, float] = {}
        for metric in self.metrics:
            flat[metric.name] = metric.value
            flat[f"{metric.name}/chance"] = metric.chance
            flat[f"{metric.name}/low"] = metric.interval.low
            flat[f"{metric.name}/high"] = metric.interval.high
            flat[f"{metric.name}/n"] = metric.n
        return flat


def selection_metric(scores: Scores) -> Metric:
    """The metric that selects the best model: top-1 accuracy for class folders, mean recall otherwise."""
    return next(metric for name in SELECTION for metric in scores.metrics if metric.name == name)


def wilson(fraction: float, n: float) -> Interval:
    """Wilson's score interval for n independent trials; its width is never zero."""
    centre = fraction + Z95**2 / (2 * n)
    half = Z95 * math.sqrt(fraction * (1 - fraction) / n + Z95**2 / (4 * n**2))
    scale = 1 + Z95**2 / n
    # Exact at 0 and 1, where rounding would miss the bound.
    low = 0.0 if fraction <= 0 else (centre - half) / scale
    high = 1.0 if fraction >= 1 else (centre + half) / scale
    return Interval(low, high)


def fraction_intervals(hits: Tensor, image_index: Tensor, seed: int = 0) -> list[Interval]:
    """One interval per column of hits (n, metrics) bool; image_index (n,) is the image of each row.

    A bootstrap over images, because the captions of one image are correlated.
    """
    sums, size = _per_image(hits.cpu().double(), image_index)
    fractions = (sums.sum(dim=0) / size.sum()).tolist()
    intervals = [wilson(value, len(size)) for value in fractions]  # n is the number of images, the conservative choice
    few = torch.minimum((sums > 0).sum(dim=0), (sums < size[:, None]).sum(dim=0)) < MIN_BOOTSTRAP_IMAGES
    # With one row per image the trials are independent, and Wilson's interval covers better than the bootstrap.
    if bool(few.all()) or len(size) == len(hits):
        return intervals
    low, high = _bootstrap(sums, size, seed).quantile(torch.tensor([0.025, 0.975]).double(), dim=0).tolist()
    return [
        intervals[column] if is_few else Interval(low[column], high[column])
        for column, is_few in enumerate(few.tolist())
    ]


def median(values: Tensor) -> float:
    """The middle value, or the mean of the two middle values."""
    return float(values.cpu().double().quantile(0.5))


def median_interval(values: Tensor, image_index: Tensor) -> Interval:
    """Woodruff's interval: that of the fraction below the median, read off as quantiles."""
    n = len(values)
    ordered = values.cpu().double().sort().values
    below = (values.cpu() <= median(values)).double()
    residuals, _ = _per_image((below - below.mean())[:, None], image_index)
    clustered = float(residuals.square().sum().sqrt()) / n
    # With many equal values the fraction below is uninformative; independent trials are the lower bound.
    half = Z95 * max(clustered, 0.5 / math.sqrt(n))
    low = max(0, math.floor(n * (0.5 - half)))
    high = min(n - 1, math.ceil(n * (0.5 + half)))
    return Interval(float(ordered[low]), float(ordered[high]))


def _per_image(rows: Tensor, image_index: Tensor) -> tuple[Tensor, Tensor]:
    """(images, columns) sums of the rows of each image, and (images,) how many rows it has."""
    _, inverse, size = image_index.cpu().unique(return_inverse=True, return_counts=True)
    return rows.new_zeros(len(size), rows.shape[1]).index_add_(0, inverse, rows), size.double()


def _bootstrap(sums: Tensor, size: Tensor, seed: int) -> Tensor:
    """(RESAMPLES, metrics) fractions over images drawn with replacement."""
    images = len(size)
    generator = torch.Generator().manual_seed(seed)
    chunk = max(1, min(RESAMPLES, MAX_DRAWS // images))
    fractions = []
    for start in range(0, RESAMPLES, chunk):
        rows = min(chunk, RESAMPLES - start)
        drawn = torch.randint(images, (rows, images), generator=generator)
        drawn += torch.arange(rows)[:, None] * images
        counts = torch.bincount(drawn.flatten(), minlength=rows * images).view(rows, images).double()
        fractions.append((counts @ sums) / (counts @ size)[:, None])
    return torch.cat(fractions)
