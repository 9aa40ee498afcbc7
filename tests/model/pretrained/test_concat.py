"""Towers side by side: their names, sizes, features, and a frozen run with them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tower_run import PIECES, frozen_config, patch_towers

import m1clip
from m1clip.errors import UserError
from m1clip.inference import load
from m1clip.model.folder import read_model
from m1clip.model.presets import CLIPConfig, PretrainedImageConfig
from m1clip.model.pretrained import packages
from m1clip.model.pretrained.packages import tower_parts
from m1clip.model.pretrained.registry import (
    build_image_tower,
    build_text_tower,
    load_image_tower,
    load_text_tower,
)
from m1clip.training.run import train_config
from model.pretrained.their_towers import write_bert, write_dino


@pytest.fixture(autouse=True)
def random_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights in pretrained towers, so that their packages are not needed."""
    patch_towers(monkeypatch)


def test_names_of_towers_side_by_side(tmp_path: Path) -> None:
    assert tower_parts("minilm") == ("minilm",)
    assert tower_parts("efficientnet-lite0+lite2") == ("efficientnet-lite0+lite2",)
    three = tower_parts("efficientnet-lite0+lite2+dinov2-small")
    assert three == ("efficientnet-lite0", "efficientnet-lite2", "dinov2-small")
    folder = tmp_path / "a+b"
    folder.mkdir()
    assert tower_parts(str(folder)) == (str(folder),)
    for wrong in ("minilm+minilm", "minilm+"):
        with pytest.raises(UserError, match="name each tower once"):
            tower_parts(wrong)


def test_each_image_tower_sees_its_own_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dino = write_dino(tmp_path / "dino")  # used with images of 28
    config, weights, preprocess = load_image_tower(f"efficientnet-lite0+{dino}", 224)
    assert [part.image_size for part in config.parts] == [224, 28]
    assert (config.image_size, preprocess.image_size) == (224, 224)
    tower = build_image_tower(config).eval()
    tower.load_state_dict(weights)
    pixels = torch.randn(2, 3, 224, 224)
    with torch.inference_mode():
        features = tower(pixels)
        alone = []
        for part in config.parts:
            name = f"parts.{config.parts.index(part)}."
            single = build_image_tower(part).eval()
            own = {
                key.removeprefix(name): value
                for key, value in weights.items()
                if key.startswith(name)
            }
            single.load_state_dict(own)
            size = (part.image_size, part.image_size)
            resized = (
                pixels if part.image_size == 224 else F.interpolate(pixels, size, mode="bilinear")
            )
            alone.append(single(resized))
    torch.testing.assert_close(features, torch.cat(alone, dim=1), atol=1e-4, rtol=1e-4)
    smaller, _, _ = load_image_tower(f"efficientnet-lite0+{dino}", 112)
    assert [part.image_size for part in smaller.parts] == [112, 14]


def test_text_towers_side_by_side_read_the_same_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bert = write_bert(tmp_path / "bert", PIECES)
    config, weights, tokenizer = load_text_tower(f"minilm+{bert}")
    tower = build_text_tower(config).eval()
    tower.load_state_dict(weights)
    ids = torch.from_numpy(tokenizer.tokenize(["a cat, a hat", "go"], 64)).long()
    single, own, _ = load_text_tower(str(bert))
    alone = build_text_tower(single).eval()
    alone.load_state_dict(own)
    assert alone.width == 2 * 16  # of two layers, since there are no four
    with torch.inference_mode():
        torch.testing.assert_close(tower(ids)[:, -32:], alone(ids))
    other = write_bert(tmp_path / "other", [*PIECES[:4], *reversed(PIECES[4:])])
    with pytest.raises(UserError, match="has other tokens than minilm"):
        load_text_tower(f"minilm+{other}")


