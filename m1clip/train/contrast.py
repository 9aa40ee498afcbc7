"""CLIP's loss and its gradient in few passes over the matrix of logits, which is what a step on features mostly is.

Written out by hand, one exponential serves both directions, the target is a short list instead of a matrix, and rows
are taken a few at a time, so that they stay in the processor's cache. Autograd would pass over it about twenty times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Up to this scale exp(logit) and its sums are normal float32 numbers; above it each row needs an offset of its own.
SAFE_SCALE = 75.0
AT_ONCE = 1 << 19  # logits: a megabyte in bf16, which stays in the processor's cache
WORD = 8  # flags in an int64


class _InfoNce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, scale: Tensor, positive: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Mean over both directions of the cross-entropy against targets spread over the positives."""
        with torch.autocast(image.device.type, enabled=False):  # `dtype` alone says how products are made
            scaled, text = (scale * image).to(dtype), text.to(dtype)
            logits = scaled @ text.T
        n, m = positive.shape
        rows, columns = places(positive)
        of_row, of_column = (
            torch.bincount(found, minlength=size).to(scale.dtype) for found, size in ((rows, n), (columns, m))
        )
        # The target of each positive, in both directions at once.
        weight = 0.5 / (n * of_row[rows]) + 0.5 / (m * of_column[columns])
        # The exponentials of float16 end at 65,504, which is a logit of 11.
        shares_of = _shared if float(scale) <= SAFE_SCALE and dtype != torch.float16 else _apart
        chosen, along, across, gradient = shares_of(logits, scale.dtype, rows, columns)
        # Target and share are of one size once it has learned: their difference is taken before it is rounded.
        share = 0.5 / n * (chosen - along[rows]).exp() + 0.5 / m * (chosen - across[columns]).exp()
        gradient[rows, columns] = (share - weight).to(dtype)
        ctx.save_for_backward(scaled, text, scale, gradient)
        return 0.5 * (along.mean() + across.mean()) - torch.dot(weight, chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the logits is there already; two products take it to the vectors."""
        scaled, text, scale, gradient = ctx.saved_tensors
        by_scaled, by_text = (gradient @ text).to(scale.dtype), (gradient.T @ scaled).to(scale.dtype)
        # The scale's own: each gradient times its cosine, summed, which are these vectors' products again.
        by_scale = (by_scaled * scaled).sum() / scale
        return by_scaled.mul_(grad * scale), by_text.mul_(grad), by_scale * grad, None, None


def places(positive: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of what is true in a mask (n, m) that is nearly empty, row by row; eight flags are one look."""
    m = positive.shape[1]
    if m % WORD or not positive.is_contiguous():
        return positive.nonzero(as_tuple=True)  # type: ignore[return-value]
    words = positive.view(torch.int64).view(-1).nonzero().view(-1)
    which, bit = positive.view(-1, WORD)[words].nonzero(as_tuple=True)
    at = words[which] * WORD + bit
    return at // m, at % m


def _shared(logits: Tensor, kind: torch.dtype, rows: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    """(logits at some places, log-sum of each row, of each column, gradient of their means by the logits).

    The last is made in the place of the logits, in their precision; sums are of `kind`.
    """
    n, m = logits.shape
    by_row, by_column = logits.new_empty(n, dtype=kind), logits.new_zeros(m, dtype=kind)
    blocks = [slice(at, at + max(1, AT_ONCE // m)) for at in range(0, n, max(1, AT_ONCE // m))]
    for block in blocks:
        part = logits[block].exp_()
        torch.sum(part, dim=1, dtype=kind, out=by_row[block])
        by_column += part.sum(dim=0, dtype=kind)
    # Of the rounded exponentials, like the sums: a picture that is told from all others has a share of exactly one.
    chosen = logits[rows, columns].to(kind).log()
    along, across = 0.5 / n / by_row[:, None], 0.5 / m / by_column
    for block in blocks:
        logits[block].mul_((along[block] + across).to(logits.dtype))
    return chosen, by_row.log(), by_column.log(), logits


def _apart(logits: Tensor, kind: torch.dtype, rows: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    """The same at a scale where each row and column needs an offset of its own."""
    n, m = logits.shape
    wide = logits.to(kind)
    gradient = wide.softmax(dim=1).mul_(0.5 / n).add_(wide.softmax(dim=0), alpha=0.5 / m)
    tops = wide.logsumexp(dim=1), wide.logsumexp(dim=0)
    return wide[rows, columns], *tops, gradient.to(logits.dtype)


def fused_infonce(
    image: Tensor, text: Tensor, scale: Tensor, positive: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """The same as `objective.infonce` without smoothing: unit vectors (n, d) and (m, d), positives (n, m).

    Its three products and its exponentials are made in `dtype`, sums always in that of the scale.
    """
    loss: Tensor = _InfoNce.apply(image, text, scale, positive, dtype or image.dtype)
    return loss
