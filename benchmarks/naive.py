"""The prior art's kind of training, written eager: the baseline that m1clip's step and accuracy stand beside.

Own code after the description: fp32, attention as two matrix products with a softmax between, dropout 0.1, every
caption padded to 77, the causal mask not used, float images made one by one, AdamW a parameter at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from in_batch import in_batch_accuracy
from sides import set_up
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from m1clip.config import Config, from_dict, read_preset
from m1clip.data.prepare import Split
from m1clip.evaluation.statistics import Metric
from m1clip.model.presets import CLIPConfig
from m1clip.training.setup import Setup

PARAMETERS = 76_736_001  # of the prior art's run
DROPOUT = 0.1


class NaiveAttention(nn.Module):
    """Fused queries, keys and values; two matrix products with a softmax between."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.heads)  # (n, heads, length, length)
        weights = self.drop(torch.softmax(scores, dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(n, length, width))


class NaiveBlock(nn.Module):
    """Pre-norm attention and MLP, dropout on each branch."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = NaiveAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(DROPOUT), nn.Linear(hidden, width), nn.Dropout(DROPOUT)
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
        return F.normalize(self.text_projection(x[torch.arange(len(x), device=x.device), end]), dim=-1)

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

    def __init__(self, job: Setup) -> None:
        torch.manual_seed(job.config.seed)
        self.device, optim = job.device.torch, job.config.optim
        self.model = NaiveClip(job.shape, job.tokenizer.eot_id).to(self.device).train()
        self.loader = DataLoader(
            NaivePairs(job.splits["train"]), batch_size=job.config.train.batch_size, shuffle=True, drop_last=True
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

    def step(self, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
        """(loss, in-batch accuracy) of one update."""
        pixels, ids = (part.to(self.device) for part in batch)
        logits = self.model(pixels, ids)
        target = torch.arange(len(logits), device=self.device)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item(), (logits.argmax(dim=1) == target).float().mean().item()

    @torch.inference_mode()
    def accuracy(self, split: Split) -> Metric:
        """In-batch accuracy at 12 with the evaluator that m1clip's own runs use."""
        self.model.eval()
        samples = NaivePairs(split)
        pixels = torch.stack([samples.image(index) for index in range(len(samples))])
        image = torch.cat([self.model.encode_image(part.to(self.device)) for part in pixels.split(24)])
        ids = torch.from_numpy(split.captions.tokens).long()
        text = torch.cat([self.model.encode_text(part.to(self.device)) for part in ids.split(48)])
        self.model.train()
        return in_batch_accuracy(
            image.cpu(),
            text.cpu(),
            torch.from_numpy(split.captions.image_index),
            torch.from_numpy(split.captions.caption_ids),
        )


def prior_art_job(config: Config, device: str = "cpu") -> Setup:
    """The data, tokenizer and shape of the job; nothing is measured, the baseline has no choices."""
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, device=device, precision="fp32"),  # type: ignore[arg-type]
        model=dataclasses.replace(config.model, attention="bmm"),
    )
    return set_up(config)


def train(job: Setup, epochs: int) -> list[dict[str, float]]:
    """Train as described; one record an epoch, printed as it comes."""
    trainer, records = NaiveTrainer(job), []
    for epoch in range(1, epochs + 1):
        steps = [trainer.step(batch) for batch in trainer.loader]
        loss, hit = (sum(values) / len(steps) for values in zip(*steps, strict=True))
        val = trainer.accuracy(job.splits["val"])
        records.append({"epoch": epoch, "loss": loss, "train_accuracy": hit, "val_accuracy": val.value})
        print(
            f"epoch {epoch:3d}  loss {loss:.3f}  in-batch accuracy: train {hit:.3f}, val {val.value:.3f} "
            f"[{val.interval.low:.3f}, {val.interval.high:.3f}], {val.n} images",
            flush=True,
        )
    return records


def main() -> None:
    """Count the parameters, or train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--train", action="store_true", help="train on the prior-art data and print the accuracy")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=("cpu", "mps", "cuda"))
    parser.add_argument("--seed", type=int, default=0, help="of data and initialization, as in m1clip train --seed")
    parser.add_argument("--json", type=Path, help="write the records there")
    options = parser.parse_args()
    config = dataclasses.replace(from_dict(read_preset("prior-art"), "prior-art"), seed=options.seed)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=float(options.epochs)))
    job = prior_art_job(config, options.device)
    count = sum(p.numel() for p in NaiveClip(job.shape, job.tokenizer.eot_id).parameters())
    assert count == PARAMETERS, f"{count:,} parameters, the prior art had {PARAMETERS:,}"
    print(f"naive baseline: {count:,} parameters, fp32, torch {torch.__version__}, {options.device}")
    if options.train:
        records = train(job, options.epochs)
        best = max(record["val_accuracy"] for record in records)
        print(f"validation in-batch accuracy at 12: last {records[-1]['val_accuracy']:.3f}, best {best:.3f}")
        if options.json:
            options.json.write_text(json.dumps({"seed": options.seed, "epochs": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
