"""Non-finite steps: nothing changes, the samples are named, the run rolls back or stops with a diagnosis."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import (
    assert_same_bits,
    before_each_step,
    prepared,
    resume_quietly,
    run_small,
    small_config,
    tensors_of,
)
from test_step import make
from torch import Tensor

from m1clip import console
from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.evaluation.statistics import selection_metric
from m1clip.optimizers import OPTIMIZERS
from m1clip.runlog import RunLog, read_log
from m1clip.training import recovery
from m1clip.training import step as update_module
from m1clip.training.checkpoint import TrainState, checkpoint_tensors, save
from m1clip.training.compose import TrainStep, compose_step
from m1clip.training.context import RunContext
from m1clip.training.distributed import Ranks
from m1clip.training.duration import step_plan
from m1clip.training.recovery import Rollback, SpikeDetector, prepare_recovery, roll_back
from m1clip.training.run import train_config
from m1clip.training.update import skip_rule
from m1clip.training.world import World

NAN = float("nan")


class Batches(list[Any]):
    """The batches of a run with a fake model."""

    plan = SimpleNamespace(steps_per_epoch=4)


PARAMETER = "image_tower.transformer.blocks.0.attn.qkv.weight"
Poison = Callable[[TrainStep, Batch], Any]


def everything(update: TrainStep) -> dict[str, Tensor]:
    """Copies of everything that a step can change."""
    tensors_of_run = {f"weights:{name}": t for name, t in update.model.state_dict().items()}
    tensors_of_run |= {f"optimizer:{name}": t for name, t in update.optimizer.tensors().items()}
    return {name: t.clone() for name, t in tensors_of_run.items()}


def in_the_loss(update: TrainStep, batch: Batch) -> None:
    objective = update.parts.loss.objective
    poisoned = replace(
        objective, row_term=lambda *args: objective.row_term(*args) * NAN, fused=None
    )
    parts = replace(update.parts, loss=replace(update.parts.loss, objective=poisoned))
    update.run = compose_step(parts).run


def in_one_gradient(update: TrainStep, batch: Batch) -> None:
    parameter = dict(update.model.named_parameters())[PARAMETER]
    parameter.register_hook(
        lambda grad: grad.clone().index_put_((torch.tensor([0]),), torch.tensor(float("inf")))
    )


def in_the_data(update: TrainStep, batch: Batch) -> None:
    batch.views[3, 5] = NAN  # brightness of one image


POISONS: dict[str, Poison] = {
    "loss": in_the_loss, "gradient": in_one_gradient, "data": in_the_data,
}  # fmt: skip


@pytest.mark.parametrize("skip", ["host", "device"])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_non_finite_step_changes_nothing(optimizer: str, poison: str, skip: Any) -> None:
    inputs, update = make({"optim.optimizer": optimizer, "data.color_jitter": 0.2})
    update.parts.update.skip = skip
    update.run(inputs.training[0], 0)
    before = everything(update)
    batch = inputs.training[1]
    POISONS[poison](update, batch)
    loss, norm, _ = update.run(batch, 1)
    assert not (loss.isfinite() & norm.isfinite())
    assert_same_bits(everything(update), before)
    assert all(p.grad is None for p in update.model.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_finite_step_is_the_same_when_skipping_on_host_or_device(optimizer: str) -> None:
    changes = {"optim.optimizer": optimizer}
    inputs, host = make(changes)
    _, device = make(changes)
    device.parts.update.skip = "device"
    for step in range(3):
        for update in (host, device):
            update.run(inputs.training[step], step)
    one, other = everything(host), everything(device)
    assert one.keys() == other.keys()
    for name, value in one.items():
        # AdamW is the same to the bit; Muon's momentum is the same sum in another order.
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)
    if optimizer == "adamw":
        assert_same_bits(one, other)


def test_samples_with_non_finite_features_are_found() -> None:
    inputs, update = make({"data.color_jitter": 0.2})
    batch = inputs.training[1]
    assert update.parts.encoder.nonfinite_rows(batch) == []
    in_the_data(update, batch)
    assert update.parts.encoder.nonfinite_rows(batch) == [3]
    with torch.no_grad():
        update.model.get_parameter(PARAMETER).fill_(NAN)
    assert update.parts.encoder.nonfinite_rows(batch) == [], (
        "if all features are non-finite, the samples are not the cause"
    )


class Log:
    """Records that would go to run.jsonl."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, kind: str, **values: Any) -> None:
        self.records.append({"kind": kind, **values})


