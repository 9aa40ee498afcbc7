"""CUDA graphs: replayed steps match eager ones; the padding is also tested on the CPU."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import losses_of, prepared, run_small, screen, small_config
from torch import Tensor

from m1clip.data.loader import Batch, batches
from m1clip.runlog import read_log
from m1clip.training.cuda_graph import MAX_CAPTURES, CapturedStep
from m1clip.training.run import resume
from m1clip.training.setup import Setup
from m1clip.training.step import TrainStep

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


def made(changes: dict[str, Any]) -> tuple[Setup, TrainStep]:
    setup = prepared(small_config({**VARIED, **changes}))
    update = TrainStep(
        setup.build_model(), setup.config, setup.device, setup.precision, setup.preprocess
    )
    return setup, update


def test_graph_padding_does_not_change_loss() -> None:
    setup, update = made({"data.synthetic_images": 136, "train.batch_size": 64})
    captured = CapturedStep(update)
    shapes = []
    for step in range(6):
        batch = setup.training[step]
        fixed = captured.pad(batch)
        shapes.append([tuple(group.shape) for group in groups(fixed)])
        loss, same = update.compute_gradients(batch, step), update.compute_gradients(fixed, step)
        torch.testing.assert_close(same, loss, rtol=1e-6, atol=1e-6)
        for own, padded in zip(groups(batch), groups(fixed), strict=True):
            assert torch.equal(padded[:, : own.shape[1]], own)
    for earlier, later in itertools.pairwise(shapes):
        assert all(a[0] == b[0] and a[1] <= b[1] for a, b in zip(earlier, later, strict=True))


def test_micro_batched_step_is_not_replayed() -> None:
    setup, update = made({})
    captured, batch = CapturedStep(update), setup.training[0]
    assert captured.accepts(batch)
    _, micro_batched = made({"train.micro_batch": 4})
    assert not CapturedStep(micro_batched).accepts(batch)
    captured.disabled = "some reason"
    assert not captured.accepts(batch)


def test_no_cuda_graph_without_cuda_or_if_disabled() -> None:
    assert made({})[1].cuda_graph is None
    assert small_config({"model.cuda_graph": False}).model.cuda_graph is False


def assert_replayed(run: Path) -> None:
    records = list(read_log(run))
    assert not [record for record in records if record.get("event") == "CUDA graph disabled"]
    assert "step" in [record for record in records if record["kind"] == "step"][-1]["seconds"]


@needs_cuda
@pytest.mark.parametrize("changes", [{}, {"optim.optimizer": "muon"}, {"train.precision": "bf16"}])
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
    setup, update = made(ON_CUDA)
    replays = 0
    assert update.cuda_graph is not None
    for step, batch in enumerate(batches(setup.training, 0, 30, 0, "fork", pin=True)):
        update(batch, step)
        replays += update.cuda_graph._graph is not None
    assert not update.cuda_graph.disabled
    # Texts may get longer before the first capture, which restarts the warm-up.
    assert replays >= 20
    assert update.cuda_graph.captures < MAX_CAPTURES


@needs_cuda
def test_replayed_non_finite_step_changes_no_weights() -> None:
    setup, update = made(ON_CUDA)
    feed = list(batches(setup.training, 0, 12, 0, "fork", pin=True))
    for step, batch in enumerate(feed[:8]):
        update(batch, step)
    assert update.cuda_graph is not None
    assert update.cuda_graph._graph is not None
    before = {name: p.detach().clone() for name, p in update.model.named_parameters()}
    feed[7].views[3, 5] = float("nan")
    loss, _ = update(feed[7], 8)
    assert not loss.isfinite()
    assert all(torch.equal(before[name], p) for name, p in update.model.named_parameters())
    loss, _ = update(feed[9], 9)
    assert loss.isfinite()
    assert any(not torch.equal(before[name], p) for name, p in update.model.named_parameters())


@needs_cuda
def test_resume_with_cuda_graph(tmp_path: Path) -> None:
    run_small(tmp_path / "reference", {**ON_CUDA, "train.save_every": 20})
    run_small(tmp_path / "again", {**ON_CUDA, "train.save_every": 20})
    shutil.rmtree(sorted((tmp_path / "again" / "checkpoints").iterdir())[-1])
    resume(tmp_path / "again", screen())
    assert_replayed(tmp_path / "again")
    reference, again = losses_of(tmp_path / "reference"), losses_of(tmp_path / "again")
    torch.testing.assert_close(again[-20:], reference[-20:], rtol=2e-3, atol=0)
