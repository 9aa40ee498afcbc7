"""Linear layers for bf16 on the CPU: oneDNN adds bias and residual inside the matrix product.

`F.linear` there writes the bias into the result first and reads it again in the product, which costs 7 to 15% of it
(docs/speed.md). Everywhere else these functions are the plain ones.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@functools.cache
def _fused_product() -> Any:
    """oneDNN's product with a fused bias, or None where torch was built without it."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        product = torch.ops.mkldnn._linear_pointwise
        x = torch.ones(2, 4, dtype=torch.bfloat16)
        product(x, x, x[:, 0].contiguous(), "none", [], "")
        product.binary(x, x[:, :2].contiguous(), x, x[:, 0].contiguous(), "add")
    except (AttributeError, RuntimeError):  # a private operation: it may go, or want another processor
        return None
    return product


def is_fused(x: Tensor) -> bool:
    """Whether this input takes the oneDNN way: bf16 autocast on a CPU, run eagerly."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.bfloat16
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and not torch.compiler.is_compiling()
        and _fused_product() is not None
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear; the weights may be fp32, the input decides."""
    return _Linear.apply(x, weight, bias, None) if is_fused(x) else F.linear(x, weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + F.linear(x, weight, bias)."""
    if is_fused(x) and residual.dtype == x.dtype:
        return _Linear.apply(x, weight, bias, residual)
    return residual + F.linear(x, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """The oneDNN call for 2-D bf16 tensors."""
    if residual is None:
        return _fused_product()(x, weight, bias, "none", [], "")
    return _fused_product().binary(x, residual, weight, bias, "add")


def half(parameter: Tensor | None) -> Tensor | None:
    """The bf16 copy of a parameter."""
    return None if parameter is None else parameter.detach().to(torch.bfloat16)


class _Linear(torch.autograd.Function):
    """Input in bf16, parameters and their gradients as they are kept (fp32)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        flat, narrow = x.flatten(0, -2), half(weight)
        assert narrow is not None
        ctx.save_for_backward(flat, narrow)
        ctx.kept = weight.dtype
        added = None if residual is None else residual.flatten(0, -2)
        return product(flat, narrow, half(bias), added).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_residual = ctx.needs_input_grad
        g = grad.reshape(-1, grad.shape[-1])
        dx = (g @ weight).view(*grad.shape[:-1], weight.shape[1]) if wants_x else None
        dweight, dbias = parameter_grads(g, flat, ctx.kept, wants_weight, wants_bias)
        return dx, dweight, dbias, grad if wants_residual else None


def parameter_grads(
    grad: Tensor, x: Tensor, dtype: torch.dtype, weight: bool, bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a layer's weight and bias for the output's gradient and the input, both 2-D."""
    return (grad.t() @ x).to(dtype) if weight else None, grad.sum(0).to(dtype) if bias else None