def checker(state: TrainState | None = None) -> tuple[RunContext, Log]:
    """A run with a fake model, in which the sample of step n, n + 5, has non-finite features."""
    batches = [SimpleNamespace(sample_ids=torch.tensor([number + 6])) for number in range(20)]
    samples = [SimpleNamespace(id=f"image {number}") for number in range(40)]
    config = small_config()
    spec = SimpleNamespace(config=config, plan=step_plan(config.train))
    training = Batches(batches)
    inputs = SimpleNamespace(spec=spec, config=config, device=SimpleNamespace(kind="cpu"), precision="bf16",
                            splits={"train": SimpleNamespace(samples=samples)}, training=training,
                            ranks=Ranks())  # fmt: skip
    encoder = SimpleNamespace(model=None, nonfinite_rows=lambda batch: [0])
    inputs.complete_model = lambda step: encoder.model
    parts = SimpleNamespace(update=SimpleNamespace(skip="device", scaler=None), encoder=encoder)
    step = SimpleNamespace(parts=parts, model=torch.nn.Linear(1, 1))
    log: Any = Log()
    return RunContext(inputs, step, Path(), log, state=state or TrainState()), log  # type: ignore[arg-type]


def feed(run: RunContext, losses: list[float], norm: float = 1.0, first: int = 1) -> None:
    for step, loss in enumerate(losses, start=first):
        run.update(step=step)
        run.checks.record(step, torch.tensor([step, 7]), torch.tensor(loss), torch.tensor(norm))
    run.update(skipped=run.checks.read(run))


def test_skipped_steps_in_a_row_are_counted_and_the_first_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 3)
    run, log = checker()
    with console.record_warnings() as warnings:
        feed(run, [1.0, NAN, math.inf, 1.0, NAN])
    assert run.state.skipped == 1
    assert [line["step"] for line in log.records if line["event"] == "update skipped"] == [2, 3, 5]
    assert log.records[0]["samples"] == ["image 2", "image 7"]
    assert [line["suspects"] for line in log.records] == [["image 7"], [], ["image 10"]]
    assert {line["reason"] for line in log.records} == {"the loss is not finite"}
    assert len(warnings) == 2
    assert "step 2: the loss is not finite" in warnings[0]
    assert "samples with non-finite features: image 7 (" in warnings[0]
    feed(run, [NAN], first=6)
    with pytest.raises(Rollback):
        feed(run, [NAN], first=7)


@pytest.mark.parametrize(
    ("samples", "shown"),
    [
        ([1, 2, 3], "the batch contained: image 1, image 2, image 3 ("),
        ([1, 2, 3, 4, 5], "the batch contained: image 1, image 2, image 3 and 2 more ("),
    ],
)
def test_gradient_that_is_not_finite_counts_in_bf16_and_some_samples_are_shown(
    samples: list[int], shown: str
) -> None:
    run, log = checker()
    run.train_step.parts.encoder.nonfinite_rows = lambda batch: []  # type: ignore[method-assign]
    run.checks.record(1, torch.tensor(samples), torch.tensor(1.0), torch.tensor(math.inf))
    with console.record_warnings() as warnings:
        assert run.checks.read(run) == 1
    (record,) = log.records
    assert record["reason"] == "the gradient is not finite"
    assert len(record["samples"]) == len(samples), "the log has all"
    assert shown in warnings[0]


def test_fp16_overflow_is_not_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 2)
    scales = [2.0]
    run, log = checker()
    run.train_step.parts.update.scaler = SimpleNamespace(get_scale=lambda: scales[0])  # type: ignore[assignment]
    with console.record_warnings() as warnings:
        feed(run, [1.0] * 3, norm=math.inf)
    assert (run.state.skipped, warnings) == (0, [])
    assert [line["event"] for line in log.records] == ["loss scale lowered"] * 3
    feed(run, [NAN], first=4)
    assert run.state.skipped == 1, "a non-finite loss counts at any scale"
    scales[0] = 1.0
    with pytest.raises(Rollback):
        feed(run, [1.0], norm=math.inf, first=5)


