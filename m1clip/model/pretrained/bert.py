"""BERT's encoder as a text tower: all-MiniLM-L6-v2 and others of its kind, from a folder of Hugging Face files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class BertShape:
    """The numbers that decide the parameters; the defaults are all-MiniLM-L6-v2's."""

    vocab_size: int = 30522
    width: int = 384
    layers: int = 6
    heads: int = 12
    hidden: int = 1536
    positions: int = 512
    norm_eps: float = 1e-12


class Layer(nn.Module):
    """Attention, then MLP, each added and normed afterwards, as in 2018."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm1 = nn.LayerNorm(shape.width, shape.norm_eps)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)
        self.norm2 = nn.LayerNorm(shape.width, shape.norm_eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(n, length, width) and an additive mask (n, 1, 1, length) -> the same shape."""
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3) + mask.to(q.dtype)
        mixed = (scores.softmax(dim=-1).to(v.dtype) @ v).transpose(1, 2).reshape(n, length, width)
        x = self.norm1(x + self.out(mixed)).to(x.dtype)
        return self.norm2(x + self.down(F.gelu(self.up(x)))).to(x.dtype)


class BertTower(nn.Module):
    """Token ids to the mean of the last layer over the tokens, as sentence-transformers reads MiniLM."""

    def __init__(self, shape: BertShape, pad_id: int = 0) -> None:
        super().__init__()
        self.shape, self.pad_id, self.width = shape, pad_id, shape.width
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.positions, shape.width))
        self.norm = nn.LayerNorm(shape.width, shape.norm_eps)
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(self, ids: Tensor) -> Tensor:
        """(n, length) token ids -> (n, width)."""
        there = ids != self.pad_id
        mask = torch.zeros(there.shape, device=ids.device).masked_fill_(~there, -1e4)[:, None, None]
        x = self.norm(self.tokens(ids) + self.positions[: ids.shape[1]])
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks:
            x = block(x, mask)
        weight = there[..., None].to(torch.float32)
        return (x.float() * weight).sum(dim=1) / weight.sum(dim=1)


# Their name -> ours; {i} is the number of a layer. Several of theirs side by side make one fused matrix of ours.
BERT_NAMES: dict[str, tuple[str, ...]] = {
    "tokens.weight": ("embeddings.word_embeddings.weight",),
    "norm.weight": ("embeddings.LayerNorm.weight",),
    "norm.bias": ("embeddings.LayerNorm.bias",),
}
_SELF = "encoder.layer.{i}.attention.self"
for _part in ("weight", "bias"):
    BERT_NAMES |= {
        f"blocks.{{i}}.qkv.{_part}": tuple(f"{_SELF}.{name}.{_part}" for name in ("query", "key", "value")),
        f"blocks.{{i}}.out.{_part}": (f"encoder.layer.{{i}}.attention.output.dense.{_part}",),
        f"blocks.{{i}}.norm1.{_part}": (f"encoder.layer.{{i}}.attention.output.LayerNorm.{_part}",),
        f"blocks.{{i}}.up.{_part}": (f"encoder.layer.{{i}}.intermediate.dense.{_part}",),
        f"blocks.{{i}}.down.{_part}": (f"encoder.layer.{{i}}.output.dense.{_part}",),
        f"blocks.{{i}}.norm2.{_part}": (f"encoder.layer.{{i}}.output.LayerNorm.{_part}",),
    }


def from_bert(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Hugging Face's tensors under our names; the one kind of sentence is added to the positions once."""
    ours = {
        name.format(i=i): torch.cat([weights[part.format(i=i)] for part in parts])
        for name, parts in BERT_NAMES.items()
        for i in (range(layers) if "{i}" in name else (0,))
    }
    kind = weights["embeddings.token_type_embeddings.weight"][0]
    ours["positions"] = weights["embeddings.position_embeddings.weight"] + kind
    return ours
