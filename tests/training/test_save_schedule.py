"""When and how checkpoints are written: by steps or time, beside the training, on a disk that is full."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import assert_same_bits, resume_quietly, run_small, screen, small_config, tensors_of

from m1clip.errors import UserError
from m1clip.formatting import steps_or_seconds
from m1clip.inference.encoder import Model
from m1clip.runlog import RunLog, read_log
from m1clip.training import checkpoint as saving
from m1clip.training.checkpoint import CheckpointWriter, SaveSchedule, TrainState
from m1clip.training.checkpoint_files import saved_steps, verify
from m1clip.training.progress import Screen
from m1clip.training.run import train_config

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(500, (500, 0.0)), ("500", (500, 0.0)), ("30s", (0, 30.0)), ("10m", (0, 600.0)), (" 1.5H ", (0, 5400.0)),
     (0, (0, 0.0))],
)  # fmt: skip
def test_steps_or_a_time(value: int | str, wanted: tuple[int, float]) -> None:
    assert steps_or_seconds(value, "--save-every") == wanted


@pytest.mark.parametrize("value", ["", "m", "10 minutes", "-5", "0s", "2.5", "1d", "٣m", "nan", "1e3"])
def test_anything_else_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="a time such as 30s, 10m or 1h"):
        small_config({"train.save_every": value})


def test_by_the_clock() -> None:
    now = [100.0]
    schedule = SaveSchedule(0, 60.0, clock=lambda: now[0])
    assert not schedule.due(7)
    now[0] = 159.0
    assert not schedule.due(8)
    now[0] = 161.0
    assert schedule.due(9)
    schedule.restart()
    assert not schedule.due(10)
    now[0] += 3600  # an hour asleep, where the clock counts it: one checkpoint, not sixty
    assert schedule.due(11)
    schedule.restart()
    assert not schedule.due(12)


def test_by_steps() -> None:
    assert [step for step in range(1, 12) if SaveSchedule.parse(4, 10).due(step)] == [4, 8]
    assert [step for step in range(1, 12) if SaveSchedule.parse(0, 10).due(step)] == [10]
    assert SaveSchedule.parse("10m", 10).seconds == 600


class Log:
    """Collects the records that would go to run.jsonl."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records

    def write(self, kind: str, **values: Any) -> None:
        self.records.append({"kind": kind, **values})

    def check_folder(self) -> None:
        pass


def saver(run: Path, free: float = 1e12, **options: Any) -> tuple[CheckpointWriter, list[dict[str, Any]], Screen]:
    log: list[dict[str, Any]] = []
    changes = {f"train.{name}": value for name, value in options.items()}
    config, shown = small_config({"train.save_every": 5, "train.save_total_limit": 2, **changes}), screen()
    return CheckpointWriter(run, config, 10, Log(log), shown, lambda: free), log, shown  # type: ignore[arg-type]


def text(shown: Screen) -> str:
    return str(shown.console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("floats", "free", "background"), [(250_000, 100e9, True), (250_000, 5e8, False),
                                                            (25_000_000, 5.4e9, False)])  # fmt: skip
def test_background_needs_free_memory(tmp_path: Path, floats: int, free: float, background: bool) -> None:
    writer, log, _ = saver(tmp_path, free=free)
    writer.save(TrainState(step=5), {"weights": {"a": torch.ones(floats)}})
    writer.finish()
    assert [line["background"] for line in log] == [background]


