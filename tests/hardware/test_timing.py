"""Timing: medians, alternation, the phases of a step, the speed of a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from m1clip.hardware import timing
from m1clip.hardware.device import Device
from m1clip.hardware.facts import read_facts
from m1clip.hardware.timing import Load, Phases, Timing, alternate, is_settled


class FakeClock:
    """A clock that advances only on request; also that of a fake CUDA device."""

    def __init__(self) -> None:
        self.now, self.calls, self.synchronized = 0.0, [], 0  # type: ignore[var-annotated]

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.calls.append(name)
            self.now += seconds

        return work


class FakeEvent:
    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.time, self.ready = clock, clock.now, False

    def synchronize(self) -> None:
        self.clock.synchronized += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.time - self.time) * 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: fake.now)
    return fake


def test_calls_alternate_after_a_warmup_and_synchronization_counts(clock: FakeClock) -> None:
    calls = {"a": clock.call("a", 1.0), "b": clock.call("b", 2.0)}
    times = alternate(calls, clock.call("wait", 10.0), rounds=2, warmup=2)
    assert "".join(name[0] for name in clock.calls) == "aabbw" + "awbw" * 2
    assert times == {"a": Timing(11.0, 11.0, 11.0, 2), "b": Timing(12.0, 12.0, 12.0, 2)}


@pytest.mark.parametrize(("seconds", "rounds"), [(1.0, 1), (10.0, 2)])
def test_alternate_stops_after_the_time_limit_but_times_each_call_once(
    clock: FakeClock, seconds: float, rounds: int
) -> None:
    calls = {"a": clock.call("a", 3.0), "b": clock.call("b", 3.0)}
    assert {t.n for t in alternate(calls, lambda: None, rounds=9, seconds=seconds).values()} == {
        rounds
    }


def test_timing_is_median_and_quartiles() -> None:
    assert timing.timing([4.0, 1.0, 3.0, 2.0, 5.0]) == Timing(3.0, 2.0, 4.0, 5)
    assert timing.timing([7.0]) == Timing(7.0, 7.0, 7.0, 1)
    assert str(Timing(0.002, 0.001, 0.003, 5)) == "2.00 ms [1.00, 3.00], n=5"


def test_warm_up_ends_when_two_steps_agree() -> None:
    assert [is_settled(s) for s in ([1.0], [2.0, 1.0], [9.0, 1.0, 1.05])] == [False, False, True]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_phases_sum_seconds_and_synchronize_only_in_take(clock: FakeClock, kind: str) -> None:
    phases = Phases(kind)
    if kind == "cuda":
        phases._now = lambda: FakeEvent(clock)  # type: ignore[method-assign]

    def step() -> None:
        for name, seconds in {"copy": 1, "forward": 2, "backward": 4, "optimizer": 8}.items():
            phases.mark(name)
            phases.mark(name)  # continues the phase
            clock.now += seconds
        phases.stop()

    for _ in range(2):
        step()
        clock.now += 1000  # waiting for data
    assert clock.synchronized == 0
    assert phases.take() == {"copy": 2, "forward": 4, "backward": 8, "optimizer": 16}
    assert clock.synchronized == (kind == "cuda")
    assert phases.take() == {}
    phases.mark("forward")
    clock.now += 3
    assert phases.take() == {}
    clock.now += 2
    phases.mark("backward")
    assert phases.take() == {"forward": 5}, "a phase is counted when it ends"


def test_phases_are_not_measured_on_mps() -> None:
    phases = Phases("mps")
    phases.mark("forward")
    phases.stop()
    assert phases.take() == {}


def test_load_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, own = iter([(100.0, 40.0), (110.0, 42.0)]), iter([5.0, 11.0])
    monkeypatch.setattr(timing, "_machine", lambda: next(machine))
    monkeypatch.setattr(timing, "_own", lambda: next(own, 0.0))
    assert Load().others() == pytest.approx((10 - 2 - 6) / 10)
    monkeypatch.setattr(timing, "_machine", lambda: (100.0, 50.0))
    assert Load().others() is None, "too short to measure"


def test_speed_of_the_cpu_is_plausible() -> None:
    cpu = Device("cpu", read_facts())
    assert min(timing.gemm_rates(cpu, ("fp32", "bf16"), size=64, rounds=3).values()) > 1e6
    assert timing.gemm_rate(cpu, "fp32", size=64) > 1e6


def test_peak_memory_can_be_reset_where_the_system_allows_it() -> None:
    cpu = Device("cpu", read_facts())
    block = torch.ones(2**25)  # 128 MB
    high = cpu.peak_bytes()
    assert high > block.nbytes
    del block
    if not cpu.reset_peak():
        pytest.skip("this system cannot reset the peak")
    assert cpu.peak_bytes() < high
    block = torch.ones(2**25)
    assert cpu.peak_bytes() > block.nbytes
    assert block.nbytes < cpu.memory_bytes() <= cpu.peak_bytes() * 1.01
    assert 0 < cpu.free_bytes() <= cpu.total_bytes()