@pytest.mark.parametrize(
    ("helps", "effect"),
    [
        (True, "using micro-batches of 8; the batch of 16 and its gradient stay the same"),
        (False, "a smaller micro-batch does not help; continuing as before"),
    ],
)
def test_low_memory_is_reported_with_what_it_changes(
    helps: bool, effect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, log = checker()
    run.train_step.attempts = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr(recovery, "make_oom_handler", lambda inputs, micro_batch, report: report)
    prepare_recovery(run)
    with console.record_warnings() as warnings:
        run.train_step.attempts.handler(3, 8, "close to the limit", helps)  # type: ignore[operator]
    assert warnings == [f"low memory at step 3 (close to the limit): {effect}"]
    (record,) = log.records
    assert (record["step"], record["micro_batch"], record["helps"]) == (3, 8, helps)


def test_only_cuda_skips_on_the_device() -> None:
    assert {kind: skip_rule(kind, can_skip=True) for kind in ("cpu", "mps", "cuda")} == {
        "cpu": "host", "mps": "host", "cuda": "device",
    }  # fmt: skip
    assert skip_rule("cuda", can_skip=False) == "host"  # no flag is on two devices


def test_diagnosis_names_samples_losses_and_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 2)
    run, _ = checker(TrainState(rollbacks=3))
    with pytest.raises(Rollback):
        feed(run, [3.5, 3.25, NAN, NAN])
    with pytest.raises(UserError) as caught:
        roll_back(run)
    assert "\n" not in str(caught.value)
    for part in ("step 4", "3.5, 3.25", "image 7", "after 3 rollbacks", "--lr", "--precision fp32"):
        assert part in str(caught.value)
    has_muon = OPTIMIZERS[run.config.optim.optimizer].lr_options == ["--lr", "--muon-lr"]
    assert ("--muon-lr" in str(caught.value)) == has_muon


def test_loss_that_stays_high_is_reported_once() -> None:
    usual = [3.0 + 0.1 * (step % 5) for step in range(40)]
    spikes = SpikeDetector()
    assert [spikes.add(loss) for loss in usual] == [None] * 40
    assert [spikes.add(loss) for loss in (50.0, 3.1)] == [None, None], (
        "a single batch is not a spike"
    )
    reports = [spikes.add(9.0) for _ in range(300)]
    assert [index for index, value in enumerate(reports) if value is not None] == [2], (
        "then 9 is the new normal"
    )
    assert reports[2] == pytest.approx(3.2)
    falling = SpikeDetector()
    assert not any(falling.add(5.0 - 0.05 * step) for step in range(80))


@pytest.mark.parametrize(
    ("usual_losses", "loss", "is_reported"),
    [(16, 3.25, True), (16, 3.23, False), (15, 3.25, False)],
)
def test_equal_losses_count_as_varying_by_one_percent(
    usual_losses: int, loss: float, is_reported: bool
) -> None:
    """8 deviations of at least 1% above the median, which needs 16 losses."""
    spikes = SpikeDetector()
    assert not any(spikes.add(3.0) for _ in range(usual_losses))
    assert [spikes.add(loss) for _ in range(3)] == [None, None, 3.0 if is_reported else None]


def poisoned_steps(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int, float], bool]) -> None:
    """The loss of a step is NaN if `bad(step, learning rate factor)`."""
    real_reduce, real_fraction = World.reduce, RunContext.lr_fraction
    now = {"step": 0, "factor": 1.0}

    def lr_fraction(self: RunContext, step: int) -> float:
        now["factor"] = self.state.lr_factor
        return real_fraction(self, step)

    def begin(train_step: TrainStep, batch: Batch, step: int) -> None:
        now["step"] = step

    def reduce(self: World, *figures: Tensor) -> tuple[Tensor, ...]:
        loss, *others = real_reduce(self, *figures)
        return loss * NAN if bad(int(now["step"]), now["factor"]) else loss, *others

    monkeypatch.setattr(RunContext, "lr_fraction", lr_fraction)
    before_each_step(begin, monkeypatch)
    monkeypatch.setattr(World, "reduce", reduce)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_log(run) if line["kind"] == "event" and line["event"] == name]


def test_one_non_finite_step_is_skipped_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m1clip.training.duration.LOG_LINES", 1)  # one line for the ten steps
    poisoned_steps(monkeypatch, lambda step, factor: step == 4)
    run_small(tmp_path / "run")
    (skipped,) = events(tmp_path / "run", "update skipped")
    assert skipped["step"] == 5
    assert len(skipped["samples"]) == 16
    steps = [line for line in read_log(tmp_path / "run") if line["kind"] == "step"]
    assert [line.get("skipped") for line in steps] == [1]
    assert math.isfinite(steps[0]["loss"])


