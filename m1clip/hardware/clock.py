"""One clock for every measurement: warm up, synchronise, repeat, give the median with its spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DRIFT = 0.08  # more than this between the first and the last third is said beside the number
BUSY = 0.10  # so is a larger share of the processors taken by other programs


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median, quartiles and the number of calls."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median * 1e3:.2f} ms [{self.low * 1e3:.2f}, {self.high * 1e3:.2f}], n={self.n}"


def timing(seconds: list[float]) -> Timing:
    """Summary of measured calls."""
    if len(seconds) == 1:
        return Timing(seconds[0], seconds[0], seconds[0], 1)
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, low, high, len(seconds))


def alternate(
    calls: Mapping[Any, Callable[[], object]], synchronize: Callable[[], None], *, rounds: int = 5, warmup: int = 1,
    seconds: float = float("inf"),
) -> dict[str, Timing]:  # fmt: skip
    """Time several calls in turn, so that a busy moment of the machine falls on all of them alike.

    Stops after `rounds` rounds, or after `seconds` once each call has been timed.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(warmup):
            call()
    synchronize()
    begin = time.perf_counter()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            synchronize()
            taken[name].append(time.perf_counter() - start)
        if time.perf_counter() - begin > seconds:
            break
    return {name: timing(values) for name, values in taken.items()}


def is_settled(seconds: Sequence[float], tolerance: float = 0.1) -> bool:
    """Whether warming up is over: the last two calls took the same time, within a tolerance."""
    return len(seconds) >= 2 and abs(seconds[-1] - seconds[-2]) <= tolerance * seconds[-2]


def drift(seconds: Sequence[float]) -> float | None:
    """How much slower the last third of the calls was than the first (0.1 = 10%); None for fewer than six calls."""
    third = len(seconds) // 3
    if third < 2:
        return None
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third]) - 1


def remarks(seconds: Sequence[float], others: float | None) -> list[str]:
    """What stands beside a number that cannot be trusted fully; `others` is the CPU share of other programs."""
    found = []
    moved = drift(seconds)
    if moved is not None and moved > DRIFT:
        found.append(f"slowed down by {moved:.0%} on the way: throttled, or disturbed")
    if moved is not None and moved < -DRIFT:
        found.append(f"still got {-moved:.0%} faster on the way: not warmed up, or disturbed before")
    if others is not None and others > BUSY:
        found.append(f"other programs took {others:.0%} of the processors meanwhile")
    if len(seconds) < 3:
        found.append(f"only {len(seconds)} measured")
    return found
