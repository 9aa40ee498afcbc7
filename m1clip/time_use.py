"""Where the time of a command goes: seconds by part, from the start of the process."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar

import psutil

from m1clip.formatting import clock
from m1clip.io import start_tick

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# In the order in which they are printed; "other" is the rest.
PARTS = {
    "imports": "starting Python and importing torch",
    "data": "finding the images and reading the captions",
    "decoding": "decoding and caching images, or computing the features of frozen towers",
    "checks": "checking the data, measuring devices, memory and heads, comparing gradients",
    "training": "steps, and waiting for batches",
    "evaluation": "validation during the run, and the test split at its end",
    "saving": "checkpoints and model folders",
    "report": "the retrieval examples and tables at the end",
}
OTHER = "other"


class TimeUse:
    """Seconds by part since a start; one thread counts, other threads are ignored."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.seconds: dict[str, float] = {}
        self.stack: list[str] = []
        self.thread = threading.get_ident()
        self.began = self.changed = now()
        self.earlier = 0.0  # seconds before the start, which are counted already

    def _count(self) -> None:
        now = self.now()
        part = self.stack[-1] if self.stack else OTHER
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.changed
        self.changed = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block for a part, except for the parts within it."""
        if threading.get_ident() != self.thread:
            yield
            return
        self._count()
        self.stack.append(name)
        try:
            yield
        finally:
            self._count()
            self.stack.pop()

    def add_earlier(self, name: str, seconds: float) -> None:
        """Count seconds that passed before the start."""
        self.earlier += seconds
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def by_part(self) -> dict[str, float]:
        """Seconds of each part so far, in the order of PARTS."""
        self._count()
        names = [name for name in (*PARTS, OTHER) if name in self.seconds]
        return {name: round(self.seconds[name], 3) for name in names}


_current = TimeUse()
_counts_process = False


def count_process() -> None:
    """Count the next command from the start of this process, which was started for it."""
    global _counts_process  # noqa: PLW0603  as below
    _counts_process = True


def begin() -> float:
    """Start to count anew; returns when the command began, on the clock time.perf_counter."""
    global _current, _counts_process  # noqa: PLW0603  one command runs at a time
    _current = TimeUse(time.perf_counter)
    if _counts_process:
        _current.add_earlier("imports", process_seconds())
    _counts_process = False
    return _current.began - _current.earlier


def process_seconds() -> float:
    """Seconds since the process was started; 0 where the system does not say."""
    if sys.platform == "linux":
        try:
            started = start_tick(os.getpid()) / os.sysconf("SC_CLK_TCK")
            return time.clock_gettime(time.CLOCK_BOOTTIME) - started
        except (OSError, ValueError, IndexError):
            return 0.0
    try:
        return max(0.0, time.time() - psutil.Process().create_time())
    except psutil.Error:
        return 0.0


def part(name: str) -> contextlib.AbstractContextManager[None]:
    """Count a block for a part of the present command."""
    assert name in PARTS
    return _current.part(name)


def count_as(name: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Count the calls of a function for a part."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with part(name):
                return function(*args, **kwargs)

        return run

    return decorate


def by_part() -> dict[str, float]:
    """Seconds of each part of the present command so far."""
    return _current.by_part()


def describe(seconds: Mapping[str, float]) -> str:
    """Write seconds by part, the largest first: `1:05 in all: training 21.4 s, decoding 12.0 s`."""
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    words = ", ".join(f"{name} {value:.1f} s" for name, value in parts if value >= 0.05)
    return f"{clock(sum(seconds.values()))} in all: {words}"
