"""Metrics with 95% confidence interval, chance level and sample size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from m1clip.formatting import one_line, percent, plural, table
from m1clip.runlog import SELECTION, label

Z95 = 1.959964
ENOUGH_TO_JUDGE = 50  # images of a split; with fewer, its scores say little about a model
CLASSES_SHOWN = 20  # in text; `Scores.classes` has all


class Interval(NamedTuple):
    """A 95% confidence interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One result, a fraction between 0 and 1."""

    name: str
    value: float
    chance: float
    interval: Interval
    n: int

    @property
    def label(self) -> str:
        """The name for users."""
        return label(self.name)

    def _cells(self) -> tuple[str, ...]:
        low = self.interval.low
        high = self.interval.high
        interval = f"{100 * low:.1f} - {100 * high:.1f}%"
        return self.label, f"{100 * self.value:.1f}%", interval, percent(self.chance), f"{self.n:,}"


@dataclass(frozen=True, slots=True)
class Scores:
    """The metrics of one evaluation, in display order.

    For class folders also the accuracy of each class.
    """

    metrics: tuple[Metric, ...]
    classes: tuple[Metric, ...] = ()  # named by class

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return ((metric.name, metric.value) for metric in self.metrics)

    def __getitem__(self, name: str) -> Metric:
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise KeyError(f"no metric {name!r}; available: {', '.join(m.name for m in self.metrics)}")

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.metrics + other.metrics, self.classes + other.classes)

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
        scores = table(("metric", "value", "95% interval", "chance", "n"), rows)
        parts = [scores, self._class_table() if self.classes else "", self.note]
        return "\n\n".join(filter(None, parts))

    @property
    def note(self) -> str:
        """That these are too few images to judge a model, if they are."""
        selected = [
            metric.n for name in SELECTION for metric in self.metrics if metric.name == name
        ]
        return too_few_to_judge(plural(selected[0], "image"), selected[0]) if selected else ""

    def _class_table(self) -> str:
        """The accuracy of each class, or of the first ones."""
        listed = self.classes[:CLASSES_SHOWN]
        rows = [
            (one_line(metric.name), *metric._cells()[1:3], f"{metric.n:,}") for metric in listed
        ]
        hidden = len(self.classes) - len(listed)
        more = f"\n... and {hidden:,} more, none with a lower accuracy" if hidden else ""
        return table(("class", "top-1", "95% interval", "images"), rows) + more

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
    """The metric that selects the best model: top-1 accuracy for class folders, or mean recall."""
    return next(metric for name in SELECTION for metric in scores.metrics if metric.name == name)


def too_few_to_judge(label: str, images: int) -> str:
    """That the images of a split, called `label`, are too few to judge a model; "" if they are not."""
    if images >= ENOUGH_TO_JUDGE:
        return ""
    low, high = wilson(0.5, max(images, 1))
    return (
        f"only {label}: too few to judge a model, as one that is right half of the time would score"
        f" {100 * low:.0f} to {100 * high:.0f}%; hold out at least {ENOUGH_TO_JUDGE}"
        " (a column split in the table)"
    )


def wilson(fraction: float, n: float) -> Interval:
    """Wilson's score interval for n independent trials; its width is never zero."""
    center = fraction + Z95**2 / (2 * n)
    half = Z95 * math.sqrt(fraction * (1 - fraction) / n + Z95**2 / (4 * n**2))
    scale = 1 + Z95**2 / n
    # Exact at 0 and 1, where rounding would miss the bound.
    low = 0.0 if fraction <= 0 else (center - half) / scale
    high = 1.0 if fraction >= 1 else (center + half) / scale
    return Interval(low, high)


def metrics_of(
    names: Sequence[str], hits: np.ndarray, chances: Sequence[float], image_index: np.ndarray
) -> list[Metric]:
    """One metric per column of hits (n, metrics) bool.

    image_index (n,) is the image of each row.
    """
    values = hits.mean(axis=0).tolist()
    columns = zip(names, values, chances, fraction_intervals(hits, image_index), strict=True)
    return [Metric(*column, len(hits)) for column in columns]


def fraction_intervals(hits: np.ndarray, image_index: np.ndarray) -> list[Interval]:
    """One interval per column of hits (n, metrics) bool; image_index (n,) is the image of each row.

    Wilson's interval for the effective number of trials: the captions of one image are correlated.
    """
    _, image, sizes = np.unique(image_index, return_inverse=True, return_counts=True)
    rows = np.asarray(hits, np.float64)
    images = len(sizes)
    fractions = rows.mean(axis=0)
    # The variance of the mean from the residuals of complete images.
    residuals = np.zeros((images, rows.shape[1]))
    np.add.at(residuals, image, rows - fractions)
    variance = np.square(residuals).sum(axis=0) / len(rows) ** 2 * images / max(1, images - 1)
    with np.errstate(divide="ignore", invalid="ignore"):  # a variance of 0
        effective = np.nan_to_num(fractions * (1 - fractions) / variance, nan=0.0, posinf=np.inf)
    effective = effective.clip(images, len(rows))
    return [
        wilson(value, n) for value, n in zip(fractions.tolist(), effective.tolist(), strict=True)
    ]
