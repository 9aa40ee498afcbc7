"""Attention, MLP and transformer: both attentions, fused products, and the shortcuts of the last block."""

from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
            monkeypatch.setattr(layers, "uses_cpu_functions", lambda x: False)
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


FP32_MATMULS = {  # by oneDNN or not: forward and gradients of inputs, gradients of weights
    "BLAS": (False, False),
    "oneDNN": (True, False),
    "oneDNN for weights too": (True, True),
}


def use_fp32_matmuls(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind != "BLAS" and layers._onednn_op(torch.float32) is None:
        pytest.skip("torch without oneDNN's fused product")
    forward, weights = FP32_MATMULS[kind]
    monkeypatch.setattr(layers, "_fp32_by_onednn", lambda: forward)
    monkeypatch.setattr(layers, "_fp32_weight_grads_by_onednn", lambda: weights)


@pytest.mark.parametrize("position", [None, "mean", 0])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu"])
@pytest.mark.parametrize("matmuls", list(FP32_MATMULS))
def test_fp32_layers_with_recomputed_activations_match_plain_ones(
    monkeypatch: pytest.MonkeyPatch, matmuls: str, activation: Activation, position: object
) -> None:
    use_fp32_matmuls(monkeypatch, matmuls)
    model = transformer(activation=activation)
    x = torch.randn(3, 7, 16)
    fused = model(x, position)
    fused_grads = grads_of(model, fused)
    monkeypatch.setattr(layers, "uses_cpu_functions", lambda x: False)
    plain = model(x, position)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
    for fused_grad, plain_grad in zip(fused_grads, grads_of(model, plain), strict=True):
        torch.testing.assert_close(fused_grad, plain_grad, atol=1e-4, rtol=1e-4)
        assert fused_grad.is_contiguous()


@pytest.mark.parametrize("matmuls", list(FP32_MATMULS))
def test_empty_batch_has_empty_outputs_and_gradients_of_zero(
    monkeypatch: pytest.MonkeyPatch, matmuls: str
) -> None:
    use_fp32_matmuls(monkeypatch, matmuls)
    model = transformer()
    x = torch.zeros(0, 7, 16, requires_grad=True)
    out = model(x)
    assert out.shape == (0, 7, 16)
    out.sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("frozen", ["norm2", "mlp.up", "mlp.down", "attn.qkv", ""])
def test_frozen_layers_get_no_gradient_and_leave_the_others_unchanged(
    monkeypatch: pytest.MonkeyPatch, frozen: str
) -> None:
    """With "", everything is frozen, and only the input has a gradient."""
    model = transformer(depth=1)
    model.blocks[0].get_submodule(frozen).requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    x = torch.randn(3, 7, 16, requires_grad=True)
    fused = torch.autograd.grad(model(x).square().sum(), [x, *trainable])
    monkeypatch.setattr(layers, "uses_cpu_functions", lambda x: False)
    plain = torch.autograd.grad(model(x).square().sum(), [x, *trainable])
    torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-4)


class CountedMatmuls(TorchDispatchMode):
    """Counts the matmuls of all kinds that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        self.count += name in ("mm", "addmm", "_linear_pointwise")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
@pytest.mark.parametrize("matmuls", list(FP32_MATMULS))
def test_mlp_recomputes_its_activation_but_no_matmul(
    monkeypatch: pytest.MonkeyPatch, matmuls: str, activation: Activation
) -> None:
    use_fp32_matmuls(monkeypatch, matmuls)
    mlp = layers.Mlp(8, 32, activation)
    x = torch.randn(5, 3, 8, requires_grad=True)
    saved = dict[int, Tensor]()

    def remember(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    with (
        CountedMatmuls() as matmul_calls,
        torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t),
    ):
        out = mlp(x, residual=x)
        assert matmul_calls.count == 2
        out.backward(torch.ones_like(out))
    assert matmul_calls.count == 6
    parameters = {p.data_ptr() for p in mlp.parameters()}
    activations = [t for pointer, t in saved.items() if pointer not in parameters]
    # The input of the MLP and that of the activation.
    assert sorted(t.numel() for t in activations) == [5 * 3 * 8, 5 * 3 * 32]


def test_onednn_multiplies_fp32_only_on_amd_with_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule depends on nothing that changes between runs, so that a resumed run is the same."""
    rule = layers._fp32_is_faster_by_onednn.__wrapped__
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(layers, "_onednn_op", lambda dtype: object())
    for cpu, by_onednn in (
        ("AMD Ryzen 7 5800X 8-Core Processor", True),
        ("AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD", True),
        ("Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", False),
        ("Apple M1", False),
    ):
        monkeypatch.setattr(layers, "_cpu_name", lambda cpu=cpu: cpu)
        assert rule() is by_onednn
    monkeypatch.setattr(layers, "_cpu_name", lambda: "AMD EPYC")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not rule()


def test_onednn_can_be_turned_off_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_fp32_is_faster_by_onednn", lambda: True)
    assert layers._fp32_by_onednn()
    with torch.backends.mkldnn.flags(enabled=False):
        assert not layers._fp32_by_onednn()
    assert layers._fp32_by_onednn()


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
