"""Worker processes that measure training steps: peak memory, thread counts and crashes are per
process.
"""

import contextlib
import copy
import gc
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from m1clip.bench.decide import decide_step
from m1clip.bench.overhead import Overhead, measure_overhead
from m1clip.bench.stability import (
    MIN_COMPARED_LOSSES,
    STABILITY_BATCHES,
    STABILITY_STEPS,
    Stability,
    summarize,
)
from m1clip.bench.steps import REDUCED_MODEL, Configuration, model_shape, reduced_shape
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.hardware.device import Device, Kind, Precision, threads
from m1clip.hardware.energy import open_meter
from m1clip.hardware.machine_info import MachineInfo, read_machine_info
from m1clip.hardware.timing import Load, Phases, gemm_rates, is_settled
from m1clip.model.clip import build_clip
from m1clip.model.presets import CLIPConfig
from m1clip.training.compose import TrainStep, compose_step
from m1clip.training.duration import step_plan
from m1clip.training.memory import random_batch
from m1clip.training.oom import is_out_of_memory
from m1clip.training.parity import fill_zeros, gradient, on_cpu, relative_difference
from m1clip.training.schedule import scheduled_lr_fraction
from m1clip.training.spec import DecidedConfig
from m1clip.training.step import make_parts, train_step

# Large enough to reach the device's peak rate.
GEMM_SIZE = {"cpu": 1536, "mps": 4096, "mlx": 4096, "cuda": 8192}
MAX_WARM_STEPS, MAX_CAPTURE_STEPS = 4, 24  # a CUDA graph is captured after a few steps
MAX_STEPS = 100  # timed at once
PARITY_IMAGES = 4
LR_FRACTION = 0.01  # of the peak learning rates
STAGE_STEPS = 3  # synchronized steps that show the stages


class MeasurementError(Exception):
    """A configuration that could not be measured."""


class Worker:
    def __init__(self, log: Path) -> None:
        """`log` receives what the process and its libraries print."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(log)), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, timeout: float, *arguments: Any) -> Any:
        """Call a function of this module in the worker.

        MeasurementError if it fails, crashes or times out.
        """
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(timeout):
                self.close()
                raise MeasurementError(f"timed out after {timeout:.0f} s")
            reason, value = self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            raise MeasurementError("the worker process ended, probably out of memory") from None
        if reason:
            raise MeasurementError(reason)
        return value

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def hang_up(self) -> None:
        """Let the process end, without waiting for it."""
        self._pipe.close()

    def close(self) -> None:
        self.hang_up()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Workers:
    """The worker processes of a comparison, one for each variant, which write to one log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.log.write_bytes(b"")
        self._workers: dict[str, Worker] = {}

    def __contains__(self, variant: str) -> bool:
        return variant in self._workers

    @property
    def names(self) -> set[str]:
        """What has a worker now."""
        return set(self._workers)

    def get(self, variant: str) -> Worker:
        """Return the worker of a variant, started if there is none or if it was killed."""
        if variant not in self._workers or not self._workers[variant].alive:
            self._workers[variant] = Worker(self.log)
        return self._workers[variant]

    def close(self, keep: Collection[str] = ()) -> None:
        """End all workers but some."""
        closed = [self._workers.pop(name) for name in list(self._workers) if name not in keep]
        for worker in closed:
            worker.hang_up()  # all of them end at the same time
        for worker in closed:
            worker.close()


def _serve(pipe: Connection, log: str) -> None:
    """Answer calls with (reason, value) until the other end closes.

    Everything printed goes to the log.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            method, arguments = pipe.recv()
            reason, value = "", None
            try:
                value = globals()[method](*arguments)
            except UserError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001  one configuration that fails must not end the comparison
                traceback.print_exc()
                reason = describe_error(error)
            pipe.send((reason, value))


def describe_error(error: Exception) -> str:
    """An error in one line; one about memory begins with these words."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    text = f"{type(error).__name__}: {first_line}"[:300]
    return f"out of memory ({text})" if is_out_of_memory(error) else text


@dataclass(frozen=True)
class DeviceMeasurement:
    """What a device can do, apart from any model."""

    total_bytes: int
    gemm_flops: dict[str, float]  # FLOP/s of a matrix multiplication by precision


def measure_device(kind: Kind, precisions: list[Precision]) -> DeviceMeasurement:
    """Memory of a device, and the FLOP/s of a matrix multiplication in each precision."""
    device = _open_device(kind)
    size = GEMM_SIZE[device.kind if device.has_gpu else "cpu"]
    rates = gemm_rates(device, precisions, size, rounds=5)
    return DeviceMeasurement(device.total_bytes(), rates)


def measure_device_overhead(
    kind: Kind, precisions: list[Precision], seconds: float
) -> list[Overhead]:
    """Launch, wait, allocation, transfer and matrix multiplication by size on a device."""
    device = _open_device(kind)
    try:
        return measure_overhead(device, precisions, seconds=seconds)
    finally:
        device.release()


def _open_device(kind: Kind) -> Device:
    facts = read_machine_info()
    torch.set_num_threads(threads(0, facts))
    return Device(kind, facts)


@dataclass(frozen=True)
class Measurement:
    """Timed steps of one configuration."""

    seconds: list[float]
    joules: float | None  # of all of them
    other_load: float | None  # fraction of the CPU used by other programs
    peak_bytes: int
    # For a few images, relative to the CPU's in fp32; None: not checked.
    gradient_difference: float | None
    stages: dict[str, float] = field(default_factory=dict)  # median seconds by stage of a step
    stages_problem: str = ""  # why they were not measured