def test_what_is_written_aside_is_what_was_true_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is held up; meanwhile the training goes on and changes every tensor."""
    go, real = threading.Event(), saving.save

    def slow(*args: Any) -> Path:
        assert go.wait(30)
        return real(*args)

    monkeypatch.setattr(saving, "save", slow)
    writer, log, said = saver(tmp_path)
    weights = torch.arange(6.0)
    state = TrainState(step=5)
    writer.save(state, {"weights": {"a": weights}})
    writer.poll()
    assert log == [], "nothing is told of before it is whole"
    weights.zero_()
    state.step = 9
    go.set()
    writer.finish()
    assert_same_bits(tensors_of(tmp_path, 5), {"weights:a": torch.arange(6.0)})
    (line,) = log
    assert (line["kind"], line["step"], line["background"]) == ("checkpoint", 5, True)
    assert line["bytes"] == sum(f.stat().st_size for f in (tmp_path / "checkpoints/step-000005").iterdir())
    assert "in the background" in text(said)


def test_an_unsound_run_saves_when_it_is_sound_again(tmp_path: Path) -> None:
    writer, _, _ = saver(tmp_path)
    assert [writer.due(step) for step in (5, 6, 7)] == [True, True, True], "owed until it is saved"
    writer.save(TrainState(step=7), {"weights": {"a": torch.ones(2)}}, wait=True)
    assert not writer.due(8)


@pytest.mark.parametrize("free", [1e12, 0.0])
def test_a_full_disk_stops_or_goes_on_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float
) -> None:
    def full(*args: Any) -> Path:
        raise FULL

    groups = {"weights": {"a": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}}
    good, _, _ = saver(tmp_path)
    good.save(TrainState(step=5), groups, wait=True)
    monkeypatch.setattr(saving, "save", full)
    stops, _, _ = saver(tmp_path, free=free)

    def stop() -> None:
        stops.save(TrainState(step=10), groups)
        stops.finish()

    with pytest.raises(UserError, match=r"the disk is full \(step 10\); earlier checkpoints are intact"):
        stop()
    goes_on, log, said = saver(tmp_path, free=free, on_save_error="continue")
    goes_on.save(TrainState(step=10), groups)
    goes_on.finish()
    assert log[0]["event"] == "could not save"
    assert "training continues" in text(said)
    with pytest.raises(UserError, match="the disk is full"):
        goes_on.save(TrainState(step=15), groups, wait=True)  # the last one must be written
    assert saved_steps(tmp_path) == [5]
    assert verify(tmp_path / "checkpoints" / "step-000005") == ""


def test_another_error_of_the_writer_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Path:
        raise ValueError("a bug")

    monkeypatch.setattr(saving, "save", broken)
    writer, _, _ = saver(tmp_path, on_save_error="continue")
    writer.save(TrainState(step=5), {"weights": {"a": torch.ones(2)}})
    with pytest.raises(ValueError, match="a bug"):
        writer.finish()


def test_a_run_by_the_clock_ends_with_the_same_weights(tmp_path: Path) -> None:
    run_small(tmp_path / "steps")
    run_small(tmp_path / "time", {"train.save_every": "0.001s", "train.save_total_limit": 3})
    log = [line for line in read_log(tmp_path / "time") if line["kind"] == "checkpoint"]
    assert [line["step"] for line in log] == list(range(1, 11))
    assert all(line["bytes"] > 0 for line in log)
    assert sorted(saved_steps(tmp_path / "time")) == [8, 9, 10]
    assert_same_bits(tensors_of(tmp_path / "steps", 10), tensors_of(tmp_path / "time", 10))


def test_a_run_goes_on_while_its_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Best model, checkpoints and log fail for a while; the run ends with the weights of one that had no trouble."""
    changes = {"train.eval_every": 3, "train.save_every": 2, "train.log_every": 1, "train.steps": 8}
    run_small(tmp_path / "good", changes)
    run, trouble = tmp_path / "run", [True]
    real_save, real_bundle, real_append = saving.save, Model.save, RunLog._append

    def save(*args: Any) -> Path:
        if args[1].step < 7 and trouble:
            raise FULL
        return real_save(*args)

    def bundle(self: Model, folder: Path) -> None:
        if trouble:
            trouble.clear()
            raise FULL
        real_bundle(self, folder)

    def append(self: RunLog, line: bytes) -> None:
        if trouble and b'"kind":"step"' in line:
            raise FULL
        real_append(self, line)

    monkeypatch.setattr(saving, "save", save)
    monkeypatch.setattr(Model, "save", bundle)
    monkeypatch.setattr(RunLog, "_append", append)
    shown = screen()
    train_config(small_config({**changes, "train.on_save_error": "continue"}), run, shown)
    assert_same_bits(tensors_of(run, 8), tensors_of(tmp_path / "good", 8))
    lines = list(read_log(run))
    assert any("lines are missing here" in line.get("text", "") for line in lines)
    failed = [line["step"] for line in lines if line.get("event") == "could not save"]
    assert sorted(failed) == [2, 3]  # a save in the background is reported when the loop next asks
    said = shown.console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("the disk is full") == 3  # checkpoint, best model, log: each once


def test_a_full_disk_stops_the_run_in_one_line_and_a_resume_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train.save_every": 4, "train.save_total_limit": 9}
    run_small(tmp_path / "good", changes)
    run, real = tmp_path / "run", saving.save

    def save(*args: Any) -> Path:
        if args[1].step >= 8:
            raise FULL
        return real(*args)

    monkeypatch.setattr(saving, "save", save)
    with pytest.raises(UserError, match="could not be saved: the disk is full"):
        run_small(run, changes)
    assert saved_steps(run) == [4]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000004"]
    monkeypatch.undo()
    resume_quietly(run)
    assert_same_bits(tensors_of(run, 10), tensors_of(tmp_path / "good", 10))


def test_a_run_that_ends_by_an_error_still_gets_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), saving.save

    def slow(*args: Any) -> Path:
        go.wait(0.2)
        return real(*args)

    monkeypatch.setattr(saving, "save", slow)
    writer, log, _ = saver(tmp_path)

    def ends_badly() -> None:
        with writer:
            writer.save(TrainState(step=5), {"weights": {"a": torch.ones(2)}})
            raise UserError("the data is gone")

    with pytest.raises(UserError, match="the data is gone"):
        ends_badly()
    assert [line["kind"] for line in log] == ["checkpoint"]
    assert saved_steps(tmp_path) == [5]
