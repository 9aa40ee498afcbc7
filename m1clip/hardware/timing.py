"""Timing of calls, of the phases of a step, and of the matmuls of a device."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil
import torch

from m1clip.hardware.device import DTYPES, Device, Precision

# Where both are one function, as in MLX; the forward pass is then timed by itself before.
FORWARD_AND_BACKWARD = "forward and backward"
MAX_MARKS = 2**16  # marks that are stored until `take` is called
# A matrix multiplication that would take longer is measured with smaller matrices.
MAX_GEMM_SECONDS = 2.0
SLOW_GEMM_SECONDS = 0.5  # that such a smaller multiplication takes
PROBED_GEMM_SIZE = 256  # rows of the matrices that show how fast a precision is


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
    call_seconds: dict[str, list[float]] = {name: [] for name in calls}
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
            call_seconds[name].append(time.perf_counter() - start)
        if time.perf_counter() - begin > seconds:
            break
    return {name: timing(values) for name, values in call_seconds.items()}


def is_settled(seconds: Sequence[float]) -> bool:
    """Whether the warmup is over: the last two calls took the same time, within 10%."""
    return len(seconds) >= 2 and abs(seconds[-1] - seconds[-2]) <= 0.1 * seconds[-2]


class Phases:
    """Seconds of each named phase of a step.

    `mark` ends one and begins the next; `take` reads and clears.
    """

    def __init__(self, kind: str = "cpu") -> None:
        self.kind = kind
        self._marks: deque[tuple[str, Any]] = deque(maxlen=MAX_MARKS)  # "" is no phase
        # The host's clock would show when work was queued, not when it was done.
        self.silent = kind in ("mps", "mlx")
        self._wait: Callable[[], None] | None = None  # in a synchronized step
        self._stage_marks: list[tuple[str, float]] = []  # of a synchronized step

    def mark(self, name: str) -> None:
        """Start the phase `name` and end the one before.

        The host waits only in a synchronized step.
        """
        if self._wait is not None:
            self._wait()
            self._stage_marks.append((name, time.perf_counter()))
        if not self.silent and not (self._marks and self._marks[-1][0] == name):
            self._marks.append((name, self._now()))

    def stop(self) -> None:
        self.mark("")

    @contextlib.contextmanager
    def synchronized(self, wait: Callable[[], None]) -> Iterator[dict[str, float]]:
        """Time one step on the host's clock, waiting for the device at each mark.

        Yields a dict that has the seconds of each stage when the block ends.
        """
        stages: dict[str, float] = {}
        self._wait = wait
        self._stage_marks = []
        try:
            self.mark("")  # waits for earlier work
            yield stages
            self.mark("")
        finally:
            self._wait = None
        for (name, begin), (_, end) in pairwise(self._stage_marks):
            if name:
                stages[name] = stages.get(name, 0.0) + end - begin
        if FORWARD_AND_BACKWARD in stages:
            both = stages.pop(FORWARD_AND_BACKWARD)
            stages["backward"] = max(0.0, both - stages.get("forward", 0.0))

    @property
    def is_synchronized(self) -> bool:
        """Whether the current step is a synchronized one."""
        return self._wait is not None

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call; {} if it cannot be measured. Synchronizes."""
        seconds: dict[str, float] = {}
        if self._marks and self.kind == "cuda":
            self._marks[-1][1].synchronize()
        for (name, begin), (_, end) in pairwise(self._marks):
            if name:
                phase_seconds = (
                    begin.elapsed_time(end) / 1e3 if self.kind == "cuda" else end - begin
                )
                seconds[name] = seconds.get(name, 0.0) + phase_seconds
        while len(self._marks) > 1:  # the last is the start of the next phase
            self._marks.popleft()
        return seconds

    def _now(self) -> Any:
        if self.kind != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


