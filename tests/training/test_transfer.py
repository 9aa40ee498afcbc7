"""Transfer learning: frozen towers, fine-tuning of last blocks, distillation and WiSE-FT."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from image_sets import make_set
from PIL import Image
from safetensors.torch import load_file
from small_run import (
    assert_same_bits,
    finished_run,
    losses_of,
    prepared,
    resume_quietly,
    small_config,
    tensors_of,
)
from tower_run import frozen_config, patch_towers

import m1clip
from m1clip import console
from m1clip.errors import UserError
from m1clip.evaluation.statistics import selection_metric
from m1clip.inference.batches import TowerRunner
from m1clip.inference.feature_cache import FeatureCache
from m1clip.inference.features import encode_split
from m1clip.losses import run_loss
from m1clip.losses.run_loss import distillation
from m1clip.model.clip import Features
from m1clip.model.lora import merged_state
from m1clip.model.pretrained import registry
from m1clip.monitor.report import write_report
from m1clip.runlog import read_log
from m1clip.training import head_trial
from m1clip.training.inputs import RunInputs
from m1clip.training.run import train_config
from m1clip.training.spec import read_spec
from m1clip.training.step import compute_gradients
from m1clip.training.transfer import interpolate_tensors


@pytest.fixture(autouse=True)
def random_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights in pretrained towers, so that their packages are not needed."""
    patch_towers(monkeypatch)


