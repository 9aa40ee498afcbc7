"""Losses: InfoNCE, sigmoid, multi-positive, text-text and distillation, as pure functions of features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable

from m1clip.model.clip import Features

TEXT_BLOCK = 1 << 20  # logits per block of the text-text loss: 4 MB of float32
INFONCE_BLOCK = 1 << 19  # logits: 1 MB of bf16, which stays in the processor's cache
# Up to this scale exp(logit) and its sums are normal float32 numbers; above it each row needs its own offset.
MAX_SHARED_SCALE = 75.0
HALF_PRECISION_PAIRS = 1 << 20  # from this many pairs on, InfoNCE's products use autocast's precision, if enabled
# Rows of a product. Its gradients are sums over rows, and MPS computes longer ones wrong on M1 and M2 (pytorch#193487).
MAX_ROWS = 32_766
FLAGS_PER_WORD = 8  # bools in an int64


def similarity(a: Tensor, b: Tensor) -> Tensor:
    """(n, d) and (m, d) -> the products (n, m)."""
    if max(len(a), len(b)) <= MAX_ROWS:
        return a @ b.T
    parts = b.split(MAX_ROWS)
    return torch.cat([torch.cat([rows @ part.T for part in parts], dim=1) for rows in a.split(MAX_ROWS)])


def infonce(features: Features, positive: Tensor) -> Tensor:
    """CLIP's loss; targets are spread evenly over all positives (n, m) of an image or caption."""
    # The fused loss reads values: on an accelerator this would synchronize, and a fake tensor (memory.py) has none.
    if features.image.device.type == "cpu" and not is_fake(features.image):
        half = torch.is_autocast_enabled("cpu") and positive.numel() >= HALF_PRECISION_PAIRS
        dtype = torch.get_autocast_dtype("cpu") if half else None
        return fused_infonce(features.image, features.text, features.scale, positive, dtype)
    logits = similarity(features.scale * features.image, features.text)
    target = positive.to(logits.dtype)

    def one_direction(logits: Tensor, target: Tensor) -> Tensor:
        target = target / target.sum(dim=1, keepdim=True)
        return F.cross_entropy(logits, target)

    return (one_direction(logits, target) + one_direction(logits.T, target.T)) / 2


def sigmoid(features: Features, positive: Tensor) -> Tensor:
    """SigLIP's loss: each of the n x m pairs is a binary classification."""
    assert features.bias is not None, "the sigmoid loss needs a model with a logit bias"
    logits = similarity(features.scale * features.image, features.text) + features.bias
    sign = 2.0 * positive.to(logits.dtype) - 1.0
    return -F.logsigmoid(sign * logits).sum() / logits.shape[1]


def distillation(features: Features, teacher: Tensor) -> Tensor:
    """KL divergence from a teacher's logits (n, m), mean of both directions, in nats."""
    logits = similarity(features.scale * features.image, features.text)

    def one_direction(logits: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(dim=1), target.log_softmax(dim=1), reduction="batchmean", log_target=True)

    return (one_direction(logits, teacher) + one_direction(logits.T, teacher.T)) / 2


OBJECTIVES = {"infonce": infonce, "multi": infonce, "sigmoid": sigmoid}


def positives(objective: str, sample_ids: Tensor, caption_ids: Tensor, image_index: Tensor) -> Tensor:
    """(n, m) bool: which pairs are positive; for plain infonce only each image's own captions."""
    if objective == "infonce":
        return own_pairs(len(sample_ids), image_index)
    return same_pairs(sample_ids, caption_ids, image_index)


def own_pairs(images: int, image_index: Tensor) -> Tensor:
    """(n, m) bool: caption j belongs to image i."""
    return torch.arange(images, device=image_index.device)[:, None] == image_index


