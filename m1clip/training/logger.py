"""The log lines of training steps (loss, speed, time by stage, sensors), and the live display of a
run.

Values are read from the device only when a line is written.
"""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from m1clip import console
from m1clip.errors import UserError
from m1clip.formatting import clock, size
from m1clip.hardware.energy import EnergyMeter, idle_watts, meter_obstacle, open_meter
from m1clip.hardware.sensors import THROTTLED, Host, core_kinds, open_sensors
from m1clip.runlog import MEAN_RECALL, Record, Sink

if TYPE_CHECKING:
    from m1clip.evaluation.statistics import Metric, Scores
    from m1clip.training.context import RunContext
    from m1clip.training.optim import Optimizer
    from m1clip.training.step import StepResult

SENSOR_SECONDS = 5.0  # between two readings: some sensors take milliseconds
RECENT_LINES = 25  # log lines whose speed predicts the time left
STEP_SECONDS = 15.0  # between two progress lines without a terminal


class StepLogger:
    """Collects what the steps report, and writes one line for several of them."""

    def __init__(self, device_kind: str) -> None:
        self.telemetry = Telemetry(device_kind)
        self._wrote_sensors = False
        self._wrote_memory = False
        self._wrote_graph = False
        self._begin()

    def _begin(self) -> None:
        self._started = time.perf_counter()
        # Loss, gradient norm, accuracy within the batch and its chance level of each step, on the
        # device.
        self._values: list[Tensor] = []
        self._data_seconds = 0.0

    def restart(self, run: RunContext) -> None:
        """Discard everything since the last line, such as an evaluation, a checkpoint or
        rolled-back steps.
        """
        run.train_step.phases.take()
        self.telemetry.read(1.0)
        self._begin()

    def record(self, waited: float, result: StepResult) -> None:
        """Called after each step; nothing is read from the device."""
        loss, grad_norm, accuracy = result
        self._values.append(torch.stack([loss.float(), grad_norm.float(), *accuracy.float()]))
        self._data_seconds += waited

    def write(self, run: RunContext) -> None:
        """Write one line for the steps since the last; the only place that synchronizes."""
        inputs = run.inputs
        state = run.state
        train_step = run.train_step
        values = torch.stack(self._values).tolist()
        finite = [figures for figures in values if all(map(math.isfinite, figures))]
        n = len(values)
        used = finite or values
        loss, grad_norm, accuracy, chance = (
            sum(column) / len(used) for column in zip(*used, strict=True)
        )
        phases = train_step.phases.take()
        seconds = time.perf_counter() - self._started
        split = time_split(seconds, self._data_seconds, phases)
        line: dict[str, Any] = {
            "step": state.step,
            "epoch": round(state.step / inputs.training.plan.steps_per_epoch, 4),
            "loss": loss,
            "grad_norm": grad_norm,
            "batch_accuracy": round(accuracy, 5),
            "batch_chance": round(chance, 6),
            **logged_learning_rates(train_step.parts.update.optimizer),
            "temperature": float(1 / train_step.model.logit_scale.detach().exp()),
            "images_per_second": n * inputs.training.plan.batch / seconds,
            "step_seconds": seconds / n,
            "data_fraction": split["data"] / seconds,
            "seconds": {name: round(value / n, 6) for name, value in split.items()},
            "memory_bytes": inputs.device.memory_bytes(),
            "elapsed": round(state.seconds, 3),
            **run.measurements.stage_timer.take(state.seconds),
            **self.telemetry.read(seconds),
        }
        run.measurements.stage_timer.record_line(seconds / n)
        if run.ranks.size > 1:  # without the time in which a rank waits for others
            own = torch.tensor((seconds - split.get("exchange", 0.0)) / n)
            line["rank_seconds"] = [round(value, 6) for value in run.ranks.gather(own).tolist()]
        if len(finite) < n:
            line["skipped"] = n - len(finite)  # the means exclude them
        run.log.write("step", **line)
        if not self._wrote_sensors:
            run.log.write("sensors", **self.telemetry.describe())
            self._wrote_sensors = True
        memory = run.measurements.memory
        is_last = state.step >= run.plan.total_steps
        if memory.done and (is_last or not self._wrote_memory):
            run.log.write("memory", **memory.record())
            self._wrote_memory = True
        graph = train_step.cuda_graph
        if graph is not None and graph.disabled and not self._wrote_graph:
            run.log.write(
                "event", step=state.step, event="CUDA graph disabled", reason=graph.disabled
            )
            self._wrote_graph = True
        run.display.step(line)
        self._begin()


def logged_learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """`lr` of AdamW, or of the last part of an optimizer without it, and `muon_lr` of Muon."""
    rates = optimizer.learning_rates()
    by_name = {"lr": rates.get("adamw", list(rates.values())[-1])}
    if "muon" in rates:
        by_name["muon_lr"] = rates["muon"]
    return by_name


def time_split(seconds: float, waited: float, phases: dict[str, float]) -> dict[str, float]:
    """Seconds by phase; they add up to `seconds`.

    Waiting for data counts only while the device is idle: waiting while the device computes costs
    nothing.
    """
    busy = sum(phases.values())
    scale = min(1.0, seconds / busy) if busy > 0 else 1.0
    data = min(waited, max(0.0, seconds - busy))
    parts = {"data": data, **{name: value * scale for name, value in phases.items()}}
    return {**parts, "rest": max(0.0, seconds - sum(parts.values()))}