def test_frozen_run_on_towers_side_by_side_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, loaded without the towers, and fine-tuned in the last block of each."""
    torch.manual_seed(0)
    dino, bert = write_dino(tmp_path / "dino"), write_bert(tmp_path / "bert", PIECES)
    changes: dict[str, Any] = {
        "transfer.image_tower": f"efficientnet-lite0+{dino}",
        "transfer.text_tower": f"minilm+{bert}",
        "model.image_size": 56,
        "train.steps": 2,
    }
    train_config(frozen_config(tmp_path, **changes), tmp_path / "run")
    for folder in (dino, bert):
        shutil.rmtree(folder)  # the saved model is complete
    model = m1clip.load(tmp_path / "run")
    kinds = [part.kind for part in model.clip.config.image_tower.parts]  # type: ignore[union-attr]
    assert kinds == ["efficientnet-lite0", "dinov2"]
    assert model.encode_text(["a red ball"]).shape == (1, 16)
    tuned: dict[str, Any] = {
        "transfer.recipe": "finetune",
        "transfer.init": str(tmp_path / "run"),
        "transfer.image_tower": "auto",
        "transfer.unfreeze_image": 1,
        "transfer.unfreeze_text": 1,
        "model.image_size": None,
        "train.steps": 1,
    }
    train_config(frozen_config(tmp_path, **tuned), tmp_path / "tuned")
    before, after = (load(tmp_path / name).clip.state_dict() for name in ("run", "tuned"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    # The best model may be the one before the first step; then nothing has changed.
    allowed = (
        "parts.1.transformer.blocks.1.",
        "parts.1.norm.",
        "parts.0.stages.6.",
        "parts.0.head.",
    )
    assert all(
        name.removeprefix("image_tower.").startswith(allowed)
        for name in changed
        if name.startswith("image_tower.")
    )


def test_onnx_export_of_towers_side_by_side(tmp_path: Path) -> None:
    """The export compares its vectors with those of torch, and fails if they differ."""
    pytest.importorskip("onnx", reason="needs the extra `export`")
    torch.manual_seed(0)
    images = [write_dino(tmp_path / name) for name in ("dino", "dino-2")]
    texts = [write_bert(tmp_path / name, PIECES) for name in ("bert", "bert-2")]
    changes: dict[str, Any] = {
        "transfer.image_tower": "+".join(map(str, images)),
        "transfer.text_tower": "+".join(map(str, texts)),
        "model.image_size": 35,
        "train.steps": 1,
    }
    train_config(frozen_config(tmp_path, **changes), tmp_path / "run")
    folder = m1clip.export(tmp_path / "run", "onnx")
    torch_model, onnx_model = m1clip.load(tmp_path / "run"), m1clip.load(folder)
    sentences = ["a red ball", "two dogs, one cat"]
    vectors = torch.as_tensor(onnx_model.encode_text(sentences))
    torch.testing.assert_close(
        vectors, torch.as_tensor(torch_model.encode_text(sentences)), atol=1e-4, rtol=1e-4
    )


def test_damaged_configs_of_towers_side_by_side_are_one_line(tmp_path: Path) -> None:
    dino = write_dino(tmp_path / "dino")
    tower, _, _ = load_image_tower(f"efficientnet-lite0+{dino}", 224)
    good = CLIPConfig(image_tower=tower).to_dict()
    assert CLIPConfig.from_dict(good).image_tower == tower
    for damage, message in (
        ({"parts": good["image_tower"]["parts"][:1]}, "kind concat with 1 parts"),
        ({"parts": [{**good["image_tower"]}] * 2}, "without parts of its own"),
        ({"parts": "x"}, "parts must be a list"),
        ({"parts": [*good["image_tower"]["parts"]] * 5}, "at most 8"),
        ({"image_size": 225}, "not that of the largest"),
        ({"kind": "dinov2"}, "kind dinov2 with 2 parts"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            CLIPConfig.from_dict({**good, "image_tower": {**good["image_tower"], **damage}})
        assert "\n" not in str(caught.value)
    broken = PretrainedImageConfig(kind="dinov2", name="x", settings='{"layers": 3}', image_size=28)
    with pytest.raises(UserError, match="the settings of x has missing or unknown keys"):
        build_image_tower(broken)


def test_towers_that_libraries_build_are_not_side_by_side(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vit = transformers.ViTModel(
        transformers.ViTConfig(image_size=32, patch_size=16, intermediate_size=24, **small)
    )
    vit.save_pretrained(tmp_path / "vit")
    with pytest.raises(UserError, match="only these can be side by side"):
        load_image_tower(f"efficientnet-lite0+{tmp_path / 'vit'}")


def test_downloaded_towers_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert not packages.installed("gte-small")
    assert packages.install_hint("minilm+gte-small") in (
        "m1clip download gte-small",
        "pip install 'm1clip[towers]'",
    )
    with pytest.raises(UserError, match="to get it: m1clip download gte-small"):
        load_text_tower("gte-small")
    folder = tmp_path / "models--thenlper--gte-small" / "snapshots" / ("0" * 40)
    write_bert(folder, PIECES)
    assert packages.installed("gte-small")
    assert load_text_tower("gte-small")[0].kind == "bert"
    assert read_model_error(folder).startswith(f"{folder}")


def read_model_error(folder: Path) -> str:
    """The error for a tower that is used as a model."""
    with pytest.raises(UserError) as caught:
        read_model(folder)
    return str(caught.value)