def measure(c: Configuration, seconds: float, min_steps: int, check: bool) -> Measurement:
    """Time the step of `train`, with a batch that is already in memory, for `seconds` or `min_steps`
    steps.

    With `check`, also compare the gradient with the CPU's and measure the stages of a step.
    """
    facts = read_machine_info()
    device = Device(c.device, facts)
    try:
        return _measure(c, facts, device, seconds, min_steps, check)
    finally:
        gc.collect()
        device.release()  # other workers need the memory


def _measure(
    c: Configuration,
    facts: MachineInfo,
    device: Device,
    seconds: float,
    min_steps: int,
    check: bool,
) -> Measurement:
    config = decide_step(facts, c).config
    torch.compiler.reset()
    torch.set_num_threads(threads(config.train.threads, facts))
    device.reset_peak()
    shape, tokens = model_shape(c.model)
    step = build_step(config, device, shape)
    # As in a warmup: the model must not overfit the batch before its gradients are compared.
    step.optimizer.set_lr(LR_FRACTION)
    batch = random_batch(shape, c.batch_size, tokens)
    durations: list[float] = []

    def run_step() -> None:
        begin = time.perf_counter()
        step.run(batch, len(durations) + 1)
        device.synchronize()
        durations.append(time.perf_counter() - begin)

    for _ in range(MAX_WARM_STEPS):
        if not (len(durations) > 2 and is_settled(durations)):
            run_step()
    while (
        step.cuda_graph is not None
        and not step.cuda_graph.settled
        and len(durations) < MAX_CAPTURE_STEPS
    ):
        run_step()
    durations.clear()
    meter, load = open_meter(device.kind), Load()
    while len(durations) < min_steps or (sum(durations) <= seconds and len(durations) < MAX_STEPS):
        run_step()
    joules, other_load, peak = meter.joules() if meter else None, load.others(), device.peak_bytes()
    if not check:
        return Measurement(durations, joules, other_load, peak, None)
    few = random_batch(shape, PARITY_IMAGES, tokens)
    checked = step.for_check(fill_zeros(copy.deepcopy(step.model)))
    there = gradient(checked, few)
    checked.parts.model.set_attention("bmm")
    cpu_gradients = gradient(on_cpu(checked, facts), few)
    difference = max(map(relative_difference, there, cpu_gradients))
    stages: dict[str, float] = {}
    problem = ""
    try:
        stages = time_stages(step, device, batch)
    except Exception as error:  # noqa: BLE001  a probe that fails must not lose the timed steps
        problem = describe_error(error)
    return Measurement(durations, joules, other_load, peak, difference, stages, problem)


def build_step(config: DecidedConfig, device: Device, shape: CLIPConfig) -> TrainStep:
    """The step of `train` for a model from random weights."""
    torch.manual_seed(0)
    model = build_clip(shape).to_devices(device.torch, device.text_torch)
    model.set_activation_checkpointing(config.model.grad_checkpointing)
    preprocess = Preprocess(image_size=shape.image_size)
    return compose_step(make_parts(model, config, device, config.train.precision, preprocess))


class SynchronizedPhases(Phases):
    """Phases of a step whose ends wait for the device, so that they can be timed everywhere."""

    def __init__(self, device: Device) -> None:
        super().__init__("cpu")  # the clock of the host
        self._device = device

    def mark(self, name: str) -> None:
        """Wait for the work of the phase before, and start the phase `name`."""
        self._device.synchronize()
        super().mark(name)


def time_stages(step: TrainStep, device: Device, batch: Batch) -> dict[str, float]:
    """Median seconds of each stage of a step, from a few synchronized steps."""
    if device.kind == "mlx":
        raise UserError("MLX computes a step as a whole")
    phases = SynchronizedPhases(device)
    phase_seconds: dict[str, list[float]] = {}
    for number in range(STAGE_STEPS + 1):
        # Not replayed as a CUDA graph, which has no stages.
        train_step(step.parts, batch, MAX_STEPS + number, mark=phases.mark)
        phases.stop()
        seconds = phases.take()
        if number == 0:
            continue  # the first step without a CUDA graph allocates its memory
        for name, value in seconds.items():
            phase_seconds.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in phase_seconds.items()}


def measure_stability(
    c: Configuration, reduced: bool, steps: int = STABILITY_STEPS, seconds: float = float("inf")
) -> Stability:
    """Train for a few steps at the learning rates of `train` and count loss spikes.

    A `reduced` model serves where the real one would take too long. After `seconds`, the run ends
    with fewer steps.
    """
    facts = read_machine_info()
    device = Device(c.device, facts)
    config = decide_step(facts, c, steps).config
    torch.set_num_threads(threads(config.train.threads, facts))
    shape, tokens = model_shape(c.model)
    name = c.model
    if reduced:
        shape = reduced_shape()
        tokens = shape.context_length
        name = REDUCED_MODEL
    try:
        step = build_step(config, device, shape)
        data = [random_batch(shape, c.batch_size, tokens) for _ in range(STABILITY_BATCHES)]
        results = []
        plan = step_plan(config.train)
        begin = time.monotonic()
        for number in range(steps):
            if number >= MIN_COMPARED_LOSSES and time.monotonic() - begin > seconds:
                break
            step.optimizer.set_lr(scheduled_lr_fraction(config.optim, plan, number))
            results.append(step.run(data[number % len(data)], number))
        losses = [float(result.loss) for result in results]
        norms = [float(result.grad_norm) for result in results]
    finally:
        gc.collect()
        device.release()
    return summarize(name, c.batch_size, losses, norms)
