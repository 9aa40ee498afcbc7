"""The stem of convolutions: what it computes, what it refuses, and that the patches it leaves out change no other."""

from __future__ import annotations

import pytest
import torch
from tiny_model import tiny_config
from torch import nn

from m1clip.errors import UserError
from m1clip.model.clip import CLIP, build_clip
from m1clip.model.convert import check_expressible
from m1clip.model.presets import flops_per_pair, preset, with_fields
from m1clip.model.towers import ConvStem, VisionTower

SMALL = tiny_config(vision_width=16, stem="conv", pooling="mean")


def test_channels_double_up_to_the_width() -> None:
    assert preset("tiny").image_tower.stem_channels == (32, 64, 128, 256)
    assert SMALL.image_tower.stem_channels == (4, 8, 16)


def test_it_is_convolutions_with_norms_over_the_channels() -> None:
    torch.manual_seed(0)
    stem = ConvStem(SMALL.image_tower)
    for norm in stem.norms:
        nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    x = torch.randn(3, 3, 32, 32)
    wanted = x
    for conv, norm in zip(stem.convs, [*stem.norms, None], strict=True):
        wanted = conv(wanted)
        if norm is not None:
            mean = wanted.mean(dim=1, keepdim=True)
            spread = wanted.var(dim=1, unbiased=False, keepdim=True)
            wanted = (wanted - mean) / (spread + 1e-5).sqrt() * norm.weight.view(1, -1, 1, 1)
            wanted = nn.functional.gelu(wanted)
    torch.testing.assert_close(stem(x), wanted.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_some_patches_are_some_rows_of_all() -> None:
    torch.manual_seed(0)
    tower = VisionTower(SMALL.image_tower)
    x, chosen = torch.randn(2, 3, 32, 32), torch.tensor([[0, 3, 7], [1, 2, 15]])
    whole = tower._patches(x, None)
    assert whole.shape == (2, 16, 16)
    torch.testing.assert_close(tower._patches(x, chosen), torch.stack([whole[0, chosen[0]], whole[1, chosen[1]]]))


def test_initialization_comes_from_the_seed() -> None:
    def made() -> CLIP:
        torch.manual_seed(5)
        return build_clip(SMALL)

    one, other = made().state_dict(), made().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(not one[f"image_tower.patch.convs.{i}.bias"].any() for i in range(3))


def test_its_work_is_counted() -> None:
    plain = with_fields(SMALL, stem="patch")
    convs = [2 * 16 * 16 * 9 * 3 * 4, 2 * 8 * 8 * 9 * 4 * 8, 2 * 4 * 4 * 9 * 8 * 16]
    patch = 2 * 16 * 3 * 64 * 16
    difference = flops_per_pair(SMALL, 8) - flops_per_pair(plain, 8)
    assert difference == 2 * convs[0] + 3 * sum(convs[1:]) - 2 * patch


@pytest.mark.parametrize("patch_size", [1, 14])
def test_a_patch_must_be_a_power_of_two(patch_size: int) -> None:
    with pytest.raises(UserError, match=rf"patch_size must be 2, 4, 8, 16 or 32, not {patch_size}"):
        with_fields(SMALL, image_size=28 * patch_size, patch_size=patch_size)


def test_other_formats_do_not_have_it() -> None:
    with pytest.raises(UserError, match="stem conv"):
        check_expressible(with_fields(SMALL, pooling="cls"), "openclip")
