"""Phases of a step, with moments that the test decides: nothing here measures time."""

from __future__ import annotations

import pytest

from m1clip.hardware import timing as module
from m1clip.hardware.timing import HostStamp, Phases, stamps_of


class Clock:
    """A device that is told what time it is, and how far it has got."""

    def __init__(self) -> None:
        self.now, self.reached, self.waited, self.made = 0.0, float("inf"), 0, 0

    def stamp(self) -> FakeStamp:
        self.made += 1
        return FakeStamp(self)


class FakeStamp:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.moment = clock, -1.0

    def record(self) -> None:
        self.moment = self.clock.now

    def query(self) -> bool:
        return self.moment <= self.clock.reached

    def synchronize(self) -> None:
        self.clock.waited += 1
        self.clock.reached = max(self.clock.reached, self.moment)

    def elapsed_time(self, end_event: FakeStamp, /) -> float:
        assert self.query(), "asked before the device got there"
        assert end_event.query(), "asked before the device got there"
        return (end_event.moment - self.moment) * 1e3


def step(phases: Phases, clock: Clock, *seconds: float) -> None:
    for name, length in zip(("copy", "forward", "backward", "optimizer"), seconds, strict=True):
        phases.mark(name)
        clock.now += length
    phases.stop()


def test_seconds_are_summed_by_phase_and_the_time_between_steps_is_nobodys() -> None:
    clock = Clock()
    phases = Phases(stamps=clock.stamp)
    step(phases, clock, 1, 2, 4, 8)
    clock.now += 1000  # waiting for data
    step(phases, clock, 1, 2, 4, 8)
    assert phases.take() == {"copy": 2, "forward": 4, "backward": 8, "optimizer": 16}
    assert phases.take() == {}
    step(phases, clock, 1, 1, 1, 1)
    assert phases.take() == {"copy": 1, "forward": 1, "backward": 1, "optimizer": 1}


def test_the_host_waits_only_when_asked() -> None:
    clock = Clock()
    phases = Phases(stamps=clock.stamp)
    clock.reached = -1.0  # the device has not done anything yet
    for _ in range(5):
        step(phases, clock, 1, 2, 4, 8)
    assert clock.waited == 0
    assert phases.take()["optimizer"] == 40
    assert clock.waited == 1


def test_a_phase_that_still_runs_is_counted_when_it_ends() -> None:
    clock = Clock()
    phases = Phases(stamps=clock.stamp)
    phases.mark("forward")
    clock.now += 3
    assert phases.take() == {}
    clock.now += 2
    phases.mark("backward")
    assert phases.take() == {"forward": 5}


def test_a_phase_marked_again_goes_on() -> None:
    clock = Clock()
    phases = Phases(stamps=clock.stamp)
    for _ in range(3):
        phases.mark("forward")
        clock.now += 1
    phases.stop()
    assert phases.take() == {"forward": 3}


def test_moments_are_used_again_and_never_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FOLD_AT", 20)
    clock = Clock()
    phases = Phases(stamps=clock.stamp)
    for _ in range(1000):
        step(phases, clock, 1, 1, 1, 1)
    assert clock.made <= 21
    assert clock.waited == 0
    assert phases.take() == {"copy": 1000, "forward": 1000, "backward": 1000, "optimizer": 1000}


def test_the_cpu_has_a_clock_and_mps_says_nothing_rather_than_something_wrong() -> None:
    assert stamps_of("cpu") is HostStamp
    phases = Phases("cpu")
    phases.mark("forward")
    phases.stop()
    taken = phases.take()
    assert list(taken) == ["forward"]
    assert taken["forward"] >= 0
    silent = Phases("mps")
    silent.mark("forward")
    silent.stop()
    assert silent.take() == {}
