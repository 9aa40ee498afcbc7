"""Two devices in one step: the same numbers as on one, both at work at the same time, and the runs that use them."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import (
    TIMEOUT,
    assert_same_bits,
    before_each_step,
    exit_code,
    figures_of,
    prepared,
    run_small,
    small_config,
    tensors_of,
)
from tower_run import frozen_changes, patch_towers

from m1clip import console
from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.losses.registry import LOSSES
from m1clip.runlog import read_log
from m1clip.training.compose import TrainStep
from m1clip.training.distributed import Ranks
from m1clip.training.hybrid import HybridEncoder, at_the_same_time
from m1clip.training.run import resume
from m1clip.training.step import compute_gradients

CASES: dict[str, dict[str, Any]] = {
    "in one pass": {"data.crop_min": 0.5, "train.text_contrast": 0.2},
    "in micro-batches": {"train.micro_batch": 5, "optim.optimizer": "adamw"},
    "with a bias": {"train.loss": next(n for n, loss in LOSSES.items() if loss.needs_bias)},
    "in bf16": {"train.precision": "bf16"},
}


def make_step(changes: dict[str, Any]) -> tuple[TrainStep, Any]:
    inputs = prepared(small_config(changes))
    return inputs.make_step(), inputs.training


@pytest.mark.parametrize("case", CASES)
def test_two_devices_give_the_loss_gradients_and_weights_of_one(case: str) -> None:
    outcomes = []
    for device in ("cpu", "cpu+cpu"):
        step, training = make_step({**CASES[case], "train.device": device})
        assert isinstance(step.parts.encoder, HybridEncoder) == (device == "cpu+cpu")
        loss = compute_gradients(step.parts, training[0], 0)
        gradients = {
            n: p.grad.clone() for n, p in step.model.named_parameters() if p.grad is not None
        }
        step.clear()
        results = [step.run(training[number], number) for number in range(2)]
        weights = {n: p.detach().clone() for n, p in step.model.named_parameters()}
        outcomes.append((loss, gradients, figures_of(results), weights))
    one, two = outcomes
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[2], two[2]), "losses and gradient norms"
    assert_same_bits(one[1], two[1])
    assert_same_bits(one[3], two[3])


def test_frozen_towers_with_dropout_give_the_same_on_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_towers(monkeypatch)
    results = []
    for device in ("cpu", "cpu+cpu"):
        step, training = make_step({**frozen_changes(tmp_path), "train.device": device})
        assert step.parts.encoder.has_dropout
        results.append([step.run(training[number], number) for number in range(2)])
    assert torch.equal(figures_of(results[0]), figures_of(results[1]))


@pytest.mark.parametrize("micro_batch", [0, 8])
def test_both_towers_are_at_work_at_the_same_time(micro_batch: int) -> None:
    """Each tower waits for the other one, in the forward and in the backward pass: in turn, none would go on."""
    step, training = make_step({"train.device": "cpu+cpu", "train.micro_batch": micro_batch})
    model = step.model
    calls = 4 if micro_batch else 1  # two chunks, in both passes
    meet = threading.Barrier(2, timeout=TIMEOUT)
    phase_calls: list[tuple[str, str, str]] = []

    def note(phase: str, tower: str) -> None:
        phase_calls.append((phase, tower, threading.current_thread().name.rpartition("_")[0]))
        meet.wait()

    for tower, head in (("image", model.image_head), ("text", model.text_head)):
        head.register_forward_hook(lambda *_, tower=tower: note("forward", tower))
        first = next(iter(head.parameters()))
        first.register_hook(lambda _, tower=tower: note("backward", tower))
    step.run(training[0], 0)
    forward = [(tower, thread) for phase, tower, thread in phase_calls if phase == "forward"]
    assert forward.count(("text", "text-tower")) == calls
    assert sum(tower == "image" for tower, _ in forward) == calls
    assert {tower for phase, tower, _ in phase_calls if phase == "backward"} == {"image", "text"}


def test_an_error_of_either_tower_is_raised_when_both_have_ended() -> None:
    ended = threading.Event()
    for first, second in ((_fail, ended.set), (ended.set, _fail)):
        ended.clear()
        with pytest.raises(MemoryError):
            at_the_same_time(first, second)
        assert ended.is_set()


def _fail() -> None:
    raise MemoryError


def test_a_run_on_two_devices_is_evaluated_saved_and_resumed_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "train.steps": 4,
        "train.eval_every": 2,
        "train.save_every": 2,
        "data.synthetic_images": 40,
    }
    expected = run_small(tmp_path / "one", changes)
    moved = tmp_path / "moved"
    with monkeypatch.context() as patch:
        before_each_step(_stop_at_third, patch)
        with pytest.raises(Killed):
            run_small(moved, {**changes, "train.device": "cpu+cpu"})
    with console.capture() as output:
        finished = resume(moved, device="cpu")
    assert "from step 2 of 4" in output.getvalue()
    assert finished.scores == expected.scores
    assert_same_bits(tensors_of(moved, 4), tensors_of(tmp_path / "one", 4))
    evaluations = [
        [record["mean_recall"] for record in read_log(run) if record["kind"] == "eval"]
        for run in (tmp_path / "one", moved)
    ]
    assert evaluations[0] == evaluations[1]


class Killed(BaseException):
    """What ends a run in its middle."""


def _stop_at_third(_step: TrainStep, _batch: Batch, number: int) -> None:
    if number == 2:
        raise Killed


def test_what_two_devices_do_not_support_is_an_error_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = "cuda+cpu" if not torch.cuda.is_available() else "mps+cpu"
    assert exit_code("train", "--data", "synthetic", "--device", missing, "--out", tmp_path) == 2
    assert f"--device {missing}: not available on this machine" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--device cpu\+cpu does not support --compile"):
        prepared(small_config({"train.device": "cpu+cpu", "model.compile": True}))
    inputs = prepared(small_config({"train.device": "cpu+cpu"}))
    with pytest.raises(UserError, match=r"--device cpu\+cpu: two devices train in one process"):
        inputs.for_rank(Ranks(0, 2))
    with pytest.raises(UserError, match=r"must be one of .*did you mean"):
        small_config({"train.device": "cpu+mps"})
