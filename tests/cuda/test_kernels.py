"""Triton kernels against torch in fp32: the error is at most that of torch in bf16."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.model.clip import CLIP, build_clip
from m1clip.model.presets import PRESETS, with_fields

if not torch.cuda.is_available():
    pytest.skip("the kernels are for CUDA, and there is no such card here", allow_module_level=True)
pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from m1clip import console
from m1clip.config import Config
from m1clip.cuda import kernels
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import read_machine_info
from m1clip.training.step import uses_kernels

SLACK = 1.5  # of torch's own distance from fp32: both round to bf16, at other places


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(7)
    return (scale * torch.randn(shape, generator=draw, device="cuda")).bfloat16()


def distance(actual: Tensor, right: Tensor) -> float:
    return float((actual.float() - right).detach().norm() / right.detach().norm())


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (37, 300), (2100, 256), (513, 3072)])
def test_gelu_and_its_gradient(rows: int, columns: int) -> None:
    x, grad = drawn(rows, columns, scale=3.0), drawn(rows, columns)
    right = F.gelu(x.float())
    assert distance(kernels.gelu(x), right) <= SLACK * distance(F.gelu(x), right)
    dright = torch.ops.aten.gelu_backward(grad.float(), x.float())
    dx, sums = kernels.gelu_backward(grad, x)
    assert distance(dx, dright) <= SLACK * distance(torch.ops.aten.gelu_backward(grad, x), dright)
    torch.testing.assert_close(sums, dright.sum(0), rtol=1e-4, atol=1e-3)


def test_gelu_far_from_zero() -> None:
    x = torch.tensor([-100.0, -20.0, -6.0, -0.0, 6.0, 20.0, 100.0], device="cuda").bfloat16()
    torch.testing.assert_close(kernels.gelu(x).float(), F.gelu(x.float()), rtol=1e-2, atol=1e-7)


def torch_attention(qkv: Tensor, n: int, heads: int, causal: bool) -> Tensor:
    rows, width = len(qkv), qkv.shape[1] // 3
    q, k, v = qkv.view(n, rows // n, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
    return (
        F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        .transpose(1, 2)
        .reshape(rows, width)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", kernels.DIMS)
@pytest.mark.parametrize("length", [1, 16, 17, 50, 64, 65, 77, kernels.LONGEST])
def test_attention_and_its_gradient(length: int, dim: int, causal: bool) -> None:
    n, heads = 5, 3
    qkv, grad = drawn(n * length, 3 * heads * dim), drawn(n * length, heads * dim)
    wide, narrow = qkv.float().requires_grad_(), qkv.clone().requires_grad_()
    right, own = torch_attention(wide, n, heads, causal), torch_attention(narrow, n, heads, causal)
    (dright,) = torch.autograd.grad(right, wide, grad.float())
    (down,) = torch.autograd.grad(own, narrow, grad)
    outputs = kernels.attention(qkv, n, heads, causal)
    dqkv, sums = kernels.attention_backward(grad, qkv, n, heads, causal)
    assert distance(outputs, right) <= SLACK * distance(own, right) + 1e-4
    assert distance(dqkv, dright) <= SLACK * distance(down, dright) + 1e-4
    torch.testing.assert_close(
        sums, dright.sum(0), rtol=2e-2, atol=0.02 * float(dright.sum(0).abs().max())
    )


def gradients(
    model: CLIP,
    inputs: tuple[Tensor, Tensor],
    bf16: bool,
    way: Callable[[Any], Any] = lambda encode: encode,
) -> dict[str, Tensor]:
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        image, text = way(model.encode_image)(inputs[0]), way(model.encode_text)(inputs[1])
    F.cross_entropy(20.0 * image @ text.T, torch.arange(len(image), device="cuda")).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", [lambda encode: encode, torch.compile], ids=["eager", "compiled"])
def test_training_with_triton_kernels_matches_torch(way: Callable[[Any], Any]) -> None:
    shape = with_fields(PRESETS["ViT-B-32"], vision_layers=3, text_layers=3, vocab_size=500)
    torch.manual_seed(0)
    model = build_clip(with_fields(shape, eot_id=499)).cuda()
    ids = torch.randint(1, 499, (8, 77), device="cuda")
    ids[:, -1] = 499
    inputs = (torch.randn(8, 3, 224, 224, device="cuda"), ids)
    right = gradients(copy.deepcopy(model), inputs, bf16=False)
    own = gradients(copy.deepcopy(model), inputs, bf16=True)
    model.use_triton()
    actual_gradients = gradients(model, inputs, bf16=True, way=way)
    assert actual_gradients.keys() == right.keys()
    for name, value in right.items():
        assert distance(actual_gradients[name], value) <= 1.5 * distance(own[name], value) + 1e-3, (
            name
        )


def test_kernels_that_cannot_be_compiled_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler\nin a long trace")

    device = Device("cuda", read_machine_info())
    kernels.compile_here.cache_clear()
    assert uses_kernels(Config(), device, "bf16", is_captured=True)
    kernels.compile_here.cache_clear()
    monkeypatch.setattr(kernels, "attention_backward", fail)
    with console.record_warnings() as warnings:
        assert not uses_kernels(Config(), device, "bf16", is_captured=True)
        assert not uses_kernels(Config(), device, "bf16", is_captured=True)
    kernels.compile_here.cache_clear()
    assert len(warnings) == 1
    assert warnings[0].endswith("triton does not work: Failed to find C compiler")


def test_compiled_step_does_not_recompile_for_each_batch() -> None:
    """The number of captions may differ from step to step.

    After some recompilations torch stops compiling.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    shape = with_fields(PRESETS["ViT-B-32"], vision_layers=1, text_layers=2, vocab_size=500)
    model = build_clip(with_fields(shape, eot_id=499)).cuda()
    model.use_triton()
    counter = CompileCounterWithBackend("aot_eager")
    encode = torch.compile(model.encode_text, backend=counter)
    for n in (4, 5, 6, 7, 8):
        ids = torch.full((n, 16), 499, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            encode(ids).sum().backward()
    assert counter.frame_count <= 2  # one for the first size, one for all
