"""Checkpoints: atomic, verified, written on schedule, listed, and restored only into the model they belong to."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import (
    assert_same_bits,
    finished_run,
    resume_quietly,
    run_small,
    small_config,
    tensors_of,
)
from test_step import make

from m1clip import console
from m1clip.cli.main import main
from m1clip.errors import UserError
from m1clip.formatting import save_interval
from m1clip.io import remove_folder
from m1clip.runlog import RunLog, read_log
from m1clip.training import checkpoint
from m1clip.training.checkpoint import (
    SaveTimer,
    TensorGroups,
    TrainState,
    checkpoint_folder,
    save,
    saved_steps,
    verify,
)
from m1clip.training.compose import TrainStep
from m1clip.training.context import RunContext
from m1clip.training.distributed import Ranks
from m1clip.training.duration import step_plan
from m1clip.training.saving import Saver

CPU = torch.device("cpu")
FULL = OSError(errno.ENOSPC, "No space left on device")


def tensors(step: int) -> TensorGroups:
    return {
        "weights": {"a.b": torch.full((3, 2), float(step)), "c": torch.arange(step + 1)},
        "optimizer": {
            "adamw/a.b/step": torch.tensor(float(step)),
            "odd/name/x": torch.ones(2).bfloat16(),
        },
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10, 20 and 30."""
    for step in (10, 20, 30):
        save(
            tmp_path,
            TrainState(step=step, best=step / 100, best_step=step, stale=1),
            tensors(step),
            keep=3,
        )
    return tmp_path


def load(run: Path, **options: bool) -> tuple[TrainState, TensorGroups, list[str]]:
    with console.record_warnings() as warnings:
        loaded = checkpoint.load_latest(run, CPU, **options)
    assert loaded is not None
    return *loaded, warnings


def test_checkpoint_round_trip(run: Path) -> None:
    state, groups, warnings = load(run)
    assert state == TrainState(step=30, best=0.3, best_step=30, stale=1)
    assert warnings == []
    for name, group in tensors(30).items():
        assert_same_bits(groups.pop(name), group)
    assert groups == {}


def test_no_checkpoints(tmp_path: Path) -> None:
    with console.record_warnings() as warnings:
        assert checkpoint.load_latest(tmp_path, CPU) is None
        (tmp_path / "checkpoints" / "step-x").mkdir(parents=True)
        assert checkpoint.load_latest(tmp_path, CPU) is None
    assert warnings == []


