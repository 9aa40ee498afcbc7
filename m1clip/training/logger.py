"""The lines of the run log that tell of steps. Tensors stay on the device until a line is written."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from m1clip.errors import UserError
from m1clip.hardware.energy import open_meter, temperature
from m1clip.runlog import Record, RunLog, Sink
from m1clip.training.checkpoint import TrainState
from m1clip.training.optim import Optimizer
from m1clip.training.progress import Screen
from m1clip.training.setup import Job
from m1clip.training.step import TrainStep

HEAT_SECONDS = 5.0  # between two readings of a thermometer: some take milliseconds


class Telemetry:
    """Readings since the last call. What cannot be measured here is left out, never estimated."""

    def __init__(self, device_kind: str) -> None:
        self._kind = device_kind
        self._cpus = _own_cpus()
        self._meter = open_meter(device_kind)
        self._joules = 0.0
        self._heat: float | None = temperature(device_kind)
        self._hot_since = time.monotonic()
        psutil.cpu_percent(percpu=True)  # the first call only sets the begin of the next

    @property
    def meter(self) -> str | None:
        """What the energy covers, or None where there is no meter."""
        return None if self._meter is None else f"{self._meter.name}: {self._meter.covers}"

    def read(self, seconds: float) -> dict[str, Any]:
        """Core use in percent; joules and mean watts of the last `seconds`; degrees."""
        use = psutil.cpu_percent(percpu=True)
        values: dict[str, Any] = {"cores": [round(use[n]) for n in self._cpus if n < len(use)]}
        if self._meter is not None:
            joules = self._meter.joules()
            used, self._joules = joules - self._joules, joules
            values |= {"joules": round(used, 3), "watts": round(used / seconds, 2)}
        if self._heat is not None and time.monotonic() - self._hot_since > HEAT_SECONDS:
            self._heat, self._hot_since = temperature(self._kind), time.monotonic()
        if self._heat is not None:
            values["celsius"] = round(self._heat, 1)
        return values

    def skip(self) -> None:
        """What was used since the last reading belongs to no step: an evaluation, a checkpoint."""
        psutil.cpu_percent(percpu=True)
        if self._meter is not None:
            self._joules = self._meter.joules()


def memory_parts(job: Job, update: TrainStep) -> dict[str, int]:
    """Bytes by component. `rest` is what the peak holds beside them: activations, libraries, buffers."""
    known = {
        "weights": _bytes(update.model.parameters()) + _bytes(update.model.buffers()),
        "gradients": _bytes(p for p in update.model.parameters() if p.requires_grad),
        "optimizer": _bytes(update.optimizer.tensors().values()),
    }
    if update.ema is not None:
        known["average"] = _bytes(update.ema.weights.values())
    if job.device.kind == "cpu":
        known["images"] = sum(split.images.ram_bytes for split in job.splits.values())
    peak = job.device.peak_bytes()
    return {**known, "rest": max(0, peak - sum(known.values())), "peak": peak}


def _own_cpus() -> list[int]:
    """Those this process may run on: of a shared machine's other cores nothing is to be said."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


BLOCK = re.compile(r"^(?P<tower>[^.]+)_tower\..*?\b(?:blocks|layers?|resblocks|stages)\.(?P<number>\d+)\.")
LOOKS = 40  # a run, unless the config says otherwise


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to, in a person's words: image block 3, text stem, image head."""
    if name.startswith("logit_"):
        return "temperature"
    block = BLOCK.match(name)
    if block:
        return f"{block['tower']} block {int(block['number']) + 1}"
    tower = re.split(r"[._]", name)[0]
    head = name.startswith((f"{tower}_head.", f"{tower}_tower.norm."))
    return f"{tower} {'head' if head else 'stem'}"


