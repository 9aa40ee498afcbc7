"""The lines of the run log that tell of steps. Tensors stay on the device until a line is written."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from m1clip.runlog import RunLog
from m1clip.train.checkpoint import LoopState
from m1clip.train.layers import LayerProbe, look_every
from m1clip.train.screen import Screen
from m1clip.train.setup import Job
from m1clip.train.telemetry import Telemetry, memory_parts
from m1clip.train.update import Update


class Recorder:
    """Gathers what happens since the last line, and writes it: figures, time split, machine, layers."""

    def __init__(self, job: Job, update: Update, log: RunLog, screen: Screen, total_steps: int) -> None:
        self.job, self.update, self.log, self.screen = job, update, log, screen
        train = job.config.train
        self.every = train.log_every or 1
        self.look_every = look_every(train.analysis_every, total_steps, self.every)
        self.telemetry = Telemetry(job.device.kind)
        self.probe = LayerProbe(update.model, update.optimizer)
        self._described = self._told = False
        self._begin()

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self._losses: list[Tensor] = []
        self._grad_norms: list[Tensor] = []
        self._data_seconds = 0.0

    def restart(self) -> None:
        """What came since the last line was no training: an evaluation, a checkpoint, steps that were taken back."""
        self.probe.disarm()  # a step that was taken back is never written down, and would leave its hooks
        self.update.phases.take()
        self.telemetry.skip()
        self._begin()

    def before(self, step: int) -> None:
        """Step number `step` (from 1) comes next."""
        if self.look_every and step % self.look_every == 0:
            self.probe.arm()

    def after(self, waited: float, loss: Tensor, grad_norm: Tensor) -> None:
        """A step was given to the device; nothing is read."""
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)
        self._data_seconds += waited

    def write(self, state: LoopState, share: float) -> None:
        """One line for the steps since the last; here, and only here, the host waits for the device."""
        n = len(self._losses)
        if n == 0:
            return
        figures = torch.stack([torch.stack(self._losses).float(), torch.stack(self._grad_norms).float()])
        (loss, grad_norm), skipped = _means(figures)
        phases = self.update.phases.take()
        seconds = time.perf_counter() - self._started
        split = time_split(seconds, self._data_seconds, phases)
        values: dict[str, Any] = {
            "step": state.step,
            "epoch": round(state.step / self.job.training.plan.steps_per_epoch, 4),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self.job.config.optim.lr * share,
            "temperature": float(1 / self.update.model.logit_scale.detach().exp()),
            "pairs_per_second": n * self.job.training.plan.batch / seconds,
            "step_seconds": seconds / n,
            "data_share": split["data"] / seconds,
            "seconds": {name: round(value / n, 6) for name, value in split.items()},
            "memory_bytes": self.job.device.memory_bytes(),
            "elapsed": round(state.seconds, 3),
            **self.telemetry.read(seconds),
        }
        if skipped:
            values["skipped"] = skipped  # updates; the means are those of the others
        self.log.write("step", **values)
        if self.look_every and state.step % self.look_every == 0:
            layers = self.probe.take(float(self._grad_norms[-1]))
            if layers is not None:
                self.log.write("layers", step=state.step, layers=layers)
        if not self._described:
            self.log.write("memory", **memory_parts(self.job, self.update), meter=self.telemetry.meter)
            self._described = True
        captured = self.update.captured
        if captured is not None and captured.off and not self._told:
            self.log.write("event", step=state.step, event="steps are not replayed", why=captured.off)
            self._told = True
        self.screen.step(values)
        self._begin()


def _means(figures: Tensor) -> tuple[list[float], int]:
    """Means over the steps (2, n) whose figures are all finite, and how many are not; one read from the device."""
    finite = figures.isfinite().all(dim=0)
    usable = torch.where(finite, figures, 0.0)
    count = finite.sum()
    means = torch.where(count > 0, usable.sum(dim=1) / count.clamp(min=1), figures.mean(dim=1))
    read: list[float] = torch.cat([means, (figures.shape[1] - count).float()[None]]).tolist()
    return read[:2], int(read[2])


def time_split(seconds: float, waited: float, phases: dict[str, float]) -> dict[str, float]:
    """Seconds by what they were spent on; they add up to `seconds`.

    Only the wait that the device sat out counts as data: while it still computes, a waiting host costs nothing.
    """
    busy = sum(phases.values())
    shrink = min(1.0, seconds / busy) if busy > 0 else 1.0
    data = min(waited, max(0.0, seconds - busy))
    parts = {"data": data, **{name: value * shrink for name, value in phases.items()}}
    return {**parts, "rest": max(0.0, seconds - sum(parts.values()))}
