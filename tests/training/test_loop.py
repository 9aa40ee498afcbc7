"""Ten steps give the same bits as five, a resume and five more, with any settings."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import assert_same_bits, resume_quietly, run_small, tensors_of, weights_sha256

from m1clip.errors import UserError
from m1clip.io import write_bytes
from m1clip.runlog import read_log
from m1clip.training import loop
from m1clip.training.checkpoint import TrainState
from m1clip.training.run import train_config
from m1clip.training.spec import Settings, read_spec

VARIANTS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "two workers": {"data.workers": 2},
    "evaluations, augmentation": {
        "train.eval_every": 3,
        "data.crop_min": 0.5,
        "data.flip": 0.5,
        "data.color_jitter": 0.2,
    },
    "adamw, sigmoid, bf16, recompute": {
        "optim.optimizer": "adamw",
        "train.loss": "sigmoid",
        "train.precision": "bf16",
        "model.grad_checkpointing": True,
    },
}


def rewind(run: Path, to: int) -> None:
    """Leave the run as a kill after the checkpoint of step `to` would."""
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name[5:]) > to:
            shutil.rmtree(folder)
    shutil.rmtree(run / "model")


@pytest.mark.parametrize("name", VARIANTS)
def test_resume_gives_identical_weights(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    # Four steps per epoch.
    run_small(run, {"train.save_every": 5, "train.save_total_limit": 9, **VARIANTS[name]})
    reference, model = tensors_of(run, 10), weights_sha256(run)
    rewind(run, 5)
    torch.manual_seed(12345)  # whatever the process did before must not matter
    _, output = resume_quietly(run)
    assert "step 5 of 10" in output
    assert_same_bits(tensors_of(run, 10), reference)
    assert weights_sha256(run) == model


def test_workers_do_not_change_the_weights(tmp_path: Path) -> None:
    for workers in (0, 2):
        run_small(tmp_path / str(workers), {"train.steps": 6, "data.workers": workers})
    assert_same_bits(tensors_of(tmp_path / "0", 6), tensors_of(tmp_path / "2", 6))


def test_seed_changes_the_weights(tmp_path: Path) -> None:
    for seed in (0, 1):
        run_small(tmp_path / str(seed), {"train.steps": 2, "seed": seed})
    assert weights_sha256(tmp_path / "0") != weights_sha256(tmp_path / "1")


def test_config_of_a_run_reproduces_it(tmp_path: Path) -> None:
    """config.toml contains all resolved settings, so the second run measures nothing."""
    first, again = tmp_path / "first", tmp_path / "again"
    open_questions = {
        "train.epochs": 1.5,
        "train.steps": None,
        "train.precision": "auto",
        "train.eval_every": None,
    }
    run_small(first, open_questions)
    spec = read_spec(first)
    assert spec.config.train.steps == 6
    assert spec.config.train.precision != "auto"
    assert (spec.chosen_by["steps"], spec.chosen_by["precision"]) == ("rule", "measurement")
    train_config(Settings(file=first / "config.toml"), again)
    assert_same_bits(tensors_of(first, 6), tensors_of(again, 6))
    assert weights_sha256(first) == weights_sha256(again)
    assert (first / "config.toml").read_text() == (again / "config.toml").read_text()
    start = next(line for line in read_log(again) if line["kind"] == "start")
    assert "hardware" not in start["choices"], "not measured again"


def test_resume_after_a_damaged_checkpoint_and_without_any(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_small(run, {"train.save_every": 3, "train.save_total_limit": 9})
    reference = tensors_of(run, 10)
    rewind(run, 6)
    weights = run / "checkpoints" / "step-000006" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for words in (("weights.safetensors is damaged", "step 3 of 10"), ("step 0 of 10",)):
        _, output = resume_quietly(run)
        assert all(word in output for word in words)
        assert_same_bits(tensors_of(run, 10), reference)
        rewind(run, 0)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = run_small(run)
    before = weights_sha256(run), tensors_of(run, 10)
    again, _ = resume_quietly(run)
    assert weights_sha256(run) == before[0]
    assert_same_bits(tensors_of(run, 10), before[1])
    assert dict(again.scores) == dict(first.scores)


def test_resume_after_early_stop_does_not_train_further(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # The learning rate is too small to change a rank, so no evaluation improves on the first.
    still = {
        "optim.lr": 1e-12,
        "optim.muon_lr": 1e-12,
        "train.eval_every": 2,
        "train.patience": 2,
        "train.steps": 20,
    }
    run_small(run, still)
    log = list(read_log(run))
    assert [line["step"] for line in log if line["kind"] == "eval"] == [2, 4, 6]
    assert [line["event"] for line in log if line["kind"] == "event"] == ["early stop"]
    before = weights_sha256(run), tensors_of(run, 6)
    resume_quietly(run)
    assert weights_sha256(run) == before[0]
    assert_same_bits(tensors_of(run, 6), before[1])
    assert (
        next(line for line in reversed(list(read_log(run))) if line["kind"] == "end")["step"] == 6
    )


def test_resume_with_changed_data_or_without_a_run_is_rejected(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_small(run, {"train.steps": 2})
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("synthetic_images = 72", "synthetic_images = 80"))
    for folder, message in ((run, "the training data has changed"), (tmp_path, "not a run folder")):
        with pytest.raises(UserError, match=message):
            resume_quietly(folder)
    for damage in ("", "[" * 5000, "null", "{}"):
        (run / "environment.json").write_text(damage)
        with pytest.raises(UserError, match=r"environment\.json: missing or damaged, so whether"):
            resume_quietly(run)


def test_resume_removes_partial_snapshot_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run_small(run, {"train.steps": 2})
    thumbs = run / "snapshots" / "thumbnails"
    names = {path.name for path in thumbs.iterdir()}
    assert names
    left = [thumbs / "3.jpg.77.partial", run / "snapshots" / "step-00000002.json.77.partial"]
    for path in left:
        path.write_bytes(b"half")
    resume_quietly(run)
    assert not [path for path in left if path.exists()]
    assert {path.name for path in thumbs.iterdir()} == names

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(thumbs / "99.jpg", b"an image", sync=False)
    assert {path.name for path in thumbs.iterdir()} == names, "complete or absent"


def test_state_of_a_run_is_written_by_the_loop_only() -> None:
    """The state is frozen, so only an assignment can change it, and only loop.py assigns it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainState().step = 1  # type: ignore[misc]
    folder = Path(loop.__file__).parent
    writers = {
        path.name
        for path in folder.glob("*.py")
        if re.search(r"\brun\.(state|plan) = |\brun\.update\(", path.read_text())
    }
    assert writers == {"loop.py"}
