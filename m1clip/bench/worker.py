"""Worker processes that measure training steps: peak memory, thread counts and crashes are per process."""

import contextlib
import copy
import gc
import multiprocessing
import os
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from m1clip.bench.steps import Configuration, model_shape
from m1clip.data.images import Preprocess
from m1clip.errors import UserError
from m1clip.hardware.device import Device, Kind, Precision, check_compile, choose_precision, threads
from m1clip.hardware.energy import open_meter
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.timing import Load, gemm_rates, is_settled
from m1clip.model.clip import build_clip
from m1clip.training.memory import random_batch
from m1clip.training.parity import fill_zeros, gradient, on_cpu, relative_difference
from m1clip.training.step import step_class

# Large enough to reach the device's peak rate.
GEMM_SIZE = {"cpu": 1536, "mps": 4096, "mlx": 4096, "cuda": 8192}
MAX_WARM_STEPS, MAX_CAPTURE_STEPS = 4, 24  # a CUDA graph is captured after a few steps
MAX_STEPS = 100  # timed at once
PARITY_IMAGES = 4


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
        """Call a function of this module in the worker; MeasurementError if it fails, crashes or times out."""
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
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, log: str) -> None:
    """Answer calls with (reason, value) until the other end closes. Everything printed goes to the log."""
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
                reason = (
                    f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[
                        :300
                    ]
                )
            pipe.send((reason, value))


def probe(kind: Kind, precisions: list[Precision]) -> tuple[int, dict[str, float]]:
    """Memory of a device, and the FLOP/s of a matrix multiplication in each precision."""
    facts = read_facts()
    device = Device(kind, facts)
    torch.set_num_threads(threads(0, facts))
    size = GEMM_SIZE[kind if device.has_gpu else "cpu"]
    return device.total_bytes(), gemm_rates(device, precisions, size, rounds=5)


@dataclass(frozen=True)
class Measurement:
    seconds: list[float]
    joules: float | None  # of all of them
    other_load: float | None  # fraction of the CPU used by other programs
    peak_bytes: int
    # For a few images, relative to the CPU's in fp32; None: not checked.
    gradient_difference: float | None


def measure(c: Configuration, seconds: float, least: int, check_gradient: bool) -> Measurement:
    """Time the step of `train`, with a batch that is already in memory, for `seconds` or `least` steps."""
    facts = read_facts()
    device = Device(c.device, facts)
    try:
        return _measure(c, facts, device, seconds, least, check_gradient)
    finally:
        gc.collect()
        device.release()  # other workers need the memory


def _measure(
    c: Configuration, facts: Facts, device: Device, seconds: float, least: int, check_gradient: bool
) -> Measurement:
    if c.compile:
        check_compile(c.device)
    precision = choose_precision(c.precision, c.device, facts)
    torch.compiler.reset()
    torch.set_num_threads(threads(c.threads, facts))
    device.reset_peak()
    shape, tokens = model_shape(c.model)
    torch.manual_seed(0)
    model = build_clip(shape).to(device.torch)
    model.set_activation_checkpointing(c.grad_checkpointing)
    preprocess = Preprocess(image_size=shape.image_size)
    step = step_class(device)(model, c.train_config(), device, precision, preprocess)
    batch = random_batch(shape, c.batch_size, tokens)
    taken: list[float] = []

    def run_step() -> None:
        begin = time.perf_counter()
        step(batch, len(taken) + 1)
        device.synchronize()
        taken.append(time.perf_counter() - begin)

    for _ in range(MAX_WARM_STEPS):
        if not (len(taken) > 2 and is_settled(taken)):
            run_step()
    while (
        step.cuda_graph is not None
        and not step.cuda_graph.settled
        and len(taken) < MAX_CAPTURE_STEPS
    ):
        run_step()
    taken.clear()
    meter, load = open_meter(c.device), Load()
    while len(taken) < least or (sum(taken) <= seconds and len(taken) < MAX_STEPS):
        run_step()
    joules, other_load, peak = meter.joules() if meter else None, load.others(), device.peak_bytes()
    difference = None
    if check_gradient:
        few = random_batch(shape, PARITY_IMAGES, tokens)
        check = step.for_check(fill_zeros(copy.deepcopy(step.model)))
        there = gradient(check, few)
        check.model.set_attention("bmm")
        difference = max(map(relative_difference, there, gradient(on_cpu(check, facts), few)))
    return Measurement(taken, joules, other_load, peak, difference)