def test_save_deletes_old_and_later_checkpoints_and_replaces_the_same_step(run: Path) -> None:
    save(run, TrainState(step=30, stale=9), tensors(5), keep=3)
    state, groups, _ = load(run)
    assert (state.step, state.stale, len(groups["weights"]["c"])) == (30, 9, 6)
    save(run, TrainState(step=40), tensors(40), keep=2)
    assert saved_steps(run) == [30, 40]
    save(run, TrainState(step=25), tensors(25), keep=2)  # after a rollback
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000025"]


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
@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
def test_damaged_checkpoint_is_reported_and_the_one_before_used(
    run: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(checkpoint_folder(run, 30) / name)
    state, groups, warnings = load(run)
    assert (state.step, len(groups["weights"]["c"])) == (20, 21)
    assert len(warnings) == 1
    assert "step-000030" in warnings[0]
    assert "the checkpoint before it" in warnings[0]
    damage(checkpoint_folder(run, 20) / name)
    assert load(run)[0].step == 10
    damage(checkpoint_folder(run, 10) / name)
    with pytest.raises(
        UserError, match=r"none of its checkpoints is valid \(step 10: .*delete .*checkpoints"
    ):
        load(run)


@pytest.mark.parametrize("text", ["[]", "{}", '{"sha256": 3}', '{"sha256": {}}'])
def test_manifest_without_hashes_is_damage(run: Path, text: str) -> None:
    (checkpoint_folder(run, 30) / "manifest.json").write_text(text)
    assert load(run)[0].step == 20


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors"])
def test_manifest_must_list_every_tensor_file(run: Path, name: str) -> None:
    path = checkpoint_folder(run, 30) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"][name]
    path.write_text(json.dumps(manifest))
    assert verify(checkpoint_folder(run, 30)) == f"manifest.json does not list {name}"
    (checkpoint_folder(run, 20) / "more.safetensors").write_bytes(b"not hashed")
    assert verify(checkpoint_folder(run, 20)) == "manifest.json does not list more.safetensors"


def rewrite_state(run: Path, version: object) -> None:
    """Give the checkpoint of step 30 another format, with valid hashes."""
    folder = checkpoint_folder(run, 30)
    state = {**json.loads((folder / "state.json").read_text()), "format": version}
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = checkpoint.sha256(folder / "state.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("version", [-1, 0, "2", 2.0])
def test_invalid_format_is_damage(run: Path, version: object) -> None:
    rewrite_state(run, version)
    assert "cannot be read" in verify(checkpoint_folder(run, 30))


def test_newer_format_is_a_clear_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite_state(run, 99)
    with pytest.raises(UserError, match=r"newer m1clip \(format 99.*upgrade"):
        load(run)
    assert command(capsys, str(run), "--verify")[0] == 2


def test_unfinished_save_is_removed_and_a_replaced_one_restored(run: Path) -> None:
    partial = run / "checkpoints" / "step-000040.123.partial"
    partial.mkdir()
    (partial / "weights.safetensors").write_bytes(b"half")
    checkpoint_folder(run, 30).rename(run / "checkpoints" / "step-000030.old.partial")
    state, _, warnings = load(run)
    assert state.step == 30
    assert not partial.exists()
    # Restored the old one; unfinished save.
    assert [text.rpartition(" ")[2] for text in warnings] == ["one", "save"]


def test_rollback_prefers_a_checkpoint_saved_after_a_finite_step(run: Path) -> None:
    for step in (40, 50):
        save(run, TrainState(step=step, skipped=step // 20), tensors(step), keep=9)
    assert load(run, without_skips=True)[0].step == 30
    for step in (10, 20, 30):
        remove_folder(checkpoint_folder(run, step))
    assert load(run, without_skips=True)[0].step == 50, "better than none"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (500, (500, 0.0, 0.0)),
        ("500", (500, 0.0, 0.0)),
        ("30s", (0, 30.0, 0.0)),
        ("10m", (0, 600.0, 0.0)),
        (" 1.5H ", (0, 5400.0, 0.0)),
        ("2ep", (0, 0.0, 2.0)),
        ("2 e", (0, 0.0, 2.0)),
        ("1 epoch", (0, 0.0, 1.0)),
        ("0.5 Epochs", (0, 0.0, 0.5)),
    ],
)
def test_save_every_is_a_number_of_steps_a_time_or_epochs(
    value: int | str, expected: tuple[int, float, float]
) -> None:
    assert save_interval(value, "--save-every") == expected


@pytest.mark.parametrize(
    "value", ["", "m", "10 minutes", "-5", "0s", "2.5", "1d", "٣m", "nan", "1e3", "0ep", "e"]
)
def test_invalid_save_every_is_rejected(value: str) -> None:
    with pytest.raises(UserError, match="a time such as 30s, 10m or 1h"):
        small_config({"train.save_every": value})


def context(folder: Path, every: int | str | None, state: TrainState) -> RunContext:
    """A run with a fake model, whose checkpoint has a tensor."""
    config = small_config({"train.save_every": every, "train.save_total_limit": 2})
    spec = SimpleNamespace(config=config, plan=step_plan(config.train))
    training = SimpleNamespace(plan=SimpleNamespace(steps_per_epoch=4))
    inputs = SimpleNamespace(
        spec=spec, ranks=Ranks(), device=SimpleNamespace(kind="cpu"), training=training
    )
    model = torch.nn.Linear(2, 2)
    optimizer = SimpleNamespace(tensors=dict)
    step = SimpleNamespace(
        model=model, optimizer=optimizer, parts=SimpleNamespace(world=SimpleNamespace(shards=None))
    )
    return RunContext(inputs, step, folder, RunLog(folder), state=state)  # type: ignore[arg-type]


def test_saves_by_the_clock_and_after_sleep_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    run = context(tmp_path, "60s", TrainState(step=7))
    for seconds, due in ((0, False), (59, False), (2, True), (3600, True)):
        now[0] += seconds
        assert run.save_timer.due(7, evaluated=True) == due
    checkpoint.write_checkpoint(run)
    assert not run.save_timer.due(8, evaluated=False)


@pytest.mark.parametrize(("every", "expected"), [(4, [4, 8]), (0, []), (None, [3, 6, 9])])
def test_saves_by_steps_or_after_evaluations(every: int | None, expected: list[int]) -> None:
    """Without --save-every, a checkpoint follows each evaluation.

    The loop saves the last step in any case.
    """
    due = [step for step in range(12) if SaveTimer(every).due(step, evaluated=step % 3 == 0)]
    assert due == expected


def test_large_checkpoint_after_an_evaluation_waits_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take longer to write than the steps between two evaluations.

    --save-every is not changed.
    """
    monkeypatch.setattr(checkpoint, "LARGE", 8)  # bytes; the fake model has more
    now = [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    run = context(tmp_path, None, TrainState(step=7))
    saved = []
    for step in range(1, 10):
        now[0] += 25
        if run.save_timer.due(step, evaluated=step % 2 == 0):
            saved.append(step)
            checkpoint.write_checkpoint(run)
    assert saved == [4, 8], "100 s and 100 s; never between evaluations"
    assert context(tmp_path, 5, TrainState()).save_timer.due(5, evaluated=False)


def test_size_is_that_of_the_trained_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)  # 24 bytes
    monkeypatch.setattr(checkpoint, "LARGE", 23)
    assert checkpoint.is_large(model)
    model.weight.requires_grad_(False)
    assert not checkpoint.is_large(model)


def test_short_run_of_a_large_model_saves_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkpoint at its evaluations, a run ends with the same weights and its best model."""
    monkeypatch.setattr(checkpoint, "LARGE", 0)
    monkeypatch.setattr(checkpoint, "LARGE_SECONDS", 1e6)
    run_small(tmp_path / "run", {"train.eval_every": 5})
    assert saved_steps(tmp_path / "run") == [10]
    assert_same_bits(tensors_of(tmp_path / "run", 10), tensors_of(finished_run(), 10))
    assert (tmp_path / "run" / "best" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("2ep", [10, 20]),
        ("1 epoch", [5, 10, 15, 20]),
        ("0.5 epochs", [3, 5, 8, 10, 13, 15, 18, 20]),
        ("0.1ep", list(range(1, 21))),
    ],
)
def test_saves_by_epochs(every: str, expected: list[int]) -> None:
    steps = range(21)
    assert [step for step in steps if SaveTimer(every, 5).due(step, False)] == expected


def test_save_stays_due_until_done(tmp_path: Path) -> None:
    run = context(tmp_path, 5, TrainState(step=7))
    delayed = run.save_timer
    assert [delayed.due(step, False) for step in (4, 5, 6, 7)] == [False, True, True, True]
    checkpoint.write_checkpoint(run)
    assert not delayed.due(8, False)
    (line,) = read_log(tmp_path)
    assert (line["kind"], line["step"]) == ("checkpoint", 7)
    assert line["bytes"] == sum(
        file.stat().st_size for file in checkpoint_folder(tmp_path, 7).iterdir()
    )


def test_run_that_saves_by_the_clock_ends_with_the_same_weights(tmp_path: Path) -> None:
    steps = finished_run()
    run_small(tmp_path / "time", {"train.save_every": "0.001s", "train.save_total_limit": 3})
    log = [line for line in read_log(tmp_path / "time") if line["kind"] == "checkpoint"]
    assert [line["step"] for line in log] == list(range(1, 11))
    assert saved_steps(tmp_path / "time") == [8, 9, 10]
    assert_same_bits(tensors_of(steps, 10), tensors_of(tmp_path / "time", 10))


def test_full_disk_stops_the_run_in_one_line_and_a_resume_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train.save_every": 4, "train.save_total_limit": 9}
    undisturbed = finished_run()
    run, real = tmp_path / "run", checkpoint.write_tensors

    def write(path: Path, group: dict[str, Any]) -> str:
        if "step-000008" in str(path) and path.stem == "optimizer":
            raise FULL
        return real(path, group)

    monkeypatch.setattr(checkpoint, "write_tensors", write)
    with pytest.raises(
        UserError, match=r"could not be saved: the disk is full \(step 8\); earlier checkpoints"
    ):
        run_small(run, changes)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000004"]
    monkeypatch.undo()
    resume_quietly(run)
    assert_same_bits(tensors_of(run, 10), tensors_of(undisturbed, 10))


def test_full_disk_is_found_by_the_thread_that_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where the run goes on while the checkpoint is written."""
    monkeypatch.setattr("m1clip.training.context.Saver", lambda in_background: Saver(True))
    real = checkpoint.write_tensors

    def write(path: Path, group: dict[str, Any]) -> str:
        if "step-000008" in str(path) and path.stem == "optimizer":
            raise FULL
        return real(path, group)

    monkeypatch.setattr(checkpoint, "write_tensors", write)
    with pytest.raises(
        UserError, match=r"could not be saved: the disk is full \(step 8\); earlier checkpoints"
    ):
        run_small(tmp_path / "run", {"train.save_every": 4, "train.save_total_limit": 9})
    assert "step-000008" not in [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    monkeypatch.undo()
    resume_quietly(tmp_path / "run")
    assert_same_bits(tensors_of(tmp_path / "run", 10), tensors_of(finished_run(), 10))


def test_saving_in_a_thread_saves_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m1clip.training.context.Saver", lambda in_background: Saver(True))
    changes = {"train.save_every": 1, "train.eval_every": 1, "train.save_total_limit": 99}
    run_small(tmp_path / "thread", changes)
    monkeypatch.undo()
    run_small(tmp_path / "at-once", changes)
    for step in range(1, 11):
        assert_same_bits(
            tensors_of(tmp_path / "thread", step), tensors_of(tmp_path / "at-once", step)
        )
    for name in ("best", "model"):
        one, other = (tmp_path / run / name / "model.safetensors" for run in ("thread", "at-once"))
        assert one.read_bytes() == other.read_bytes()
    steps = [r["step"] for r in read_log(tmp_path / "thread") if r["kind"] == "checkpoint"]
    assert steps == list(range(1, 11))


QKV = "image_tower.transformer.blocks.0.attn.qkv.weight"
DAMAGES: dict[str, Callable[[TensorGroups], object]] = {
    f"weights: {QKV} is missing": lambda groups: groups["weights"].pop(QKV),
    "weights: x is unknown": lambda groups: groups["weights"].update(x=torch.ones(1)),
    r"has the shape \(2,\), not": lambda groups: groups["weights"].update({QKV: torch.ones(2)}),
    f"optimizer: adamw/{QKV}/step is missing": lambda groups: groups["optimizer"].pop(
        f"adamw/{QKV}/step"
    ),
    "or has another shape": lambda groups: groups["optimizer"].update(
        {f"adamw/{QKV}/exp_avg": torch.ones(2)}
    ),
}


@pytest.fixture(scope="module")
def train_step() -> TrainStep:
    inputs, made = make({"optim.optimizer": "adamw"})
    made.run(inputs.training[0], 0)
    return made


@pytest.mark.parametrize("message", DAMAGES)
def test_checkpoint_of_another_model_is_rejected_in_one_line(
    train_step: TrainStep, message: str
) -> None:
    groups = {
        name: dict(group) for name, group in checkpoint.checkpoint_tensors(train_step).items()
    }
    before = {name: t.clone() for name, t in train_step.model.state_dict().items()}
    checkpoint.restore(train_step, TrainState(step=7), groups)
    DAMAGES[message](groups)
    with pytest.raises(
        UserError, match=rf"checkpoint of step 7 does not match the run: .*{message}"
    ):
        checkpoint.restore(train_step, TrainState(step=7), groups)
    assert_same_bits(dict(train_step.model.state_dict()), before)


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", *words])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def test_checkpoints_are_listed_and_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, str(run))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step", "10", "20", "30", "3"]
    code, out, _ = command(capsys, str(run), "--json")
    rows = json.loads(out)
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert all(row["bytes"] > 500 and row["problem"] is None for row in rows)
    assert command(capsys, str(run), "--verify")[0] == 0
    flip_a_bit(checkpoint_folder(run, 20) / "weights.safetensors")
    code, out, _ = command(capsys, str(run), "--verify")
    assert (code, out.count("valid")) == (1, 2)
    assert "weights.safetensors is damaged" in out
    code, out, _ = command(capsys, str(run), "--verify", "--json")
    assert [bool(row["problem"]) for row in json.loads(out)] == [False, True, False]
    code, _, error = command(capsys, str(run / "missing"))
    assert (code, "not a run" in error) == (2, True)
