"""The block's second half: two linear layers and what stands between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from m1clip.model.again import computed_again
from m1clip.model.linear import (
    half,
    is_fused,
    linear,
    norm_parts,
    normed,
    parameter_grads,
    product,
    through_norm,
    to_keep,
)
from m1clip.model.shape import Activation


class Mlp(nn.Module):
    """Two linear layers with a GELU, or OpenAI's sigmoid approximation of it, between them."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.quick = activation == "quick_gelu"
        self.fused = False  # set by `Clip.fuse`
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: nn.LayerNorm | None = None) -> Tensor:
        """(n, length, width) -> the same shape; of the `norm` of `x`, and added to `residual`, where given."""
        if is_fused(x) and not self.quick:
            parts = (self.up.weight, self.up.bias, self.down.weight, self.down.bias)
            return _GeluMlp.apply(x, *parts, residual, *norm_parts(norm))
        if self.fused and not self.quick:
            from m1clip.model import fused

            if fused.takes(x):
                y = x if norm is None else norm(x).to(x.dtype)
                y = fused.gelu_mlp(y, self.up.weight, self.up.bias, self.down.weight, self.down.bias)
                return y if residual is None else residual + y
        x = linear(x, self.up.weight, self.up.bias, norm)
        if torch.is_grad_enabled() and x.device.type == "cpu":
            # The activation is the block's largest tensor and the cheapest to compute again (docs/speed.md).
            x = computed_again(self.down, self._down, x)
        else:
            x = self._down(x)
        return x if residual is None else residual + x

    def mean(self, x: Tensor) -> Tensor:
        """(n, length, width) -> (n, width): the mean over the sequence, taken before the second product."""
        x = self._active(linear(x, self.up.weight, self.up.bias)).mean(dim=1)
        return linear(x, self.down.weight, self.down.bias)

    def _down(self, x: Tensor) -> Tensor:
        return self.down(self._active(x))

    def _active(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x) if self.quick else F.gelu(x)


class _GeluMlp(torch.autograd.Function):
    """The whole MLP for bf16 on the CPU; GELU, its largest tensor, and the norm are computed again backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        residual: Tensor | None,
        norm: Tensor | None,
        norm_bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        flat = x.flatten(0, -2)
        narrow_up, narrow_down = half(up), half(down)
        hidden = product(normed(flat, norm, norm_bias, eps)[0], narrow_up, half(up_bias))
        matrices = to_keep(up, narrow_up), to_keep(down, narrow_down)
        ctx.save_for_backward(flat, hidden, *matrices, norm, norm_bias)
        ctx.kept, ctx.eps = up.dtype, eps
        added = None if residual is None else residual.flatten(0, -2)
        return product(F.gelu(hidden), narrow_down, half(down_bias), added).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, hidden, up, down, norm, norm_bias = ctx.saved_tensors
        wants_x, wants_up, wants_up_bias, wants_down, wants_down_bias, wants_residual, *wants_norm, _ = (
            ctx.needs_input_grad
        )
        g = grad.reshape(-1, grad.shape[-1])
        active = F.gelu(hidden) if wants_down else g
        ddown, ddown_bias = parameter_grads(g, active, ctx.kept, wants_down, wants_down_bias)
        del active
        dhidden = g @ half(down)
        torch.ops.aten.gelu_backward.grad_input(dhidden, hidden, grad_input=dhidden)
        y, *stats = normed(flat, norm, norm_bias, ctx.eps)
        dup, dup_bias = parameter_grads(dhidden, y, ctx.kept, wants_up, wants_up_bias)
        del y
        dy = dhidden @ half(up) if wants_x or any(wants_norm) else None
        dx, dnorm, dnorm_bias = through_norm(dy, flat, stats, norm, norm_bias, [wants_x, *wants_norm])
        dx = None if dx is None else dx.view(grad.shape)
        dresidual = grad if wants_residual else None
        return dx, dup, dup_bias, ddown, ddown_bias, dresidual, dnorm, dnorm_bias, None
