"""The block's shortcuts: fused products against the plain ones, and the last block read at one place or as a mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from m1clip.model import layers as fused
from m1clip.model import layers as mlp
from m1clip.model.layers import Transformer, linear, linear_add, pick
from m1clip.model.presets import Activation

needs_fused = pytest.mark.skipif(fused._fused_product() is None, reason="torch without oneDNN's fused product")


def transformer(causal: bool = False, activation: Activation = "gelu", layers: int = 2) -> Transformer:
    torch.manual_seed(0)
    made = Transformer(16, layers, 2, 2.0, causal, activation, 0.0)
    for p in made.parameters():
        nn.init.normal_(p, std=0.3)
    made.set_attention("bmm")
    return made


def grads_of(model: nn.Module, out: Tensor) -> list[Tensor]:
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return list(torch.autograd.grad(out, list(model.parameters()), cotangent, allow_unused=True))


def assert_equal_grads(model: nn.Module, one: Tensor, other: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for a, b in zip(grads_of(model, one), grads_of(model, other), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_mean_is_that_of_the_whole(recompute: bool, activation: Activation, layers: int) -> None:
    model = transformer(activation=activation, layers=layers)
    model.grad_checkpointing = recompute
    x = torch.randn(3, 7, 16)
    assert_equal_grads(model, model(x, "mean"), model(x).mean(dim=1))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_one_place_is_that_of_the_whole(recompute: bool, causal: bool) -> None:
    model = transformer(causal)
    model.grad_checkpointing = recompute
    x = torch.randn(3, 7, 16)
    for place in (0, 4, torch.tensor([6, 0, 3])):
        assert_equal_grads(model, model(x, place), pick(model(x), place))


def test_what_stands_after_the_place_has_no_effect_when_causal() -> None:
    model, x = transformer(causal=True), torch.randn(2, 7, 16)
    changed = x.clone()
    changed[:, 5:] += 10.0
    assert torch.equal(model(x, torch.tensor([4, 2])), model(changed, torch.tensor([4, 2])))
    assert not torch.allclose(model(x, torch.tensor([5, 5])), model(changed, torch.tensor([5, 5])))


@needs_fused
@pytest.mark.parametrize("place", [None, "mean", 0])
def test_fused_products_in_bf16_give_the_plain_result(monkeypatch: pytest.MonkeyPatch, place: object) -> None:
    model = transformer()
    x = torch.randn(3, 7, 16, dtype=torch.bfloat16)
    exact = [model(x.float(), place)]
    exact += grads_of(model, exact[0])
    results = []
    for on in (True, False):
        if not on:
            for module in (fused, mlp):
                monkeypatch.setattr(module, "is_fused", lambda x: False)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, place)
        assert out.dtype == torch.bfloat16
        grads = grads_of(model, out)
        assert {g.dtype for g in grads} == {torch.float32}
        results.append([out, *grads])
    for ours, plain, truth in zip(*results, exact, strict=True):
        # As near to fp32 as the plain products are, up to the luck of rounding.
        far = [float((t.float() - truth).norm() / truth.norm()) for t in (ours, plain)]
        assert far[0] < 1.5 * far[1] + 0.01


@needs_fused
def test_a_frozen_layer_gets_no_gradient() -> None:
    x = torch.randn(4, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = torch.randn(6, 8), torch.randn(6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, weight, bias)
    out.float().sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(bias.grad, torch.full((6,), 20.0))
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


@needs_fused
def test_the_residual_is_added_and_gets_the_gradient() -> None:
    x, residual = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(4, 6, dtype=torch.bfloat16)
    residual.requires_grad_()
    weight = torch.randn(6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_add(x, weight, None, residual)
    torch.testing.assert_close(out.float(), x.float() @ weight.T + residual.float(), atol=0.1, rtol=0.05)
    (grad,) = torch.autograd.grad(out, residual, torch.full_like(out, 2.0))
    assert torch.equal(grad, torch.full_like(residual, 2.0))


def test_the_fused_way_is_for_bf16_autocast_on_the_cpu_alone() -> None:
    x = torch.randn(2, 3)
    assert not fused.is_fused(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused.is_fused(x)
        assert fused.is_fused(x.bfloat16()) == (fused._fused_product() is not None)