@pytest.fixture(scope="module")
def scratch() -> Path:
    """A run from scratch to start from, with its own embedding width."""
    return finished_run({"train.steps": 3, "model.embed_dim": 24})


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on frozen towers to start from; its features are cached next to it."""
    folder = tmp_path_factory.mktemp("frozen")
    with pytest.MonkeyPatch.context() as patch:
        patch_towers(patch)
        train_config(frozen_config(folder, **{"train.steps": 3}), folder / "run")
    return folder / "run"


def tuned(first: Path, **changes: Any) -> Any:
    """The config of a run that starts from another one."""
    values = {
        "transfer.init": str(first),
        "train.steps": 4,
        "optim.optimizer": "adamw",
        "train.save_every": 2,
    }
    values |= {
        "data.cache_dir": str(first.parent / "cache"),
        "train.batch_size": 8,
        "data.synthetic_images": 40,
    }
    return small_config({**values, **changes})


def weights(run: Path, kind: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / kind / "model.safetensors")


def changed(first: Path, run: Path) -> set[str]:
    old, new = weights(first, "best"), weights(run)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def trainable(inputs: RunInputs) -> set[str]:
    return {name for name, p in inputs.build_model().named_parameters() if p.requires_grad}


def assert_resumes_exactly(run: Path, step: int) -> None:
    complete = tensors_of(run, step)
    shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    shutil.rmtree(run / "model")
    resume_quietly(run)
    assert_same_bits(tensors_of(run, step), complete)


def test_frozen_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, config = tmp_path / "run", frozen_config(tmp_path)
    train_config(config, run)
    saved = weights(run)
    for name, tensor in registry.package_weights("efficientnet-lite0").items():
        assert torch.equal(saved[f"image_tower.{name}"], tensor)
    inputs = prepared(config)
    fresh = inputs.build_model().state_dict()
    assert not torch.equal(fresh["image_head.project.weight"], saved["image_head.project.weight"])
    assert torch.equal(fresh["image_head.mean"], saved["image_head.mean"])

    # All captions of an image are in its step.
    batch = inputs.training[0]
    assert batch.image_features.shape == (16, inputs.build_model().image_tower.width)
    assert torch.bincount(batch.image_index).tolist() == [2] * 16

    # The saved model is complete: it computes the cached features from images and captions.
    model, data = m1clip.load(run), inputs.splits["test"]
    image, text, *_ = encode_split(model, data)
    images = list(data.images.read(np.arange(4)))
    # Stored as float16.
    np.testing.assert_allclose(model.encode_image(images), image[:4], atol=2e-3, rtol=0)
    captions = [caption for sample in data.samples for caption in sample.captions][:4]
    np.testing.assert_allclose(model.encode_text(captions), text[:4], atol=2e-3, rtol=0)

    # A checkpoint contains what changes, and references the frozen towers by hash.
    tensors = tensors_of(run, 6)
    assert not [
        name for name in tensors if name.startswith(("weights:image_tower.", "weights:text_tower."))
    ]
    assert {"weights:image_head.project.weight", "weights:logit_scale"} <= tensors.keys()

    # A second run and a resume find every feature.
    monkeypatch.setattr(
        FeatureCache, "towers", property(lambda self: pytest.fail("features were recomputed"))
    )
    train_config(config, tmp_path / "again")
    assert_same_bits(tensors_of(tmp_path / "again", 6), tensors)
    assert_resumes_exactly(run, 6)

    other = {
        name: tensor + 1 for name, tensor in registry.package_weights("efficientnet-lite0").items()
    }
    real = registry.package_weights
    monkeypatch.undo()
    patch_towers(monkeypatch)
    monkeypatch.setattr(
        registry, "package_weights", lambda name: real(name) if name == "minilm" else dict(other)
    )
    with pytest.raises(UserError, match="the frozen weights have changed since the run started"):
        resume_quietly(run)


def test_unreadable_images_are_skipped_with_frozen_towers(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = ["image,caption,split"]
    for number in range(12):
        Image.fromarray(np.full((20, 30, 3), 20 * number, np.uint8)).save(folder / f"{number}.png")
        rows.append(f"{number}.png,grey number {number},{'train' if number < 8 else 'val'}")
    (folder / "3.png").write_bytes(b"no image")
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")
    changes = {"data.source": [str(folder)], "data.max_unreadable": 0.5, "train.batch_size": 4}
    inputs = prepared(frozen_config(tmp_path, **changes))
    assert [sample.id for sample in inputs.splits["train"].samples] == [
        f"{n}.png" for n in range(8) if n != 3
    ]
    with pytest.raises(UserError, match=r"1 of 8 train images cannot be read"):
        prepared(frozen_config(tmp_path, **{**changes, "data.max_unreadable": 0.0}))


def test_trainable_parts(scratch: Path, frozen: Path) -> None:
    """--unfreeze-image and --unfreeze-text, for our own and for pretrained towers."""
    own = trainable(
        prepared(tuned(scratch, **{"transfer.unfreeze_image": 0, "transfer.unfreeze_text": 1}))
    )
    assert not [name for name in own if name.startswith("image_tower.")]
    assert {name.split(".")[3] for name in own if ".blocks." in name} == {"1"}
    assert {"image_head.weight", "text_tower.norm.weight", "logit_scale"} <= own
    trainable_parts = trainable(
        prepared(tuned(frozen, **{"transfer.unfreeze_image": 1, "transfer.unfreeze_text": 2}))
    )
    assert {
        name.split(".")[2] for name in trainable_parts if name.startswith("image_tower.stages.")
    } == {"6"}
    assert {name.split(".")[2] for name in trainable_parts if name.startswith("text_tower.")} == {
        "4",
        "5",
    }
    assert "text_head.up.weight" in trainable_parts


def test_frozen_tower_of_a_finetuning_run_uses_cached_features(
    frozen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = prepared(tuned(frozen, **{"transfer.unfreeze_text": 0}))
    assert inputs.splits["val"].captions.features is not None
    assert inputs.splits["val"].image_features is None
    batch = inputs.training[0]
    assert (batch.images.dtype, batch.text_features.dtype) == (torch.uint8, torch.float32)
    monkeypatch.setattr(
        TowerRunner, "files", lambda *_: pytest.fail("features of the frozen run were not found")
    )
    prepared(tuned(frozen, **{"transfer.unfreeze_image": 0}))


@pytest.mark.parametrize("kind", ["scratch", "frozen"])
def test_last_block_is_trained_and_resumes_exactly(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first, run = request.getfixturevalue(kind), tmp_path / "run"
    last = {"transfer.unfreeze_image": 0, "transfer.unfreeze_text": 1, "optim.lr": 0.01}
    train_config(tuned(first, **last), run)
    moved = {name for name in changed(first, run) if name.startswith("text_tower.")}
    block = "text_tower.transformer.blocks.1." if kind == "scratch" else "text_tower.blocks.5."
    assert moved
    # What follows the blocks, too.
    assert all(name.startswith((block, "text_tower.norm")) for name in moved)
    assert_resumes_exactly(run, 4)


@pytest.mark.parametrize("kind", ["scratch", "frozen"])
def test_lora_saves_a_plain_model_and_resumes_exactly(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first, run = request.getfixturevalue(kind), tmp_path / "run"
    changes = {"transfer.lora": 2, "transfer.unfreeze_text": 1, "optim.lr": 0.01}
    if kind == "frozen":
        changes["transfer.unfreeze_image"] = 0  # a convolutional tower
    memory = {"train.micro_batch": 3, "model.grad_checkpointing": True}
    train_config(tuned(first, **changes, **memory), run)
    tensors = tensors_of(run, 4)
    trained = {name for name in tensors if name.startswith("weights:text_tower.")}
    assert trained
    assert all(name.endswith((".up", ".down")) for name in trained)
    block = "text_tower.transformer.blocks.1." if kind == "scratch" else "text_tower.blocks.5."
    moved = {name for name in changed(first, run) if name.startswith("text_tower.")}
    assert moved
    assert all(name.startswith(block) and name.endswith(".weight") for name in moved)
    assert_resumes_exactly(run, 4)

    # With other micro-batches the gradient is the same.
    gradients = []
    for step in (changes, {**changes, **memory}):
        inputs = prepared(tuned(first, **step))
        parts = inputs.make_step().parts
        compute_gradients(parts, inputs.training[0], 0)
        gradients.append({n: p.grad for n, p in parts.model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["scratch", "frozen"])
def test_frozen_recipe_adapts_the_heads_of_a_trained_model(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters begin as the identity, are chosen on held-out images, resume exactly, and are merged."""
    first, run = request.getfixturevalue(kind), tmp_path / "run"
    monkeypatch.setattr(head_trial, "LEAST_IMAGES", 10)
    changes = {"transfer.recipe": "frozen", "data.cache_dir": str(tmp_path / "cache")}
    config = tuned(first, **changes, **{"optim.lr": 0.01, "train.eval_every": 2})
    with console.capture() as output:
        train_config(config, run)
    decided = read_spec(run)
    assert (decided.config.transfer.recipe, decided.config.transfer.init) == ("frozen", str(first))
    adapters = {"embeddings", "features"} if kind == "scratch" else {"features"}
    assert decided.config.transfer.adapter in adapters
    # Heads of a frozen run have one kind of adapter, so with the user's learning rate nothing is
    # tried.
    assert decided.chosen_by["adapter"] == ("measurement" if kind == "scratch" else "rule")
    assert ("held-out training images" in output.getvalue()) == (kind == "scratch")
    moved = changed(first, run)
    assert moved
    assert all("_head." in name or name == "logit_scale" for name in moved)
    assert next(line["step"] for line in read_log(run) if line["kind"] == "eval") == 0
    tensors = tensors_of(run, 4)
    assert not [name for name in tensors if "_tower." in name]
    assert_resumes_exactly(run, 4)
    # The start is the initial model.
    start = prepared(config).build_model()
    for name, tensor in merged_state(start).items():
        assert torch.equal(tensor, weights(first, "best")[name]), name


