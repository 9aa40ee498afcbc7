"""SigLIP of Hugging Face and open_clip: configs, layers, tokenizers, and everything that a loaded model does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.test_fixture import write
from torch import Tensor, nn

import m1clip
from m1clip.data.images import Preprocess, to_square
from m1clip.errors import UserError
from m1clip.export.layouts import convert
from m1clip.model.clip import CLIP
from m1clip.model.folder import read_model, siglip_tokenizer
from m1clip.model.layers import AttentionPool
from m1clip.model.presets import CLIPConfig, TextTowerConfig, VisionTowerConfig
from m1clip.model.siglip import (
    config_from_hf_siglip,
    config_from_openclip_siglip,
    hf_siglip_config,
    is_siglip,
    openclip_siglip_config,
)
from m1clip.text.tokenizers import with_cleaning

IMAGE = torch.arange(40 * 50 * 3).view(40, 50, 3).remainder(251).to(torch.uint8).numpy()
NAMES = [
    ("vit_base_patch16_siglip_384", 768, 3072, 576),
    ("vit_so400m_patch14_siglip_384", 1152, 4304, 729),
    ("vit_giantopt_patch16_siglip_256", 1536, 6144, 256),
]


def openclip_of(name: str, **vision: Any) -> dict[str, Any]:
    """A `model_cfg` as open_clip has it."""
    return {
        "embed_dim": 768,
        "vision_cfg": {"timm_model_name": name, "timm_pool": "map", "timm_proj": "none", **vision},
        "text_cfg": {
            "context_length": 64,
            "vocab_size": 32000,
            "hf_tokenizer_name": "timm/any",
            "tokenizer_kwargs": {"clean": "canonicalize"},
            **{"width": 768, "heads": 12, "layers": 12, "norm_kwargs": {"eps": 1e-6}},
            **{"no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
        },
    }


@pytest.mark.parametrize(("name", "width", "hidden", "patches"), NAMES)
def test_names_of_timm_are_written_again_from_their_sizes(
    name: str, width: int, hidden: int, patches: int
) -> None:
    record = openclip_of(name) | {"embed_dim": width}
    config = config_from_openclip_siglip(record, 1, 1, "here")
    vision = config.own_towers[0]
    assert (vision.width, vision.hidden, vision.patches) == (width, hidden, patches)
    again = openclip_siglip_config(config)
    assert again["vision_cfg"]["timm_model_name"] == name
    assert "timm_model_kwargs" not in again["vision_cfg"]
    assert config_from_openclip_siglip(again, 1, 1, "here") == config


def test_config_of_hugging_face_survives_a_round_trip_through_open_clip() -> None:
    record: dict[str, Any] = {"text_config": {"vocab_size": 256000}}
    record["vision_config"] = {"hidden_size": 1152, "intermediate_size": 4304}
    record["vision_config"] |= {"num_attention_heads": 16, "image_size": 256}
    record["text_config"] |= {"projection_size": 1152}
    config = config_from_hf_siglip(record, 1, 0, "here")
    assert is_siglip(config)
    assert config_from_hf_siglip(hf_siglip_config(config), 1, 0, "here") == config
    through = config_from_openclip_siglip(openclip_siglip_config(config), 1, 0, "here")
    assert through == config


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match=r"images have 1024 dimensions, texts 768"):
        config_from_hf_siglip({"vision_config": {"hidden_size": 1024}}, 1, 1, "here")
    with pytest.raises(UserError, match=r"vision_use_head is off"):
        config_from_hf_siglip({"vision_config": {"vision_use_head": False}}, 1, 1, "here")
    wrong = openclip_of("vit_base_patch16_siglip_224") | {"embed_dim": 512}
    with pytest.raises(UserError, match=r"embed_dim 512 is not the width"):
        config_from_openclip_siglip(wrong, 1, 1, "here")
    with pytest.raises(UserError, match=r"fill_id 9 is outside"):
        TextTowerConfig(vocab_size=9, eot_id=1, fill_id=9)


def test_attention_pooling_is_that_of_torch() -> None:
    torch.manual_seed(0)
    config = VisionTowerConfig(width=32, heads=4, layers=1, pooling="map", norm_eps=1e-6)
    pool = AttentionPool(config)
    pool.initialize()
    for layer in (pool.qkv, pool.out):
        nn.init.normal_(layer.bias, std=0.1)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": pool.qkv.weight,
            "in_proj_bias": pool.qkv.bias,
            "out_proj.weight": pool.out.weight,
            "out_proj.bias": pool.out.bias,
        }
    )
    x = torch.randn(3, 7, 32)
    y = theirs(pool.query.expand(3, 1, 32), x, x)[0][:, 0]
    hidden = nn.functional.gelu(pool.mlp.up(pool.norm(y)))
    torch.testing.assert_close(pool(x), y + pool.mlp.down(hidden))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """SigLIP 2 as open_clip writes it, 32 pixels."""
    return write("openclip-siglip", tmp_path / "siglip2")


def test_text_features_do_not_depend_on_the_length_of_the_batch(folder: Path) -> None:
    """Positions after the text are read too, so a batch of short texts is filled up like one with a long text."""
    model = m1clip.load(folder, precision="fp32")
    alone = model.encode_text("a cat")
    beside = model.encode_text(["a cat", "two dogs running on the beach at sunset with a red car"])
    torch.testing.assert_close(alone[0], beside[0])
    tokens = torch.from_numpy(model.tokenizer.tokenize(["a cat"], model.context_length)).long()
    changed = tokens.clone()
    changed[0, -1] = 5
    torch.testing.assert_close(model.clip.encode_text(changed), model.clip.encode_text(tokens))
    assert not torch.equal(alone[0], beside[1])


def test_scale_of_the_sigmoid_loss_may_exceed_that_of_clip(folder: Path) -> None:
    clip: CLIP = m1clip.load(folder).clip
    with torch.no_grad():
        clip.logit_scale.fill_(4.77)
    clip.clamp_scale()
    assert float(clip.scale().detach()) == pytest.approx(117.9, abs=0.1)


def test_bf16_training_of_tanh_gelu_on_the_cpu_is_close_to_fp32(folder: Path) -> None:
    clip = m1clip.load(folder).clip.train()
    pixels = torch.rand(4, 3, 32, 32)

    def gradient(bf16: bool) -> Tensor:
        clip.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            clip.encode_image(pixels)[:, 0].sum().backward()
        gradients = [p.grad.flatten() for p in clip.image_tower.parameters() if p.grad is not None]
        return torch.cat(gradients)

    exact, rounded = gradient(False), gradient(True)
    assert float((rounded - exact).norm() / exact.norm()) < 0.03


def test_fine_tuning_takes_the_sigmoid_loss_and_saves_a_model_that_can_be_exported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"data": "synthetic", "synthetic_images": 40, "batch_size": 16, "steps": 2}
    options |= {"precision": "fp32", "patience": 0}
    options |= {"unfreeze_image": 0, "micro_batch": 8}  # locked images: a tower without a head
    before = read_model(folder)
    result = m1clip.train(**options, init=str(folder), device="cpu", out=tmp_path / "run")
    assert "loss       sigmoid: the model has its bias" in capsys.readouterr().out
    saved = read_model(Path(result.path))
    assert is_siglip(saved.config)
    assert torch.equal(
        saved.weights["image_tower.pool.query"], before.weights["image_tower.pool.query"]
    )
    model = m1clip.load(result.path, precision="fp32")
    for to in ("hf", "openclip"):
        convert(saved, to, tmp_path / to)  # type: ignore[arg-type]
        again = m1clip.load(tmp_path / to, precision="fp32")
        torch.testing.assert_close(again.encode_text(["A Cat!"]), model.encode_text(["A Cat!"]))
        torch.testing.assert_close(again.encode_image(IMAGE), model.encode_image(IMAGE))
    convert(saved, "onnx", tmp_path / "onnx")
    graphs = m1clip.load(tmp_path / "onnx")
    difference = graphs.encode_text(["a cat", "a"]) - model.encode_text(["a cat", "a"]).numpy()
    assert np.abs(difference).max() < 1e-5


def test_projection_for_the_frozen_recipe_begins_as_the_identity(folder: Path) -> None:
    saved = read_model(folder)
    model = m1clip.load(folder, precision="fp32").clip
    projected = saved.with_projections()
    assert projected.config.image_head.kind == "projection"
    assert projected.with_projections() is projected
    pixels = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            projected.build().encode_image(pixels), model.encode_image(pixels)
        )


def test_bilinear_resizing_is_that_of_pillow(folder: Path) -> None:
    preprocess = read_model(folder).preprocess
    assert (preprocess.resize, preprocess.squashes, preprocess.bilinear) == (
        "squash-bilinear",
        True,
        True,
    )
    from PIL import Image

    image = Image.fromarray(IMAGE)
    expected = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR))
    assert np.array_equal(to_square(image, 32, preprocess.resize), expected)
    assert not Preprocess(image_size=32).bilinear


def test_text_is_cleaned_as_the_library_of_the_folder_does(tmp_path: Path) -> None:
    siglip = siglip_tokenizer(write("hf-siglip", tmp_path / "one"), None)[0]
    assert siglip.encode("A  photo,\nof_a CAT!") == siglip.encode("a photo ofa cat")
    two = write("openclip-siglip", tmp_path / "two")
    open_clip = siglip_tokenizer(two, "canonicalize")[0]
    assert open_clip.encode("A photo, of_a CAT!") == open_clip.encode("a photo of a cat")
    hugging_face = siglip_tokenizer(two, None)[0]
    assert hugging_face.encode("A Photo!") == hugging_face.encode("a photo!")
    assert hugging_face.encode("a photo!") != hugging_face.encode("a photo")
    # Once is enough: a model that is written and read again keeps its tokenizer.
    text = json.dumps(siglip.record()["tokenizer"])
    assert json.loads(with_cleaning(text, "siglip", "</s>")) == json.loads(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "siglip2"}, r"variable resolution \(NaFlex\)"),
        ({"text_config": {"hidden_act": "relu", "hidden_size": 32}}, "hidden_act relu"),
    ],
)
def test_unsupported_folders_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write("hf-siglip", tmp_path / "m") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=words):
        m1clip.load(path.parent)


def test_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    folder = write("hf-siglip", tmp_path / "m")
    for content, words in (
        (b"\x0a\xff", "not a SentencePiece model"),
        (None, r"no tokenizer\.json"),
    ):
        (folder / "spiece.model").unlink()
        if content is not None:
            (folder / "spiece.model").write_bytes(content)
        with pytest.raises(UserError, match=words):
            m1clip.load(folder)


def test_image_size_that_is_no_multiple_of_the_patch_needs_attention_pooling() -> None:
    with pytest.raises(UserError, match="not a multiple"):
        VisionTowerConfig(image_size=30, patch_size=8)
    config = CLIPConfig(image_tower=VisionTowerConfig(image_size=30, patch_size=8, pooling="map"))
    assert config.own_towers[0].patches == 9
