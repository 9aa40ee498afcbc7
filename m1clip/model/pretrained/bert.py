"""BERT text towers such as MiniLM: their layers, and the tensors of Hugging Face under our names."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.model.layers import linear
from m1clip.model.towers import Tower, embedding
from m1clip.model.weights import Tensors
from m1clip.schema import check_limits

MAX_BERT_POSITIONS = 2**16


@dataclass(frozen=True, kw_only=True)
class BertSize:
    """The sizes of a BERT; the defaults are all-MiniLM-L6-v2's."""

    width: int = 384
    layers: int = 6
    heads: int = 12
    hidden: int = 1536
    positions: int = 512
    norm_eps: float = 1e-12
    pooled: int = 0  # how many of the last layers give features; 0: all, and the embeddings

    def __post_init__(self) -> None:
        check_limits(self, "the text tower: ")
        sizes = (self.width, self.layers, self.heads, self.hidden, self.positions)
        is_possible = min(sizes) >= 1 and 0 <= self.pooled <= self.layers
        if not is_possible or self.width % self.heads or self.positions > MAX_BERT_POSITIONS:
            raise UserError(f"the text tower: impossible sizes ({self})")


MINILM = BertSize()
POOLED_LAYERS = 4  # of a BERT that is not MiniLM: the last layers, as measured on gte-small


def bert_size(config: dict[str, Any]) -> BertSize | None:
    """The sizes in a config.json of transformers; None if it is not a BERT with these layers."""
    usual = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
    }
    if any(config.get(name, value) != value for name, value in usual.items()):
        return None
    names = {
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "hidden",
        "max_position_embeddings": "positions",
    }
    values: dict[str, Any] = {ours: config.get(theirs) for theirs, ours in names.items()}
    if not all(type(value) is int for value in values.values()):
        return None
    norm_eps = float(config.get("layer_norm_eps", 1e-12))
    pooled = min(POOLED_LAYERS, values["layers"])
    return BertSize(**values, norm_eps=norm_eps, pooled=pooled)


class BertLayer(nn.Module):
    """Post-norm: attention, then MLP, each added to its input and normalized afterwards."""

    def __init__(self, size: BertSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm1 = nn.LayerNorm(size.width, size.norm_eps)
        self.up = nn.Linear(size.width, size.hidden)
        self.down = nn.Linear(size.hidden, size.width)
        self.norm2 = nn.LayerNorm(size.width, size.norm_eps)

    def forward(self, x: Tensor, groups: Sequence[tuple[int, int]], mask: Tensor | None) -> Tensor:
        """(tokens, width) of all texts one after the other -> the same shape.

        `groups` are (number, length) of consecutive texts; `mask` (n, 1, 1, length) is added to the
        scores.
        """
        width = x.shape[1]
        qkv = linear(x, self.qkv.weight, self.qkv.bias)
        outputs = []
        for (n, length), part in zip(
            groups, qkv.split([n * length for n, length in groups]), strict=True
        ):
            q, k, v = part.view(n, length, 3, self.heads, width // self.heads).permute(
                2, 0, 3, 1, 4
            )
            outputs.append(
                _bert_attention(q, k, v, mask).transpose(1, 2).reshape(n * length, width)
            )
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        x = self.norm1(linear(attended, self.out.weight, self.out.bias, residual=x)).to(x.dtype)
        hidden = linear(x, self.up.weight, self.up.bias, gelu=True)
        return self.norm2(linear(hidden, self.down.weight, self.down.bias, residual=x)).to(x.dtype)


def _bert_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """(n, heads, length, dim) x 3 -> the same shape.

    `mask` None is for inference, without padding.
    """
    if mask is None and len(q) == 1:
        return F.scaled_dot_product_attention(q, k, v)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
    if mask is not None:
        return (scores + mask.to(q.dtype)).softmax(dim=-1).to(v.dtype) @ v
    scores = scores.float()  # a softmax of rows this short takes twice as long as its parts
    scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    return scores.div_(scores.sum(dim=-1, keepdim=True)).to(v.dtype) @ v


class BertTower(Tower):
    """Token ids to the mean over the tokens of some outputs, side by side.

    Those of the last layers; where all of them are pooled, that of the embeddings comes first.
    """

    def __init__(self, vocab_size: int, pad_id: int = 0, size: BertSize = MINILM) -> None:
        super().__init__()
        self.pad_id = pad_id
        self.pooled = size.pooled or size.layers + 1
        self.width = self.pooled * size.width
        self.tokens = embedding(vocab_size, size.width)
        self.positions = nn.Parameter(torch.zeros(size.positions, size.width))
        self.norm = nn.LayerNorm(size.width, size.norm_eps)
        self.blocks = nn.ModuleList(BertLayer(size) for _ in range(size.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, length) token ids -> (n, width)."""
        n, length = tokens.shape
        real = tokens != self.pad_id
        # (n * length, width).
        x = self.norm(self.tokens(tokens) + self.positions[:length]).flatten(0, 1)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        groups = [(n, length)]
        mask = None
        if x.device.type == "cpu" and torch.is_inference_mode_enabled():
            # Without padding: attention for each group of texts of one length, everything else for
            # all tokens at once.
            x = x[real.flatten()]
            groups = [
                (len(list(same)), size)
                for size, same in itertools.groupby(real.sum(dim=1).tolist())
            ]
        else:
            mask = torch.zeros(real.shape, device=x.device).masked_fill_(~real, -1e4)[:, None, None]
        weight = real[..., None].to(torch.float32)

        def mean(x: Tensor) -> Tensor:
            if mask is not None:
                return (x.view(n, length, -1).float() * weight).sum(dim=1) / weight.sum(dim=1)
            parts = x.float().split([n * size for n, size in groups])
            return torch.cat(
                [
                    part.view(*group, -1).mean(dim=1)
                    for group, part in zip(groups, parts, strict=True)
                ]
            )

        skipped = len(self.blocks) + 1 - self.pooled
        means = [mean(x)] if skipped == 0 else []
        for number, block in enumerate(self.blocks, start=1):
            x = block(x, groups, mask)
            if number >= skipped:
                means.append(mean(x))
        return torch.cat(means, dim=1)


# Part of a layer -> their name for it, or for the three parts of a fused matrix.
BERT_LAYER = {
    "qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    "out": ("attention.output.dense",),
    "norm1": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "norm2": ("output.LayerNorm",),
}


def from_bert(weights: Tensors, layers: int = MINILM.layers) -> Tensors:
    """Hugging Face's tensors under our names; the first token type is added to the positions."""
    weights = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    token_type = weights["embeddings.token_type_embeddings.weight"][0]
    ours = {
        "tokens.weight": weights["embeddings.word_embeddings.weight"],
        "positions": weights["embeddings.position_embeddings.weight"] + token_type,
    }
    for kind in ("weight", "bias"):
        ours[f"norm.{kind}"] = weights[f"embeddings.LayerNorm.{kind}"]
        for i in range(layers):
            for name, theirs in BERT_LAYER.items():
                parts = [weights[f"encoder.layer.{i}.{part}.{kind}"] for part in theirs]
                ours[f"blocks.{i}.{name}.{kind}"] = torch.cat(parts)
    return ours
