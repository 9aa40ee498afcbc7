"""Analyses of a step: gradient norms of real models, and how their values reach the log."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from small_run import prepared, run_small, small_config, weights_sha256
from torch import Tensor, nn

from m1clip.analyses import ANALYSES, Analysis, analyses_that_need, load_function
from m1clip.log_field import figure
from m1clip.model.clip import CLIP
from m1clip.monitor.layer_gradients import gradient_problems
from m1clip.runlog import FIELDS, parse, read_log
from m1clip.schema import matches_schema
from m1clip.training.inputs import RunInputs
from m1clip.training.process import Interrupted, Stopped
from m1clip.training.run import resume
from m1clip.training.step_analyses import StepView, layer_grad_norms

NAME = "layer_grad_norms"
DEPTH = 16


class DeepTower(nn.Module):
    """A plain deep network without normalization or skip connections, as in the textbooks."""

    capturable = False
    tokens_per_image = 1

    def __init__(self, activation: nn.Module, gain: float, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.patch = nn.Linear(3 * 32 * 32, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(DEPTH))
        self.activation = activation
        generator = torch.Generator().manual_seed(0)
        for block in self.blocks:
            nn.init.normal_(block.weight, std=gain / width**0.5, generator=generator)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.activation(self.patch(pixels.flatten(1)))
        for block in self.blocks:
            x = self.activation(block(x))
        return x


def norms_of(model: CLIP, inputs: RunInputs) -> dict[str, float]:
    """The gradient norms of one real step."""
    norms: list[dict[str, float]] = []
    inputs.make_step(model).run(
        inputs.training[0], 0, lambda view: norms.append(layer_grad_norms(view))
    )
    return norms[0]


@pytest.mark.parametrize(
    ("activation", "gain", "words"),
    [
        (nn.Sigmoid(), 1.0, "the gradients of the image tower vanish towards its input"),
        (nn.Tanh(), 10.0, "the gradients of the image tower explode towards its input"),
    ],
)
def test_gradients_that_vanish_or_explode_are_named(
    activation: nn.Module, gain: float, words: str
) -> None:
    inputs = prepared(small_config())
    model = inputs.build_model()
    model.image_tower = DeepTower(activation, gain, model.image_tower.width)
    norms = norms_of(model, inputs)
    assert [layer for layer in norms if layer.startswith("image/block")] == [
        f"image/block {number}" for number in range(1, DEPTH + 1)
    ]
    (problem,) = gradient_problems(norms)
    assert words in problem


@pytest.mark.parametrize("micro_batch", [0, 5])
def test_healthy_model_has_no_verdict_and_its_norms_add_up(micro_batch: int) -> None:
    inputs = prepared(small_config({"train.micro_batch": micro_batch, "model.vision_layers": 4}))
    model = inputs.build_model()
    norms = norms_of(model, inputs)
    assert gradient_problems(norms) == []
    grad_norm = inputs.make_step().run(inputs.training[0], 0).grad_norm
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    assert total == pytest.approx(float(grad_norm), rel=1e-4)
    assert set(norms) == {*model_layer_names(4, 2)}


def model_layer_names(image_blocks: int, text_blocks: int) -> list[str]:
    return [
        *("image/input", *(f"image/block {n + 1}" for n in range(image_blocks))),
        *("image/output", "image/head"),
        *("text/input", *(f"text/block {n + 1}" for n in range(text_blocks))),
        *("text/output", "text/head", "scale"),
    ]


@pytest.mark.parametrize("analysis", ANALYSES.values(), ids=lambda analysis: analysis.name)
def test_entry_of_the_table_is_complete(analysis: Analysis) -> None:
    assert callable(load_function(analysis.function))
    assert not analysis.verdict or callable(load_function(analysis.verdict))
    assert analysis.title
    assert analysis.name not in FIELDS or analysis.record_kind == "analysis", "the page needs an id"
    assert analysis.meaning
    assert (analysis.shown_as == "curve") == bool(analysis.label)
    if analysis.record_kind == "analysis":
        assert FIELDS[analysis.name].schema == analysis.schema


def analyses_in(run: Path) -> list[tuple[int, Any]]:
    return [(line["step"], line) for line in read_log(run) if line["kind"] == "analysis"]


def add_entry(monkeypatch: pytest.MonkeyPatch, **values: Any) -> Analysis:
    usual: dict[str, Any] = {"schema": figure, "shown_as": "curve", "title": "T", "label": "l"}
    entry = Analysis(**{**usual, "meaning": "a test", **values})
    monkeypatch.setitem(ANALYSES, entry.name, entry)
    for field in entry.log_fields():
        monkeypatch.setitem(FIELDS, field.name, field)
    return entry


def weight_norm(view: StepView) -> float:
    return sum(view.norms(view.weights, {"all": list(view.weights)}).values())


def size_of(features: Any) -> float:
    return float(len(features.image))


def constant() -> float:
    return 7.0


def short_of_memory(*needed: Any) -> float:
    raise MemoryError("no memory for the analysis")


def test_run_with_and_without_analyses_has_the_same_weights_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every kind of entry, some of which fail; without them only the values are missing."""
    with monkeypatch.context() as patch:
        for name, need, function in (
            ("weight_norm", "step", weight_norm),
            ("validation_images", "features", size_of),
            ("constant", "nothing", constant),
            ("failing", "step", short_of_memory),
            ("failing_features", "features", short_of_memory),
            ("failing_split", "split", short_of_memory),
        ):
            add_entry(patch, name=name, needs=need, function=f"{__name__}:{function.__name__}")
        run_small(tmp_path / "with", {"train.eval_every": 5})
        values = analyses_in(tmp_path / "with")
        for _, record in values:
            assert parse(json.dumps({**record, "weight_norm": True}).encode()) is None
    assert [step for step, _ in values] == [5, 10], "one record for each evaluation"
    for _, record in values:
        assert matches_schema(record[NAME], ANALYSES[NAME].schema)
        assert set(record[NAME]) == {*model_layer_names(2, 2)}
        assert record["weight_norm"] > 1
        assert record["constant"] == 7.0
        assert "failing" not in record
    texts = [line["text"] for line in read_log(tmp_path / "with") if line["kind"] == "warning"]
    assert [text for text in texts if text.startswith("analysis ")] == [
        f"analysis {name} of step {step} skipped: no memory for the analysis"
        for step in (5, 10)
        for name in ("failing", "failing_features", "failing_split")
    ]
    evaluated = [line for line in read_log(tmp_path / "with") if line["kind"] == "eval"]
    for line in evaluated:
        assert line["analysis"]["validation_images"] >= 8
        assert "held_out_batch_accuracy" in line["analysis"]
        assert not {"failing_features", "failing_split"} & line["analysis"].keys()
    # Restores also the order of the table, which other tests compare.
    with mock.patch.dict(ANALYSES):
        for analysis in analyses_that_need("step"):
            del ANALYSES[analysis.name]
        run_small(tmp_path / "without", {"train.eval_every": 5})
    assert analyses_in(tmp_path / "without") == []
    assert weights_sha256(tmp_path / "with") == weights_sha256(tmp_path / "without")


def test_interrupted_evaluation_loses_no_analysis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are in the log before the evaluation begins.

    The resumed run evaluates without the gradients.
    """
    with monkeypatch.context() as patch:

        def interrupted(run: Any) -> Any:
            run.stop.signal = 15
            raise Interrupted(15)

        patch.setattr("m1clip.training.loop.evaluate", interrupted)
        with pytest.raises(Stopped):
            run_small(tmp_path / "run", {"train.eval_every": 5})
    assert [step for step, _ in analyses_in(tmp_path / "run")] == [5]
    resume(tmp_path / "run")
    assert [step for step, _ in analyses_in(tmp_path / "run")] == [5, 10]
    kinds = [(line["kind"], line["step"]) for line in read_log(tmp_path / "run") if "step" in line]
    assert [step for kind, step in kinds if kind == "eval"] == [5, 10]
