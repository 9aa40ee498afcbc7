"""Our two towers and the CLIP made of them; patch positions and the conv stem."""

import math

import pytest
import torch
import torch.nn.functional as F
from tiny_model import tiny_clip, tiny_config
from torch import Tensor, nn

from m1clip.model.clip import CLIP, MAX_LOGIT_SCALE
from m1clip.model.layers import Block
from m1clip.model.presets import flops_per_pair, with_fields
from m1clip.model.towers import (
    ConvStem,
    VisionTower,
    resize_positions,
    sincos_2d,
    stem_groups,
    whitening_filters,
)

EOT = 9


def clip(**changes: object) -> CLIP:
    return tiny_clip(eot_id=EOT, **changes)


def pixels(n: int = 3, size: int = 32) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(1))


def ids() -> Tensor:
    rows = torch.zeros(3, 16, dtype=torch.long)
    for row, words in enumerate(([1, 4, EOT], [1, 5, 6, 7, EOT], [1, 2, 3, 4, 5, 6, EOT])):
        rows[row, : len(words)] = torch.tensor(words)
    return rows


def gradients(model: CLIP) -> dict[str, Tensor]:
    features = model(pixels(), ids())
    (features.scale * (features.image * features.text.roll(1, 0)).sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_patch_matmul_matches_convolution() -> None:
    for bias in (False, True):
        tower = clip(patch_bias=bias).double().image_tower
        if tower.patch.bias is not None:
            torch.nn.init.normal_(tower.patch.bias)
        by_conv = tower.patch(pixels().double()).flatten(2).transpose(1, 2)
        torch.testing.assert_close(
            tower._patches(pixels().double(), None), by_conv, atol=1e-12, rtol=0
        )


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("positions", ["learned", "sincos"])
def test_dropped_patches_have_no_effect(pooling: str, positions: str) -> None:
    model = clip(pooling=pooling, positions=positions, init="clip")
    chosen = torch.tensor([[0, 2, 3], [5, 6, 7], [1, 9, 15]])
    vectors = model.encode_view(pixels(), chosen)
    other = pixels()
    for row, patches_of_row in enumerate(chosen.tolist()):
        for patch in set(range(16)) - set(patches_of_row):
            top, left = 8 * (patch // 4), 8 * (patch % 4)
            other[row, :, top : top + 8, left : left + 8] = 9.0
    torch.testing.assert_close(model.encode_view(other, chosen), vectors)
    assert not torch.allclose(model.encode_image(other), model.encode_image(pixels()), atol=1e-3)
    every = torch.arange(16).expand(3, -1)
    torch.testing.assert_close(model.encode_view(pixels(), every), model.encode_image(pixels()))


@pytest.mark.parametrize("pooling", ["eot", "eot+mean"])
def test_tokens_after_eot_have_no_effect(pooling: str) -> None:
    model = clip(text_pooling=pooling)
    changed = ids()
    changed[0, 3:] = torch.randint(0, 20, (13,))
    changed[1, 5:] = EOT
    assert torch.equal(model.encode_text(ids()), model.encode_text(changed))
    torch.testing.assert_close(
        model.encode_text(ids()[:, :8]), model.encode_text(ids()), atol=1e-6, rtol=1e-5
    )
    changed[2, 3] = 11  # before its EOT token
    assert not torch.allclose(model.encode_text(ids())[2], model.encode_text(changed)[2])


def test_mean_of_token_embeddings_is_added() -> None:
    tower = clip(text_pooling="eot+mean").double().text_tower
    nn.init.normal_(tower.norm_mean.weight)
    means = [tower.tokens(row[: row.tolist().index(EOT) + 1]).mean(dim=0) for row in ids()]
    both = tower(ids())
    norm, tower.norm_mean = tower.norm_mean, None
    torch.testing.assert_close(both, tower(ids()) + norm(torch.stack(means)))


def test_activation_checkpointing_is_bit_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    import m1clip.model.layers as module

    used, original = [], module.recompute
    monkeypatch.setattr(module, "recompute", lambda *a: used.append(a[0]) or original(*a))
    plain, saving = clip(), clip()
    saving.set_activation_checkpointing(True)
    results = []
    for model in (plain, saving):
        torch.manual_seed(5)
        results.append(gradients(model))
    assert [type(module) for module in used].count(Block) == 4
    assert results[0].keys() == dict(plain.named_parameters()).keys(), (
        "the gradient reaches every parameter"
    )
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_sincos_positions_are_not_saved() -> None:
    model = clip(positions="sincos")
    assert "image_tower.positions" not in model.state_dict()
    assert torch.equal(model.image_tower.positions[0], torch.zeros(32))
    assert "image_tower.positions" in clip().state_dict()
    small, large = (
        clip(positions="sincos", pooling="mean"),
        clip(positions="sincos", pooling="mean", image_size=64),
    )
    large.load_state_dict(small.state_dict())
    assert large.encode_image(pixels(size=64)).shape == (3, 16)


def test_zero_init_makes_every_residual_branch_zero() -> None:
    zeroed, usual = clip(init="zero"), clip(init="clip")
    for tower in ("image_tower", "text_tower"):
        x = torch.randn(2, 5, 32)
        assert torch.equal(getattr(zeroed, tower).transformer(x), x)
        assert not torch.allclose(getattr(usual, tower).transformer(x), x, atol=1e-2)
    grads = gradients(zeroed)  # zero, but it can learn
    assert all(
        grads[f"image_tower.transformer.blocks.{i}.mlp.down.weight"].abs().max() > 0
        for i in range(2)
    )


def test_temperature_is_clamped() -> None:
    model = clip()
    assert model(pixels(), ids()).scale.item() == pytest.approx(1 / 0.07)
    for value, clamped in ((10.0, MAX_LOGIT_SCALE), (-3.0, 0.0), (2.0, 2.0)):
        model.logit_scale.data.fill_(value)
        assert model(pixels(), ids()).scale.item() <= 100.0 * (1 + 1e-6)
        model.clamp_scale()
        assert model.logit_scale.item() == pytest.approx(clamped)


def test_sigmoid_loss_has_siglip_bias_and_temperature() -> None:
    model = clip(logit_bias=True)
    features = model(pixels(), ids())
    assert features.bias is model.logit_bias
    assert (features.bias.item(), features.scale.item()) == (-10.0, pytest.approx(10.0))
    assert math.isclose(
        sum(p.numel() for p in model.parameters()), sum(p.numel() for p in clip().parameters()) + 1
    )


def test_bf16_is_close_to_fp32() -> None:
    model = clip()
    exact = model(pixels(), ids())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(pixels(), ids())
    assert rough.image.dtype == torch.float32
    assert not torch.equal(rough.image, exact.image)
    for name in ("image", "text"):
        assert F.cosine_similarity(getattr(rough, name), getattr(exact, name)).min() > 0.999


@pytest.mark.parametrize(("grid", "width"), [(7, 32), (14, 64), (28, 256)])
def test_sincos_positions_are_distinct(grid: int, width: int) -> None:
    table = sincos_2d(grid, width)
    assert table.shape == (grid * grid, width)
    apart = torch.cdist(table, table) + 10 * torch.eye(len(table))
    assert apart.min() > 0.1


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid", [4, 7, 14])
def test_resized_positions_keep_the_class_token_and_constants(prefix: int, grid: int) -> None:
    positions = torch.full((49 + prefix, 8), 0.25)
    positions[:prefix] = 3.0
    resized = resize_positions(positions, grid)
    assert resized.shape == (grid * grid + prefix, 8)
    assert torch.equal(resized[:prefix], positions[:prefix])
    torch.testing.assert_close(resized[prefix:], torch.full((grid * grid, 8), 0.25))


def test_resized_positions_stay_monotonic() -> None:
    column = torch.arange(8.0).repeat(8)[:, None]  # grows to the right, the same in each row
    resized = resize_positions(column, 16).reshape(16, 16)
    torch.testing.assert_close(resized, resized[:1].expand(16, 16))
    assert (resized[0].diff() > 0).all()


def test_non_square_positions_are_rejected() -> None:
    with pytest.raises(ValueError, match="neither a square grid"):
        resize_positions(torch.zeros(52, 4), 7)


SMALL = tiny_config(vision_width=16, stem="conv", pooling="mean")


def test_conv_stem_matches_reference() -> None:
    torch.manual_seed(0)
    stem = ConvStem(SMALL.image_tower)
    for norm in stem.group_norms:
        nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    x = torch.randn(3, 3, 32, 32)
    expected = x
    for conv, norm in zip(stem.convs, [*stem.group_norms, None], strict=True):
        expected = conv(expected)
        if norm is not None:
            groups = expected.view(3, expected.shape[1] // 2, -1)  # 4 and 8 channels in groups of 2
            mean, variance = (
                groups.mean(dim=2, keepdim=True),
                groups.var(dim=2, unbiased=False, keepdim=True),
            )
            expected = ((groups - mean) / (variance + 1e-5).sqrt()).view_as(
                expected
            ) * norm.weight.view(1, -1, 1, 1)
            expected = nn.functional.gelu(expected)
    torch.testing.assert_close(stem(x), expected.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_stem_groups_divide_any_number_of_channels() -> None:
    for channels in range(1, 200):
        nn.GroupNorm(stem_groups(channels), channels)
    assert [stem_groups(channels) for channels in (1, 2, 4, 8, 24, 25, 32, 50)] == [
        1,
        1,
        2,
        4,
        8,
        1,
        8,
        2,
    ]


def test_whitening_filters_decorrelate_patches() -> None:
    torch.manual_seed(0)
    # Neighboring pixels are correlated.
    pixels = nn.functional.avg_pool2d(torch.randn(40, 3, 68, 68), 3, 1)
    filters = whitening_filters(pixels, 54)
    assert filters.shape == (54, 3, 3, 3)
    torch.testing.assert_close(filters[:27], -filters[27:])
    out = nn.functional.conv2d(pixels, filters[:27]).transpose(0, 1).flatten(1)
    covariance = out.cov()
    off_diagonal = covariance - covariance.diag().diag()
    assert off_diagonal.abs().max() < 0.05
    assert (covariance.diag().diff() < 0.05).all()  # by decreasing variance, before scaling
    assert covariance[0, 0] > 0.8  # close to 1: its variance is far above the regularization
    assert len(whitening_filters(pixels, 32)) == 32


def test_conv_stem_with_patch_dropout() -> None:
    torch.manual_seed(0)
    tower = VisionTower(SMALL.image_tower)
    x, chosen = torch.randn(2, 3, 32, 32), torch.tensor([[0, 3, 7], [1, 2, 15]])
    full = tower._patches(x, None)
    assert full.shape == (2, 16, 16)
    torch.testing.assert_close(
        tower._patches(x, chosen), torch.stack([full[0, chosen[0]], full[1, chosen[1]]])
    )


def test_flops_of_a_conv_stem() -> None:
    plain = with_fields(SMALL, stem="patch")
    convs = [2 * 16 * 16 * 9 * 3 * 4, 2 * 8 * 8 * 9 * 4 * 8, 2 * 4 * 4 * 9 * 8 * 16]
    patch = 2 * 16 * 3 * 64 * 16
    difference = flops_per_pair(SMALL, 8) - flops_per_pair(plain, 8)
    assert difference == 2 * convs[0] + 3 * sum(convs[1:]) - 2 * patch
