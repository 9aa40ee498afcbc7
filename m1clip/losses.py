"""What training makes small: functions of features, which know nothing of ranks, devices or steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable

from m1clip.model.clip import Features

AT_ONCE = 1 << 20  # logits of a block, 4 MB


def text_contrast(features: Features, images: Tensor, captions: Tensor, image_index: Tensor, in_blocks: bool) -> Tensor:
    """The mean over captions that have another of their image; one without counts nothing."""
    if in_blocks:
        loss: Tensor = _InBlocks.apply(features.text, features.scale, images[image_index], captions)
        return loss
    return at_once(features, images, captions, image_index)


def at_once(features: Features, images: Tensor, captions: Tensor, image_index: Tensor) -> Tensor:
    """The definition, with all logits in memory: five captions an image make 25 times as many as its images have."""
    same_image = images[image_index][:, None] == images[image_index]
    same_caption = captions[:, None] == captions  # itself, and equal ones: neither right nor wrong
    positive = same_image & ~same_caption
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
    def forward(ctx: Any, text: Tensor, scale: Tensor, images: Tensor, captions: Tensor) -> Tensor:
        by_text, loss, by_scale, number = torch.zeros_like(text), 0.0 * scale, 0.0 * scale, 0.0 * scale
        step = max(1, AT_ONCE // len(text))
        with torch.autocast("cpu", enabled=False):
            for at in range(0, len(text), step):
                rows = slice(at, at + step)
                equal = captions[rows, None] == captions
                positive = (images[rows, None] == images) & ~equal
                counts = positive.sum(dim=1, keepdim=True)
                counted = counts > 0
                logits = ((scale * text[rows]) @ text.T).masked_fill_(equal & counted, float("-inf"))
                target = positive.to(text.dtype) / counts.clamp(min=1)
                tops = logits.logsumexp(dim=1, keepdim=True)
                loss += torch.where(counted, tops, 0.0).sum() - (logits.masked_fill(~positive, 0.0) * target).sum()
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


# Up to this scale exp(logit) and its sums are normal float32 numbers; above it each row needs an offset of its own.
SAFE_SCALE = 75.0
CONTRAST_AT_ONCE = 1 << 19  # logits: a megabyte in bf16, which stays in the processor's cache
WORD = 8  # flags in an int64


class _InfoNce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, scale: Tensor, positive: Tensor, dtype: torch.dtype) -> Tensor:
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
    blocks = [slice(at, at + max(1, CONTRAST_AT_ONCE // m)) for at in range(0, n, max(1, CONTRAST_AT_ONCE // m))]
    for block in blocks:
        part = logits[block].exp_()
        torch.sum(part, dim=1, dtype=kind, out=by_row[block])
        by_column += part.sum(dim=0, dtype=kind)
    # Of the rounded exponentials, like the sums: an image that is told from all others has a share of exactly one.
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


LARGE = 1 << 20  # pairs of a step, from which its products are made in autocast's precision, if that is on


def own_pairs(images: int, image_index: Tensor) -> Tensor:
    """(n, m) bool: caption j was given to image i."""
    return torch.arange(images, device=image_index.device)[:, None] == image_index


def same_pairs(images: Tensor, captions: Tensor, image_index: Tensor) -> Tensor:
    """(n, m) bool: text j also describes image i, because the image, or one of its captions here, is the same."""
    if image_index.device.type == "cpu" and not is_fake(image_index):
        return _few_same_pairs(images, captions, image_index)
    same_image = images[:, None] == images[image_index]
    # Equal captions get one number below m, without asking how many there are: that would make the host wait.
    order = captions.argsort()
    steps = captions[order].diff(prepend=captions[order[:1]]) != 0
    number = torch.empty_like(order).scatter_(0, order, steps.cumsum(0))
    told = torch.zeros(same_image.numel(), dtype=torch.bool, device=image_index.device)
    told.scatter_(0, image_index * len(captions) + number, True)  # image i has a caption with this number
    return same_image | told.view(same_image.shape)[:, number]


def _few_same_pairs(images: Tensor, captions: Tensor, image_index: Tensor) -> Tensor:
    """The same where looking at values costs nothing: only images and captions that are there twice are compared."""
    own = torch.zeros(len(images), len(captions), dtype=torch.bool)
    own[image_index, torch.arange(len(captions))] = True
    twins = _repeated(images)
    own[twins] = images[twins, None] == images[image_index]
    twins = _repeated(captions)
    _, number = captions[twins].unique(return_inverse=True)
    told = torch.zeros(len(images), len(twins), dtype=torch.bool)
    told[image_index[twins], number] = True  # image i has a caption with this number
    own[:, twins] |= told[:, number]
    return own


def _repeated(values: Tensor) -> Tensor:
    """Where a value stands that is there more than once."""
    _, number, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts[number] > 1).nonzero().view(-1)


def infonce(features: Features, positive: Tensor, smoothing: float = 0.0) -> Tensor:
    """CLIP's loss; the target is spread evenly over all captions (images) that belong to the image (caption)."""
    # It looks at values, which on a device would make the host wait, and which a fake tensor (train/memory.py) has not.
    if smoothing == 0 and features.image.device.type == "cpu" and not is_fake(features.image):
        half = torch.is_autocast_enabled("cpu") and positive.numel() >= LARGE
        dtype = torch.get_autocast_dtype("cpu") if half else None
        return fused_infonce(features.image, features.text, features.scale, positive, dtype)
    logits = features.scale * features.image @ features.text.T  # (n, m)
    target = positive.to(logits.dtype)

    def one_way(logits: Tensor, target: Tensor) -> Tensor:
        target = target / target.sum(dim=1, keepdim=True)
        return F.cross_entropy(logits, target, label_smoothing=smoothing)

    return (one_way(logits, target) + one_way(logits.T, target.T)) / 2


def sigmoid(features: Features, positive: Tensor, smoothing: float = 0.0) -> Tensor:
    """SigLIP's loss: each of the n x m pairs is asked on its own whether it belongs together."""
    assert features.bias is not None, "the sigmoid loss needs a model with a logit bias"
    logits = features.scale * features.image @ features.text.T + features.bias
    sign = 2.0 * positive.to(logits.dtype) - 1.0
    return -F.logsigmoid(sign * logits).sum() / logits.shape[1]


def distillation(features: Features, teacher: Tensor) -> Tensor:
    """How far what is thought of the pairs is from what a teacher's logits (n, m) say: KL, both ways, in nats."""
    logits = features.scale * features.image @ features.text.T

    def one_way(logits: Tensor, wanted: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(dim=1), wanted.log_softmax(dim=1), reduction="batchmean", log_target=True)

    return (one_way(logits, teacher) + one_way(logits.T, teacher.T)) / 2


OBJECTIVES = {"infonce": infonce, "multi": infonce, "sigmoid": sigmoid}


def positives(objective: str, images: Tensor, captions: Tensor, image_index: Tensor) -> Tensor:
    """(n, m) bool: what counts as belonging together; plain infonce counts only what was given together."""
    if objective == "infonce":
        return own_pairs(len(images), image_index)
    return same_pairs(images, captions, image_index)
