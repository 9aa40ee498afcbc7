"""MISSION 15: accuracy within a batch beside its chance level 1/B, also with micro-batches."""

import pytest
import torch
from small_run import assert_same_bits, finished_run, prepared, small_config

from m1clip.evaluation.evaluate import open_split
from m1clip.evaluation.split_analyses import accuracy_within_batches
from m1clip.runlog import FIELDS, read_log
from m1clip.training.step import train_step


def test_accuracy_within_a_batch_is_logged_beside_its_chance() -> None:
    records = list(read_log(finished_run()))
    steps = [line for line in records if line["kind"] == "step"]
    accuracies = [step["batch_accuracy"] for step in steps]
    assert all(0 <= value <= 1 and value * 16 == round(value * 16) for value in accuracies)
    assert len(set(accuracies)) > 1, "it changes from batch to batch"
    assert [step["batch_chance"] for step in steps] == pytest.approx(
        [1 / 16] * len(steps), abs=0.01
    )
    (evaluation,) = [line for line in records if line["kind"] == "eval"]
    held_out = evaluation["analysis"]["held_out_batch_accuracy"]["val"]
    assert held_out["chance"] == pytest.approx(1 / 8), "the 8 validation images are one batch"
    assert "not comparable between batch sizes" in FIELDS["batch_accuracy"].title


def test_micro_batches_have_the_accuracy_of_the_complete_batch() -> None:
    inputs = prepared(small_config())
    complete = inputs.make_step().run(inputs.training[0], 0)
    in_parts = train_step(inputs.make_step().parts, inputs.training[0], 0, micro_batch=5)
    assert in_parts.batch_accuracy.tolist() == pytest.approx(complete.batch_accuracy.tolist())


def test_weights_do_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = prepared(small_config())
    measured = inputs.make_step()
    measured.run(inputs.training[0], 0)
    monkeypatch.setattr("m1clip.training.step.accuracy_within_batch", lambda *batch: torch.zeros(2))
    unmeasured = inputs.make_step()
    assert unmeasured.run(inputs.training[0], 0).batch_accuracy.tolist() == [0.0, 0.0]
    assert_same_bits(measured.model.state_dict(), unmeasured.model.state_dict())


def test_batch_size_changes_the_value_and_its_chance() -> None:
    evaluator = open_split(finished_run(), split="train", device_name="cpu")
    assert evaluator.batch_size == 16
    features = evaluator.encode()
    small, large = (accuracy_within_batches(features, size) for size in (2, 72))
    assert small is not None
    assert large is not None
    assert small.value > large.value
    assert (small.chance, large.chance) == (pytest.approx(1 / 2), pytest.approx(1 / 72))
