"""Estimates and diagnostics after an hour of sleep or a clock change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import screen

from m1clip.formatting import ago
from m1clip.hardware.timing import drift
from m1clip.monitor.diagnostics import stalled, throttling
from m1clip.monitor.history import History


def step(number: int, seconds: float, time: float = 0.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": 1.0, "images_per_second": 1.0, "memory_bytes": 1,
            "step_seconds": seconds, "time": time}  # fmt: skip


def test_time_left_ignores_sleep() -> None:
    shown = screen()
    shown.begin(0, 1000)
    for number in range(1, 11):
        shown.step(step(number, 360.0 if number == 5 else 0.1))  # ten steps of it slept for an hour
    shown._last_line = -1e9
    shown.step(step(11, 0.1))
    line = shown.console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined]
    assert line.endswith("1:39 left")


def test_single_long_step_is_not_throttling(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.add({"kind": "start", "step": 0, "steps": 1000})
    for number in range(1, 60):
        history.add(step(number, 3600.0 if number in (20, 50) else 0.1))
    assert throttling(history) is None
    assert drift([0.1] * 20 + [3600.0] + [0.1] * 9) == pytest.approx(0.0)


def test_stall_is_detected_after_clock_is_set_back(tmp_path: Path) -> None:
    """The clock is set back by an hour, then the run stops logging."""
    history = History(tmp_path)
    history.add({"kind": "start", "step": 0, "steps": 1000, "time": 10_000.0})
    for number in range(1, 9):
        history.add(step(number, 0.1, time=10_000.0 + number))
    for number in range(9, 12):
        history.add(step(number, 0.1, time=6_400.0 + number))
    assert history.last_time == 6_411.0
    assert stalled(history, 6_412.0, "running") is None
    assert stalled(history, 6_600.0, "running") is not None
    assert ago(-3600.0) == "0 s ago"


def test_history_after_rollback(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.add({"kind": "start", "step": 0, "steps": 1000})
    for number in range(1, 9):
        history.add(step(number, 0.1))
    history.add({"kind": "event", "event": "rolled back", "step": 3, "back_to": 3})
    assert history.step == 3
    history.add(step(4, 0.1))
    assert [row["step"] for row in history.steps] == [1, 2, 3, 4]
