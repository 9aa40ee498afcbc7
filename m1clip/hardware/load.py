"""Whether somebody else is using the processors while we measure."""

from __future__ import annotations

import os

import psutil


class Load:
    """The processor time that other programs take, from the moment this is made."""

    def __init__(self) -> None:
        self._all, self._idle = _machine()
        self._own = _own()

    def others(self) -> float | None:
        """Share of all processors taken by others since then; None over too short a time to tell."""
        total, idle = (now - then for now, then in zip(_machine(), (self._all, self._idle), strict=True))
        if total < 0.5:  # clock ticks are hundredths of a second
            return None
        return min(1.0, max(0.0, (total - idle - (_own() - self._own)) / total))


def _machine() -> tuple[float, float]:
    times = psutil.cpu_times()
    return sum(times[:8]), times.idle + getattr(times, "iowait", 0.0)  # guests are counted in user already


def _own() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
