"""Worker processes that measure training steps: peak memory, thread counts and crashes are per process."""

from __future__ import annotations

import contextlib
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
from m1clip.hardware.device import Device, check_compile, choose_precision, threads
from m1clip.hardware.energy import open_meter
from m1clip.hardware.facts import read_facts
from m1clip.hardware.timing import Load, is_settled

GEMM_SIZE = {"cpu": 1536, "mps": 4096, "cuda": 8192}  # large enough to reach the device's peak rate
MAX_WARM_STEPS, MAX_CAPTURE_STEPS = 4, 24  # a CUDA graph is captured after a few steps
PARITY_IMAGES = 4


class MeasurementError(Exception):
    """A configuration that could not be measured; `kind` is memory, settings, time, crash or error."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


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
                raise MeasurementError("time", f"timed out after {timeout:.0f} s")
            ok, value = self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            code = self._process.exitcode
            reason = "was killed, probably out of memory" if code == -9 else f"ended with exit code {code}"
            raise MeasurementError("crash", f"the worker process {reason}") from None
        if not ok:
            raise MeasurementError(*value)
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
    """Serve calls until the other end closes. Everything printed goes to the log."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    measurements = Measurements()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            method, arguments = pipe.recv()
            pipe.send(_answer(getattr(measurements, method), arguments))


def _answer(method: Any, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, method(*arguments)
    except UserError as error:
        return False, ("settings", str(error))
    except Exception as error:  # noqa: BLE001  one configuration that fails must not end the comparison
        traceback.print_exc()
        is_memory = isinstance(error, MemoryError) or "out of memory" in str(error).lower()
        line = next(iter(str(error).strip().splitlines()), "")
        return False, ("memory" if is_memory else "error", f"{type(error).__name__}: {line}"[:300])


class Measurements:
    """Measures one open configuration at a time: the step of `train`, with inputs preloaded in memory."""

    def __init__(self) -> None:
        self.facts = read_facts()
        self.is_first = True
        self.step: Any = None

    def probe(self, kind: Any, precisions: list[Any]) -> dict[str, Any]:
        """Raw device speed: matrix multiplication, memory bandwidth, kernel launch."""
        import torch

        from m1clip.hardware.timing import copy_bandwidth, gemm_rate, launch_seconds

        device = Device(kind, self.facts)
        torch.set_num_threads(threads(0, self.facts))
        return {
            "device": kind,
            "name": self.facts.cuda if kind == "cuda" else self.facts.cpu,
            "memory_bytes": device.total_bytes(),
            "gemm_flops": {name: gemm_rate(device, name, GEMM_SIZE[kind], rounds=5) for name in precisions},
            "bandwidth": copy_bandwidth(device, rounds=5),
            "launch_seconds": launch_seconds(device),
        }

    def open(self, configuration: Configuration, seconds: float) -> dict[str, Any]:
        """Build the step of a configuration and warm up until two steps agree, or for `seconds`."""
        import torch

        from m1clip.data.images import Preprocess
        from m1clip.model.clip import build_clip
        from m1clip.model.presets import flops_per_pair
        from m1clip.training.memory import stand_in
        from m1clip.training.step import TrainStep

        self._close()
        kind: Any = configuration.device
        config, device = configuration.train_config(), Device(kind, self.facts)
        if configuration.compile:
            check_compile(kind)
        precision = choose_precision(configuration.precision, kind, self.facts, None)
        torch.set_num_threads(threads(configuration.threads, self.facts))
        peak_is_known = device.reset_peak() or self.is_first
        self.is_first = False
        shape, tokens = model_shape(configuration.model)
        torch.manual_seed(0)
        model = build_clip(shape).to(device.torch)
        model.set_attention(configuration.attention)  # type: ignore[arg-type]
        model.set_activation_checkpointing(configuration.grad_checkpointing)
        preprocess = Preprocess(image_size=shape.image_size)
        self.device, self.number, self.peak_is_known = device, 0, peak_is_known
        self.step = TrainStep(model, config, device, precision, preprocess)
        self.batch = stand_in(shape, configuration.batch_size, tokens)
        self.parity_batch = stand_in(shape, PARITY_IMAGES, tokens)
        taken = [self._run_step()]
        while len(taken) < MAX_WARM_STEPS and sum(taken) < seconds and not (len(taken) > 2 and is_settled(taken)):
            taken.append(self._run_step())
        graph = self.step.cuda_graph
        for _ in range(MAX_CAPTURE_STEPS if graph is not None else 0):
            if not graph.settled:
                taken.append(self._run_step())
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "flops": configuration.batch_size * flops_per_pair(shape, tokens),
            "text_tokens": tokens,
            "threads": torch.get_num_threads(),
            "first_step_seconds": taken[0],
            "last_warm_step_seconds": taken[-1],
        }

    def steps(self, count: int, seconds: float) -> dict[str, Any]:
        """Time up to `count` steps, each one synchronized; starts none after `seconds`."""
        meter, load = open_meter(self.device.kind), Load()
        samples: list[dict[str, float]] = []
        self.step.phases.take()
        while len(samples) < count and sum(s["seconds"] for s in samples) <= seconds:
            samples.append({"seconds": self._run_step(), **self.step.phases.take()})
        return {
            "samples": samples,
            "joules": meter.joules() if meter else None,
            "other_load": load.others(),
            "peak_bytes": self.device.peak_bytes() if self.peak_is_known else None,
        }

    def gradient_difference(self) -> float:
        """Relative difference between the gradient of a few images and the CPU's in fp32."""
        from m1clip.training.parity import gradient, perturbed, relative_difference

        twin = perturbed(self.step.model).eval()
        there = gradient(twin, self.parity_batch, self.step.preprocess, self.step.autocast)
        twin.zero_grad(set_to_none=True)
        twin.set_attention("bmm")
        here = gradient(twin.to("cpu"), self.parity_batch, self.step.preprocess, contextlib.nullcontext)
        return relative_difference(there, here)

    def _run_step(self) -> float:
        """Seconds of one step."""
        self.number += 1
        begin = time.perf_counter()
        self.step(self.batch, self.number)
        self.device.synchronize()
        return time.perf_counter() - begin

    def _close(self) -> None:
        import torch

        self.step = None
        gc.collect()
        torch.compiler.reset()
