"""Timing: medians, alternation, the phases of a step, the speed of a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from m1clip.hardware import timing
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import read_machine_info
from m1clip.hardware.timing import (
    ASSUMED_SLOWDOWN,
    MAX_STAGE_STEPS,
    STAGE_COST,
    Load,
    Phases,
    StageCosts,
    Timing,
    alternate,
    is_settled,
    stages_due,
)


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
    cpu = Device("cpu", read_machine_info())
    assert min(timing.gemm_rates(cpu, ("fp32", "bf16"), size=64, rounds=3).values()) > 1e6
    assert timing.gemm_rate(cpu, "fp32", size=64) > 1e6


def test_peak_memory_can_be_reset_where_the_system_allows_it() -> None:
    cpu = Device("cpu", read_machine_info())
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


class FakeAccelerator:
    """A device that works through a queue while the host goes on, and the clock of the host."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until = 0.0

    def queue(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.now) + seconds
        self.now += 0.001  # to queue it

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)


def test_synchronized_step_times_the_stages_that_the_device_works_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeAccelerator()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: device.now)
    phases = Phases("mps")

    def step() -> None:
        for name, seconds in (("copy", 0.5), ("forward", 2.0), ("backward", 4.0)):
            phases.mark(name)
            device.queue(seconds)
        phases.stop()

    step()
    assert phases.take() == {}, "not timed in flight"
    device.queue(9.0)  # work of earlier steps is not counted
    with phases.synchronized(device.synchronize) as stages:
        step()
    assert stages == pytest.approx({"copy": 0.5, "forward": 2.0, "backward": 4.0})
    before = device.now
    step()
    assert device.now - before < 0.1, "later steps do not wait"


@pytest.mark.parametrize("extra", [0.0, 0.1, 0.9, 5.0])  # of a step, by synchronizing it
@pytest.mark.parametrize("total", [10, 99, 150, 2_000, 20_000])
def test_synchronized_steps_cost_less_than_one_percent_of_a_run(total: int, extra: float) -> None:
    step_seconds = 0.25
    costs = StageCosts()
    steps = []
    for step in range(20, total):
        if stages_due(step, total, step_seconds, costs):
            costs = costs.with_step(step, (1 + extra) * step_seconds, step_seconds)
            steps.append(step)
    if total < 100:
        assert steps == [], "one step would cost too much of a short run"
        return
    assert steps[0] == 20, "as early as possible"
    assert len(steps) <= MAX_STAGE_STEPS + 1
    if extra <= ASSUMED_SLOWDOWN:
        assert costs.fraction(total * step_seconds) <= STAGE_COST
    else:  # the first one was slower than assumed; no other follows until the run has paid for it
        allowed = max(extra * step_seconds, STAGE_COST * total * step_seconds)
        assert costs.seconds <= allowed
    if total == 20_000:
        assert len(steps) > 5


def test_stages_are_not_due_before_the_time_of_a_step_is_known() -> None:
    assert not stages_due(50, 10_000, 0.0, StageCosts())
