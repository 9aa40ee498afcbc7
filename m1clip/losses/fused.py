"""Fused forms of losses for the CPU: loss and gradient together, in blocks that fit its cache.

Each is compared with the row term it replaces in tests/test_losses.py.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TEXT_BLOCK = 1 << 20  # logits per block of the text-text loss: 4 MB of float32
INFONCE_BLOCK = 1 << 19  # logits: 1 MB of bf16, which stays in the processor's cache
# Up to this scale exp(logit) and its sums are normal float32 numbers; above it each row needs its
# own offset.
MAX_SHARED_SCALE = 75.0
FLAGS_PER_WORD = 8  # bools in an int64


def infonce(
    features: Any, positive: Tensor, dtype: torch.dtype | None = None, smoothing: float = 0.0
) -> Tensor:
    """Compute InfoNCE of `model.clip.Features` (n, d) and (m, d); `positive` may have weights.

    Matmuls and exponentials are in `dtype`, by default that of the features; sums are in the dtype
    of the scale. The gradient overwrites the logits.
    """
    image, text, scale, _ = features
    loss: Tensor = _FusedInfoNCE.apply(image, text, scale, positive, dtype or image.dtype)
    if smoothing:
        loss = loss + smoothing * _lead_of_positives(image, text, scale, positive)
    return loss


def _lead_of_positives(image: Tensor, text: Tensor, scale: Tensor, positive: Tensor) -> Tensor:
    """Return by how much the logits of positives exceed the mean of all, over both directions.

    Label smoothing adds this to the loss: the log-sum-exp of a row does not depend on its target.
    """
    rows, columns, target = _positives(positive, scale.dtype)
    chosen = (image[rows] * text[columns]).sum(dim=1)
    return scale * (torch.dot(target, chosen) - torch.dot(image.mean(dim=0), text.mean(dim=0)))


def _positives(positive: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows and columns of positives, and their targets, both directions together."""
    n, m = positive.shape
    rows, columns = true_positions(positive if positive.dtype == torch.bool else positive > 0)
    weight = positive[rows, columns].to(dtype)
    per_row = torch.bincount(rows, weight, minlength=n).to(dtype)
    per_column = torch.bincount(columns, weight, minlength=m).to(dtype)
    target = weight * (0.5 / (n * per_row[rows]) + 0.5 / (m * per_column[columns]))
    return rows, columns, target


