"""The pre-norm transformer that both towers are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from m1clip.model.attention import AttentionKind, attention
from m1clip.model.mlp import Mlp
from m1clip.model.shape import Activation, Init


class Attention(nn.Module):
    """Multi-head self-attention with one fused matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.kind: AttentionKind = "sdpa"
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        n, length, width = x.shape
        qkv = self.qkv(x).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, length, dim)
        mixed = attention(q, k, v, self.causal, self.kind)
        return self.out(mixed.transpose(1, 2).reshape(n, length, width))


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
        x = x + self._drop(self.attn(self.norm1(x).to(x.dtype)))
        return x + self._drop(self.mlp(self.norm2(x).to(x.dtype)))

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

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        recompute = self.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x

    def _each(self) -> Iterator[Block]:
        return iter(cast("Iterable[Block]", self.blocks))

    def set_attention(self, kind: AttentionKind) -> None:
        """Use one implementation of attention in every block."""
        for block in self._each():
            block.attn.kind = kind

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
            for linear in (block.attn.qkv, block.attn.out, block.mlp.up, block.mlp.down):
                nn.init.zeros_(linear.bias)
