"""Choice of configurations, skipped ones with their reason, and worker processes."""

import dataclasses
import functools
import json
import math
import os
import random
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from machines import H200, M1, TURING
from small_run import TIMEOUT

import m1clip
from m1clip.bench import compare as module
from m1clip.bench import steps, worker
from m1clip.bench.compare import (
    CompareOptions,
    Session,
    configurations,
    precisions_of,
    run_comparison,
    second_round,
    thread_counts,
    unsupported_precisions,
)
from m1clip.bench.loading import Loading
from m1clip.bench.overhead import Overhead, measure_overhead
from m1clip.bench.stability import summarize
from m1clip.bench.steps import Configuration, Result, load_measured, reduced_shape
from m1clip.bench.worker import DeviceMeasurement, Measurement, MeasurementError, Worker
from m1clip.errors import UserError
from m1clip.hardware.device import Kind
from m1clip.hardware.machine_info import MachineInfo, read_machine_info
from m1clip.hardware.timing import timing

from .examples import configuration


@pytest.mark.parametrize(
    ("facts", "device", "requested", "precisions"),
    [
        (H200, "cuda", (), ["bf16", "fp32", "fp16"]),
        (H200, "cpu", (), ["bf16", "fp32", "fp16"]),
        (H200, "cuda", ("fp16",), ["fp16"]),
        (TURING, "cuda", (), ["fp32", "fp16"]),
    ],
)
def test_precisions_of_a_device(
    facts: MachineInfo, device: Kind, requested: tuple[str, ...], precisions: list[str]
) -> None:
    assert precisions_of(facts, device, requested) == precisions


def test_unsupported_precisions_are_named() -> None:
    assert unsupported_precisions(TURING, "cuda", ()) == ["bf16"]
    assert unsupported_precisions(TURING, "cuda", ("fp16",)) == []
    assert unsupported_precisions(dataclasses.replace(M1, mlx="0.32.4"), "mlx", ()) == ["fp16"]


def test_single_model_also_varies_one_setting_at_a_time() -> None:
    first = configurations(
        H200, CompareOptions(models=("original",), batch_sizes=(12,)), ["cuda", "cpu"]
    )
    variants = [c.variant for c in first]
    assert variants[:2] == ["cuda bf16 CUDA graph", "cpu bf16"]
    assert variants[2:6] == ["cuda fp32 CUDA graph", "cpu fp32", "cuda fp16", "cpu fp16"]
    changed = {"cuda bf16", "cpu bf16 24 threads", "cpu bf16 gradient checkpointing"}
    compiled = {"cuda bf16 compiled CUDA graph", "cpu bf16 compiled"}
    assert changed | compiled <= set(variants)
    repeated = [c.variant for c in second_round(first)]
    assert repeated == [name for name in reversed(variants) if name not in compiled]


def test_threads_are_all_cores_performance_cores_and_half() -> None:
    assert thread_counts(M1) == [8, 2]  # the default is 4, one per performance core
    assert thread_counts(H200) == [24]  # all cores are the default
    candidates = configurations(M1, CompareOptions(), ["cpu"])
    assert {c.threads for c in candidates} == {0, 8, 2}


def test_mlx_is_measured_without_torchs_variants() -> None:
    candidates = configurations(
        dataclasses.replace(M1, mlx="0.32.4"), CompareOptions(), ["mps", "cpu", "mlx"]
    )
    variants = {c.variant for c in candidates if c.device == "mlx"}
    assert variants == {"mlx bf16", "mlx fp32", "mlx bf16 gradient checkpointing"}


def test_several_models_are_ordered_by_precision_then_size() -> None:
    options = CompareOptions(models=("tiny", "original"), batch_sizes=(64, 1))
    candidates = configurations(M1, options, ["mps", "cpu"])
    order = dict.fromkeys((c.model, c.batch_size) for c in candidates[:8])
    assert list(order) == [("tiny", 1), ("tiny", 64), ("original", 1), ("original", 64)]
    assert [c.variant for c in candidates[:8]] == ["mps bf16", "cpu bf16"] * 4
    assert [c.precision for c in candidates[8:]] == ["fp32"] * 8 + ["fp16"] * 8
    assert len(candidates) == 24
    assert second_round(candidates) == candidates[::-1]


