"""Timing: warm up, synchronize, repeat, report the median with its spread; and the phases of a step."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import psutil

DRIFT = 0.08  # report a larger relative change between the first and the last third
BUSY = 0.10  # report a larger fraction of CPU time used by other programs


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
    """Time several calls in alternation, so that a busy moment affects all of them.

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
    """Whether the warm-up is over: the last two calls took the same time, within a tolerance."""
    return len(seconds) >= 2 and abs(seconds[-1] - seconds[-2]) <= tolerance * seconds[-2]


def drift(seconds: Sequence[float]) -> float | None:
    """How much slower the last third of the calls was than the first (0.1 = 10%); None for fewer than six calls."""
    third = len(seconds) // 3
    if third < 2:
        return None
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third]) - 1


def remarks(seconds: Sequence[float], others: float | None) -> list[str]:
    """Warnings about a measurement; `others` is the CPU fraction of other programs."""
    warnings = []
    change = drift(seconds)
    if change is not None and change > DRIFT:
        warnings.append(f"slowed down by {change:.0%} during the measurement: thermal throttling, or other programs")
    if change is not None and change < -DRIFT:
        warnings.append(f"became {-change:.0%} faster during the measurement: not warmed up, or other programs")
    if others is not None and others > BUSY:
        warnings.append(f"other programs used {others:.0%} of the CPU")
    if len(seconds) < 3:
        warnings.append(f"too few measurements ({len(seconds)})")
    return warnings


_FOLD_AT = 4096  # marks stored before they are summed, to bound memory


class Stamp(Protocol):
    """A moment in time, as torch.cuda.Event measures it on a device."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Self, /) -> float: ...


class HostStamp:
    """A timestamp on the host, where work is done when the call returns; milliseconds, as in CUDA."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        """Now."""
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        """Always complete on the host."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: HostStamp, /) -> float:
        """Milliseconds to a later moment."""
        return (end_event.seconds - self.seconds) * 1e3


def stamps_of(kind: str) -> Callable[[], Stamp] | None:
    """Timestamp type of a device; None where reading it would synchronize."""
    if kind == "cpu":
        return HostStamp
    if kind == "cuda":
        import torch

        return lambda: torch.cuda.Event(enable_timing=True)
    return None  # MPS: the host's clock would show when work was queued, not when it was done


class Phases:
    """Seconds of each named phase of a step. `mark` ends one and begins the next; `take` reads and clears."""

    def __init__(self, kind: str = "cpu", stamps: Callable[[], Stamp] | None = None) -> None:
        """For a kind of device, or with other `stamps` than its own."""
        self._new = stamps or stamps_of(kind)
        self._marks: list[tuple[str, Stamp]] = []  # in order; "" is no phase
        self._free: list[Stamp] = []
        self._seconds: dict[str, float] = {}
        self.silent = False  # set while a CUDA graph is captured: marks would become part of it

    def mark(self, name: str) -> None:
        """Start the phase `name` and end the one before; the host does not wait."""
        if self._new is None or self.silent or (self._marks and self._marks[-1][0] == name):
            return
        stamp = self._free.pop() if self._free else self._new()
        stamp.record()
        self._marks.append((name, stamp))
        if len(self._marks) >= _FOLD_AT and self._marks[-2][1].query():
            self._fold()

    def stop(self) -> None:
        """End the current phase."""
        self.mark("")

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call; {} if it cannot be measured. Synchronizes."""
        if self._marks:
            self._marks[-1][1].synchronize()
            self._fold()
        taken, self._seconds = self._seconds, {}
        return taken

    def _fold(self) -> None:
        """Sum all phases that have ended; keep the last mark as the start of the next."""
        for (name, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
            self._free.append(begin)
        self._marks = self._marks[-1:]


class Load:
    """CPU time used by other programs since this was created."""

    def __init__(self) -> None:
        self._all, self._idle = _machine()
        self._own = _own()

    def others(self) -> float | None:
        """Fraction of total CPU time used by other programs; None if too little time has passed."""
        total, idle = (now - then for now, then in zip(_machine(), (self._all, self._idle), strict=True))
        if total < 0.5:  # clock ticks are hundredths of a second
            return None
        return min(1.0, max(0.0, (total - idle - (_own() - self._own)) / total))


def _machine() -> tuple[float, float]:
    times = psutil.cpu_times()
    return sum(times[:8]), times.idle + getattr(times, "iowait", 0.0)  # guest time is part of user time


def _own() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
