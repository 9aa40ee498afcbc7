"""What the machine does while it trains: core use, energy, heat, memory by part. Read once a line of the log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import psutil
from torch import Tensor

from m1clip.data.store import ArrayPictures
from m1clip.hardware.energy import open_meter
from m1clip.hardware.heat import temperature
from m1clip.train.setup import Job
from m1clip.train.update import Update

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


def memory_parts(job: Job, update: Update) -> dict[str, int]:
    """Bytes by component. `rest` is what the peak holds beside them: activations, libraries, buffers."""
    known = {
        "weights": _bytes(update.model.parameters()) + _bytes(update.model.buffers()),
        "gradients": _bytes(p for p in update.model.parameters() if p.requires_grad),
        "optimizer": _bytes(update.optimizer.tensors().values()),
    }
    if update.ema is not None:
        known["average"] = _bytes(update.ema.weights.values())
    if job.device.kind == "cpu":
        stores = (split.pictures for split in job.splits.values())
        known["pictures"] = sum(store.array.nbytes for store in stores if isinstance(store, ArrayPictures))
    peak = job.device.peak_bytes()
    return {**known, "rest": max(0, peak - sum(known.values())), "peak": peak}


def _own_cpus() -> list[int]:
    """Those this process may run on: of a shared machine's other cores nothing is to be said."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
