"""Attention: one function, two implementations, the same result."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

AttentionKind = Literal["bmm", "sdpa"]


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, kind: AttentionKind) -> Tensor:
    """(n, heads, length, dim) x 3 -> the same shape; `causal` lets position i see only positions <= i."""
    if kind == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return _bmm_attention(q, k, v, causal)


def attention_at(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """One query for each sequence: q (n, heads, 1, dim); `seen` (n, length) says which positions it may see."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)  # (n, heads, 1, length)
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    return scores.softmax(dim=-1) @ v


def _bmm_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    n, heads, length, dim = q.shape
    # The scale goes onto q: it is smaller than the score matrix, and bf16 scores stay in range.
    q = (q * dim**-0.5).reshape(n * heads, length, dim)
    scores = q @ k.reshape(n * heads, length, dim).transpose(1, 2)  # (n * heads, length, length)
    if causal:
        scores = scores + _causal_mask(length, scores.device, scores.dtype)
    weights = scores.softmax(dim=-1)
    return (weights @ v.reshape(n * heads, length, dim)).view(n, heads, length, dim)


def _causal_mask(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.full((length, length), float("-inf"), device=device, dtype=dtype).triu(1)
