"""Linear layers for bf16 on the CPU: oneDNN adds bias and residual inside the matrix product.

`F.linear` there writes the bias into the result first and reads it again in the product, which costs 7 to 15% of it
(docs/speed.md). Everywhere else these functions are the plain ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, norm: nn.LayerNorm | None = None) -> Tensor:
    """F.linear of the input, or of its layer norm; the weights may be fp32, the input decides."""
    if is_fused(x):
        return _Linear.apply(x, weight, bias, None, *norm_parts(norm))
    return F.linear(x if norm is None else norm(x).to(x.dtype), weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + F.linear(x, weight, bias)."""
    if is_fused(x) and residual.dtype == x.dtype:
        return _Linear.apply(x, weight, bias, residual, *norm_parts(None))
    return residual + F.linear(x, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """The oneDNN call for 2-D bf16 tensors."""
    if residual is None:
        return _fused_product()(x, weight, bias, "none", [], "")
    return _fused_product().binary(x, residual, weight, bias, "add")


def half(parameter: Tensor) -> Tensor:
    """The bf16 copy of a parameter."""
    return parameter.detach().to(torch.bfloat16)


def to_keep(weight: Tensor, narrow: Tensor) -> Tensor:
    """What the backward pass keeps of a matrix: itself if it stays anyway, else (a sum with LoRA) the small copy.

    To cast it again takes 0.3% of the products it is for; kept copies are half a model at the peak of the step.
    """
    owner = weight._base if weight._base is not None else weight
    return weight if owner.is_leaf else narrow


def norm_parts(norm: nn.LayerNorm | None) -> tuple[Tensor | None, Tensor | None, float]:
    """A layer norm as arguments of an autograd function."""
    return (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    """(rows, width) -> the layer norm of each row, its mean and its deviation; `x` itself where there is no norm."""
    return (x,) if weight is None else torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


def through_norm(
    grad: Tensor | None, x: Tensor, stats: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None,
    wants: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the norm's input, weight and bias for that of its output."""
    if weight is None or grad is None:
        return grad, None, None
    return torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], *stats, weight, bias, wants)


class _Linear(torch.autograd.Function):
    """Input in bf16, parameters and their gradients as they are kept (fp32). A layer norm is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None,
        norm_bias: Tensor | None, eps: float,
    ) -> Tensor:  # fmt: skip
        flat, narrow = x.flatten(0, -2), half(weight)
        ctx.save_for_backward(flat, to_keep(weight, narrow), norm, norm_bias)
        ctx.kept, ctx.eps = weight.dtype, eps
        added = None if residual is None else residual.flatten(0, -2)
        y = normed(flat, norm, norm_bias, eps)[0]
        return product(y, narrow, None if bias is None else half(bias), added).view(
            *x.shape[:-1], len(weight)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, norm, norm_bias = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_residual, *wants_norm, _ = ctx.needs_input_grad
        g = grad.reshape(-1, grad.shape[-1])
        y, *stats = normed(flat, norm, norm_bias, ctx.eps)
        dweight, dbias = parameter_grads(g, y, ctx.kept, wants_weight, wants_bias)
        del y
        dy = g @ half(weight) if wants_x or any(wants_norm) else None
        dx, dnorm, dnorm_bias = through_norm(dy, flat, stats, norm, norm_bias, [wants_x, *wants_norm])
        dx = None if dx is None else dx.view(*grad.shape[:-1], flat.shape[1])
        return dx, dweight, dbias, grad if wants_residual else None, dnorm, dnorm_bias, None


def parameter_grads(
    grad: Tensor, x: Tensor, dtype: torch.dtype, weight: bool, bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a layer's weight and bias for the output's gradient and the input, both 2-D."""
    return (grad.t() @ x).to(dtype) if weight else None, grad.sum(0).to(dtype) if bias else None
