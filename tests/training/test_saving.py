"""Saving in a thread: what is written is a copy, in order, and errors reach the run."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import assert_same_bits, resume_quietly, run_small, tensors_of

from m1clip.errors import UserError
from m1clip.model.folder import WEIGHTS
from m1clip.training import saving, validation
from m1clip.training.checkpoint import TensorGroups
from m1clip.training.saving import Saver

TIMEOUT = 300.0  # seconds; only a test that fails waits so long


def test_later_steps_do_not_change_what_is_saved() -> None:
    weight = torch.zeros(3)
    stepped = threading.Event()
    saved: list[list[float]] = []

    def write(groups: TensorGroups) -> None:
        assert stepped.wait(TIMEOUT)
        saved.append(groups["weights"]["w"].tolist())

    saver = Saver(in_background=True)
    saver.submit(Path("a"), {"weights": {"w": weight}}, write)
    weight += 1
    stepped.set()
    saver.wait()
    assert saved == [[0.0, 0.0, 0.0]]
    saver.close()


def test_folders_are_written_in_order_and_reported_by_the_calling_thread() -> None:
    reports: list[tuple[str, str]] = []
    go = threading.Event()
    saver = Saver(in_background=True)

    def save(name: str) -> None:
        def write(groups: TensorGroups) -> str:
            assert go.wait(TIMEOUT)
            return name

        saver.submit(
            Path(name),
            {},
            write,
            lambda done: reports.append((done, threading.current_thread().name)),
        )

    for name in ("best", "checkpoint", "model"):
        save(name)
    saver.poll()
    assert reports == []
    go.set()
    saver.wait(Path("checkpoint"))
    own_thread = threading.current_thread().name
    assert reports[:2] == [("best", own_thread), ("checkpoint", own_thread)]
    saver.close()
    assert reports[2:] == [("model", own_thread)]


def test_error_of_the_thread_is_raised_once() -> None:
    def fail(groups: TensorGroups) -> None:
        raise UserError("the disk is full")

    saver = Saver(in_background=True)
    saver.submit(Path("a"), {}, fail)
    with pytest.raises(UserError, match="full"):
        saver.wait()
    saver.wait()
    saver.submit(Path("b"), {}, fail)
    saver.close()  # after another error


EVALUATED_TWICE: dict[str, Any] = {
    "train.evaluations": 2,
    "train.steps": 4,
    "train.eval_every": None,
}


def models_of(run: Path) -> tuple[Path, Path]:
    """The weights of the best and of the last model."""
    return run / "best" / WEIGHTS, run / "model" / WEIGHTS


def test_last_model_that_is_the_best_one_is_stored_once(tmp_path: Path) -> None:
    run_small(tmp_path / "run", EVALUATED_TWICE | {"train.evaluations": 1})
    best, last = models_of(tmp_path / "run")
    assert last.samefile(best)
    assert_same_bits(load_file(last), weights_of_last_checkpoint(tmp_path / "run"))
    shutil.rmtree(best.parent)  # the other name keeps the file
    resume_quietly(tmp_path / "run")
    assert_same_bits(load_file(last), weights_of_last_checkpoint(tmp_path / "run"))


def test_last_model_after_a_better_one_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "improves", lambda metric, best, later_wins: best < 0)
    run_small(tmp_path / "run", EVALUATED_TWICE)
    best, last = models_of(tmp_path / "run")
    assert best.read_bytes() != last.read_bytes()
    assert_same_bits(load_file(last), weights_of_last_checkpoint(tmp_path / "run"))


def weights_of_last_checkpoint(run: Path) -> dict[str, torch.Tensor]:
    tensors = tensors_of(run, EVALUATED_TWICE["train.steps"])
    return {
        name.removeprefix("weights:"): tensor
        for name, tensor in tensors.items()
        if name.startswith("weights:")
    }


@pytest.mark.parametrize("in_background", [False, True])
def test_tensors_without_room_for_a_copy_are_written_at_once(
    in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "COPIED_FRACTION", 0.0)
    weight = torch.zeros(3)
    waits: list[bool] = []
    saver = Saver(in_background)
    saver.submit(
        Path("a"),
        {"weights": {"w": weight}},
        lambda groups: groups["weights"]["w"] is weight,
        waits.append,
    )
    assert waits == [True]
    saver.close()