def look_every(asked: int | None, total_steps: int, log_every: int) -> int:
    """Steps between two looks, a multiple of the log's interval so that both read the device at once; 0 = never."""
    if asked == 0:
        return 0
    wish = asked if asked is not None else max(1, total_steps // LOOKS)
    return -(-wish // log_every) * log_every


class LayerProbe:
    """Armed for one step, it reads gradients just before the optimizer moves the weights, and the move just after."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._names = {id(p): layer_of(name) for name, p in model.named_parameters()}
        self._handles: list[RemovableHandle] = []
        self._before: list[Tensor] = []
        self._seen: list[tuple[list[str], list[Tensor], list[Tensor], list[Tensor]]] = []

    def arm(self) -> None:
        """Look at the next step."""
        self._optimizer.observed = True
        for part in self._optimizer.parts.values():
            self._handles.append(part.register_step_pre_hook(self._look_before))
            self._handles.append(part.register_step_post_hook(self._look_after))

    def disarm(self) -> None:
        """Look no more, and forget what was seen."""
        for handle in self._handles:
            handle.remove()
        self._optimizer.observed = False
        self._handles, self._before, self._seen = [], [], []

    @torch.no_grad()
    def _look_before(self, part: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        moved = _moving(part)
        grads = [p.grad for p in moved if p.grad is not None]
        self._before = [p.detach().clone() for p in moved]
        names = [self._names[id(p)] for p in moved]
        norms, weights = torch._foreach_norm(grads), torch._foreach_norm(self._before)
        self._seen.append((names, list(norms), list(weights), []))

    @torch.no_grad()
    def _look_after(self, part: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        moved = [p.detach() for p in _moving(part)]
        torch._foreach_sub_(self._before, moved)
        self._seen[-1][3].extend(torch._foreach_norm(self._before))
        self._before = []

    def take(self, grad_norm: float) -> dict[str, list[float]] | None:
        """layer -> [gradient norm before clipping, update / weight]; one read of the device. None: nothing moved."""
        seen = self._seen
        self.disarm()
        names = [name for part in seen for name in part[0]]
        columns = (
            [norm for part in seen for norm in part[1]],
            [norm for part in seen for norm in part[2]],
            [norm for part in seen for norm in part[3]],
        )
        if not names or len(columns[2]) != len(names):
            return None
        rows = torch.stack([torch.stack([t.float() for t in column]) for column in columns]).square().tolist()
        sums: dict[str, list[float]] = {}
        for name, *squares in zip(names, *rows, strict=True):
            row = sums.setdefault(name, [0.0, 0.0, 0.0])
            for place, square in enumerate(squares):
                row[place] += square
        # Clipping scaled all gradients alike: the norm before it is known, so that each can be scaled back.
        clipped = math.sqrt(sum(row[0] for row in sums.values()))
        scale = grad_norm / clipped if clipped > 0 and math.isfinite(grad_norm) else 1.0
        return {
            name: [_short(scale * math.sqrt(grad)), _short(math.sqrt(moved / weight) if weight else 0.0)]
            for name, (grad, weight, moved) in sums.items()
        }


def _moving(part: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in part.param_groups for p in group["params"] if p.grad is not None]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


class StepLogger:
    """Gathers what happens since the last line, and writes it: figures, time split, machine, layers."""

    def __init__(self, job: Job, update: TrainStep, log: RunLog, screen: Screen, total_steps: int) -> None:
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

    def write(self, state: TrainState, share: float) -> None:
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
            "images_per_second": n * self.job.training.plan.batch / seconds,
            "step_seconds": seconds / n,
            "data_fraction": split["data"] / seconds,
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
        captured = self.update.cuda_graph
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


NOT_CURVES = {"v", "step", "time"}


def check_sink(name: str) -> None:
    """A sink that is not installed is an error before anything is trained."""
    if name == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise UserError("--report-to tensorboard: it is not installed; pip install 'm1clip[log]', or leave it out")


def open_sink(name: str, run: Path) -> tuple[Sink, Callable[[], None]] | None:
    """What takes each record, and what ends it; None for the file alone."""
    if name != "tensorboard":
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run / "tensorboard"))

    def write(record: Record) -> None:
        step = record.get("step")
        if record["kind"] in ("step", "eval", "end", "layers") and isinstance(step, int):
            for key, value in scalars(record):
                writer.add_scalar(key, value, step, walltime=record["time"])

    return write, writer.close


def scalars(record: Record) -> list[tuple[str, float]]:
    """Every number of a record under kind/name, nested ones under kind/name/name."""
    found: list[tuple[str, float]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}/{key}", item)
        elif isinstance(value, list):
            if prefix.count("/") > 1 and value:  # [share, n] of a group, [gradient, update] of a layer
                walk(prefix, value[0])
            else:
                for place, item in enumerate(value):
                    walk(f"{prefix}/{place}", item)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((prefix, float(value)))

    for key, value in record.items():
        if key not in NOT_CURVES:
            walk(f"{record['kind']}/{key}", value)
    return found
