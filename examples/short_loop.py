"""Train CLIP in a loop that fits on one screen: plain PyTorch, with m1clip's data, model and loss.

    python examples/short_loop.py

`m1clip train` does the same, and adds what a real run needs: evaluation, checkpoints, large
batches, precision, devices. docs/learn.md explains the terms.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from m1clip.data.images import Preprocess
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.losses.fused import infonce
from m1clip.model.clip import CLIP, build_clip
from m1clip.model.presets import preset, with_fields
from m1clip.text.tokenizers import CharTokenizer

IMAGE_SIZE = 32
BATCH_SIZE = 32
CONTEXT_LENGTH = 77  # tokens of a caption


def load_data(count: int) -> tuple[Tensor, Tensor, CharTokenizer]:
    """(n, 3, size, size) normalized pixels and (n, length) token ids of synthetic images."""
    samples = SyntheticSource(IMAGE_SIZE, count, 1, 1, seed=0).samples("train")
    pixels = np.stack([np.asarray(sample.image.open()) for sample in samples])
    preprocess = Preprocess(image_size=IMAGE_SIZE)
    mean, std = np.array(preprocess.mean), np.array(preprocess.std)
    images = torch.from_numpy(((pixels / 255 - mean) / std).astype(np.float32))
    captions = [sample.captions[0] for sample in samples]
    tokenizer = CharTokenizer.from_captions(captions)
    tokens = torch.from_numpy(tokenizer.tokenize(captions, CONTEXT_LENGTH)).long()
    return images.permute(0, 3, 1, 2), tokens, tokenizer


def make_model(tokenizer: CharTokenizer) -> CLIP:
    """A small model with random weights: two blocks of width 64 in each tower."""
    sizes = {"vision_width": 64, "vision_layers": 2, "vision_heads": 1, "embed_dim": 64}
    sizes |= {"text_width": 64, "text_layers": 2, "text_heads": 1}
    sizes |= {"image_size": IMAGE_SIZE, "patch_size": 8, "context_length": CONTEXT_LENGTH}
    shape = with_fields(
        preset("tiny"), vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id, **sizes
    )
    return build_clip(shape)


def batches(count: int, steps: int) -> Iterator[Tensor]:
    """Row numbers of each batch: a new random order in every epoch."""
    rows = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(rows) < BATCH_SIZE:
            rows = torch.randperm(count)
        yield rows[:BATCH_SIZE]
        rows = rows[BATCH_SIZE:]


def train(steps: int = 60, count: int = 256) -> list[float]:
    """Train, and return the loss of each step."""
    torch.manual_seed(0)
    images, tokens, tokenizer = load_data(count)
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    matches = torch.eye(BATCH_SIZE, dtype=torch.bool)  # image i belongs to caption i
    losses = []
    for rows in batches(count, steps):
        features = model(images[rows], tokens[rows])  # unit vectors of both towers
        loss = infonce(features, matches)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.clamp_scale()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(train(), start=1):
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss:.3f}")
