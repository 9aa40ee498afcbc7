"""Does a figure grow? The slope of a series of samples, robust against single jumps, and a stated limit for it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Samples = Sequence[tuple[float, float]]  # (seconds since the start, value)


@dataclass(frozen=True)
class Limit:
    """How much a figure may grow over the whole window: a share of its median, or an amount, whichever is more."""

    share: float
    amount: float


def slope(samples: Samples, most: int = 400) -> float:
    """Theil-Sen: the median of the slopes between all samples of samples; one odd sample moves it little."""
    step = max(1, len(samples) // most)
    points = list(samples)[::step]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0


def judge(samples: Samples, warm_up: float, limit: Limit) -> dict[str, Any]:
    """Growth after the warm-up seconds, and whether it is within the limit."""
    window = [point for point in samples if point[0] >= warm_up]
    if len(window) < 5:
        return {"ok": False, "samples": len(window), "reason": "too few samples after the warm-up"}
    seconds = window[-1][0] - window[0][0]
    values = [value for _, value in window]
    median = statistics.median(values)
    growth = slope(window) * seconds
    allowed = max(limit.share * median, limit.amount)
    return {
        "ok": growth <= allowed,
        "samples": len(window),
        "seconds": round(seconds, 1),
        "first": values[0],
        "median": median,
        "last": values[-1],
        "largest": max(values),
        "growth": round(growth, 3),
        "allowed": round(allowed, 3),
    }