class FixedClock(module.CompareClock):
    """A clock that does not advance."""

    def __init__(self, remaining: float) -> None:
        super().__init__(seconds=480.0)
        self._remaining = remaining

    @property
    def remaining(self) -> float:
        return self._remaining


def session_with(folder: Path, remaining: float) -> Session:
    """A session with a fixed time left, on a machine with a GPU of 69 GB."""
    session = Session(CompareOptions(minutes=8), H200, folder, lambda text, used: None)
    session.clock = FixedClock(remaining)
    device = DeviceMeasurement(2**36, {"fp32": 1e12, "bf16": 2e12, "fp16": 2e12})
    session.steps.devices = {"cpu": device, "cuda": device}
    return session


def test_configurations_that_are_too_slow_or_large_are_skipped(tmp_path: Path) -> None:
    session = session_with(tmp_path, remaining=400.0)

    def add(c: Configuration, seconds: float, peak_bytes: int = 10**9) -> None:
        session.steps.add(c, Measurement([seconds] * 3, None, None, peak_bytes, 0.0))

    for batch_size in (1, 2):
        add(configuration(batch_size=batch_size), 1.0)
    assert "too long for --minutes 8" in session.obstacle(configuration("200M", 1024), 10.0)
    small = configuration("tiny", 8, "cuda")
    assert session.obstacle(small, 10.0) == ""
    add(configuration("1B", 8, "cuda"), 0.1, 60 * 10**9)
    assert session.obstacle(configuration("1B", 16, "cuda"), 10.0).endswith(" GB of 69 GB")
    session.steps.failed["tiny", small.variant] = 8
    assert session.obstacle(dataclasses.replace(small, batch_size=16), 10.0) == "batch 8 failed"


