"""Updates that are not finite in a whole run: skipped, then a way back with a lower rate, then a diagnosis."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import assert_same_bits, resume_quietly, run_small, screen, small_config, tensors_of
from test_step import make
from torch import Tensor

from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.evaluation.statistics import selection_metric
from m1clip.runlog import RunLog, read_log
from m1clip.training import recovery
from m1clip.training import step as update_module
from m1clip.training.checkpoint import CheckpointWriter, TensorGroups, TrainState, save
from m1clip.training.recovery import Recovery
from m1clip.training.run import train_config
from m1clip.training.step import TrainStep

NAN = float("nan")


def poisoned_steps(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int, float], bool]) -> None:
    """The loss of a step is NaN where `bad(step, rate factor)` says so."""
    real = TrainStep.compute_gradients

    def backward(self: TrainStep, batch: Batch, step: int) -> Tensor:
        loss = real(self, batch, step)
        return loss * NAN if bad(step, self.lr_factor) else loss

    monkeypatch.setattr(update_module.TrainStep, "compute_gradients", backward)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_log(run) if line["kind"] == "event" and line["event"] == name]


def test_one_bad_step_is_skipped_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_steps(monkeypatch, lambda step, factor: step == 4)
    run_small(tmp_path / "run", {"train.log_every": 10})
    (skipped,) = events(tmp_path / "run", "update skipped")
    assert skipped["step"] == 5
    assert len(skipped["samples"]) == 16
    steps = [line for line in read_log(tmp_path / "run") if line["kind"] == "step"]
    assert [line.get("skipped") for line in steps] == [1]
    assert math.isfinite(steps[0]["loss"])


def test_a_run_goes_back_with_a_lower_rate_and_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divergence that a lower rate cures: steps 5 to 8 are not finite at the full one."""
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 3)
    poisoned_steps(monkeypatch, lambda step, factor: factor == 1.0 and 5 <= step < 9)
    changes = {"train.save_every": 3, "train.save_total_limit": 9}
    run = tmp_path / "run"
    run_small(run, changes)
    (back,) = events(run, "rolled back")
    assert (back["failed"], back["back_to"], back["lr_factor"]) == (8, 3, 0.5)
    assert (run / "checkpoints" / "step-000006").exists()
    whole = tensors_of(run, 10)
    for step in (9, 10):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    resume_quietly(run)
    assert_same_bits(tensors_of(run, 10), whole)

    # A kill before the return: it is made again, from the same checkpoint, to the same end.
    for step in (6, 9, 10):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    resume_quietly(run)
    assert_same_bits(tensors_of(run, 10), whole)


def test_a_way_back_from_a_step_that_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of the last bad step were being looked at: nothing of it is left, and later looks work."""
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 2)
    poisoned_steps(monkeypatch, lambda step, factor: factor == 1.0 and 4 <= step < 6)
    run = tmp_path / "run"
    changes = {"train.log_every": 1, "train.analysis_every": 2, "train.save_every": 3}
    run_small(run, {**changes, "train.steps": 12, "optim.optimizer": "adamw"})
    assert [line["failed"] for line in events(run, "rolled back")] == [6]
    looks = [line["step"] for line in read_log(run) if line["kind"] == "layers"]
    assert looks == [2, 4, 4, 6, 8, 10, 12]
    losses = [line["loss"] for line in read_log(run) if line["kind"] == "step"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("skip", ["host", "device"])
def test_no_checkpoint_among_skipped_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip: Any) -> None:
    """On an accelerator too, where the host learns of them only when it looks; and the best model stays known."""
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 3)
    poisoned_steps(monkeypatch, lambda step, factor: factor == 1.0 and 5 <= step < 8)
    monkeypatch.setattr(update_module, "skip_rule", lambda kind, one_device: skip)
    run = tmp_path / "run"
    changes = {"train.save_every": 2, "train.save_total_limit": 9, "train.eval_every": 3, "train.log_every": 50}
    values = iter([0.9, 0.1, 0.2, 0.3, 0.4])
    monkeypatch.setattr(
        "m1clip.training.validation.selection_metric",
        lambda scores: replace(selection_metric(scores), value=next(values)),
    )
    run_small(run, {**changes, "train.steps": 8})
    saved = [line["step"] for line in read_log(run) if line["kind"] == "checkpoint"]
    assert saved == [2, 4, 6, 8], "6 and 8 only after the return"
    (back,) = events(run, "rolled back")
    assert back["back_to"] == 4
    assert json.loads((run / "checkpoints/step-000008/state.json").read_text())["best_step"] == 3


def test_a_way_back_keeps_the_smaller_scale(tmp_path: Path) -> None:
    """The scale of fp16 was lowered since the checkpoint for a reason."""
    job, update = make({"optim.optimizer": "adamw"})
    update.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for saved, wanted in ((65536.0, 64.0), (32.0, 32.0)):
        run, log = tmp_path / str(saved), RunLog(tmp_path)
        save(run, TrainState(step=3, scaler_scale=saved, best=0.1), groups_of(update), keep=1)
        state = TrainState(step=9, best=0.7, best_step=6, stale=1)
        writer = CheckpointWriter(run, job.config, 10, log, screen(), lambda: 0.0)
        Recovery(job, update, run, log, screen(), writer).roll_back(state)
        log.close()
        assert (state.step, state.best, state.best_step, state.stale) == (3, 0.7, 6, 1)
        assert (state.scaler_scale, update.scaler.get_scale()) == (wanted, wanted)


def groups_of(update: TrainStep) -> TensorGroups:
    return {"weights": update.model.state_dict(), "optimizer": update.optimizer.tensors()}


def test_a_run_without_a_checkpoint_goes_back_to_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 2)
    poisoned_steps(monkeypatch, lambda step, factor: factor == 1.0 and step >= 2)
    run_small(tmp_path / "run", {"optim.ema": 0.9})
    (back,) = events(tmp_path / "run", "rolled back")
    assert back["back_to"] == 0


def test_after_the_last_return_the_run_stops_with_a_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 2)
    poisoned_steps(monkeypatch, lambda step, factor: step >= 5)
    changes = {"train.save_every": 2, "train.max_rollbacks": 2}
    shown = screen()
    with pytest.raises(UserError, match=r"diverged at step 7.*after 2 rollbacks.*samples most often"):
        train_config(small_config(changes), tmp_path / "run", shown)
    assert len(events(tmp_path / "run", "rolled back")) == 2
    assert "learning rate is now 0.25 times the configured one" in shown.console.file.getvalue()  # type: ignore[attr-defined]