STAGE_COST = 0.01  # maximum fraction of a run's time that synchronized steps may cost together
MAX_STAGE_STEPS = 20  # synchronized steps of a run
ASSUMED_SLOWDOWN = 1.0  # until it is measured, a synchronized step may take this many steps longer
# And at least this many seconds: beside a CUDA graph, it allocates its activations anew.
ASSUMED_SECONDS = 0.1


@dataclass(frozen=True)
class StageCosts:
    """What synchronized steps have cost so far."""

    count: int = 0
    seconds: float = 0.0  # that they took longer than other steps, together
    last_step: int = 0  # when the last one was made

    def with_step(self, step: int, step_seconds: float, usual: float) -> StageCosts:
        """Add a synchronized step that took `step_seconds` seconds instead of the `usual`."""
        return StageCosts(self.count + 1, self.seconds + max(0.0, step_seconds - usual), step)

    def fraction(self, elapsed: float) -> float:
        """Fraction of the time of training."""
        return self.seconds / elapsed if elapsed > 0 else 0.0


def stages_due(step: int, total_steps: int, step_seconds: float, costs: StageCosts) -> bool:
    """Whether to synchronize the next step; all synchronized steps cost less than 1% of the run.

    `step` steps are done; `step_seconds` is the usual time of one, measured in this run. The cost
    of the first synchronized step is compared with the planned time of the run, and that of the
    others with the time so far.
    """
    if step_seconds <= 0:
        return False
    if costs.count == 0:
        assumed = max(ASSUMED_SLOWDOWN * step_seconds, ASSUMED_SECONDS)
        return assumed <= STAGE_COST * total_steps * step_seconds
    if step - costs.last_step < max(1, total_steps // MAX_STAGE_STEPS):
        return False
    expected = max(costs.seconds / costs.count, step_seconds * STAGE_COST)
    return costs.seconds + 2 * expected <= STAGE_COST * step * step_seconds


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
    """Measure the FLOP/s of a large matmul in each precision: the upper bound for a step.

    A precision that is very slow, such as fp16 on a CPU without instructions for it, is measured
    with smaller matrices.
    """
    sizes = {precision: affordable_size(device, precision, size) for precision in precisions}
    calls = {
        precision: matmul_call(device, precision, sizes[precision]) for precision in precisions
    }
    timings = alternate(calls, device.synchronize, rounds=rounds, warmup=2)
    return {precision: 2 * size**3 / timings[precision].low for precision, size in sizes.items()}


def affordable_size(device: Device, precision: Precision, size: int) -> int:
    """Return the size of matrices to measure: `size`, or less if one matmul would take too long."""
    if size <= PROBED_GEMM_SIZE:
        return size
    call = {precision: matmul_call(device, precision, PROBED_GEMM_SIZE)}
    seconds = alternate(call, device.synchronize, rounds=3)[precision].low
    if seconds * (size / PROBED_GEMM_SIZE) ** 3 <= MAX_GEMM_SECONDS:
        return size
    fraction = (SLOW_GEMM_SECONDS / seconds) ** (1 / 3)
    return min(size, max(PROBED_GEMM_SIZE, int(PROBED_GEMM_SIZE * fraction)))


def matmul_call(device: Device, precision: Precision, size: int) -> Callable[[], object]:
    """A call that multiplies two square matrices of `size` rows on a device."""
    if device.kind == "mlx":
        return _mlx_matmul(size, precision)
    a, b = (torch.randn(size, size, device=device.torch).to(DTYPES[precision]) for _ in range(2))
    return functools.partial(torch.mm, a, b)


def _mlx_matmul(size: int, precision: Precision) -> Callable[[], object]:
    import mlx.core as mx

    dtype = {"fp32": mx.float32, "bf16": mx.bfloat16}[precision]
    a, b = (mx.random.normal((size, size)).astype(dtype) for _ in range(2))
    return lambda: mx.eval(a @ b)


def gemm_rate(device: Device, precision: Precision, size: int = 1536) -> float:
    """`gemm_rates` of one precision."""
    return gemm_rates(device, (precision,), size)[precision]