class _FusedInfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, scale: Tensor, positive: Tensor, dtype: torch.dtype
    ) -> Tensor:
        with torch.autocast(image.device.type, enabled=False):  # use exactly `dtype`
            scaled = (scale * image).to(dtype)
            text = text.to(dtype)
            logits = scaled @ text.T
        n, m = positive.shape
        rows, columns, target = _positives(positive, scale.dtype)
        # The largest float16 is 65,504, the exponential of a logit of 11.
        shared = float(scale) <= MAX_SHARED_SCALE and dtype != torch.float16
        softmax = _softmax_shared if shared else _softmax_by_row
        chosen, row_sums, column_sums, gradient = softmax(logits, scale.dtype, rows, columns)
        # Late in training target and probability are almost equal: subtract before rounding.
        by_row = 0.5 / n * (chosen - row_sums[rows]).exp()
        by_column = 0.5 / m * (chosen - column_sums[columns]).exp()
        probability = by_row + by_column
        gradient[rows, columns] = (probability - target).to(dtype)
        ctx.save_for_backward(scaled, text, scale, gradient)
        return 0.5 * (row_sums.mean() + column_sums.mean()) - torch.dot(target, chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Propagate the gradient of the logits, computed in forward, to the features."""
        scaled, text, scale, gradient = ctx.saved_tensors
        by_scaled = (gradient @ text).to(scale.dtype)
        by_text = (gradient.T @ scaled).to(scale.dtype)
        # Gradient of the scale: the sum of each gradient times its cosine, which these contain.
        by_scale = (by_scaled * scaled).sum() / scale
        return by_scaled.mul_(grad * scale), by_text.mul_(grad), by_scale * grad, None, None


def true_positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `mask.nonzero()` of a sparse mask (n, m), reading eight flags at a time."""
    m = mask.shape[1]
    if m % FLAGS_PER_WORD or not mask.is_contiguous():
        return mask.nonzero(as_tuple=True)  # type: ignore[return-value]
    words = mask.view(torch.int64).view(-1).nonzero().view(-1)
    word_index, bit = mask.view(-1, FLAGS_PER_WORD)[words].nonzero(as_tuple=True)
    position = words[word_index] * FLAGS_PER_WORD + bit
    return position // m, position % m


def _softmax_shared(
    logits: Tensor, dtype: torch.dtype, rows: Tensor, columns: Tensor
) -> tuple[Tensor, ...]:
    """Return logits at (rows, columns), log-sum-exp of rows and columns, gradient of their means.

    The gradient replaces the logits, in their precision; sums are in `dtype`.
    """
    n, m = logits.shape
    row_sums = logits.new_empty(n, dtype=dtype)
    column_sums = logits.new_zeros(m, dtype=dtype)
    size = max(1, INFONCE_BLOCK // m)
    blocks = [slice(start, start + size) for start in range(0, n, size)]
    for block in blocks:
        exponentials = logits[block].exp_()
        torch.sum(exponentials, dim=1, dtype=dtype, out=row_sums[block])
        column_sums += exponentials.sum(dim=0, dtype=dtype)
    # From the rounded exponentials, like the sums: a perfectly separated pair then has a
    # probability of exactly 1.
    chosen = logits[rows, columns].to(dtype).log()
    by_row = 0.5 / n / row_sums[:, None]
    by_column = 0.5 / m / column_sums
    for block in blocks:
        logits[block].mul_((by_row[block] + by_column).to(logits.dtype))
    return chosen, row_sums.log(), column_sums.log(), logits


def _softmax_by_row(
    logits: Tensor, dtype: torch.dtype, rows: Tensor, columns: Tensor
) -> tuple[Tensor, ...]:
    """Do the same as `_softmax_shared` where each row and column needs its own offset."""
    n, m = logits.shape
    accumulated = logits.to(dtype)
    gradient = (
        accumulated.softmax(dim=1).mul_(0.5 / n).add_(accumulated.softmax(dim=0), alpha=0.5 / m)
    )
    row_sums = accumulated.logsumexp(dim=1)
    column_sums = accumulated.logsumexp(dim=0)
    return accumulated[rows, columns], row_sums, column_sums, gradient.to(logits.dtype)


def text_contrast(text: Tensor, scale: Tensor, image_ids: Tensor, caption_ids: Tensor) -> Tensor:
    """Compute the loss between captions; `image_ids` (m,) are the ids of their images."""
    loss: Tensor = _BlockwiseTextContrast.apply(text, scale, image_ids, caption_ids)
    return loss


class _BlockwiseTextContrast(torch.autograd.Function):
    """Computes `registry.text_contrast_rows` in blocks of rows.

    The gradient is computed with the loss, so no logits are stored.
    """

    @staticmethod
    def forward(
        ctx: Any, text: Tensor, scale: Tensor, image_ids: Tensor, caption_ids: Tensor
    ) -> Tensor:
        by_text = torch.zeros_like(text)
        loss = 0.0 * scale
        by_scale = 0.0 * scale
        count = 0.0 * scale
        size = max(1, TEXT_BLOCK // len(text))
        with torch.autocast("cpu", enabled=False):
            for start in range(0, len(text), size):
                rows = slice(start, start + size)
                equal = caption_ids[rows, None] == caption_ids
                positive = (image_ids[rows, None] == image_ids) & ~equal
                counts = positive.sum(dim=1, keepdim=True)
                counted = counts > 0
                logits = (scale * text[rows]) @ text.T
                logits.masked_fill_(equal & counted, float("-inf"))
                target = positive.to(text.dtype) / counts.clamp(min=1)
                sums = logits.logsumexp(dim=1, keepdim=True)
                loss += torch.where(counted, sums, 0.0).sum()
                loss -= (logits.masked_fill(~positive, 0.0) * target).sum()
                gradient = logits.sub_(sums).exp_().sub_(target).mul_(counted)
                by_rows = gradient @ text
                by_text[rows] += by_rows
                by_text += gradient.T @ text[rows]
                by_scale += (by_rows * text[rows]).sum()
                count += counted.sum()
        count.clamp_(min=1)
        ctx.save_for_backward(by_text.mul_(scale / count), by_scale / count)
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        by_text, by_scale = ctx.saved_tensors
        return grad * by_text, grad * by_scale, None, None
