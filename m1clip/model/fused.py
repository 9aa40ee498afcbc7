"""A block's parts for the compiled bf16 step on CUDA, each one autograd function around the kernels of `kernels.py`.

Import this where CUDA is in use alone: the kernels need triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from m1clip.model import kernels

HALF = torch.bfloat16


def takes(x: Tensor) -> bool:
    """Whether an input goes this way: bf16 on a CUDA card."""
    return x.is_cuda and x.dtype == HALF


def takes_attention(x: Tensor, heads: int) -> bool:
    """Whether a head of this (n, length, width) input is short and narrow enough for our kernel."""
    return takes(x) and x.shape[1] <= kernels.LONGEST and x.shape[2] // heads in kernels.DIMS


def gelu_mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """Two linear layers of an input in bf16, with a GELU between them; the weights may be fp32."""
    out: Tensor = _GeluMlp.apply(x, up, up_bias, down, down_bias)
    return out


def short_attention(x: Tensor, weight: Tensor, bias: Tensor, heads: int, causal: bool) -> Tensor:
    """(n, length, width) in bf16 -> what the heads see, side by side, before the output projection."""
    out: Tensor = _ShortAttention.apply(x, weight, bias, heads, causal)
    return out


class _GeluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        flat, wide, narrow = x.flatten(0, -2), up.to(HALF), down.to(HALF)
        hidden = torch.addmm(up_bias.to(HALF), flat, wide.t())
        active = kernels.gelu(hidden)
        ctx.save_for_backward(flat, hidden, active, wide, narrow)
        ctx.kept = up.dtype
        return torch.addmm(down_bias.to(HALF), active, narrow.t()).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        flat, hidden, active, wide, narrow = ctx.saved_tensors
        g = grad.reshape(-1, grad.shape[-1])
        dhidden, dup_bias = kernels.gelu_backward(g @ narrow, hidden)
        ddown, dup = (g.t() @ active).to(ctx.kept), (dhidden.t() @ flat).to(ctx.kept)
        dx = (dhidden @ wide).view(grad.shape)
        return dx, dup, dup_bias.to(ctx.kept), ddown, g.sum(0, dtype=torch.float32).to(ctx.kept)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, heads: int, causal: bool) -> Tensor:
        flat, narrow = x.flatten(0, -2), weight.to(HALF)
        qkv = torch.addmm(bias.to(HALF), flat, narrow.t())
        ctx.save_for_backward(flat, narrow, qkv)
        ctx.how = (x.shape[0], heads, causal)
        ctx.kept = weight.dtype
        return kernels.attention(qkv, x.shape[0], heads, causal).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, narrow, qkv = ctx.saved_tensors
        g = grad.reshape(-1, grad.shape[-1]).contiguous()
        dqkv, dbias = kernels.attention_backward(g, qkv, *ctx.how)
        dx = (dqkv @ narrow).view(grad.shape)
        return dx, (dqkv.t() @ flat).to(ctx.kept), dbias.to(ctx.kept), None, None