def test_gain_and_forgetting_are_reported(scratch: Path, tmp_path: Path) -> None:
    """In run.jsonl, on the console and in the report: scores of the initial and of the best model."""
    data = make_set(tmp_path / "general", train=2, val=2, test=6)
    changes = {"transfer.general_data": [str(data)], "optim.lr": 0.05, "transfer.wise_ft": "1.0"}
    run = tmp_path / "run"
    with console.capture() as output:
        result = train_config(tuned(scratch, **changes), run)
    new, general = (record for record in read_log(run) if record["kind"] == "adaptation")
    assert (new["role"], general["role"], general["split"]) == ("new", "general", "test")
    assert new["score_after"] == result.scores["mean_recall"].value
    best, start = m1clip.load(run), m1clip.load(scratch)
    recalls = [m1clip.evaluate(model, data)["mean_recall"].value for model in (start, best)]
    assert [general["score_before"], general["score_after"]] == pytest.approx(recalls)
    assert f"general data, {data}, test split" in output.getvalue()
    page = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Gained and forgotten" in page
    assert str(data) in page


def test_general_data_is_opened_before_anything_is_prepared(scratch: Path, tmp_path: Path) -> None:
    misplaced = tuned(
        scratch, **{"transfer.general_data": ["/nowhere"], "data.source": ["/no data"]}
    )
    with pytest.raises(UserError, match="--general-data: /nowhere"):
        train_config(misplaced, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run" / "run.jsonl").exists()


def test_missing_teacher_is_reported_before_the_data_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        train_config(
            small_config({"transfer.teacher": "/nowhere", "data.source": ["/no data"]}),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_dead_channels_do_not_increase_the_gradient(frozen: Path) -> None:
    head: Any = prepared(tuned(frozen)).build_model().text_head
    usual = float(head.deviation.median())
    head.deviation[0] = 1e-6
    head.spare_dead_channels()
    assert float(head.deviation[0]) == pytest.approx(usual, rel=0.02)
    assert float(head.deviation.min()) >= 0.01 * usual


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("frozen", {"model.image_size": 64}, "is fixed, 32"),
        ("frozen", {"transfer.unfreeze_text": 9}, "the tower has 6 blocks"),
        ("frozen", {"train.loss": "sigmoid"}, "has no logit bias for --loss sigmoid"),
        ("scratch", {"transfer.unfreeze_image": 3}, "the tower has 2 blocks"),
        ("scratch", {"transfer.lora": 64}, "--lora 64: the smallest matrix"),
        ("frozen", {"transfer.lora": 4}, "no linear layers"),
        ("scratch", {"transfer.init": "/nowhere"}, "no such file or folder"),
        ("scratch", {"transfer.teacher": "/nowhere"}, "no such file or folder"),
    ],
)
def test_impossible_settings(
    kind: str, changes: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(UserError, match=message):
        prepared(tuned(request.getfixturevalue(kind), **changes)).build_model()


def test_finetuning_starts_from_the_model_without_the_augmentation_of_scratch(
    scratch: Path,
) -> None:
    inputs = prepared(tuned(scratch))
    start = weights(scratch, "best")
    assert all(
        torch.equal(tensor, start[name])
        for name, tensor in inputs.build_model().state_dict().items()
    )
    data, train = inputs.config.data, inputs.config.train
    assert (data.word_dropout, data.patch_dropout, train.text_contrast) == (0.0, 0.0, 0.0)
    unwanted = {"data.word_dropout": 0.1, "data.patch_dropout": 0.2, "train.text_contrast": 0.3}
    config = prepared(tuned(scratch, **unwanted)).config
    assert (config.data.word_dropout, config.data.patch_dropout, config.train.text_contrast) == (
        0.1,
        0.2,
        0.3,
    )


def test_initial_model_stays_best_if_training_makes_it_worse(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recalls = iter([0.5, 0.4, 0.3])
    monkeypatch.setattr(
        "m1clip.training.validation.selection_metric",
        lambda scores: replace(selection_metric(scores), value=next(recalls)),
    )
    run = tmp_path / "run"
    train_config(tuned(scratch, **{"train.eval_every": 2}), run)
    assert [line["step"] for line in read_log(run) if line["kind"] == "eval"] == [0, 2, 4]
    assert_same_bits(weights(run, "best"), weights(scratch, "best"))


def test_wise_ft_keeps_the_interpolation_that_is_best_on_validation(
    scratch: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # Evaluates the last model only.
    changes = {"optim.lr": 0.02, "transfer.wise_ft": "search", "train.eval_every": 0}
    train_config(tuned(scratch, **changes), run)
    tried = [record for record in read_log(run) if record["kind"] == "wise_ft"]
    scores = {record["new_fraction"]: record["val_mean_recall"] for record in tried}
    assert set(scores) == {0.0, 0.25, 0.5, 0.75, 1.0}
    old, new = weights(scratch, "best"), weights(run)
    best = max(scores, key=lambda fraction: (scores[fraction], fraction))
    assert_same_bits(weights(run, "best"), interpolate_tensors(old, new, best))
    assert_same_bits(interpolate_tensors(old, new, 0.0), old)
    assert_same_bits(interpolate_tensors(old, new, 1.0), new)


def test_distillation_loss() -> None:
    torch.manual_seed(0)
    image, text = F.normalize(torch.randn(4, 6), dim=1), F.normalize(torch.randn(7, 6), dim=1)
    features = Features(image, text, torch.tensor(5.0), None)
    assert float(distillation(features, 5.0 * image @ text.T)) == pytest.approx(0.0, abs=1e-6)
    # One image, two captions: the student's probabilities are equal, the teacher's 3 : 1.
    even = Features(
        torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor(1.0), None
    )
    by_image = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    target = torch.tensor([[np.log(3.0), 0.0]], dtype=torch.float32)
    assert float(distillation(even, target)) == pytest.approx(by_image / 2, abs=1e-6)

    def loss(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return distillation(Features(image, text, scale, None), logits)

    image, text, logits = (
        torch.randn(n, m, dtype=torch.double) for n, m in ((3, 4), (5, 4), (3, 5))
    )
    scale = torch.tensor(2.0, dtype=torch.double)
    assert torch.autograd.gradcheck(loss, tuple(t.requires_grad_() for t in (image, text, scale)))


def test_distillation(scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teacher logits of each batch; the same gradient in micro-batches.

    The student approaches the teacher.
    """
    changes = {
        "transfer.teacher": str(scratch),
        "data.cache_dir": str(tmp_path / "cache"),
        "optim.lr": 2e-3,
    }
    gradients = []
    for micro_batch in (0, 5):
        inputs = prepared(small_config({**changes, "train.micro_batch": micro_batch}))
        step = inputs.make_step()
        compute_gradients(step.parts, inputs.training[0], 0)
        gradients.append(
            {n: p.grad.clone() for n, p in step.model.named_parameters() if p.grad is not None}
        )
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-3)

    assert inputs.teacher is not None
    batch, train = inputs.training[1], inputs.splits["train"]
    model = m1clip.load(scratch)
    captions = [caption for sample in train.samples for caption in sample.captions]
    texts = [
        captions[int(np.flatnonzero(train.captions.caption_ids == key)[0])]
        for key in batch.caption_ids
    ]
    images = [train.samples[int(number)].image.open() for number in batch.sample_ids]
    expected = (
        float(model.clip.scale().detach()) * model.encode_image(images) @ model.encode_text(texts).T
    )
    logits = inputs.teacher.logits(batch.sample_ids, batch.caption_ids)
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.01)  # stored as float16

    monkeypatch.setattr(run_loss, "TEACHER_WEIGHT", 1.0)
    train_config(small_config(changes), tmp_path / "run")
    losses = losses_of(tmp_path / "run")
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
