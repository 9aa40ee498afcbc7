"""A measured number that carries its n, its 95% interval and the level of pure chance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
