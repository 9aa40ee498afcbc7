"""InfoNCE among the captions of a step: those of one picture belong together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from m1clip.model.clip import Features

AT_ONCE = 1 << 20  # logits of a block, 4 MB


def text_contrast(
    features: Features, pictures: Tensor, captions: Tensor, owners: Tensor, in_blocks: bool
) -> Tensor:
    """The mean over captions that have another of their picture; one without counts nothing."""
    if in_blocks:
        loss: Tensor = _InBlocks.apply(features.text, features.scale, pictures[owners], captions)
        return loss
    return at_once(features, pictures, captions, owners)


def at_once(features: Features, pictures: Tensor, captions: Tensor, owners: Tensor) -> Tensor:
    """The definition, with all logits in memory: five captions a picture make 25 times as many as its pictures have."""
    same_picture = pictures[owners][:, None] == pictures[owners]
    same_caption = captions[:, None] == captions  # itself, and equal ones: neither right nor wrong
    positive = same_picture & ~same_caption
    counts = positive.sum(dim=1)
    # A row that is not counted keeps its logits: with nothing but -inf in it, its gradient would be NaN.
    unseen = same_caption & (counts > 0)[:, None]
    logits = (features.scale * features.text @ features.text.T).masked_fill(unseen, float("-inf"))
    log_shares = logits.log_softmax(dim=1).masked_fill(~positive, 0.0)
    rows = torch.where(counts > 0, log_shares.sum(dim=1) / counts.clamp(min=1), 0.0)
    return -rows.sum() / (counts > 0).sum().clamp(min=1)


class _InBlocks(torch.autograd.Function):
    """The same, some rows at a time; the gradient is made with the loss, so no logits are kept for it."""

    @staticmethod
    def forward(ctx: Any, text: Tensor, scale: Tensor, pictures: Tensor, captions: Tensor) -> Tensor:
        by_text, loss, by_scale, number = torch.zeros_like(text), 0.0 * scale, 0.0 * scale, 0.0 * scale
        step = max(1, AT_ONCE // len(text))
        with torch.autocast("cpu", enabled=False):
            for at in range(0, len(text), step):
                rows = slice(at, at + step)
                equal = captions[rows, None] == captions
                positive = (pictures[rows, None] == pictures) & ~equal
                counts = positive.sum(dim=1, keepdim=True)
                counted = counts > 0
                logits = ((scale * text[rows]) @ text.T).masked_fill_(equal & counted, float("-inf"))
                target = positive.to(text.dtype) / counts.clamp(min=1)
                tops = logits.logsumexp(dim=1, keepdim=True)
                loss += (
                    torch.where(counted, tops, 0.0).sum()
                    - (logits.masked_fill(~positive, 0.0) * target).sum()
                )
                gradient = logits.sub_(tops).exp_().sub_(target).mul_(counted)
                pull = gradient @ text
                by_text[rows] += pull
                by_text += gradient.T @ text[rows]
                by_scale += (pull * text[rows]).sum()
                number += counted.sum()
        number.clamp_(min=1)
        ctx.save_for_backward(by_text.mul_(scale / number), by_scale / number)
        return loss / number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        by_text, by_scale = ctx.saved_tensors
        return grad * by_text, grad * by_scale, None, None