def test_no_time_left_skips_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_with(tmp_path, remaining=-1.0)
    monkeypatch.setattr(module, "available", lambda facts: ())
    session.run()
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert written["results"] == []
    assert written["skipped"]
    assert all("--minutes 8" in reason for reason in written["skipped"].values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": ("orignal",)}, "did you mean 'original'"),
        ({"devices": ("mps",)}, "--device mps: not available on this machine"),
        ({"batch_sizes": (0,)}, "--batch-size"),
        ({"batch_sizes": ()}, "--batch-size"),
        ({"minutes": 0.0}, "--minutes"),
        ({"precisions": ("fp8",)}, "--precision fp8: expected some of bf16, fp32, fp16"),
    ],
)
def test_invalid_options_are_one_line_errors(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_comparison(CompareOptions(**values), tmp_path, lambda text, used: None)


class FakeWorker:
    """Answers the calls of a session from a table of step times; some calls fail."""

    alive = True
    fails: ClassVar[dict[str, str]] = {}  # a part of the call's text -> the reason
    step_seconds: ClassVar[dict[str, float]] = {"bf16": 0.010, "fp32": 0.020, "fp16": 0.040}

    def __init__(self, log: Path) -> None: ...

    def hang_up(self) -> None: ...

    def close(self) -> None: ...

    def call(self, method: str, timeout: float, *arguments: Any) -> Any:
        for part, reason in self.fails.items():
            if part in f"{method} {arguments}":
                raise MeasurementError(reason)
        if method == "measure_device":
            return DeviceMeasurement(2**36, dict.fromkeys(("fp32", "bf16", "fp16"), 1e12))
        if method == "measure_device_overhead":
            return [Overhead("synchronize", 0, timing([1e-6, 2e-6, 3e-6]))]
        c = arguments[0]
        if method == "measure_stability":
            return summarize(c.model, c.batch_size, [3.0, 2.0, 1.0], [1.0, 1.0, math.inf])
        seconds = self.step_seconds[c.precision] * c.batch_size
        stages = {"forward": 0.4 * seconds, "backward": 0.6 * seconds}
        return Measurement([seconds] * 3, None, None, 10**9, 0.001, stages)


@pytest.fixture
def fake_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeWorker]:
    """Sessions measure nothing: step times come from a table."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(worker, "Worker", FakeWorker)
    monkeypatch.setattr(
        module, "measure_loading", lambda facts, seconds: [Loading(0, timing([10.0]))]
    )
    monkeypatch.setattr(module, "read_machine_info", lambda: TURING)
    monkeypatch.setattr(FakeWorker, "fails", {})
    return FakeWorker


def test_failures_are_rows_of_the_table_and_the_comparison_goes_on(
    fake_workers: type[FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {
        "measure Configuration(model='tiny', batch_size=8, device='cuda'": "out of memory (CUDA)",
        "measure_device_overhead ('cuda'": "the worker process ended, probably out of memory",
        "measure_stability (Configuration(model='tiny', batch_size=8, device='cpu', "
        "precision='fp16'": "out of memory (bad_alloc)",
    }
    reasons = {key.replace("measure C", "measure (C"): value for key, value in reasons.items()}
    monkeypatch.setattr(fake_workers, "fails", reasons)
    comparison = m1clip.compare("tiny", [4, 8], ["cuda", "cpu"], out=tmp_path / "out")
    assert {r.configuration.label for r in comparison.results} >= {
        "tiny, batch 4, cuda fp32 CUDA graph",
        "tiny, batch 8, cpu bf16",
    }
    assert all(r.seconds.n == 6 for r in comparison.results if not r.configuration.compile), (
        "two rounds"
    )
    assert comparison.skipped["cuda bf16"] == "bf16 is not supported on cuda"
    assert comparison.skipped["tiny, batch 8, cuda fp32 CUDA graph"] == "out of memory (CUDA)"
    assert comparison.skipped["cuda: overhead"].startswith("the worker process ended")
    assert comparison.skipped["tiny, cpu fp16: stability"] == "out of memory (bad_alloc)"
    assert comparison.stability["tiny, cpu fp32"].skipped == 1
    (line,) = [row for row in str(comparison).splitlines() if row.startswith("cuda: overhead")]
    assert line.endswith("not measured: the worker process ended, probably out of memory")
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written["skipped"] == dict(comparison.skipped)
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "tiny, batch 8, cuda fp32 CUDA graph: out of memory (CUDA)" in page


class SlowMachine:
    """A clock that workers advance by what their work takes on a simulated machine."""

    def __init__(self, speed: float, start_seconds: float, spread: float, seed: int) -> None:
        self.now = 0.0
        self.speed = speed  # of the CPU, in FLOP/s; the GPU is 20 times as fast
        self.start_seconds = start_seconds  # of a worker
        self.spread = spread  # each step takes up to this many times as long, at random
        self.random = random.Random(seed)

    def work(self, seconds: float) -> float:
        """Spend time; returns how much."""
        seconds_taken = seconds * self.random.uniform(1.0, self.spread)
        self.now += seconds_taken
        return seconds_taken

    def step(self, c: Configuration) -> float:
        """The seconds of a step without other programs."""
        slowdown = {"bf16": 1.0, "fp32": 2.0, "fp16": 3.0}[c.precision]
        fixed, speed = (0.002, 20 * self.speed) if c.device == "cuda" else (0.03, self.speed)
        return fixed + slowdown * steps.size_of(c)[1] / speed


class TimedWorker(FakeWorker):
    """Takes as long as the real one: a start, the model, warmup, steps and checks."""

    machine: ClassVar[SlowMachine]

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.is_started = False

    def call(self, method: str, timeout: float, *arguments: Any) -> Any:
        machine, begin = self.machine, self.machine.now
        if not self.is_started:
            machine.work(machine.start_seconds)
            self.is_started = True
        answer = super().call(method, timeout, *arguments)
        if method == "measure_device":
            machine.work(1.0)
            answer = DeviceMeasurement(
                2**36, dict.fromkeys(("fp32", "bf16", "fp16"), self.gemm(arguments[0]))
            )
        elif method == "measure_device_overhead":
            machine.work(arguments[-1])
        else:
            c, step = arguments[0], machine.step(arguments[0])
            machine.work(steps.size_of(c)[0] / 5e7)  # drawing the weights
            if method == "measure_stability":
                step = 0.01 if arguments[1] else step
                machine.work(max(5 * step, min(50 * step, arguments[3])))
            else:
                count = max(3, min(100, int(arguments[1] / step)))
                step_times = [machine.work(step) for _ in range(count)]
                machine.work((4 + 4 * arguments[3]) * step)  # warmup, gradient and stages
                answer = dataclasses.replace(answer, seconds=step_times)
        if machine.now - begin > timeout:
            machine.now = begin + timeout
            raise MeasurementError(f"timed out after {timeout:.0f} s")
        return answer

    def gemm(self, device: str) -> float:
        return self.machine.speed * (40 if device == "cuda" else 2)


@pytest.mark.parametrize("minutes", [0.5, 2.0])
@pytest.mark.parametrize(
    ("speed", "start_seconds", "spread"),
    [(2e12, 4.0, 1.0), (2e11, 10.0, 1.5), (3e10, 6.0, 3.0)],
    ids=["H200", "laptop", "busy laptop"],
)
def test_comparison_ends_with_its_time(
    fake_workers: type[FakeWorker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minutes: float,
    speed: float,
    start_seconds: float,
    spread: float,
) -> None:
    machine = SlowMachine(speed, start_seconds, spread, seed=0)

    def load(facts: MachineInfo, seconds: float) -> list[Loading]:
        machine.work(min(seconds, 5.0))
        return [Loading(0, timing([10.0]))]

    monkeypatch.setattr(worker, "Worker", TimedWorker)
    monkeypatch.setattr(TimedWorker, "machine", machine, raising=False)
    monkeypatch.setattr(module, "measure_loading", load)
    monkeypatch.setattr(module, "read_machine_info", lambda: H200)
    monkeypatch.setattr(module.time, "monotonic", lambda: machine.now)
    options = CompareOptions(
        models=("tiny", "original", "ViT-B-32"), batch_sizes=(1, 8, 64), minutes=minutes
    )
    used_by_imports = 3.0
    measured: list[Result] = []
    try:
        comparison = run_comparison(options, tmp_path, lambda text, used: None, used_by_imports)
        measured += comparison.results
    except UserError:
        if minutes > 0.5:
            raise  # in half a minute, starting one worker may take all of the time
    limit = 60 * minutes + max(module.OVERRUN_SECONDS, 60 * minutes * module.OVERRUN_FRACTION)
    assert machine.now + used_by_imports <= limit + 0.01
    if minutes > 0.5:
        devices = {r.configuration.device for r in measured}
        assert devices >= {"cuda", "cpu"}, "every device is measured, even in a short time"
        assert machine.now > 0.7 * 60 * minutes, "the time is used"


def test_side_measurements_come_after_the_steps_that_were_asked_for(
    fake_workers: type[FakeWorker], tmp_path: Path
) -> None:
    shown: list[str] = []
    options = CompareOptions(devices=("cpu",), minutes=10.0)
    run_comparison(options, tmp_path, lambda text, used: shown.append(text))
    steps_begin = shown.index("tiny, batch 64, cpu bf16")
    assert shown[:steps_begin] == ["cpu: matrix multiplication"], "the estimates need it"
    last_first_round = shown.index("tiny, batch 64, cpu bf16 compiled")
    for name in ("cpu: overhead", "loading by workers"):
        assert shown.index(name) > last_first_round


def test_first_step_gets_the_time_of_the_stability(tmp_path: Path) -> None:
    session = session_with(tmp_path, remaining=30.0)  # of which 72 s are for the stability
    assert session.obstacle(configuration("tiny", 8), 10.0) == ""


def test_comparison_without_a_step_names_it_and_the_minutes_that_are_enough(
    fake_workers: type[FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORKER_START_SECONDS", 200.0)
    options = CompareOptions(devices=("cpu",), precisions=("bf16",), minutes=1.5)
    with pytest.raises(UserError) as error:
        run_comparison(options, tmp_path, lambda text, used: None)
    message = str(error.value)
    expected = "no training step could be timed within 1.5 minutes: tiny, batch 64, cpu bf16: needs"
    assert message.startswith(expected)
    assert message.endswith("too long for --minutes 1.5; --minutes 4.5 would be enough")


class InThisProcess:
    """Does the calls of a session here, where tests can make the models small."""

    alive = True

    def __init__(self, log: Path) -> None: ...

    def hang_up(self) -> None: ...

    def close(self) -> None: ...

    def call(self, method: str, timeout: float, *arguments: Any) -> Any:
        return getattr(worker, method)(*arguments)


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is the reduced one, and only the smallest operations are measured, once each."""
    shape = reduced_shape()
    monkeypatch.setattr(worker, "model_shape", lambda model: (shape, shape.context_length))
    once = functools.partial(measure_overhead, rounds=1, seconds=0.0, matmul_sizes=(32,))
    monkeypatch.setattr(worker, "measure_overhead", once)
    monkeypatch.setitem(worker.GEMM_SIZE, "cpu", 64)
    monkeypatch.setattr(worker, "threads", lambda requested, facts: 1)


