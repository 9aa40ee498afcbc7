"""Images encoded with their mirror images."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_run import finished_run
from tiny_model import tiny_model
from torch.testing import assert_close

import m1clip
from m1clip.errors import UserError
from m1clip.model.clip import build_clip, normalize
from m1clip.model.convert import check_expressible
from m1clip.model.members import vectors_by_member
from m1clip.model.presets import (
    CLIPConfig,
    HeadConfig,
    PretrainedImageConfig,
    PretrainedTextConfig,
    preset,
    with_fields,
)

ONE = with_fields(
    preset("tiny"),
    **{"image_size": 32, "vocab_size": 40, "vision_width": 64, "vision_heads": 1},
    **{"vision_layers": 1, "text_width": 64, "text_heads": 1, "text_layers": 1, "embed_dim": 16},
)


@pytest.mark.parametrize("members", [1, 2])
@torch.no_grad()
def test_vector_is_the_mean_of_an_image_and_its_mirror_image(members: int) -> None:
    torch.manual_seed(2)
    model = build_clip(replace(ONE, members=members, embed_dim=16 * members)).eval()
    pixels = torch.randn(5, 3, 32, 32)
    vectors = model.encode_image(pixels)
    assert_close(model.encode_image(pixels.flip(3)), vectors)
    left, right = (model.encode_view(view) for view in (pixels, pixels.flip(3)))
    assert not torch.allclose(left, right, atol=1e-3), "training sees one of them at a time"
    by_member = [vectors_by_member(side, members) for side in (vectors, left, right)]
    for mean, one, other in zip(*by_member, strict=True):
        assert_close(mean, normalize(one + other), atol=1e-5, rtol=1e-5)
    model.config = replace(model.config, mirror=False)
    assert_close(model.encode_image(pixels), left)


@torch.no_grad()
def test_pretrained_tower_has_mirror_images() -> None:
    torch.manual_seed(2)
    head = HeadConfig(kind="adapter", hidden=8)
    text_tower = PretrainedTextConfig(vocab_size=40)
    towers = {"image_tower": PretrainedImageConfig(image_size=64), "text_tower": text_tower}
    shape = CLIPConfig(**towers, image_head=head, text_head=head, embed_dim=16, mirror=True)
    model = build_clip(shape).eval()
    pixels = torch.randn(4, 3, 64, 64)
    features = model.image_tower(pixels)
    model.image_head.standardize(features.mean(dim=0), features.std(dim=0))
    left, right = (model.encode_view(view) for view in (pixels, pixels.flip(3)))
    assert not torch.allclose(left, right, atol=1e-2)
    assert_close(model.encode_image(pixels), normalize(left + right), atol=1e-5, rtol=1e-5)


def test_training_does_not_see_mirror_images() -> None:
    runs = [finished_run({"model.mirror": mirror, "train.steps": 2}) for mirror in (True, False)]
    models = [m1clip.load(run / "model").clip for run in runs]
    assert [model.config.mirror for model in models] == [True, False]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_mirror_images_are_a_property_of_the_saved_model(tmp_path: Path) -> None:
    model = tiny_model("clip-bpe-pruned", ["a red ball"])
    image = torch.randint(0, 255, (40, 51, 3), dtype=torch.uint8).numpy()
    plain = model.encode_image([image])
    model.clip.config = replace(model.clip.config, mirror=True)
    mirrored = model.encode_image([image])
    assert not torch.allclose(plain, mirrored, atol=1e-3)
    model.save(tmp_path / "model")
    assert_close(m1clip.load(tmp_path / "model").encode_image([image]), mirrored)


def test_config_of_an_older_model_has_no_mirror_images() -> None:
    values = ONE.to_dict()
    assert CLIPConfig.from_dict(values).mirror
    del values["mirror"]
    assert not CLIPConfig.from_dict(values).mirror


def test_what_cannot_have_mirror_images_says_so() -> None:
    shape = replace(preset("ViT-B-32"), mirror=True)
    with pytest.raises(UserError, match="does not support the mean with mirror images"):
        check_expressible(shape, "openclip")
