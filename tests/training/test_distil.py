"""A teacher as a second target: the right loss, the right gradient, and a run that comes nearer to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_run import assert_same_bits, run_small, screen, small_config, tensors_of

import m1clip
from m1clip.errors import UserError
from m1clip.losses import distillation
from m1clip.model.clip import Features
from m1clip.runlog import read_log
from m1clip.training import transfer
from m1clip.training.run import decode_plan, train_config
from m1clip.training.setup import prepare
from m1clip.training.step import TrainStep


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to learn from, of another width than the student."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    run_small(run, {"train.steps": 12, "model.embed_dim": 24, "optim.lr": 3e-3})
    return run


def config_of(teacher: Path, tmp_path: Path, **changes: Any) -> Any:
    asked = {"transfer.teacher": str(teacher), "data.cache_dir": str(tmp_path / "cache")}
    return small_config({**asked, **changes})


def test_the_loss_is_nothing_where_pupil_and_teacher_agree() -> None:
    torch.manual_seed(0)
    image, text = F.normalize(torch.randn(4, 6), dim=1), F.normalize(torch.randn(7, 6), dim=1)
    features = Features(image, text, torch.tensor(5.0), None)
    assert float(distillation(features, 5.0 * image @ text.T)) == pytest.approx(0.0, abs=1e-6)
    # By hand: one image, two captions; the student is even, the teacher has 3 : 1.
    even = Features(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor(1.0), None)
    wanted = torch.tensor([[np.log(3.0), 0.0]], dtype=torch.float32)
    by_image = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    assert float(distillation(even, wanted)) == pytest.approx(by_image / 2, abs=1e-6)  # the other way is certain


def test_the_gradient_is_that_of_finite_differences() -> None:
    torch.manual_seed(1)
    image, text = torch.randn(3, 4, dtype=torch.double), torch.randn(5, 4, dtype=torch.double)
    wanted = torch.randn(3, 5, dtype=torch.double)

    def loss(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return distillation(Features(image, text, scale, None), wanted)

    scale = torch.tensor(2.0, dtype=torch.double)
    assert torch.autograd.gradcheck(loss, tuple(t.requires_grad_() for t in (image, text, scale)))


def test_a_teacher_is_asked_about_the_pairs_of_the_step(teacher: Path, tmp_path: Path) -> None:
    job = prepare(config_of(teacher, tmp_path), lambda line: None, decode_plan(screen()))
    assert job.teacher is not None
    batch = job.training[1]
    found = job.teacher.logits(batch.sample_ids, batch.caption_ids)
    bundle, train_split = m1clip.load(teacher), job.splits["train"]
    captions = [caption for sample in train_split.samples for caption in sample.captions]
    sentences = [captions[int(np.flatnonzero(train_split.captions.caption_ids == key)[0])] for key in batch.caption_ids]
    images = [train_split.samples[int(number)].image.open() for number in batch.sample_ids]
    wanted = float(bundle.clip.scale().detach()) * bundle.encode_image(images) @ bundle.encode_text(sentences).T
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.01)  # kept as float16


def test_student_approaches_the_teacher(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "TEACHER_WEIGHT", 1.0)
    config = config_of(teacher, tmp_path, **{"optim.lr": 2e-3})
    said = screen()
    train_config(config, tmp_path / "run", said)
    losses = [record["loss"] for record in read_log(tmp_path / "run") if record["kind"] == "step"]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    assert "teacher    " in said.console.file.getvalue()  # type: ignore[attr-defined]


def test_chunks_give_the_same_gradient(teacher: Path, tmp_path: Path) -> None:
    gradients = []
    for chunk in (0, 5):
        config = config_of(teacher, tmp_path, **{"train.micro_batch": chunk})
        job = prepare(config, lambda line: None, decode_plan(screen()))
        update = TrainStep(job.build_model(), job.config, job.device, job.precision, job.preprocess, job.teacher)
        update.compute_gradients(job.training[0], 0)
        gradients.append({n: p.grad.clone() for n, p in update.model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=2e-6, rtol=1e-4)


def test_a_repeat_finds_the_features_and_is_the_same_run(teacher: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train_config(config_of(teacher, tmp_path, **{"train.steps": 2}), tmp_path / name, screen())
    assert_same_bits(tensors_of(tmp_path / "one", 2), tensors_of(tmp_path / "two", 2))
    with pytest.raises(UserError, match="no trained model found"):
        train_config(config_of(tmp_path / "nowhere", tmp_path), tmp_path / "none", screen())