@pytest.mark.usefixtures("small_models")
def test_gradients_and_stages_of_a_step_are_measured() -> None:
    c = configuration(batch_size=2)
    measurement = worker.measure(c, 0.0, 2, True)
    assert len(measurement.seconds) == 2
    assert measurement.peak_bytes > 1e7
    assert 0 < measurement.gradient_difference < 0.15
    # Another batch size in another precision in the same process.
    measurement = worker.measure(
        dataclasses.replace(c, batch_size=1, precision="fp32"), 0.0, 1, True
    )
    assert measurement.gradient_difference < 1e-4
    assert measurement.stages.keys() >= {"copy", "forward", "backward", "optimizer"}
    assert measurement.stages_problem == ""


@pytest.mark.slow
def test_worker_process_measures_reports_errors_and_is_killed_when_late(tmp_path: Path) -> None:
    c = dataclasses.replace(configuration(batch_size=1), threads=1)
    process = Worker(tmp_path / "log")
    try:
        measurement = process.call("measure", TIMEOUT, c, 0.0, 1, False)
        assert len(measurement.seconds) == 1
        assert measurement.gradient_difference is None
        with pytest.raises(MeasurementError, match="unknown model preset"):
            process.call("measure", TIMEOUT, dataclasses.replace(c, model="none"), 0.0, 1, False)
        assert process.alive
        with pytest.raises(MeasurementError, match="timed out after"):
            process.call("measure", 0.0, c, 0.0, 1, False)
    finally:
        process.close()
    with pytest.raises(MeasurementError, match="worker process"):
        process.call("measure", TIMEOUT, c, 0.0, 1, False)


