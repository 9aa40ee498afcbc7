"""Checkpoints: whole or not used, and never trusted blindly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from m1clip.errors import UserError
from m1clip.io import remove_folder
from m1clip.training import checkpoint
from m1clip.training.checkpoint import TrainState, load_latest, save
from m1clip.training.checkpoint_files import checkpoint_folder, saved_steps, sha256, verify

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
    assert "the old one is back" in warnings[0]
