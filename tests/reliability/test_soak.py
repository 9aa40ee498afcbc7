"""Promise 12: beside a run that trains, nothing grows and no line of its log is missing. The hour: soak.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drift import Limit, judge, slope
from soak import EVAL_EVERY, LOG_EVERY, SAVE_EVERY, complete, soak

from m1clip.runlog import RunLog
from m1clip.training.checkpoint import TrainState, save


def test_a_slope_is_found_under_noise_and_a_single_jump_is_none() -> None:
    flat = [(float(t), 100.0 + (-1) ** t) for t in range(60)]
    growing = [(t, value + 0.5 * t) for t, value in flat]
    jumping = [(t, value + (500 if t == 30 else 0)) for t, value in flat]
    assert abs(slope(flat)) < 0.05
    assert slope(growing) == pytest.approx(0.5, abs=0.05)
    limit = Limit(share=0.05, amount=1)
    assert judge(flat, 10, limit)["ok"]
    assert judge(jumping, 10, limit)["ok"]
    assert not judge(growing, 10, limit)["ok"]
    assert not judge(flat[:4], 0, limit)["ok"], "too few samples prove nothing"


def test_a_missing_step_is_noticed(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in (10, 20, 40):
        log.write("step", step=step)
    assert complete(tmp_path)["missing"] == {"step": [30]}


def test_an_evaluation_that_a_signal_broke_off_is_not_missing(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(LOG_EVERY, EVAL_EVERY + 1, LOG_EVERY):
        log.write("step", step=step)
        if step % SAVE_EVERY == 0:
            log.write("checkpoint", step=step)
    assert complete(tmp_path)["missing"] == {"eval": [EVAL_EVERY]}
    groups = {"weights": {"a": torch.ones(1)}, "optimizer": {"a": torch.ones(1)}}
    save(tmp_path, TrainState(step=EVAL_EVERY, evaluation_due=True), groups, keep=1)
    assert complete(tmp_path)["missing"] == {}


@pytest.mark.slow
def test_a_short_soak_is_flat_and_its_log_complete(tmp_path: Path) -> None:
    told = soak(tmp_path, seconds=8, every=0.3)
    assert told["log"]["missing"] == {}
    assert told["log"]["last_step"] > 10
    assert told["exit_code"] == 143
    assert all(told["alive"].values())
    assert told["polls"]["pages"] > 0
    assert told["polls"]["screen_bytes"] > 0
    # In seconds memory still warms up: only what must not move at all is judged here.
    for name in ("train", "monitor"):
        assert told["verdicts"][name]["fds"]["ok"], told["verdicts"][name]
        assert told["verdicts"][name]["threads"]["ok"], told["verdicts"][name]
