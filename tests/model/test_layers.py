"""Attention, MLP and transformer: both attentions, fused products, and the shortcuts of the last block."""

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

from m1clip.model import layers
from m1clip.model.layers import AttentionKind, Transformer, attention, take_position
from m1clip.model.presets import Activation, TextTowerConfig
from m1clip.training.distributed import Ranks

KINDS: tuple[AttentionKind, ...] = ("bmm", "sdpa")


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax of q k / sqrt(dim) over the visible positions, one query at a time."""
    length, dim = q.shape[2:]
    rows = []
    for i in range(length):
        visible = i + 1 if causal else length
        scores = (
            torch.stack([(q[:, :, i] * k[:, :, j]).sum(-1) for j in range(visible)], -1) / dim**0.5
        )
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rows.append(sum(weights[..., j, None] * v[:, :, j] for j in range(visible)))
    return torch.stack(rows, dim=2)  # type: ignore[arg-type]


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, 3, 7, 5, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_attention_and_gradient_match_reference(
    kind: AttentionKind, causal: bool, dtype: torch.dtype, tolerance: float
) -> None:
    q, k, v = inputs(dtype)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    cotangent = torch.randn(q.shape, dtype=torch.float64)
    ours, theirs = attention(q, k, v, causal, kind), reference(*exact, causal)
    torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
    ours_grad = torch.autograd.grad(ours, (q, k, v), cotangent.to(dtype))
    for one, other in zip(ours_grad, torch.autograd.grad(theirs, exact, cotangent), strict=True):
        torch.testing.assert_close(one.double(), other, atol=10 * tolerance, rtol=10 * tolerance)


BY_RULE: dict[torch.dtype, AttentionKind] = {torch.bfloat16: "bmm", torch.float32: "sdpa"}


def kernels_by_rule(_ranks: Ranks) -> list[list[Tensor]]:
    """For each precision: the kernel that the rule names, the rule, and the rule when compiled."""
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    results = []
    for dtype, kind in BY_RULE.items():
        q, k, v = (t.detach() for t in inputs(dtype))
        results.append(
            [attention(q, k, v, True, kind), attention(q, k, v, True), compiled(q, k, v, True)]
        )
    return results


def test_kernel_by_rule_also_when_compiled() -> None:
    """In a process of its own: the compiler cannot read code whose lines are counted for coverage."""
    (results,) = on_ranks(1, kernels_by_rule)
    assert len(results) == len(BY_RULE)
    for expected, by_rule, compiled in results:
        assert torch.equal(by_rule, expected)
        assert torch.equal(compiled, expected)


@pytest.mark.parametrize("dtype", list(BY_RULE))
def test_inference_uses_the_fused_kernel(dtype: torch.dtype) -> None:
    q, k, v = (t.detach() for t in inputs(dtype))
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v, True), attention(q, k, v, True, "sdpa"))


needs_fused = pytest.mark.skipif(
    layers._onednn_op() is None, reason="torch without oneDNN's fused product"
)


def transformer(
    causal: bool = False, activation: Activation = "gelu", depth: int = 2
) -> Transformer:
    torch.manual_seed(0)
    made = Transformer(
        TextTowerConfig(width=16, layers=depth, heads=2, mlp_ratio=2.0, activation=activation),
        causal,
    )
    for p in made.parameters():
        nn.init.normal_(p, std=0.3)
    for block in made.blocks:
        block.attn.kind = "bmm"
    return made


def grads_of(model: nn.Module, out: Tensor) -> list[Tensor]:
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return list(torch.autograd.grad(out, list(model.parameters()), cotangent, allow_unused=True))


def assert_equal_grads(
    model: nn.Module, one: Tensor, other: Tensor, tolerance: float = 1e-4
) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for a, b in zip(grads_of(model, one), grads_of(model, other), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
@pytest.mark.parametrize("depth", [1, 2])
def test_mean_shortcut_matches_full_sequence(
    checkpointing: bool, activation: Activation, depth: int
) -> None:
    model = transformer(activation=activation, depth=depth)
    model.activation_checkpointing = checkpointing
    x = torch.randn(3, 7, 16)
    assert_equal_grads(model, model(x, "mean"), model(x).mean(dim=1))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_single_position_shortcut_matches_full_sequence(checkpointing: bool, causal: bool) -> None:
    model = transformer(causal)
    model.activation_checkpointing = checkpointing
    x = torch.randn(3, 7, 16)
    for position in (0, 4, torch.tensor([6, 0, 3])):
        assert_equal_grads(model, model(x, position), take_position(model(x), position))


@needs_fused
@pytest.mark.parametrize("position", [None, "mean", 0])
def test_fused_bf16_layers_match_unfused(monkeypatch: pytest.MonkeyPatch, position: object) -> None:
    model = transformer()
    x = torch.randn(3, 7, 16, dtype=torch.bfloat16)
    exact = [model(x.float(), position)]
    exact += grads_of(model, exact[0])
    results = []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(layers, "uses_onednn", lambda x: False)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, position)
        assert out.dtype == torch.bfloat16
        grads = grads_of(model, out)
        assert {g.dtype for g in grads} == {torch.float32}
        results.append([out, *grads])
    for ours, plain, truth in zip(*results, exact, strict=True):
        # As near to fp32 as the plain products are, up to the luck of rounding.
        far = [float((t.float() - truth).norm() / truth.norm()) for t in (ours, plain)]
        assert far[0] < 1.5 * far[1] + 0.01


def test_onednn_is_used_only_for_bf16_autocast_on_cpu() -> None:
    x = torch.randn(2, 3)
    assert not layers.uses_onednn(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not layers.uses_onednn(x)
        assert layers.uses_onednn(x.bfloat16()) == (layers._onednn_op() is not None)


@pytest.mark.parametrize("position", [None, "mean", 0])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kept_copies_of_weights_match_autocast(
    monkeypatch: pytest.MonkeyPatch, position: object, device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model, casts, pack = transformer(activation="quick_gelu").to(device), [], layers.prepack
    x = torch.randn(3, 7, 16, dtype=torch.bfloat16, device=device)
    monkeypatch.setattr(layers, "uses_onednn", lambda x: False)
    monkeypatch.setattr(
        layers, "prepack", lambda p, f, *key: pack(p, lambda w: casts.append(w) or f(w), *key)
    )
    with torch.inference_mode():
        exact = model(x.float(), position)
    with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
        with monkeypatch.context() as never:
            never.setattr(layers, "keeps_copies", lambda x: False)
            plain = model(x, position)
        if device == "cpu":
            monkeypatch.setattr(layers, "keeps_copies", lambda x: True)
        ours = model(x, position)
        far = [float((t.float() - exact).norm() / exact.norm()) for t in (ours, plain)]
        assert far[0] < 1.5 * far[1] + 0.01
        made = len(casts)
        assert made
        assert torch.equal(model(x, position), ours)
        if position != 0:  # there, slices of a matrix are copied each time
            assert len(casts) == made
    with torch.no_grad():
        model.blocks[0].norm1.weight.mul_(2)
    with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
        assert not torch.equal(model(x, position), ours)
