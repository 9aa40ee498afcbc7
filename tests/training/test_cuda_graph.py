"""CUDA graphs: replayed steps match eager ones; the padding is also tested on the CPU."""

import itertools
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import losses_of, prepared, run_small, small_config
from torch import Tensor

from m1clip.cuda.graph import MAX_CAPTURES, CapturedStep
from m1clip.data.loader import Batch, batches
from m1clip.optimizers import OPTIMIZERS
from m1clip.runlog import read_log
from m1clip.training.compose import TrainStep, compose_step
from m1clip.training.inputs import RunInputs
from m1clip.training.run import resume
from m1clip.training.step import StepResult, compute_gradients, make_parts
from m1clip.training.step_analyses import layer_grad_norms

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device"
)
VARIED = {
    "data.crop_min": 0.5,
    "data.flip": 0.5,
    "data.color_jitter": 0.3,
    "data.captions_per_step": 2,
}
ON_CUDA = {**VARIED, "train.device": "cuda", "train.steps": 40}
# AdamW keeps rounding errors small over forty steps.
ON_CUDA |= {"optim.optimizer": "adamw", "data.synthetic_images": 136, "train.batch_size": 64}


def groups(batch: Batch) -> list[Tensor]:
    return [batch.texts(rows) for rows in batch.text_rows()]


def made(changes: dict[str, Any]) -> tuple[RunInputs, TrainStep]:
    inputs = prepared(small_config({**VARIED, **changes}))
    update = compose_step(
        make_parts(
            inputs.build_model(),
            inputs.config,
            inputs.device,
            inputs.precision,
            inputs.model.preprocess,
        )
    )
    return inputs, update


def captured_step(update: TrainStep) -> CapturedStep:
    """Replay the step as on CUDA."""
    captured = CapturedStep(
        update.attempt,
        clear=update.clear,
        device=update.parts.device,
        phases=update.phases,
        context_length=update.model.config.context_length,
    )
    update.attempt = captured
    return captured


def test_graph_padding_does_not_change_loss() -> None:
    inputs, update = made({"data.synthetic_images": 136, "train.batch_size": 64})
    captured = captured_step(update)
    shapes = []
    for step in range(6):
        batch = inputs.training[step]
        fixed = captured.pad(batch)
        shapes.append([tuple(group.shape) for group in groups(fixed)])
        loss, same = (
            compute_gradients(update.parts, batch, step),
            compute_gradients(update.parts, fixed, step),
        )
        torch.testing.assert_close(same, loss, rtol=1e-6, atol=1e-6)
        for own, padded in zip(groups(batch), groups(fixed), strict=True):
            assert torch.equal(padded[:, : own.shape[1]], own)
    for earlier, later in itertools.pairwise(shapes):
        assert all(a[0] == b[0] and a[1] <= b[1] for a, b in zip(earlier, later, strict=True))


def test_probed_or_timed_step_has_the_shapes_of_replayed_ones_but_is_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, update = made({"data.synthetic_images": 136, "train.batch_size": 64})
    captured = captured_step(update)
    replayed: list[int] = []
    trained: list[list[tuple[int, ...]]] = []
    monkeypatch.setattr(captured, "replay", lambda batch, step, mark: replayed.append(step))
    plain = captured.step

    def train(batch: Batch, *rest: Any) -> StepResult:
        trained.append([tuple(group.shape) for group in groups(batch)])
        result: StepResult = plain(batch, *rest)
        return result

    captured.step = train
    batch = inputs.training[0]
    norms: list[dict[str, float]] = []
    update.run(batch, 0)
    update.run(batch, 1, lambda view: norms.append(layer_grad_norms(view)))
    update.run(batch, 2)
    with captured.phases.synchronized(lambda: None):
        update.run(batch, 3)
    assert replayed == [0, 2]
    assert len(norms) == 1
    assert trained[0] == trained[1] == trained[2] == trained[3]
    assert trained[0] != [tuple(group.shape) for group in groups(batch)], "padded"


def test_micro_batched_step_is_not_replayed() -> None:
    inputs, update = made({})
    captured, batch = captured_step(update), inputs.training[0]
    assert captured.accepts(batch, 0)
    assert captured.accepts(batch, len(batch))
    assert not captured.accepts(batch, 4)
    captured.disabled = "some reason"
    assert not captured.accepts(batch, 0)


