"""What a run has used of its machine: energy, power, cores, heat. Sums of the lines of its log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

JOULES_PER_WATT_HOUR = 3600.0


class ResourceUse:
    """Sums over the steps of a log, in constant memory.

    Steps that were rolled back count: they were made.
    """

    def __init__(self) -> None:
        self.joules = 0.0
        self.measured_seconds = 0.0  # in which the joules were used
        self.peak_watts: float | None = None  # highest mean of a line
        self.peak_celsius: float | None = None
        self.peak_fan: float | None = None  # rpm, or percent on a GPU
        self.throttled_lines = 0
        self.reads_throttling = False
        self.lines = 0
        self.battery: list[float] = []  # percent: the first and the newest
        self._core_sums: list[float] = []
        self._core_lines = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line of kind `step`."""
        self.lines += 1
        joules = _number(record, "joules")
        watts = _number(record, "watts")
        if joules is not None and watts is not None:
            self.joules += joules
            self.measured_seconds += joules / watts if watts > 0 else 0.0
            self.peak_watts = max(watts, self.peak_watts or 0.0)
        elif joules is not None:
            self.joules += joules
        self.peak_celsius = _highest(self.peak_celsius, _number(record, "celsius"))
        fan = _number(record, "fan_rpm")
        self.peak_fan = _highest(
            self.peak_fan, _number(record, "fan_percent") if fan is None else fan
        )
        throttled = _number(record, "throttled")
        self.reads_throttling |= throttled is not None
        self.throttled_lines += (throttled or 0.0) > 0
        battery = _number(record, "battery_percent")
        if battery is not None:
            self.battery = [*self.battery[:1], battery]
        self._add_cores(record.get("cores"))

    def _add_cores(self, cores: Any) -> None:
        if not isinstance(cores, list) or not cores:
            return
        if len(cores) != len(self._core_sums):  # resumed on another machine
            self._core_sums = [0.0] * len(cores)
            self._core_lines = 0
        self._core_sums = [
            total + value for total, value in zip(self._core_sums, cores, strict=True)
        ]
        self._core_lines += 1

    @property
    def core_use(self) -> list[float]:
        """Mean use of each core in percent."""
        return [total / self._core_lines for total in self._core_sums]

    @property
    def mean_watts(self) -> float | None:
        """Mean power of the steps; None without a meter."""
        return self.joules / self.measured_seconds if self.measured_seconds else None


def mean_by_kind(use: Sequence[float], kinds: Sequence[str]) -> dict[str, float]:
    """Average the use of cores by their kind, such as performance and efficiency."""
    if len(use) != len(kinds):
        return {}
    groups: dict[str, list[float]] = {}
    for value, kind in zip(use, kinds, strict=True):
        groups.setdefault(kind, []).append(value)
    return {kind: sum(values) / len(values) for kind, values in groups.items()}


def energy_figures(use: ResourceUse, epochs: float, score: float | None) -> dict[str, float]:
    """Return the energy of training, by epoch and as power, and the score for a watt-hour.

    {} if the energy was not measured.
    `score` is the selection metric, such as mean recall, as a fraction.
    """
    if not use.joules or not epochs:
        return {}
    figures = {"joules": use.joules, "joules_per_epoch": use.joules / epochs}
    if use.mean_watts is not None and use.peak_watts is not None:
        figures["mean_watts"] = use.mean_watts
        figures["peak_watts"] = use.peak_watts
    if score is not None:
        figures["recall_per_watt_hour"] = score / (use.joules / JOULES_PER_WATT_HOUR)
    return figures


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _highest(before: float | None, value: float | None) -> float | None:
    numbers = [number for number in (before, value) if number is not None]
    return max(numbers, default=None)
