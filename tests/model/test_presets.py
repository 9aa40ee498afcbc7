"""Presets: parameter counts (the standard ones equal open_clip 3.3.0's), overrides and validation."""

import json
from importlib import resources
from typing import Any

import pytest

from m1clip.config import ModelConfig
from m1clip.errors import UserError
from m1clip.model.clip import count_parameters
from m1clip.model.presets import (
    PRESETS,
    CLIPConfig,
    HeadConfig,
    PretrainedImageConfig,
    clip_config,
    flops_per_pair,
    model_config,
    preset,
    with_fields,
)

PARAMETERS = {
    "tiny": 16_341_249,
    "original": 76_736_001,  # the original project's run, with its 33-character vocabulary
    "original-documented": 105_426_689,
    "ViT-S-16": 62_257_537,  # this and the next three: counted in open_clip 3.3.0
    "ViT-B-32": 151_277_313,
    "ViT-B-16": 149_620_737,
    "ViT-L-14": 427_616_513,
    "200M": 208_948_097,
    "500M": 522_393_601,
    "1B": 1_017_753_345,
}


def test_parameter_count_of_every_preset() -> None:
    assert {name: count_parameters(preset(name)) for name in PRESETS} == PARAMETERS


def test_config_overrides_change_only_named_fields() -> None:
    shape = clip_config(
        ModelConfig(name="ViT-B-32", text_layers=3, stem="conv"), vocab_size=100, logit_bias=True
    )
    expected = preset("ViT-B-32").to_dict() | {"logit_bias": True}
    expected["text_tower"] |= {"layers": 3, "vocab_size": 100, "eot_id": 99}
    expected["image_tower"] |= {"stem": "conv"}
    assert shape.to_dict() == expected


def test_resolved_config_sets_every_field() -> None:
    shape = clip_config(ModelConfig(name="original", text_layers=3), vocab_size=50)
    config = model_config(ModelConfig(name="original", text_layers=3), shape)
    assert None not in vars(config).values()
    assert clip_config(config, vocab_size=50) == shape


def test_config_dict_round_trip() -> None:
    pretrained = CLIPConfig(
        image_tower=PretrainedImageConfig(), image_head=HeadConfig(kind="adapter", hidden=16)
    )
    for shape in (pretrained, preset("tiny")):
        assert CLIPConfig.from_dict(shape.to_dict()) == shape
    with pytest.raises(UserError, match="color"):
        CLIPConfig.from_dict({**shape.to_dict(), "color": 3})
    with pytest.raises(UserError, match="width"):
        CLIPConfig.from_dict({**shape.to_dict(), "text_tower": {"kind": "transformer"}})
    with pytest.raises(UserError, match="image_head must be an object"):
        CLIPConfig.from_dict({k: v for k, v in shape.to_dict().items() if k != "image_head"})


def test_flops_grow_with_tokens() -> None:
    base = with_fields(CLIPConfig(), vision_layers=2, text_layers=2)
    fewer, more = flops_per_pair(base, 10), flops_per_pair(base, 20)
    # Twice the tokens: twice the matrix work, four times the attention of the text tower.
    width, layers = base.text_tower.width, base.text_tower.layers
    assert more - fewer == pytest.approx(
        3 * 2 * layers * (12 * width**2 * 10 + 2 * width * (400 - 100))
    )


@pytest.mark.parametrize(
    "values",
    [
        *({"stem": "conv", "image_size": 28 * patch, "patch_size": patch} for patch in (1, 14)),
        {"stem": "conv", "vision_width": 4, "vision_heads": 1, "positions": "learned"},
        {"image_size": 4096, "patch_size": 8},
        {"vision_width": 0},
        {"mlp_ratio": 0.0},
        {"eot_id": 20, "vocab_size": 20},
    ],
)
def test_impossible_sizes_are_user_errors(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="model: "):
        with_fields(CLIPConfig(), **values)


def test_impossible_sizes_of_pretrained_towers_and_heads_are_user_errors() -> None:
    with pytest.raises(UserError, match="at least 32 pixels, not 20"):
        PretrainedImageConfig(image_size=20)
    for kind, hidden in (("adapter", 0), ("projection", -1)):
        with pytest.raises(UserError, match="hidden must be at least"):
            HeadConfig(kind=kind, hidden=hidden)  # type: ignore[arg-type]


def test_config_of_every_model_in_the_package_is_read() -> None:
    """Their files are older than some fields, and no test with towers runs everywhere."""
    paths = list((resources.files("m1clip") / "models").iterdir())
    shipped = [path / "config.json" for path in paths if (path / "config.json").is_file()]
    assert shipped
    for path in shipped:
        CLIPConfig.from_dict(json.loads(path.read_text(encoding="utf-8"))["model"])


def test_config_of_an_older_model_lacks_later_fields_and_no_others() -> None:
    values = preset("tiny").to_dict()
    del values["image_tower"]["norm_eps"], values["text_tower"]["fill_id"]
    assert CLIPConfig.from_dict(values) == preset("tiny")
    del values["text_tower"]["eot_id"]
    with pytest.raises(UserError, match="eot_id"):
        CLIPConfig.from_dict(values)