def test_rollback_lowers_the_learning_rate_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 5 to 8 are not finite at the full learning rate; a lower one fixes them."""
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 3)
    poisoned_steps(monkeypatch, lambda step, factor: factor == 1.0 and 5 <= step < 9)
    changes = {"train.save_every": 3, "train.save_total_limit": 9}
    run = tmp_path / "run"
    run_small(run, changes)
    (back,) = events(run, "rolled back")
    assert (back["failed"], back["back_to"], back["lr_factor"]) == (8, 3, 0.5)
    assert (run / "checkpoints" / "step-000006").exists()
    reference = tensors_of(run, 10)
    for step in (9, 10):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    resume_quietly(run)
    assert_same_bits(tensors_of(run, 10), reference)

    # Killed before the rollback: it is repeated from the same checkpoint with the same result.
    for step in (6, 9, 10):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    resume_quietly(run)
    assert_same_bits(tensors_of(run, 10), reference)


@pytest.mark.parametrize("skip", ["host", "device"])
def test_no_checkpoint_is_saved_between_skipped_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip: Any
) -> None:
    """Also on an accelerator, where the host detects them later; the best model is kept."""
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 3)
    poisoned_steps(monkeypatch, lambda step, factor: factor == 1.0 and 5 <= step < 8)
    monkeypatch.setattr(update_module, "skip_rule", lambda kind, one_device: skip)
    run = tmp_path / "run"
    changes = {"train.save_every": 2, "train.save_total_limit": 9, "train.eval_every": 3}
    values = iter([0.9, 0.1, 0.2, 0.3, 0.4])
    monkeypatch.setattr(
        "m1clip.training.validation.selection_metric",
        lambda scores: replace(selection_metric(scores), value=next(values)),
    )
    run_small(run, {**changes, "train.steps": 8})
    saved = [line["step"] for line in read_log(run) if line["kind"] == "checkpoint"]
    assert saved == [2, 4, 6, 8], "6 and 8 only after the rollback"
    (back,) = events(run, "rolled back")
    assert back["back_to"] == 4
    assert json.loads((run / "checkpoints/step-000008/state.json").read_text())["best_step"] == 3


@pytest.mark.parametrize(("saved", "expected"), [(65536.0, 64.0), (32.0, 32.0)])
def test_rollback_keeps_the_smaller_loss_scale_and_the_best_model(
    tmp_path: Path, saved: float, expected: float
) -> None:
    inputs, update = make({"optim.optimizer": "adamw"})
    groups = checkpoint_tensors(update)
    save(tmp_path, TrainState(step=3, scaler_scale=saved, best=0.1), groups, keep=1)
    update.parts.update.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    failed, log = TrainState(step=9, best=0.7, best_step=6, stale=1), RunLog(tmp_path)
    state = roll_back(RunContext(inputs, update, tmp_path, log, state=failed))
    log.close()
    assert (state.step, state.best, state.best_step, state.stale) == (3, 0.7, 6, 1)
    assert (state.scaler_scale, update.parts.update.scaler.get_scale()) == (expected, expected)


def test_run_without_a_checkpoint_rolls_back_to_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 2)
    poisoned_steps(monkeypatch, lambda step, factor: factor == 1.0 and step >= 2)
    run_small(tmp_path / "run")
    (back,) = events(tmp_path / "run", "rolled back")
    assert back["back_to"] == 0


def test_rollback_to_the_start_forgets_the_moments(tmp_path: Path) -> None:
    inputs = prepared(small_config())
    update = inputs.make_step()
    before = everything(update)
    for step in range(2):
        update.run(inputs.training[step], step)
    log = RunLog(tmp_path)
    state = roll_back(RunContext(inputs, update, tmp_path, log, state=TrainState(step=2)))
    log.close()
    assert (state.step, state.lr_factor) == (0, 0.5)
    assert_same_bits(everything(update), before)


def test_run_stops_with_a_diagnosis_after_the_last_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SKIP_LIMIT", 2)
    poisoned_steps(monkeypatch, lambda step, factor: step >= 5)
    changes = {"train.save_every": 2}
    with (
        console.capture() as output,
        pytest.raises(
            UserError, match=r"diverged at step 7.*after 3 rollbacks.*samples most often"
        ),
    ):
        train_config(small_config(changes), tmp_path / "run")
    assert len(events(tmp_path / "run", "rolled back")) == 3
    (diverged,) = events(tmp_path / "run", "diverged")
    assert (diverged["step"], diverged["rollbacks"]) == (7, 3)
    assert "learning rate is now 0.125 times the configured one" in output.getvalue()
