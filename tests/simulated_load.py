"""A computer that other programs make slow, without any waiting: its clock advances by the work that is done."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType

import pytest

Slowdown = Callable[[float], float]  # time in seconds -> how many times slower the computer is then
QUANTUM = 0.05  # seconds of work between two looks at the load


class SimulatedTime:
    """Stands in for the module `time`.

    `work(seconds)` takes as long as the load at that moment makes it take.
    """

    def __init__(self, slowdown: Slowdown = lambda now: 1.0) -> None:
        self.now = 0.0
        self.slowdown = slowdown

    def perf_counter(self) -> float:
        return self.now

    monotonic = process_time = perf_counter

    def time(self) -> float:
        return 1.7e9 + self.now

    def work(self, seconds: float) -> None:
        """Do what takes `seconds` on a computer with nothing else to do."""
        while seconds > 0:
            part = min(seconds, QUANTUM)
            self.now += part * self.slowdown(self.now)
            seconds -= part

    def install(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Replace the clock of these modules."""
        for module in modules:
            monkeypatch.setattr(module, "time", self)


def quiet(now: float) -> float:
    return 1.0


def load_from(start: float, slowdown: float) -> Slowdown:
    """Other programs begin at `start`, and stay."""
    return lambda now: slowdown if now >= start else 1.0


def load_until(end: float, slowdown: float) -> Slowdown:
    """Other programs are busy from the beginning until `end`."""
    return lambda now: slowdown if now < end else 1.0


def random_load(seed: int, seconds: float) -> Slowdown:
    """A load that begins or ends at a random moment and makes the computer up to three times slower."""
    draw = random.Random(seed)
    moment = draw.uniform(0, seconds)
    slowdown = draw.uniform(1, 3)
    return load_from(moment, slowdown) if draw.random() < 0.5 else load_until(moment, slowdown)
