"""The frozen recipe: frozen towers, features computed once, and a saved model that is complete."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small_run import assert_same_bits, resume_quietly, screen, tensors_of
from tower_run import frozen_config, patch_towers

import m1clip
from m1clip.config import load_config
from m1clip.data.cache import RowTable
from m1clip.errors import UserError
from m1clip.inference.encoder import Encoder, encode_split
from m1clip.inference.feature_cache import FeatureCache
from m1clip.model import pretrained
from m1clip.runlog import read_log
from m1clip.training import autotune, setup
from m1clip.training.run import decode_plan, train_config


@pytest.fixture(autouse=True)
def random_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages with the real towers need not be there."""
    patch_towers(monkeypatch)


def forbidden(*arguments: Any) -> Any:
    raise AssertionError("features were computed once more")


def test_a_run_on_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    config = frozen_config(tmp_path)
    result = train_config(config, run, screen())
    assert result.scores["text_to_image/recall@1"].n == 24

    # The towers are as they came, the heads have moved, and the folder needs nothing else.
    saved = load_file(run / "model" / "model.safetensors")
    for name, tensor in pretrained.package_weights("efficientnet-lite0").items():
        assert torch.equal(saved[f"image_tower.{name}"], tensor)
    job = setup.prepare(config, lambda line: None, decode_plan(screen()))
    fresh = job.build_model().state_dict()
    assert not torch.equal(fresh["image_head.project.weight"], saved["image_head.project.weight"])
    assert torch.equal(fresh["image_head.mean"], saved["image_head.mean"])
    bundle = m1clip.load(run)
    data = job.splits["test"]
    image, text, *_ = encode_split(bundle.clip, data, bundle.preprocess, 8, job.autocast)
    images = list(data.images.read(np.arange(4)))
    torch.testing.assert_close(bundle.encode_image(images), image[:4], atol=2e-3, rtol=0)  # kept as float16
    captions = [caption for sample in data.samples for caption in sample.captions][:4]
    torch.testing.assert_close(bundle.encode_text(captions), text[:4], atol=2e-3, rtol=0)

    # A checkpoint holds what changes, and refers to the frozen towers by hash.
    kept = tensors_of(run, 6)
    assert not [name for name in kept if name.startswith(("weights:image_tower.", "weights:text_tower."))]
    assert {"weights:image_head.project.weight", "weights:logit_scale"} <= kept.keys()

    # A second run finds every feature, and is the same run.
    monkeypatch.setattr(FeatureCache, "encoder", property(forbidden))
    train_config(config, tmp_path / "again", screen())
    assert_same_bits(tensors_of(tmp_path / "again", 6), tensors_of(run, 6))

    # Six steps equal three, resume, three.
    shutil.rmtree(run / "checkpoints" / "step-000006")
    shutil.rmtree(run / "model")
    _, said = resume_quietly(run)
    assert "step 3 of 6" in said
    assert_same_bits(tensors_of(run, 6), tensors_of(tmp_path / "again", 6))
    assert load_config(run / "config.toml").transfer.recipe == "frozen"

    # Other towers than it began with are noticed.
    other = {name: tensor + 1 for name, tensor in pretrained.package_weights("efficientnet-lite0").items()}
    real = pretrained.package_weights
    monkeypatch.undo()
    patch_towers(monkeypatch)
    monkeypatch.setattr(pretrained, "package_weights", lambda name: real(name) if name == "minilm" else dict(other))
    with pytest.raises(UserError, match="the frozen weights have changed since the run started"):
        resume_quietly(run)


def test_only_new_views_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(views: int) -> RowTable:
        config = frozen_config(tmp_path, **{"transfer.views": views})
        images = setup.prepare(config, lambda line: None, decode_plan(screen())).splits["train"].image_features
        assert images is not None
        return images

    one = prepared(1)
    counted: list[int] = []
    real = Encoder.files

    def counting(encoder: Encoder, refs: Any, failures: Any, progress: Any, view: int) -> Any:
        counted.append(view)
        return real(encoder, refs, failures, progress, view)

    monkeypatch.setattr(Encoder, "files", counting)
    two = prepared(2)
    assert counted == [1]
    where = np.arange(5)
    assert np.array_equal(one.read(where), two.read(where))
    assert not np.allclose(two.read(where), two.read(where, np.ones(5, np.int64)), atol=1e-3)


def test_every_caption_of_a_image_is_in_its_step(tmp_path: Path) -> None:
    job = setup.prepare(frozen_config(tmp_path), lambda line: None, decode_plan(screen()))
    batch = job.training[0]
    assert batch.image_features.shape == (16, job.build_model().image_tower.width)
    assert len(batch.text_features) == 32
    assert torch.bincount(batch.image_index).tolist() == [2] * 16


def test_compiled_code_sees_captions_of_one_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "check_compile", lambda kind: None)
    asked = {"transfer.text_tower": "text", "model.context_length": 40}
    lengths = []
    for compiled in (True, False):
        config = frozen_config(tmp_path, **asked, **{"model.compile": compiled})
        job = setup.prepare(config, lambda line: None, decode_plan(screen()))
        lengths.append(job.training[0].tokens.shape[1])
    assert lengths[0] == 40 > lengths[1]


@pytest.mark.parametrize("batch", [None, 0])
def test_the_batch_fits_the_data_unless_the_user_named_it(tmp_path: Path, batch: int | None) -> None:
    shown = screen()
    changes = {"train.batch_size": batch, "data.train_count": 20, "train.steps": 3, "train.micro_batch": 64}
    result = train_config(frozen_config(tmp_path, **changes), tmp_path / "run", shown)
    assert load_config(result.path / "config.toml").train.batch_size == 8
    assert shown.warned[0].startswith("only 20 training images")


def test_a_batch_that_the_images_cannot_fill_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "_from_towers", forbidden)
    with pytest.raises(UserError, match="40 training images do not fill one batch of 64"):
        train_config(frozen_config(tmp_path, **{"train.batch_size": 64}), tmp_path / "run", screen())


def test_broken_images_are_left_out_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = ["image,caption,split"]
    for number in range(12):
        Image.fromarray(np.full((20, 30, 3), 20 * number, np.uint8)).save(folder / f"{number}.png")
        rows.append(f"{number}.png,grey number {number},{'train' if number < 8 else 'val'}")
    (folder / "3.png").write_bytes(b"no image")
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")
    changes = {"data.source": [str(folder)], "data.max_bad": 0.5, "train.batch_size": 4, "train.steps": 2}
    said = screen()
    train_config(frozen_config(tmp_path, **changes), tmp_path / "run", said)
    skipped = [record for record in read_log(tmp_path / "run") if record["kind"] == "skipped"]
    assert [Path(record["where"]).name for record in skipped] == ["3.png"]
    job = setup.prepare(frozen_config(tmp_path, **changes), lambda line: None, decode_plan(said))
    assert [sample.id for sample in job.splits["train"].samples] == [f"{n}.png" for n in range(8) if n != 3]
    with pytest.raises(UserError, match=r"1 of 8 train images cannot be read"):
        train_config(frozen_config(tmp_path, **{**changes, "data.max_bad": 0.0}), tmp_path / "strict", screen())
