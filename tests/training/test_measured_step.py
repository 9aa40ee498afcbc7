"""Steps that measure themselves: stages where they cannot be timed in flight, with their cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import assert_same_bits, finished_run, run_small, tensors_of

from m1clip.hardware import timing
from m1clip.hardware.timing import Phases
from m1clip.runlog import read_log
from m1clip.training import duration
from m1clip.training.measured_step import StageTimer


def test_stage_timer_knows_the_usual_step_and_reports_once() -> None:
    timer = StageTimer()
    assert timer.usual_seconds == 0.0
    timer.record_line(9.0)  # the first steps are slower
    assert not timer.due(10, 1000)
    for seconds in (1.0, 1.1, 0.9):
        timer.record_line(seconds)
    assert timer.usual_seconds == 1.0
    assert timer.due(40, 1000)
    timer.add(41, 1.5, {"forward": 0.5, "backward": 1.0})
    assert not timer.due(41, 1000), "just measured"
    stages = timer.take(elapsed=100.0)
    assert stages == {"stages": {"forward": 0.5, "backward": 1.0}, "stages_cost": 0.005}
    assert timer.take(elapsed=101.0) == {}


def test_lines_kept_by_the_stage_timer_are_bounded() -> None:
    timer = StageTimer()
    for number in range(1000):
        timer.record_line(float(number))
    assert timer.usual_seconds == 997.0


def test_run_without_stages_in_flight_has_them_from_synchronized_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on MPS: the phases are silent, so that one step is synchronized.

    Its result is the same.
    """

    def silent(self: Phases, kind: str = "cpu") -> None:
        original(self, kind)
        self.silent = True

    changes = {"train.eval_every": 5}
    expected = tensors_of(finished_run(changes), 10)  # before the patches: other tests share it
    original = Phases.__init__
    monkeypatch.setattr(Phases, "__init__", silent)
    monkeypatch.setattr(timing, "STAGE_COST", 1.0)  # of a run of ten steps
    monkeypatch.setattr(timing, "ASSUMED_SECONDS", 0.0)
    monkeypatch.setattr(duration, "LOG_EVERY", 1)
    run_small(tmp_path / "run", changes)
    lines = [record for record in read_log(tmp_path / "run") if record["kind"] == "step"]
    assert all("forward" not in line["seconds"] for line in lines)
    staged = [line for line in lines if "stages" in line]
    assert staged
    for line in staged:
        assert {"copy", "preprocess", "forward", "backward", "optimizer"} <= set(line["stages"])
        assert all(seconds >= 0 for seconds in line["stages"].values())
        assert 0 <= line["stages_cost"] <= 1
    assert_same_bits(tensors_of(tmp_path / "run", 10), expected)
