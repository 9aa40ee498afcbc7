"""EfficientNet-Lite against an implementation written from the paper."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.model.presets import PretrainedImageConfig
from m1clip.model.pretrained import efficientnet, registry
from m1clip.model.pretrained.concat import ConcatImageTower
from model.pretrained.plain_result import assert_inference_matches


def their_efficientnet(size: efficientnet.LiteSize = efficientnet.LITE0) -> dict[str, Tensor]:
    """Random weights under the names of the package."""
    made: dict[str, Tensor] = {}

    def layer(conv: str, norm: str, shape: tuple[int, ...]) -> None:
        made[f"{conv}.weight"] = torch.randn(shape) * (2 / (shape[1] * shape[2] * shape[3])) ** 0.5
        made[f"{norm}.weight"], made[f"{norm}.bias"] = (
            torch.rand(shape[0]) + 0.5,
            torch.randn(shape[0]) * 0.1,
        )
        made[f"{norm}.running_mean"] = torch.randn(shape[0]) * 0.1
        made[f"{norm}.running_var"] = torch.rand(shape[0]) + 0.5

    layer("_conv_stem", "_bn0", (32, 3, 3, 3))
    width, number = 32, 0
    for stage in size.stages:
        for _ in range(stage.repeats):
            name, hidden = f"_blocks.{number}", width * stage.expand
            if stage.expand > 1:
                layer(f"{name}._expand_conv", f"{name}._bn0", (hidden, width, 1, 1))
            layer(
                f"{name}._depthwise_conv", f"{name}._bn1", (hidden, 1, stage.kernel, stage.kernel)
            )
            layer(f"{name}._project_conv", f"{name}._bn2", (stage.width, hidden, 1, 1))
            width, number = stage.width, number + 1
    layer("_conv_head", "_bn1", (efficientnet.HEAD_CHANNELS, width, 1, 1))
    return made


def plain_efficientnet(
    weights: dict[str, Tensor], x: Tensor, size: efficientnet.LiteSize = efficientnet.LITE0
) -> Tensor:
    """Written from the paper: convolution with TensorFlow's padding, norm, ReLU6, block by block."""

    def conv(x: Tensor, conv: str, norm: str, stride: int, act: bool) -> Tensor:
        w = weights[f"{conv}.weight"]
        kernel, side = w.shape[2], x.shape[2]
        pad = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        x = F.pad(x, (pad // 2, pad - pad // 2) * 2)
        x = F.conv2d(x, w, stride=stride, groups=x.shape[1] if w.shape[1] == 1 else 1)
        stats = [
            weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        ]
        x = F.batch_norm(x, *stats, training=False, eps=efficientnet.BATCH_NORM_EPS)
        return x.clamp(0, 6) if act else x

    x = conv(x, "_conv_stem", "_bn0", 2, True)
    number = 0
    for stage in size.stages:
        for repeat in range(stage.repeats):
            name, stride, before = f"_blocks.{number}", stage.stride if repeat == 0 else 1, x
            if stage.expand > 1:
                x = conv(x, f"{name}._expand_conv", f"{name}._bn0", 1, True)
            x = conv(x, f"{name}._depthwise_conv", f"{name}._bn1", stride, True)
            x = conv(x, f"{name}._project_conv", f"{name}._bn2", 1, False)
            x = x + before if stride == 1 and before.shape == x.shape else x
            number += 1
    return conv(x, "_conv_head", "_bn1", 1, True).mean(dim=(2, 3))


@pytest.mark.parametrize("size", [64, 50, 33])
def test_fused_convolutions_give_the_plain_result(size: int) -> None:
    torch.manual_seed(0)
    tower = efficientnet.EfficientNetLite()
    tower.load_state_dict(efficientnet.from_efficientnet(their_efficientnet()))
    assert_inference_matches(tower, torch.randn(2, 3, size, size))


@pytest.mark.parametrize(
    ("kernel", "stride", "side"), [(3, 1, 9), (5, 1, 8), (5, 2, 9), (3, 2, 10)]
)
def test_gradient_of_depthwise_convolution_in_bf16(kernel: int, stride: int, side: int) -> None:
    torch.manual_seed(0)
    conv = efficientnet.SameConv(16, 16, kernel, stride, groups=16)
    x = torch.randn(2, 16, side, side).bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = x.to(dtype).requires_grad_()
        y = conv(leaf)
        grads = torch.autograd.grad(y, [leaf, conv.weight, conv.bias], torch.ones_like(y).cumsum(3))
        results.append([y.detach(), *grads])
    assert [gradient.dtype for gradient in results[0]] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    for ours, exact in zip(*results, strict=True):
        assert float((ours.float() - exact).norm() / exact.norm()) < 0.01


def test_bf16_convolutions_without_support_of_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(efficientnet, "onednn_conv", {torch.bfloat16: None}.__getitem__)
    torch.manual_seed(0)
    tower, batch = efficientnet.EfficientNetLite().eval(), torch.randn(2, 3, 40, 40)
    tower.load_state_dict(efficientnet.from_efficientnet(their_efficientnet()))
    with torch.no_grad():
        plain = tower(batch)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert F.cosine_similarity(tower(batch).float(), plain).min() > 0.999


def test_lite2_and_two_networks_side_by_side() -> None:
    torch.manual_seed(0)
    weights = [their_efficientnet(size) for size in (efficientnet.LITE0, efficientnet.LITE2)]
    tower = registry.build_image_tower(
        PretrainedImageConfig(kind="efficientnet-lite0+lite2", image_size=65)
    )
    assert isinstance(tower, ConcatImageTower)
    for part, size, theirs in zip(
        tower.parts, (efficientnet.LITE0, efficientnet.LITE2), weights, strict=True
    ):
        part.load_state_dict(efficientnet.from_efficientnet(theirs, size))
    pixels = torch.randn(2, 3, 65, 65)
    with torch.inference_mode():
        features = tower.eval()(pixels)
        smaller = plain_efficientnet(weights[0], F.interpolate(pixels, (56, 56), mode="bilinear"))
        larger = plain_efficientnet(weights[1], pixels, efficientnet.LITE2)
    assert features.shape == (2, tower.width)
    first = features[:, : tower.parts[0].width]
    torch.testing.assert_close(
        first[:, -efficientnet.HEAD_CHANNELS :], smaller, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        features[:, -efficientnet.HEAD_CHANNELS :], larger, atol=1e-4, rtol=1e-4
    )
