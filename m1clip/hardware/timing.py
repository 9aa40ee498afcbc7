"""Timing: warm up, synchronize, repeat, report the median with its spread; the phases of a step; speed of a device."""

import functools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil
import torch

from m1clip.hardware.device import DTYPES, Device, Precision

MAX_MARKS = 2**16  # of phases that nobody reads


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median, quartiles and the number of calls."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return (
            f"{self.median * 1e3:.2f} ms [{self.low * 1e3:.2f}, {self.high * 1e3:.2f}], n={self.n}"
        )


def timing(seconds: list[float]) -> Timing:
    if len(seconds) == 1:
        return Timing(seconds[0], seconds[0], seconds[0], 1)
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, low, high, len(seconds))


def alternate(
    calls: Mapping[Any, Callable[[], object]],
    synchronize: Callable[[], None],
    *,
    rounds: int = 5,
    warmup: int = 1,
    seconds: float = float("inf"),
) -> dict[str, Timing]:
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


def is_settled(seconds: Sequence[float]) -> bool:
    """Whether the warm-up is over: the last two calls took the same time, within 10%."""
    return len(seconds) >= 2 and abs(seconds[-1] - seconds[-2]) <= 0.1 * seconds[-2]


class Phases:
    """Seconds of each named phase of a step. `mark` ends one and begins the next; `take` reads and clears."""

    def __init__(self, kind: str = "cpu") -> None:
        self.kind = kind
        self._marks: deque[tuple[str, Any]] = deque(maxlen=MAX_MARKS)  # "" is no phase
        # The host's clock would show when work was queued, not when it was done.
        self.silent = kind in ("mps", "mlx")

    def mark(self, name: str) -> None:
        """Start the phase `name` and end the one before; the host does not wait."""
        if not self.silent and not (self._marks and self._marks[-1][0] == name):
            self._marks.append((name, self._now()))

    def stop(self) -> None:
        self.mark("")

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call; {} if it cannot be measured. Synchronizes."""
        seconds: dict[str, float] = {}
        if self._marks and self.kind == "cuda":
            self._marks[-1][1].synchronize()
        for (name, begin), (_, end) in pairwise(self._marks):
            if name:
                taken = begin.elapsed_time(end) / 1e3 if self.kind == "cuda" else end - begin
                seconds[name] = seconds.get(name, 0.0) + taken
        while len(self._marks) > 1:  # the last is the start of the next phase
            self._marks.popleft()
        return seconds

    def _now(self) -> Any:
        if self.kind != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Load:
    """CPU time used by other programs since this was created."""

    def __init__(self) -> None:
        self._all, self._idle = _machine()
        self._own = _own()

    def others(self) -> float | None:
        """Fraction of total CPU time used by other programs; None if too little time has passed."""
        total, idle = (
            now - then for now, then in zip(_machine(), (self._all, self._idle), strict=True)
        )
        if total < 0.5:  # clock ticks are hundredths of a second
            return None
        return min(1.0, max(0.0, (total - idle - (_own() - self._own)) / total))


def _machine() -> tuple[float, float]:
    times = psutil.cpu_times()
    # Guest time is part of user time.
    return sum(times[:8]), times.idle + getattr(times, "iowait", 0.0)


def _own() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def gemm_rates(
    device: Device, precisions: Sequence[Precision], size: int = 1536, rounds: int = 7
) -> dict[str, float]:
    """FLOP/s of a large matrix multiplication in each precision, in alternation: the upper bound for a step."""
    calls: dict[Precision, Callable[[], object]] = {}
    for precision in precisions:
        if device.kind == "mlx":
            calls[precision] = _mlx_product(size, precision)
            continue
        a, b = (
            torch.randn(size, size, device=device.torch).to(DTYPES[precision]) for _ in range(2)
        )
        calls[precision] = functools.partial(torch.mm, a, b)
    found = alternate(calls, device.synchronize, rounds=rounds, warmup=2)
    return {precision: 2 * size**3 / taken.low for precision, taken in found.items()}


def _mlx_product(size: int, precision: Precision) -> Callable[[], object]:
    import mlx.core as mx

    dtype = {"fp32": mx.float32, "bf16": mx.bfloat16}[precision]
    a, b = (mx.random.normal((size, size)).astype(dtype) for _ in range(2))
    return lambda: mx.eval(a @ b)


def gemm_rate(device: Device, precision: Precision, size: int = 1536) -> float:
    """`gemm_rates` of one precision."""
    return gemm_rates(device, (precision,), size)[precision]