class Telemetry:
    """Hardware readings since the last call.

    Values that cannot be measured are omitted, never estimated.
    """

    def __init__(
        self,
        device_kind: str,
        host: Host | None = None,
        open_energy_meter: Callable[[str], EnergyMeter | None] = open_meter,
        measure_idle: Callable[[EnergyMeter], float] = idle_watts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the sensors.

        With an energy meter, measure for a moment what the machine uses before the run.
        """
        host = host or Host()
        own = (
            os.sched_getaffinity(0)
            if hasattr(os, "sched_getaffinity")
            else range(os.cpu_count() or 1)
        )
        self._cpus = sorted(own)  # ignore cores that this process may not use
        self._core_kinds = core_kinds(self._cpus, host)
        self._sensors = open_sensors(device_kind, host)
        self._not_measured = dict(self._sensors.not_measured)
        self._meter = open_energy_meter(device_kind)
        self._idle_watts = None if self._meter is None else measure_idle(self._meter)
        if self._meter is None:
            self._not_measured["energy"] = meter_obstacle(device_kind, host.system)
        self._joules = 0.0 if self._meter is None else self._meter.joules()
        self._clock = clock
        self._values = self._sensors.read()
        self._measured = clock()
        psutil.cpu_percent(percpu=True)  # the first call only starts the interval

    def describe(self) -> dict[str, Any]:
        """What this machine measures, and for the rest why it does not."""
        values: dict[str, Any] = {"core_kinds": self._core_kinds}
        if self._meter is not None:
            values["meter"] = f"{self._meter.name}: {self._meter.covers}"
        if self._idle_watts is not None:
            values["idle_watts"] = round(self._idle_watts, 2)
        return {**values, "not_measured": self._not_measured}

    def read(self, seconds: float) -> dict[str, Any]:
        """CPU usage per core in percent, joules and mean watts of the last `seconds`, temperature
        and the like.
        """
        use = psutil.cpu_percent(percpu=True)
        values: dict[str, Any] = {"cores": [round(use[n]) for n in self._cpus if n < len(use)]}
        if self._meter is not None:
            joules = self._meter.joules()
            used, self._joules = joules - self._joules, joules
            values |= {"joules": round(used, 3), "watts": round(used / seconds, 2)}
        if self._clock() - self._measured > SENSOR_SECONDS:
            self._values = self._sensors.read()
            self._measured = self._clock()
        values |= self._values
        if THROTTLED in self._values:
            self._values[THROTTLED] = 0.0  # an event is logged once
        return values


def check_sink(name: str) -> None:
    if name == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "--report-to tensorboard: not installed; run pip install 'm1clip[log]', or remove the"
            " option"
        )


def open_sink(name: str, run: Path) -> tuple[Sink, Callable[[], None]] | None:
    """(write, close) functions of a logging backend; None for only run.jsonl."""
    if name != "tensorboard":
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run / "tensorboard"))

    def write(record: Record) -> None:
        if record["kind"] in ("step", "eval", "analysis", "end"):
            for key, value in scalars(record["kind"], record):
                writer.add_scalar(key, value, record["step"], walltime=record["time"])

    return write, writer.close


def scalars(prefix: str, record: Record) -> Iterator[tuple[str, float]]:
    """Every number of a record as kind/name, nested ones as kind/name/name.

    Of a list, its first number.
    """
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


class TrainingDisplay:
    """The live line of a run: its last step, score and time left."""

    def __init__(self) -> None:
        self._bar: console.Bar | None = None
        self._step = 0
        self._total = 0
        self._text = ""
        self._score = ""
        self._last_line = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=RECENT_LINES)

    def begin(self, step: int, total: int) -> None:
        self._step = step
        self._total = total
        self._text = "first steps ..."
        self._step_seconds.clear()
        if console.has_bars():
            self._bar = console.Bar()
            self._bar.show(self._text, step, total)

    def change_total(self, total: int) -> None:
        """Show another number of steps: --minutes has corrected it."""
        self._total = total
        if self._bar is not None:
            self._bar.show(self._text, self._step, total)

    def step(self, values: dict[str, Any]) -> None:
        # The median ignores outliers such as an hour of sleep between two steps.
        self._step_seconds.append(values["step_seconds"])
        seconds_left = statistics.median(self._step_seconds) * (self._total - values["step"])
        self._step = values["step"]
        self._text = (
            f"step {values['step']:,}/{self._total:,}  loss {values['loss']:.3f}{self._score}  "
            f"{values['images_per_second']:,.0f} images/s  {size(values['memory_bytes'])}  {clock(seconds_left)} left"
        )
        if self._bar is not None:
            self._bar.show(self._text, self._step, self._total)
        elif time.monotonic() - self._last_line > STEP_SECONDS or values["step"] == self._total:
            self._last_line = time.monotonic()
            console.print(self._text)

    def evaluation(
        self, step: int, scores: Scores, metric: Metric, best: tuple[float, int] | None
    ) -> None:
        """Show the metric that selects the best model, and `best` (value, step) if an earlier one
        was better.
        """
        low, high = 100 * metric.interval.low, 100 * metric.interval.high
        self._score = f"  {metric.label} {100 * metric.value:.1f}%"
        earlier = f"best so far {100 * best[0]:.1f}% at step {best[1]:,}" if best else "best so far"
        line = (
            f"validation step {step:,}:{self._score[1:]} [{low:.1f}, {high:.1f}], chance"
            f" {100 * metric.chance:.3g}%"
        )
        if metric.name == MEAN_RECALL:
            to_image, to_text = (
                100 * scores[f"{name}/recall@1"].value
                for name in ("text_to_image", "image_to_text")
            )
            earlier += f"; recall@1 text to image {to_image:.1f}%, image to text {to_text:.1f}%"
        console.print(f"{line}, {earlier}")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.remove()
            self._bar = None