def same_pairs(sample_ids: Tensor, caption_ids: Tensor, image_index: Tensor) -> Tensor:
    """(n, m) bool: caption j describes image i, because its image or one of that image's captions is the same."""
    if image_index.device.type == "cpu" and not is_fake(image_index):
        return _same_pairs_by_repeats(sample_ids, caption_ids, image_index)
    same_image = sample_ids[:, None] == sample_ids[image_index]
    # Equal captions get the same number below m without counting them: a count would synchronize.
    order = caption_ids.argsort()
    changes = caption_ids[order].diff(prepend=caption_ids[order[:1]]) != 0
    number = torch.empty_like(order).scatter_(0, order, changes.cumsum(0))
    has_caption = torch.zeros(same_image.numel(), dtype=torch.bool, device=image_index.device)
    has_caption.scatter_(0, image_index * len(caption_ids) + number, True)  # image i has a caption with this number
    return same_image | has_caption.view(same_image.shape)[:, number]


def _same_pairs_by_repeats(sample_ids: Tensor, caption_ids: Tensor, image_index: Tensor) -> Tensor:
    """`same_pairs` where reading values is free (CPU): only images and captions that occur twice are compared."""
    positive = torch.zeros(len(sample_ids), len(caption_ids), dtype=torch.bool)
    positive[image_index, torch.arange(len(caption_ids))] = True
    repeats = _repeated(sample_ids)
    positive[repeats] = sample_ids[repeats, None] == sample_ids[image_index]
    repeats = _repeated(caption_ids)
    _, number = caption_ids[repeats].unique(return_inverse=True)
    has_caption = torch.zeros(len(sample_ids), len(repeats), dtype=torch.bool)
    has_caption[image_index[repeats], number] = True
    positive[:, repeats] |= has_caption[:, number]
    return positive


def _repeated(values: Tensor) -> Tensor:
    """Indices of the values that occur more than once."""
    _, number, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts[number] > 1).nonzero().view(-1)