@dataclasses.dataclass
class Killer:
    """An argument that kills the worker that reads it."""

    pid: int

    def __reduce__(self) -> Any:
        return os.kill, (self.pid, signal.SIGKILL)


@pytest.mark.slow
def test_worker_that_is_killed_within_a_measurement_is_replaced(tmp_path: Path) -> None:
    """As the system does when memory is short, or a driver when its device is lost."""
    session = session_with(tmp_path, remaining=TIMEOUT)
    c = dataclasses.replace(configuration(batch_size=1, precision="fp32"), threads=1)
    victim = session.workers.get(c.variant)
    with pytest.raises(MeasurementError, match="worker process ended, probably out of memory"):
        victim.call("measure", TIMEOUT, Killer(victim.pid))
    assert not victim.alive
    session.measure(c, 0.0)
    session.workers.close()
    assert session.skipped == {}
    assert [r.configuration for r in session.steps.results] == [c]


@pytest.mark.usefixtures("small_models")
def test_complete_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Results of a busy machine are not saved otherwise.
    monkeypatch.setattr(steps, "MAX_OTHERS", 1.0)
    monkeypatch.setattr(worker, "Worker", InThisProcess)
    c = configuration(precision="fp32", batch_size=2)
    monkeypatch.setattr(module, "configurations", lambda *values: [c])
    monkeypatch.setattr(module, "measure_loading", lambda facts, seconds: [])
    monkeypatch.setattr(module, "STABILITY_STEPS", 6)
    monkeypatch.setattr(module, "COMPARED_SECONDS", 0.0)
    shown: list[str] = []
    options = CompareOptions(batch_sizes=(2,), devices=("cpu",), precisions=("fp32",), minutes=10.0)
    comparison = run_comparison(options, tmp_path / "out", lambda text, used: shown.append(text))
    (c,) = comparison.results
    assert c.seconds.n >= 6, "two passes"
    assert c.gradient_difference is not None
    assert c.gradient_difference < 1e-3
    assert shown[-1] == c.configuration.label
    assert "tiny, cpu fp32" in comparison.stability
    assert "memory bandwidth" in {overhead.operation for overhead in comparison.overheads["cpu"]}
    assert (tmp_path / "out" / "comparison.html").stat().st_size > 10_000
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written["complete"]
    assert "the fastest of 1" in written["verdict"][0]
    assert load_measured(read_machine_info()) == [c]
