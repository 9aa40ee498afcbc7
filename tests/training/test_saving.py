"""Saving in a thread: what is written is a copy, in order, and errors reach the run."""

import threading
from pathlib import Path

import pytest
import torch

from m1clip.errors import UserError
from m1clip.training import saving
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
