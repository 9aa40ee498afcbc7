"""Checkpoints: atomic, verified, written on schedule, and restored only into the model they belong to."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import assert_same_bits, resume_quietly, run_small, screen, small_config, tensors_of
from test_step import make

from m1clip.errors import UserError
from m1clip.formatting import steps_or_seconds
from m1clip.io import remove_folder
from m1clip.runlog import read_log
from m1clip.training import checkpoint
from m1clip.training import checkpoint as saving
from m1clip.training.checkpoint import (
    CheckpointWriter,
    SaveSchedule,
    TensorGroups,
    TrainState,
    checkpoint_tensors,
    load_latest,
    restore,
    save,
)
from m1clip.training.checkpoint_list import checkpoint_folder, saved_steps, sha256, verify
from m1clip.training.progress import Screen
from m1clip.training.step import TrainStep

CPU = torch.device("cpu")


def tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "weights": {"a.b": torch.full((3, 2), float(step)), "c": torch.arange(step + 1)},
        "optimizer": {"adamw/a.b/step": torch.tensor(float(step)), "odd/name/x": torch.ones(2).bfloat16()},
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10, 20 and 30."""
    for step in (10, 20, 30):
        save(
            tmp_path,
            TrainState(step=step, best=step / 100, best_step=step, stale=1, seconds=2.5),
            tensors(step),
            keep=3,
        )
    return tmp_path


def load(run: Path) -> tuple[TrainState | None, dict[str, dict[str, torch.Tensor]], list[str]]:
    warnings: list[str] = []
    kept = load_latest(run, CPU, warnings.append)
    return (*kept, warnings) if kept else (None, {}, warnings)


def test_what_was_saved_comes_back(run: Path) -> None:
    state, groups, warnings = load(run)
    assert state == TrainState(step=30, best=0.3, best_step=30, stale=1, seconds=2.5)
    assert warnings == []
    assert groups.keys() == tensors(30).keys()
    for name, group in tensors(30).items():
        assert groups[name].keys() == group.keys()
        for key, tensor in group.items():
            assert groups[name][key].dtype == tensor.dtype
            assert torch.equal(groups[name][key], tensor)


def test_only_the_newest_are_kept(run: Path) -> None:
    save(run, TrainState(step=40), tensors(40), keep=2)
    assert sorted(saved_steps(run)) == [30, 40]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000030", "step-000040"]


def test_a_checkpoint_of_the_same_step_is_replaced(run: Path) -> None:
    save(run, TrainState(step=30, stale=9), tensors(5), keep=3)
    state, groups, _ = load(run)
    assert state is not None
    assert (state.step, state.stale) == (30, 9)
    assert groups["weights"]["c"].tolist() == list(range(6))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def fill_with_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, fill_with_zeros, empty, Path.unlink])
@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    run: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(checkpoint_folder(run, 30) / name)
    state, groups, warnings = load(run)
    assert state is not None
    assert state.step == 20
    assert groups["weights"]["c"].tolist() == list(range(21))
    assert len(warnings) == 1
    assert "step-000030" in warnings[0]
    assert "the checkpoint before it" in warnings[0]


def test_two_damaged_ones_lead_to_the_third(run: Path) -> None:
    flip_a_bit(checkpoint_folder(run, 30) / "weights.safetensors")
    empty(checkpoint_folder(run, 20) / "manifest.json")
    state, _, warnings = load(run)
    assert state is not None
    assert state.step == 10
    assert len(warnings) == 2


@pytest.mark.parametrize("text", ["[]", "{}", '{"sha256": 3}', '{"sha256": {}}'])
def test_a_manifest_that_says_nothing_is_no_reason_to_fall_over(run: Path, text: str) -> None:
    (checkpoint_folder(run, 30) / "manifest.json").write_text(text)
    state, _, _ = load(run)
    assert state is not None
    assert state.step == 20


def test_an_unfinished_save_is_removed(run: Path) -> None:
    stray = run / "checkpoints" / "step-000040.123.partial"
    stray.mkdir()
    (stray / "weights.safetensors").write_bytes(b"half")
    state, _, warnings = load(run)
    assert state is not None
    assert state.step == 30
    assert not stray.exists()
    assert len(warnings) == 1
    assert "unfinished" in warnings[0]


def test_a_save_that_fails_leaves_the_old_ones_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(OSError, match="No space"):
        save(run, TrainState(step=40), tensors(40), keep=1)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000010", "step-000020", "step-000030"]


