"""Timing: medians, alternation, warnings; and the phases of a step."""

from __future__ import annotations

import pytest

from m1clip.hardware import timing as clock
from m1clip.hardware import timing as module
from m1clip.hardware.timing import HostStamp, Phases, stamps_of


class FakeTime:
    """A clock that moves only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, []  # type: ignore[var-annotated]
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)

    def call(self, name: str, seconds: float) -> object:
        def work() -> None:
            self.calls.append(name)
            self.now += seconds

        return work


def test_calls_take_turns_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    calls = {"a": fake.call("a", 1.0), "b": fake.call("b", 2.0)}
    times = clock.alternate(calls, lambda: None, rounds=3, warmup=2)  # type: ignore[arg-type]
    assert fake.calls == ["a", "a", "b", "b", "a", "b", "a", "b", "a", "b"]
    assert times["a"] == clock.Timing(1.0, 1.0, 1.0, 3)
    assert times["b"] == clock.Timing(2.0, 2.0, 2.0, 3)


def test_waiting_for_the_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    wait = fake.call("wait", 10.0)
    times = clock.alternate({"a": fake.call("a", 1.0)}, wait, rounds=2, warmup=1)  # type: ignore[arg-type, dict-item]
    assert fake.calls == ["a", "wait", "a", "wait", "a", "wait"]
    assert times["a"].median == 11.0


def test_it_stops_when_the_time_is_up_but_times_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    calls = {"a": fake.call("a", 3.0), "b": fake.call("b", 3.0)}
    assert {t.n for t in clock.alternate(calls, lambda: None, rounds=9, seconds=1.0).values()} == {1}  # type: ignore[arg-type]
    assert {t.n for t in clock.alternate(calls, lambda: None, rounds=9, seconds=10.0).values()} == {2}  # type: ignore[arg-type]


def test_the_summary_is_median_and_quartiles() -> None:
    assert clock.timing([4.0, 1.0, 3.0, 2.0, 5.0]) == clock.Timing(3.0, 2.0, 4.0, 5)
    assert clock.timing([7.0]) == clock.Timing(7.0, 7.0, 7.0, 1)
    assert str(clock.Timing(0.002, 0.001, 0.003, 5)) == "2.00 ms [1.00, 3.00], n=5"


def test_warm_is_when_two_calls_agree() -> None:
    assert not clock.is_settled([1.0])
    assert not clock.is_settled([2.0, 1.0])
    assert clock.is_settled([9.0, 1.0, 1.05])


def test_drift_compares_the_ends() -> None:
    assert clock.drift([1.0] * 5) is None
    assert clock.drift([1.0, 1.0, 1.5, 1.5, 2.0, 2.0]) == pytest.approx(1.0)
    assert clock.drift([1.0, 1.1, 1.0, 1.1, 1.0, 1.1]) == pytest.approx(0.0)


def test_remarks_stand_beside_a_doubtful_number() -> None:
    assert clock.remarks([1.0] * 9, others=0.02) == []
    assert "slowed down by 50%" in clock.remarks([1.0, 1.0, 1.2, 1.2, 1.5, 1.5], None)[0]
    assert "became 33% faster" in clock.remarks([1.5, 1.5, 1.2, 1.2, 1.0, 1.0], None)[0]
    assert clock.remarks([1.0] * 9, others=0.4) == ["other programs used 40% of the CPU"]
    assert clock.remarks([1.0], None) == ["too few measurements (1)"]


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