class FakeGraph:
    """A CUDA graph whose replay does nothing; its capture computes the step once."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_fourth_step_of_the_same_shapes_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what is passed to the graph and what it returns."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: nullcontext())
    inputs, plain = made({})
    _, update = made({})
    captured = captured_step(update)
    batch = inputs.training[0]
    for step in range(4):
        expected = plain.run(batch, step)
        result = update.run(batch, step)
        assert isinstance(result, StepResult)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)
        assert captured.settled == (step == 3)
    assert captured.captures == 1
    assert captured._graph.replays == 1  # type: ignore[union-attr]
    assert not update.phases.silent
    captured_at: list[int] = []
    update.run(batch, 4, lambda view: captured_at.append(len(view.gradients)))
    assert captured_at, "a step with a probe is not replayed"
    assert captured._graph.replays == 1  # type: ignore[union-attr]
    update.run(inputs.training[0], 5)
    assert captured._graph.replays == 2  # type: ignore[union-attr]
    captured.reset()
    assert not captured.settled


def test_step_that_cannot_be_captured_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore words")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fail)
    inputs, update = made({})
    captured = captured_step(update)
    for step in range(4):
        loss = update.run(inputs.training[0], step).loss
        assert loss.isfinite()
    assert captured.disabled == "operation not permitted when stream is capturing"
    assert not update.phases.silent


def test_no_cuda_graph_without_cuda_or_if_disabled() -> None:
    assert made({})[1].cuda_graph is None
    assert small_config({"model.cuda_graph": False}).model.cuda_graph is False


def assert_replayed(run: Path) -> None:
    records = list(read_log(run))
    assert not [record for record in records if record.get("event") == "CUDA graph disabled"]
    # The last line ends with a step that is analyzed for the evaluation, which is not replayed.
    assert "step" in [record for record in records if record["kind"] == "step"][-2]["seconds"]


@needs_cuda
@pytest.mark.parametrize(
    "changes",
    [
        *({"optim.optimizer": name} for name, entry in OPTIMIZERS.items() if entry.skips_on_device),
        {"train.precision": "bf16"},
    ],
    ids=str,
)
def test_replayed_steps_match_eager_steps(tmp_path: Path, changes: dict[str, Any]) -> None:
    for name, graph in (("plain", False), ("replayed", True)):
        run_small(tmp_path / name, {**ON_CUDA, **changes, "model.cuda_graph": graph})
    assert_replayed(tmp_path / "replayed")
    plain, replayed = losses_of(tmp_path / "plain"), losses_of(tmp_path / "replayed")
    assert plain[-1] < 0.9 * plain[0]
    loose = bool({"optim.optimizer", "train.precision"} & changes.keys())
    torch.testing.assert_close(replayed, plain, rtol=0.05 if loose else 2e-3, atol=0)


@needs_cuda
def test_all_but_the_first_steps_are_replayed() -> None:
    inputs, update = made(ON_CUDA)
    replays = 0
    assert update.cuda_graph is not None
    for step, batch in enumerate(batches(inputs.training, 0, 30, 0, "fork", pin=True)):
        update.run(batch, step)
        replays += update.cuda_graph._graph is not None
    assert not update.cuda_graph.disabled
    # Texts may get longer before the first capture, which restarts the warmup.
    assert replays >= 20
    assert update.cuda_graph.captures < MAX_CAPTURES


@needs_cuda
def test_replayed_non_finite_step_changes_no_weights() -> None:
    inputs, update = made(ON_CUDA)
    feed = list(batches(inputs.training, 0, 12, 0, "fork", pin=True))
    for step, batch in enumerate(feed[:8]):
        update.run(batch, step)
    assert update.cuda_graph is not None
    assert update.cuda_graph._graph is not None
    before = {name: p.detach().clone() for name, p in update.model.named_parameters()}
    feed[7].views[3, 5] = float("nan")
    loss = update.run(feed[7], 8).loss
    assert not loss.isfinite()
    assert all(torch.equal(before[name], p) for name, p in update.model.named_parameters())
    loss = update.run(feed[9], 9).loss
    assert loss.isfinite()
    assert any(not torch.equal(before[name], p) for name, p in update.model.named_parameters())


@needs_cuda
def test_resume_with_cuda_graph(tmp_path: Path) -> None:
    run_small(tmp_path / "reference", {**ON_CUDA, "train.save_every": 20})
    run_small(tmp_path / "again", {**ON_CUDA, "train.save_every": 20})
    shutil.rmtree(sorted((tmp_path / "again" / "checkpoints").iterdir())[-1])
    resume(tmp_path / "again")
    assert_replayed(tmp_path / "again")
    reference, again = losses_of(tmp_path / "reference"), losses_of(tmp_path / "again")
    torch.testing.assert_close(again[-20:], reference[-20:], rtol=2e-3, atol=0)
