"""Logging of training steps: loss, speed, time split, hardware. Values are read only when a line is written."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from m1clip.errors import UserError
from m1clip.hardware.energy import open_meter, temperature
from m1clip.runlog import Record, Sink
from m1clip.training.schedule import lr_schedule

if TYPE_CHECKING:
    from m1clip.training.context import RunContext
    from m1clip.training.setup import Setup
    from m1clip.training.step import TrainStep

TEMPERATURE_SECONDS = 5.0  # between two readings: some sensors take milliseconds


class StepLogger:
    """Collects what the steps report, and writes one line for several of them."""

    def __init__(self, device_kind: str) -> None:
        self.telemetry = Telemetry(device_kind)
        self._wrote_memory = False
        self._wrote_graph = False
        self._begin()

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self._values: list[Tensor] = []  # (loss, gradient norm) of each step, on the device
        self._data_seconds = 0.0

    def restart(self, run: RunContext) -> None:
        """Discard everything since the last line, such as an evaluation, a checkpoint or rolled-back steps."""
        run.train_step.phases.take()
        self.telemetry.read(1.0)
        self._begin()

    def record(self, waited: float, loss: Tensor, grad_norm: Tensor) -> None:
        """Called after each step; nothing is read from the device."""
        self._values.append(torch.stack([loss.float(), grad_norm.float()]))
        self._data_seconds += waited

    def write(self, run: RunContext) -> None:
        """Write one line for the steps since the last; the only place that synchronizes."""
        setup = run.setup
        state = run.state
        train_step = run.train_step
        values = torch.stack(self._values).tolist()
        finite = [pair for pair in values if all(map(math.isfinite, pair))]
        n = len(values)
        used = finite or values
        loss, grad_norm = (sum(column) / len(used) for column in zip(*used, strict=True))
        schedule = lr_schedule(run.config.optim, run.plan)
        phases = train_step.phases.take()
        seconds = time.perf_counter() - self._started
        split = time_split(seconds, self._data_seconds, phases)
        line: dict[str, Any] = {
            "step": state.step,
            "epoch": round(state.step / setup.training.plan.steps_per_epoch, 4),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": run.config.optim.lr * schedule(state.step - 1) * train_step.lr_factor,
            "temperature": float(1 / train_step.model.logit_scale.detach().exp()),
            "images_per_second": n * setup.training.plan.batch / seconds,
            "step_seconds": seconds / n,
            "data_fraction": split["data"] / seconds,
            "seconds": {name: round(value / n, 6) for name, value in split.items()},
            "memory_bytes": setup.device.memory_bytes(),
            "elapsed": round(state.seconds, 3),
            **self.telemetry.read(seconds),
        }
        if run.ranks.size > 1:  # without the time in which a rank waits for others
            own = torch.tensor((seconds - split.get("exchange", 0.0)) / n)
            line["rank_seconds"] = [round(each, 6) for each in run.ranks.gather(own).tolist()]
        if len(finite) < n:
            line["skipped"] = n - len(finite)  # the means exclude them
        run.log.write("step", **line)
        if not self._wrote_memory:
            run.log.write(
                "memory", **memory_parts(setup, train_step), meter=self.telemetry.meter_name
            )
            self._wrote_memory = True
        graph = train_step.cuda_graph
        if graph is not None and graph.disabled and not self._wrote_graph:
            run.log.write(
                "event", step=state.step, event="CUDA graph disabled", reason=graph.disabled
            )
            self._wrote_graph = True
        run.screen.step(line)
        self._begin()


def time_split(seconds: float, waited: float, phases: dict[str, float]) -> dict[str, float]:
    """Seconds by phase; they add up to `seconds`.

    Waiting for data counts only while the device is idle: waiting while the device computes costs nothing.
    """
    busy = sum(phases.values())
    scale = min(1.0, seconds / busy) if busy > 0 else 1.0
    data = min(waited, max(0.0, seconds - busy))
    parts = {"data": data, **{name: value * scale for name, value in phases.items()}}
    return {**parts, "rest": max(0.0, seconds - sum(parts.values()))}


class Telemetry:
    """Hardware readings since the last call. Values that cannot be measured are omitted, never estimated."""

    def __init__(self, device_kind: str) -> None:
        self._kind = device_kind
        own = (
            os.sched_getaffinity(0)
            if hasattr(os, "sched_getaffinity")
            else range(os.cpu_count() or 1)
        )
        self._cpus = sorted(own)  # ignore cores that this process may not use
        self._meter = open_meter(device_kind)
        self.meter_name = (
            None if self._meter is None else f"{self._meter.name}: {self._meter.covers}"
        )
        self._joules = 0.0
        self._celsius, self._measured = temperature(device_kind), time.monotonic()
        psutil.cpu_percent(percpu=True)  # the first call only starts the interval

    def read(self, seconds: float) -> dict[str, Any]:
        """CPU usage per core in percent, joules and mean watts of the last `seconds`, temperature."""
        use = psutil.cpu_percent(percpu=True)
        values: dict[str, Any] = {"cores": [round(use[n]) for n in self._cpus if n < len(use)]}
        if self._meter is not None:
            joules = self._meter.joules()
            used, self._joules = joules - self._joules, joules
            values |= {"joules": round(used, 3), "watts": round(used / seconds, 2)}
        if self._celsius is not None and time.monotonic() - self._measured > TEMPERATURE_SECONDS:
            self._celsius, self._measured = temperature(self._kind), time.monotonic()
        if self._celsius is not None:
            values["celsius"] = round(self._celsius, 1)
        return values


def memory_parts(setup: Setup, train_step: TrainStep) -> dict[str, int]:
    """Bytes by component; `rest` is everything else in the peak: activations, libraries, buffers."""

    def nbytes(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    model = train_step.model
    parts = {
        "weights": nbytes(train_step.parameters) + nbytes(model.buffers()),
        "gradients": nbytes(p for p in train_step.parameters if p.requires_grad),
        "optimizer": nbytes(train_step.optimizer.tensors().values()),
    }
    if setup.device.kind == "cpu":
        parts["images"] = sum(split.images.ram_bytes for split in setup.splits.values())
    peak = setup.device.peak_bytes()
    return {**parts, "rest": max(0, peak - sum(parts.values())), "peak": peak}


def check_sink(name: str) -> None:
    if name == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "--report-to tensorboard: not installed; run pip install 'm1clip[log]', or remove the option"
        )


def open_sink(name: str, run: Path) -> tuple[Sink, Callable[[], None]] | None:
    """(write, close) functions of a logging backend; None for only run.jsonl."""
    if name != "tensorboard":
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run / "tensorboard"))

    def write(record: Record) -> None:
        if record["kind"] in ("step", "eval", "end"):
            for key, value in scalars(record["kind"], record):
                writer.add_scalar(key, value, record["step"], walltime=record["time"])

    return write, writer.close


def scalars(prefix: str, record: Record) -> Iterator[tuple[str, float]]:
    """Every number of a record as kind/name, nested ones as kind/name/name; of a list, its first number."""
    for key, value in record.items():
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, dict):
            yield from scalars(f"{prefix}/{key}", first)
        elif (
            key not in ("v", "step", "time")
            and isinstance(first, int | float)
            and not isinstance(first, bool)
        ):
            yield f"{prefix}/{key}", float(first)
