"""One clock for every measurement: warm up, synchronise, repeat, give the median with its spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
