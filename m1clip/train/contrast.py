"""CLIP's loss and its gradient in few passes over the matrix of logits, which is what a step on features mostly is.

Written out by hand, one exponential serves both directions, the target is a short list instead of a matrix, and rows
are taken a few at a time, so that they stay in the processor's cache. Autograd would pass over it about twenty times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Above this scale exp(-2 * scale) is no longer a normal float32, and each row needs a maximum of its own.
SAFE_SCALE = 40.0
AT_ONCE = 1 << 18  # logits: a megabyte of float32


class _InfoNce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, scale: Tensor, positive: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Mean over both directions of the cross-entropy against targets spread over the positives."""
        with torch.autocast(image.device.type, enabled=False):  # `dtype` alone says how products are made
            image, text = image.to(dtype), text.to(dtype)
            cosine = (image @ text.T).to(scale.dtype)
        n, m = positive.shape
        rows, columns = positive.nonzero(as_tuple=True)
        of_row, of_column = (
            torch.bincount(places, minlength=size).to(scale.dtype)
            for places, size in ((rows, n), (columns, m))
        )
        # The target of each positive, in both directions at once.
        weight = 0.5 / (n * of_row[rows]) + 0.5 / (m * of_column[columns])
        at_positives = scale * (weight * cosine[rows, columns]).sum()
        tops, gradient = _shared(cosine, scale) if float(scale) <= SAFE_SCALE else _apart(cosine, scale)
        gradient.index_put_((rows, columns), -weight, accumulate=True)
        by_scale = torch.dot(gradient.view(-1), cosine.view(-1))
        ctx.save_for_backward(image, text, scale, gradient.to(dtype), by_scale)
        return tops - at_positives

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the logits is there already; two products take it to the vectors."""
        image, text, scale, gradient, by_scale = ctx.saved_tensors
        factor = grad * scale
        by_image, by_text = (gradient @ text).to(scale.dtype), (gradient.T @ image).to(scale.dtype)
        return by_image.mul_(factor), by_text.mul_(factor), by_scale * grad, None, None


def _shared(cosine: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(mean log-sum of rows and columns, its gradient by the logits); no logit is larger than the scale."""
    n, m = cosine.shape
    shares, shift = torch.empty_like(cosine), float(scale)
    by_row, by_column = cosine.new_empty(n), cosine.new_zeros(m)
    blocks = [slice(at, at + max(1, AT_ONCE // m)) for at in range(0, n, max(1, AT_ONCE // m))]
    for block in blocks:
        part = torch.mul(cosine[block], shift, out=shares[block]).sub_(shift).exp_()
        torch.sum(part, dim=1, out=by_row[block])
        by_column += part.sum(dim=0)
    tops = 0.5 * (by_row.log().mean() + by_column.log().mean()) + shift
    along, across = 0.5 / n / by_row[:, None], 0.5 / m / by_column
    for block in blocks:
        shares[block].mul_(along[block] + across)
    return tops, shares


def _apart(cosine: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same at a scale where each row and column needs an offset of its own."""
    n, m = cosine.shape
    logits = cosine * scale
    tops = 0.5 * (logits.logsumexp(dim=1).mean() + logits.logsumexp(dim=0).mean())
    shares = logits.softmax(dim=1).mul_(0.5 / n).add_(logits.softmax(dim=0), alpha=0.5 / m)
    return tops, shares


def fused_infonce(
    image: Tensor, text: Tensor, scale: Tensor, positive: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """The same as `objective.infonce` without smoothing: unit vectors (n, d) and (m, d), positives (n, m).

    Its three products are made in `dtype`, sums and exponentials always in that of the scale.
    """
    loss: Tensor = _InfoNce.apply(image, text, scale, positive, dtype or image.dtype)
    return loss
