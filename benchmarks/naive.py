"""Training as in the original project, written without optimizations: the baseline of step.py and same_work.py.

Own code after the description: fp32, attention as two matmuls with a softmax between,
dropout 0.1, every caption padded to 77, the causal mask not used, float images made one by one,
AdamW a parameter at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sides import set_up
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from m1clip.config import Config
from m1clip.data.prepare import Split
from m1clip.model.presets import CLIPConfig
from m1clip.training.inputs import RunInputs

DROPOUT = 0.1


class NaiveAttention(nn.Module):
    """Fused queries, keys and values; two matmuls with a softmax between."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        n, length, width = x.shape
        q, k, v = (
            self.qkv(x)
            .reshape(n, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        # (n, heads, length, length).
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.heads)
        weights = self.drop(torch.softmax(scores, dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(n, length, width))


class NaiveBlock(nn.Module):
    """Pre-norm attention and MLP, dropout on each branch."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = NaiveAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Dropout(DROPOUT),
            nn.Linear(hidden, width),
            nn.Dropout(DROPOUT),
        )
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


def _blocks(width: int, heads: int, layers: int, ratio: float) -> nn.Sequential:
    return nn.Sequential(*(NaiveBlock(width, heads, int(ratio * width)) for _ in range(layers)))


class NaiveClip(nn.Module):
    """Both towers, projections with bias, temperature from 0.07; initialization is torch's own."""

    def __init__(self, shape: CLIPConfig, eot_id: int) -> None:
        super().__init__()
        vision, text = shape.own_towers
        wide, narrow = vision.width, text.width
        self.eot_id = eot_id
        self.patch = nn.Conv2d(3, wide, kernel_size=vision.patch_size, stride=vision.patch_size)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, wide))
        self.image_positions = nn.Parameter(0.02 * torch.randn(1, vision.grid**2 + 1, wide))
        self.image_blocks = _blocks(wide, vision.heads, vision.layers, vision.mlp_ratio)
        self.image_norm = nn.LayerNorm(wide)
        self.image_projection = nn.Linear(wide, shape.embed_dim)
        self.tokens = nn.Embedding(shape.vocab_size, narrow)
        self.text_positions = nn.Parameter(0.02 * torch.randn(1, shape.context_length, narrow))
        self.text_blocks = _blocks(narrow, text.heads, text.layers, text.mlp_ratio)
        self.text_norm = nn.LayerNorm(narrow)
        self.text_projection = nn.Linear(narrow, shape.embed_dim)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.drop = nn.Dropout(DROPOUT)

    def encode_image(self, pixels: Tensor) -> Tensor:
        """(n, 3, size, size) -> (n, embed) unit vectors."""
        x = self.patch(pixels).flatten(2).transpose(1, 2)  # (n, patches, width)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        x = self.image_norm(self.image_blocks(self.drop(x + self.image_positions)))
        return F.normalize(self.image_projection(x[:, 0]), dim=-1)

    def encode_text(self, ids: Tensor) -> Tensor:
        """(n, context) -> (n, embed) unit vectors, read at the EOT token."""
        x = self.text_norm(self.text_blocks(self.drop(self.tokens(ids) + self.text_positions)))
        end = (ids == self.eot_id).int().argmax(dim=1)
        return F.normalize(
            self.text_projection(x[torch.arange(len(x), device=x.device), end]), dim=-1
        )

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """(n, n) logits, an image a row."""
        return self.logit_scale.exp() * self.encode_image(pixels) @ self.encode_text(ids).T


class NaivePairs(Dataset[tuple[Tensor, Tensor]]):
    """One float image and one caption padded to the full length, made when asked for."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split.images)

    def image(self, index: int) -> Tensor:
        """(3, size, size) float32 between -1 and 1."""
        pixels = self.split.images.read(torch.tensor([index]).numpy())[0]
        return (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - 0.5) / 0.5

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first, last = self.split.captions.first[index : index + 2]
        chosen = int(torch.randint(int(first), int(last), ()))
        return self.image(index), torch.from_numpy(self.split.captions.tokens[chosen]).long()


class NaiveTrainer:
    """The baseline's step, on its own data path."""

    def __init__(self, job: RunInputs) -> None:
        torch.manual_seed(job.config.seed)
        self.device, optim = job.device.torch, job.config.optim
        self.model = NaiveClip(job.shape, job.model.tokenizer.eot_id).to(self.device).train()
        self.loader = DataLoader(
            NaivePairs(job.splits["train"]),
            batch_size=job.config.train.batch_size,
            shuffle=True,
            drop_last=True,
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, weight_decay=optim.wd, foreach=False, fused=False
        )
        total_steps = round((job.config.train.epochs or 1) * len(self.loader))
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, total_steps)

    def epochs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end, a new order each epoch."""
        while True:
            yield from self.loader

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """The loss of one update."""
        pixels, ids = (part.to(self.device) for part in batch)
        logits = self.model(pixels, ids)
        target = torch.arange(len(logits), device=self.device)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def original_job(config: Config) -> RunInputs:
    """The data, tokenizer and shape of the job.

    Nothing is measured, the baseline has no choices.
    """
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, device="cpu", precision="fp32"),  # type: ignore[arg-type]
    )
    return set_up(config)
