"""Worker processes that measure training steps: peak memory, thread counts and crashes are per process."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from m1clip.bench.configurations import Configuration, model_shape
from m1clip.errors import UserError
from m1clip.hardware.device import Device, Kind, Precision, check_compile, choose_precision, threads
from m1clip.hardware.energy import open_meter
from m1clip.hardware.facts import read_facts
from m1clip.hardware.timing import Load, is_settled

GEMM_SIZE = {"cpu": 1536, "mps": 4096, "mlx": 4096, "cuda": 8192}  # large enough to reach the device's peak rate
MAX_WARM_STEPS, MAX_CAPTURE_STEPS = 4, 24  # a CUDA graph is captured after a few steps
PARITY_IMAGES = 4


class MeasurementError(Exception):
    """A configuration that could not be measured."""


class Worker:
    """Handle of a worker process."""

    def __init__(self, log: Path) -> None:
        """`log` receives what the process and its libraries print."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(log)), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, timeout: float, *arguments: Any) -> Any:
        """Call a method of `Measurements` in the worker; MeasurementError if it fails, crashes or times out."""
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
        """Whether the process is running."""
        return self._process.is_alive()

    def close(self) -> None:
        """End the process."""
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
    measurements = Measurements()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            method, arguments = pipe.recv()
            reason, value = "", None
            try:
                value = getattr(measurements, method)(*arguments)
            except UserError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001  one configuration that fails must not end the comparison
                traceback.print_exc()
                reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:300]
            pipe.send((reason, value))


class Measurements:
    """Measures one open configuration at a time: the step of `train`, with inputs preloaded in memory."""

    def __init__(self) -> None:
        self.facts = read_facts()
        self.is_first = True
        self.step: Any = None

    def probe(self, kind: Kind, precisions: list[Precision]) -> tuple[int, dict[str, float]]:
        """Memory of a device, and the FLOP/s of a matrix multiplication in each precision."""
        import torch

        from m1clip.hardware.timing import gemm_rate

        device = Device(kind, self.facts)
        torch.set_num_threads(threads(0, self.facts))
        size = GEMM_SIZE[kind if device.has_gpu else "cpu"]
        return device.total_bytes(), {name: gemm_rate(device, name, size, rounds=5) for name in precisions}

    def open(self, configuration: Configuration, seconds: float) -> tuple[int, float, float]:
        """Build the step of a configuration and warm it up until two steps agree, or for `seconds`.

        Returns the number of parameters, the FLOPs of a step and the seconds of the last one.
        """
        import torch

        from m1clip.data.images import Preprocess
        from m1clip.model.clip import build_clip
        from m1clip.model.presets import flops_per_pair
        from m1clip.training.memory import random_batch
        from m1clip.training.step import make_train_step

        self.step = None
        gc.collect()
        torch.compiler.reset()
        config, self.device = configuration.train_config(), Device(configuration.device, self.facts)
        if configuration.compile:
            check_compile(configuration.device)
        precision = choose_precision(configuration.precision, configuration.device, self.facts, None)
        torch.set_num_threads(threads(configuration.threads, self.facts))
        self.peak_is_known = self.device.reset_peak() or self.is_first
        self.is_first = False
        shape, tokens = model_shape(configuration.model)
        torch.manual_seed(0)
        model = build_clip(shape).to(self.device.torch)
        model.set_attention(configuration.attention)  # type: ignore[arg-type]
        model.set_activation_checkpointing(configuration.grad_checkpointing)
        preprocess = Preprocess(image_size=shape.image_size)
        self.number = 0
        self.step = make_train_step(model, config, self.device, precision, preprocess)
        self.batch = random_batch(shape, configuration.batch_size, tokens)
        self.parity_batch = random_batch(shape, PARITY_IMAGES, tokens)
        taken = [self._run_step()]
        while len(taken) < MAX_WARM_STEPS and sum(taken) < seconds and not (len(taken) > 2 and is_settled(taken)):
            taken.append(self._run_step())
        graph = self.step.cuda_graph
        for _ in range(MAX_CAPTURE_STEPS if graph is not None else 0):
            if not graph.settled:
                taken.append(self._run_step())
        parameters = sum(p.numel() for p in model.parameters())
        return parameters, configuration.batch_size * flops_per_pair(shape, tokens), taken[-1]

    def steps(self, count: int, seconds: float) -> dict[str, Any]:
        """Time up to `count` steps, each one synchronized; starts none after `seconds`."""
        meter, load = open_meter(self.device.kind), Load()
        taken: list[float] = []
        while len(taken) < count and sum(taken) <= seconds:
            taken.append(self._run_step())
        return {
            "seconds": taken,
            "joules": meter.joules() if meter else None,
            "other_load": load.others(),
            "peak_bytes": self.device.peak_bytes() if self.peak_is_known else None,
        }

    def gradient_difference(self) -> float:
        """Relative difference between the gradient of a few images and the CPU's in fp32."""
        from m1clip.training.parity import fill_zeros, gradient, on_cpu, relative_difference

        check = self.step.for_check(fill_zeros(copy.deepcopy(self.step.model)))
        there = gradient(check, self.parity_batch)
        check.model.set_attention("bmm")
        return max(map(relative_difference, there, gradient(on_cpu(check, self.facts), self.parity_batch)))

    def _run_step(self) -> float:
        """Seconds of one step."""
        self.number += 1
        begin = time.perf_counter()
        self.step(self.batch, self.number)
        self.device.synchronize()
        return time.perf_counter() - begin