def rewrite_state(run: Path, version: object) -> None:
    """Give the checkpoint of step 30 another format, with valid hashes."""
    folder = checkpoint_folder(run, 30)
    state = {**json.loads((folder / "state.json").read_text()), "format": version}
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = sha256(folder / "state.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("version", [-1, 0, "2", 2.0])
def test_impossible_format_is_passed_over(run: Path, version: object) -> None:
    rewrite_state(run, version)
    assert "cannot be read" in verify(checkpoint_folder(run, 30))


def test_newer_format_is_a_clear_error(run: Path) -> None:
    rewrite_state(run, 99)
    with pytest.raises(UserError, match=r"newer m1clip \(format 99.*upgrade"):
        load(run)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors"])
def test_a_manifest_lists_all_that_is_loaded(run: Path, name: str) -> None:
    path = checkpoint_folder(run, 30) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"][name]
    path.write_text(json.dumps(manifest))
    assert verify(checkpoint_folder(run, 30)) == f"manifest.json does not list {name}"
    (checkpoint_folder(run, 20) / "ema.safetensors").write_bytes(b"not hashed")
    assert verify(checkpoint_folder(run, 20)) == "manifest.json does not list ema.safetensors"


def test_checkpoints_of_an_abandoned_future_do_not_count(run: Path) -> None:
    flip_a_bit(checkpoint_folder(run, 30) / "weights.safetensors")
    save(run, TrainState(step=25), tensors(25), keep=2)
    assert sorted(saved_steps(run)) == [20, 25]


def test_a_way_back_leads_to_a_sound_checkpoint(run: Path) -> None:
    for step in (40, 50):
        save(run, TrainState(step=step, skipped=step // 20), tensors(step), keep=9)
    kept = load_latest(run, CPU, lambda text: None, without_skips=True)
    assert kept is not None
    assert kept[0].step == 30
    for step in (10, 20, 30):
        remove_folder(checkpoint_folder(run, step))
    kept = load_latest(run, CPU, lambda text: None, without_skips=True)
    assert kept is not None
    assert kept[0].step == 50, "an unsound one is better than none"


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert load(tmp_path) == (None, {}, [])
    (tmp_path / "checkpoints" / "step-x").mkdir(parents=True)
    assert load(tmp_path) == (None, {}, [])


def test_a_whole_one_is_verified(run: Path) -> None:
    assert verify(checkpoint_folder(run, 30)) == ""


def test_a_run_with_no_whole_checkpoint_is_not_started_again_in_silence(run: Path) -> None:
    for step in (10, 20, 30):
        empty(checkpoint_folder(run, step) / "state.json")
    warnings: list[str] = []
    with pytest.raises(
        UserError, match=r"none of its checkpoints is valid \(step 10: .*delete .*checkpoints"
    ) as caught:
        load_latest(run, CPU, warnings.append)
    assert str(run) in str(caught.value)
    assert ["before it" in warning for warning in warnings] == [True, True]  # of 30 and 20


def test_a_checkpoint_that_was_being_replaced_comes_back(run: Path) -> None:
    checkpoint_folder(run, 30).rename(run / "checkpoints" / "step-000030.old.partial")
    state, _, warnings = load(run)
    assert state is not None
    assert state.step == 30
    assert len(warnings) == 1
    assert "restored the old one" in warnings[0]


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
    assert saved_steps(tmp_path) == [5]
    assert verify(tmp_path / "checkpoints" / "step-000005") == ""


def test_another_error_of_the_writer_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Path:
        raise ValueError("a bug")

    monkeypatch.setattr(saving, "save", broken)
    writer, _, _ = saver(tmp_path)
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


QKV = "image_tower.transformer.blocks.0.attn.qkv.weight"


@dataclass(frozen=True)
class Damage:
    """What is done to a checkpoint, and what is said of it."""

    do: Callable[[TensorGroups], object]
    words: str


DAMAGES = (
    Damage(lambda kept: kept["weights"].pop(QKV), f"weights: {QKV} is missing"),
    Damage(lambda kept: kept["weights"].update(x=torch.ones(1)), "weights: x is unknown"),
    Damage(lambda kept: kept["weights"].update({QKV: torch.ones(2)}), r"has the shape \(2,\), not"),
    Damage(lambda kept: kept.pop("ema"), "ema: .* is missing"),
    Damage(lambda kept: kept["optimizer"].pop(f"adamw/{QKV}/step"), f"optimizer: adamw/{QKV}/step is missing"),
    Damage(lambda kept: kept["optimizer"].update({f"adamw/{QKV}/exp_avg": torch.ones(2)}), "or has another shape"),
)  # fmt: skip


@pytest.fixture(scope="module")
def update() -> TrainStep:
    job, made = make({"optim.optimizer": "adamw", "optim.ema": 0.9})
    made(job.training[0], 0)
    return made


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.words)
def test_a_checkpoint_that_does_not_fit_is_one_line(update: TrainStep, damage: Damage) -> None:
    kept = {name: dict(tensors) for name, tensors in checkpoint_tensors(update, TrainState()).items()}
    before = {name: t.clone() for name, t in update.model.state_dict().items()}
    restore(update, TrainState(step=7), kept)
    damage.do(kept)
    with pytest.raises(UserError, match=rf"checkpoint of step 7 does not match the run: .*{damage.words}"):
        restore(update, TrainState(step=7), kept)
    assert_same_bits(dict(update.model.state_dict()), before)
