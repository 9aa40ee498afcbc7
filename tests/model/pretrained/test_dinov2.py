"""DINOv2 towers against transformers, against themselves, and against wrong files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from m1clip.errors import UserError
from m1clip.model.pretrained import dinov2
from m1clip.model.pretrained.folders import native_size
from m1clip.model.pretrained.registry import build_image_tower, load_image_tower, tower_image_size
from m1clip.model.towers import Tower
from model.pretrained.plain_result import assert_inference_matches
from model.pretrained.their_towers import DINO, PIXELS, write_dino

WITHOUT_REGISTERS = {**DINO, "model_type": "dinov2"}


def loaded(folder: Path, image_size: int) -> Tower:
    config, weights, _ = load_image_tower(str(folder), image_size)
    tower = build_image_tower(config).eval()
    tower.load_state_dict(weights)
    return tower


@pytest.mark.parametrize("config", [DINO, WITHOUT_REGISTERS], ids=["registers", "without"])
@pytest.mark.parametrize("image_size", [28, 35, 42])
def test_dinov2_matches_transformers(
    config: dict[str, Any], image_size: int, tmp_path: Path
) -> None:
    """At the size of its positions, at a smaller and at a larger one."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = write_dino(tmp_path / "dino", config)
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    registers = config["num_register_tokens"] if config is DINO else 0
    pixels = torch.rand(3, 3, image_size, image_size)
    mean, std = (torch.tensor(PIXELS[f"image_{part}"])[:, None, None] for part in ("mean", "std"))
    with torch.inference_mode():
        last = theirs(pixel_values=(pixels - mean) / std).last_hidden_state
        expected = torch.cat([last[:, 0], last[:, 1 + registers :].mean(dim=1)], dim=1)
        features = loaded(folder, image_size)(2 * pixels - 1)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)


def test_features_without_a_graph_are_the_plain_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tower = loaded(write_dino(tmp_path / "dino"), 28)
    assert (tower.width, tower.tokens_per_image) == (32, 1 + 3 + 16)
    assert_inference_matches(tower, torch.randn(3, 3, 28, 28))


def test_bf16_features_are_close(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tower = loaded(write_dino(tmp_path / "dino"), 28)
    pixels = torch.randn(3, 3, 28, 28)
    with torch.inference_mode():
        plain = tower(pixels)
        with torch.autocast("cpu", torch.bfloat16):
            half = tower(pixels)
    assert half.dtype == torch.float32
    assert float(torch.nn.functional.cosine_similarity(half, plain).min()) > 0.999


def test_image_size_of_a_folder_and_of_a_name(tmp_path: Path) -> None:
    assert tower_image_size(str(write_dino(tmp_path / "dino"))) == 28
    assert tower_image_size("dinov2-small") == 224
    assert tower_image_size("efficientnet-lite0+lite2+dinov2-small") == 260


def test_size_that_is_not_a_multiple_of_the_patch_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"multiple of 7, not 30: try --image-size 28"):
        load_image_tower(str(write_dino(tmp_path / "dino")), 30)


@pytest.mark.parametrize(
    ("changes", "is_native"),
    [
        ({}, True),
        ({"use_swiglu_ffn": True}, False),
        ({"hidden_act": "gelu_new"}, False),
        ({"model_type": "vit"}, False),
        ({"hidden_size": "16"}, False),
    ],
)
def test_only_models_with_these_layers_are_built_here(
    changes: dict[str, Any], is_native: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DINO, **changes}))
    assert isinstance(native_size(tmp_path), dinov2.DinoSize) == is_native


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "config.json: the image tower: layers must be at most 256"),
        ({"num_attention_heads": 3}, "config.json: .*impossible sizes"),
        ({"patch_size": 0}, "config.json: .*impossible sizes"),
        ({"num_hidden_layers": 3}, "not the weights of this DINOv2 .*encoder.layer.2"),
    ],
)
def test_wrong_configs_are_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_dino(tmp_path / "dino")
    (folder / "config.json").write_text(json.dumps({**DINO, **changes}))
    with pytest.raises(UserError, match=message) as caught:
        load_image_tower(str(folder), 28)
    assert "\n" not in str(caught.value)


def test_weights_in_half_precision_are_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = write_dino(tmp_path / "dino")
    pixels = torch.randn(2, 3, 28, 28)
    path = folder / "model.safetensors"
    with torch.inference_mode():
        expected = loaded(folder, 28)(pixels)
        save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)
        features = loaded(folder, 28)(pixels)
    torch.testing.assert_close(features, expected, atol=0.02, rtol=0.02)