def fused_infonce(
    image: Tensor, text: Tensor, scale: Tensor, positive: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """`infonce` for unit vectors (n, d) and (m, d); the gradient overwrites the logits.

    Products and exponentials are in `dtype`, sums in the dtype of the scale.
    """
    loss: Tensor = _FusedInfoNCE.apply(image, text, scale, positive, dtype or image.dtype)
    return loss


class _FusedInfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, scale: Tensor, positive: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.autocast(image.device.type, enabled=False):  # use exactly `dtype`
            scaled, text = (scale * image).to(dtype), text.to(dtype)
            logits = scaled @ text.T
        n, m = positive.shape
        rows, columns = true_places(positive)
        per_row, per_column = (
            torch.bincount(found, minlength=size).to(scale.dtype) for found, size in ((rows, n), (columns, m))
        )
        # The target of each positive, both directions together.
        target = 0.5 / (n * per_row[rows]) + 0.5 / (m * per_column[columns])
        # The largest float16 is 65,504, the exponential of a logit of 11.
        shared = float(scale) <= MAX_SHARED_SCALE and dtype != torch.float16
        chosen, row_sums, column_sums, gradient = (_softmax_shared if shared else _softmax_by_row)(
            logits, scale.dtype, rows, columns
        )
        # Late in training target and probability are almost equal: subtract before rounding.
        probability = 0.5 / n * (chosen - row_sums[rows]).exp() + 0.5 / m * (chosen - column_sums[columns]).exp()
        gradient[rows, columns] = (probability - target).to(dtype)
        ctx.save_for_backward(scaled, text, scale, gradient)
        return 0.5 * (row_sums.mean() + column_sums.mean()) - torch.dot(target, chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Propagate the gradient of the logits, computed in forward, to the features."""
        scaled, text, scale, gradient = ctx.saved_tensors
        by_scaled, by_text = (gradient @ text).to(scale.dtype), (gradient.T @ scaled).to(scale.dtype)
        # Gradient of the scale: the sum of each gradient times its cosine, which these products contain.
        by_scale = (by_scaled * scaled).sum() / scale
        return by_scaled.mul_(grad * scale), by_text.mul_(grad), by_scale * grad, None, None


def true_places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """`mask.nonzero()` for a sparse mask (n, m), in row order, reading eight flags at a time."""
    m = mask.shape[1]
    if m % FLAGS_PER_WORD or not mask.is_contiguous():
        return mask.nonzero(as_tuple=True)  # type: ignore[return-value]
    words = mask.view(torch.int64).view(-1).nonzero().view(-1)
    which, bit = mask.view(-1, FLAGS_PER_WORD)[words].nonzero(as_tuple=True)
    place = words[which] * FLAGS_PER_WORD + bit
    return place // m, place % m


def _softmax_shared(logits: Tensor, dtype: torch.dtype, rows: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    """(logits at (rows, columns), log-sum-exp of each row and of each column, gradient of their means).

    The gradient replaces the logits, in their precision; sums are in `dtype`.
    """
    n, m = logits.shape
    row_sums, column_sums = logits.new_empty(n, dtype=dtype), logits.new_zeros(m, dtype=dtype)
    size = max(1, INFONCE_BLOCK // m)
    blocks = [slice(start, start + size) for start in range(0, n, size)]
    for block in blocks:
        exponentials = logits[block].exp_()
        torch.sum(exponentials, dim=1, dtype=dtype, out=row_sums[block])
        column_sums += exponentials.sum(dim=0, dtype=dtype)
    # From the rounded exponentials, like the sums: a perfectly separated pair has a probability of exactly 1.
    chosen = logits[rows, columns].to(dtype).log()
    by_row, by_column = 0.5 / n / row_sums[:, None], 0.5 / m / column_sums
    for block in blocks:
        logits[block].mul_((by_row[block] + by_column).to(logits.dtype))
    return chosen, row_sums.log(), column_sums.log(), logits


def _softmax_by_row(logits: Tensor, dtype: torch.dtype, rows: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    """`_softmax_shared` at a scale where each row and column needs its own offset."""
    n, m = logits.shape
    wide = logits.to(dtype)
    gradient = wide.softmax(dim=1).mul_(0.5 / n).add_(wide.softmax(dim=0), alpha=0.5 / m)
    return wide[rows, columns], wide.logsumexp(dim=1), wide.logsumexp(dim=0), gradient.to(logits.dtype)


def text_contrast(
    features: Features, sample_ids: Tensor, caption_ids: Tensor, image_index: Tensor, blockwise: bool
) -> Tensor:
    """Contrastive loss between captions: those of one image are positives. Mean over captions that have a positive."""
    if blockwise:
        loss: Tensor = _BlockwiseTextContrast.apply(features.text, features.scale, sample_ids[image_index], caption_ids)
        return loss
    same_image = sample_ids[image_index][:, None] == sample_ids[image_index]
    same_caption = caption_ids[:, None] == caption_ids  # itself and duplicates: neither positive nor negative
    positive = same_image & ~same_caption
    counts = positive.sum(dim=1)
    # A row without positives keeps its logits: a row of only -inf would have a NaN gradient.
    ignored = same_caption & (counts > 0)[:, None]
    logits = similarity(features.scale * features.text, features.text).masked_fill(ignored, float("-inf"))
    log_probability = logits.log_softmax(dim=1).masked_fill(~positive, 0.0)
    rows = torch.where(counts > 0, log_probability.sum(dim=1) / counts.clamp(min=1), 0.0)
    return -rows.sum() / (counts > 0).sum().clamp(min=1)


class _BlockwiseTextContrast(torch.autograd.Function):
    """`text_contrast` in blocks of rows; the gradient is computed with the loss, so no logits are stored."""

    @staticmethod
    def forward(ctx: Any, text: Tensor, scale: Tensor, sample_ids: Tensor, caption_ids: Tensor) -> Tensor:
        by_text, loss, by_scale, count = torch.zeros_like(text), 0.0 * scale, 0.0 * scale, 0.0 * scale
        size = max(1, TEXT_BLOCK // len(text))
        with torch.autocast("cpu", enabled=False):
            for start in range(0, len(text), size):
                rows = slice(start, start + size)
                equal = caption_ids[rows, None] == caption_ids
                positive = (sample_ids[rows, None] == sample_ids) & ~equal
                counts = positive.sum(dim=1, keepdim=True)
                counted = counts > 0
                logits = ((scale * text[rows]) @ text.T).masked_fill_(equal & counted, float("-inf"))
                target = positive.to(text.dtype) / counts.clamp(min=1)
                sums = logits.logsumexp(dim=1, keepdim=True)
                loss += torch.where(counted, sums, 0.0).sum() - (logits.masked_fill(~positive, 0.0) * target).sum()
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
