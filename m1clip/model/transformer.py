"""The pre-norm transformer that both towers are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.model.again import computed_again
from m1clip.model.attention import AttentionKind, attention, attention_at
from m1clip.model.linear import linear, linear_add
from m1clip.model.mlp import Mlp
from m1clip.model.shape import Activation, Init

Place = Tensor | int  # (n,) a position for each sequence, or one for all


def pick(x: Tensor, place: Place) -> Tensor:
    """(n, length, width) -> (n, width): one position of each sequence."""
    return x[:, place] if isinstance(place, int) else x[torch.arange(len(x), device=x.device), place]


def _run(block: nn.Module, function: Callable[..., Tensor], *inputs: object) -> Tensor:
    return function(*inputs)


class Attention(nn.Module):
    """Multi-head self-attention with one fused matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.kind: AttentionKind = "sdpa"
        self.fused = False  # set by `Clip.fuse`
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: nn.LayerNorm | None = None) -> Tensor:
        """(n, length, width) -> the same shape; of the `norm` of `x`, and added to `residual`, where given."""
        mixed = self._mixed(x, norm)
        if residual is None:
            return linear(mixed, self.out.weight, self.out.bias)
        return linear_add(mixed, self.out.weight, self.out.bias, residual)

    def _mixed(self, x: Tensor, norm: nn.LayerNorm | None) -> Tensor:
        """What the heads see, side by side: (n, length, width)."""
        n, length, width = x.shape
        if self.fused and self.kind == "sdpa":  # who asks for bmm gets it
            from m1clip.model import fused

            if fused.takes_attention(x, self.heads):
                y = x if norm is None else norm(x).to(x.dtype)
                return fused.short_attention(y, self.qkv.weight, self.qkv.bias, self.heads, self.causal)
        qkv = linear(x, self.qkv.weight, self.qkv.bias, norm).view(
            n, length, 3, self.heads, width // self.heads
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, length, dim)
        return attention(q, k, v, self.causal, self.kind).transpose(1, 2).reshape(n, length, width)

    def at(self, x: Tensor, place: Place) -> Tensor:
        """What `forward` gives at one place of each sequence, (n, width): its query alone, all keys and values."""
        n, length, width = x.shape
        weight, bias, heads = self.qkv.weight, self.qkv.bias, self.heads
        q = linear(pick(x, place), weight[:width], bias[:width]).view(n, heads, 1, width // heads)
        kv = linear(x, weight[width:], bias[width:]).view(n, length, 2, heads, width // heads)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, length, dim)
        positions = torch.arange(length, device=x.device)
        seen = positions <= torch.as_tensor(place, device=x.device).view(-1, 1) if self.causal else None
        mixed = attention_at(q, k, v, seen if seen is None else seen.expand(n, -1)).reshape(n, width)
        return linear(mixed, self.out.weight, self.out.bias)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, width: int, heads: int, hidden: int, causal: bool, activation: Activation, dropout: float
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden, activation)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape and dtype."""
        x = self._mixed(x)
        if self.dropout and self.training:
            return x + self._drop(self.mlp(x, norm=self.norm2))
        return self.mlp(x, residual=x, norm=self.norm2)

    def at(self, x: Tensor, place: Place) -> Tensor:
        """What `forward` gives at one place of each sequence, (n, width), with the work of that place alone."""
        y = pick(x, place) + self._drop(self.attn.at(self.norm1(x).to(x.dtype), place))
        return y + self._drop(self.mlp(self.norm2(y).to(y.dtype)))

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the sequence of what `forward` gives, (n, width): the last product is done after the mean."""
        x = self._mixed(x)
        return x.mean(dim=1) + self._drop(self.mlp.mean(self.norm2(x).to(x.dtype)))

    def _mixed(self, x: Tensor) -> Tensor:
        if self.dropout and self.training:
            return x + self._drop(self.attn(x, norm=self.norm1))
        # Norm and sum are part of the products where that is faster or takes less memory.
        return self.attn(x, residual=x, norm=self.norm1)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Transformer(nn.Module):
    """A stack of blocks, with activation checkpointing as a switch."""

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        mlp_ratio: float,
        causal: bool,
        activation: Activation,
        dropout: float,
    ) -> None:
        super().__init__()
        self.width = width
        self.recompute = False  # gradient checkpointing: half the memory for a third more work
        hidden = int(width * mlp_ratio)
        self.blocks = nn.ModuleList(
            Block(width, heads, hidden, causal, activation, dropout) for _ in range(layers)
        )

    def forward(self, x: Tensor, place: Place | Literal["mean"] | None = None) -> Tensor:
        """(n, length, width) -> the same shape; (n, width) where only one place, or the mean, will be read.

        The last block then does the work of what is read: the same numbers for a twelfth less of ViT-B's work.
        """
        *first, last = self._each()
        run = computed_again if self.recompute and torch.is_grad_enabled() else _run
        for block in first:
            x = run(block, block, x)
        if place is None:
            return run(last, last, x)
        return run(last, last.mean, x) if isinstance(place, str) else run(last, last.at, x, place)

    def _each(self) -> Iterator[Block]:
        return iter(cast("Iterable[Block]", self.blocks))

    def set_attention(self, kind: AttentionKind) -> None:
        """Use one implementation of attention in every block."""
        for block in self._each():
            block.attn.kind = kind

    def fuse(self, on: bool) -> None:
        """Let the blocks take the kernels of `fused.py` where their input is for them: bf16 on CUDA."""
        for block in self._each():
            block.attn.fused = block.mlp.fused = on

    @torch.no_grad()
    def initialise(self, init: Init) -> None:
        """CLIP's scaled normal start, or the same with silent residual branches ("zero")."""
        branch = self.width**-0.5 * (2 * len(self.blocks)) ** -0.5
        for block in self._each():
            nn.init.normal_(block.attn.qkv.weight, std=self.width**-0.5)
            nn.init.normal_(block.mlp.up.weight, std=(2 * self.width) ** -0.5)
            for last in (block.attn.out, block.mlp.down):
                nn.init.normal_(last.weight, std=branch)
                if init == "zero":
                    nn.init.zeros_(last.weight)
            for layer in (block.attn.qkv, block.attn.out, block.mlp.up, block.mlp.down):
                nn.init.zeros_(layer.bias)
