"""The one clock, run with a clock of our own."""

from __future__ import annotations

import pytest

from m1clip.hardware import timing as clock


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
    assert "got 33% faster" in clock.remarks([1.5, 1.5, 1.2, 1.2, 1.0, 1.0], None)[0]
    assert clock.remarks([1.0] * 9, others=0.4) == ["other programs took 40% of the processors meanwhile"]
    assert clock.remarks([1.0], None) == ["only 1 measured"]
