"""Losses: InfoNCE, sigmoid, multi-positive, text-text and distillation, as pure functions of features."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
TERM_LOGITS = 1 << 23  # logits of one term of `loss_terms`: 32 MB of float32
ALL = slice(None)


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


class Terms(NamedTuple):
    """The loss of a run: its objective with the weights of its parts."""

    objective: str
    text_contrast: float = 0.0
    teacher: Callable[[Tensor, Tensor], Tensor] | None = None  # its logits (n, m) of sample and caption ids
    teacher_weight: float = 0.0


def loss_terms(
    loss: Terms,
    features: Callable[[], Features],
    sample_ids: Tensor,
    caption_ids: Tensor,
    image_index: Tensor,
    images: slice,
    texts: slice,
) -> Iterator[Tensor]:
    """The part of the loss that belongs to some images and captions, as terms of a few rows each.

    The terms of all rows add up to the loss. Each has at most TERM_LOGITS logits, so that with a backward pass after
    each term the memory of the loss grows with the batch, not with its square. `features` is called for each term.
    """
    n, m = len(sample_ids), len(caption_ids)
    teacher_weight = loss.teacher_weight if loss.teacher is not None else 0.0

    def positive(rows: slice, columns: slice) -> Tensor:
        return positives(loss.objective, sample_ids, caption_ids, image_index, rows, columns)

    def one_direction(logits: Tensor, positive: Tensor, teacher: Tensor | None) -> Tensor:
        """Of some rows; the mean over all rows and both directions."""
        total = logits.new_zeros(())
        if loss.objective != "sigmoid":
            target = positive.to(logits.dtype)
            target = target / target.sum(dim=1, keepdim=True)
            total = F.cross_entropy(logits, target, reduction="sum")
        if teacher is not None:
            kl = F.kl_div(logits.log_softmax(1), teacher.log_softmax(1), reduction="sum", log_target=True)
            total = (1 - teacher_weight) * total + teacher_weight * kl
        return total / 2

    for rows in _row_blocks(images, m):
        f = features()
        logits, matches = similarity(f.scale * f.image[rows], f.text), positive(rows, ALL)
        teacher = None if loss.teacher is None else loss.teacher(sample_ids[rows], caption_ids).to(logits.dtype)
        term = one_direction(logits, matches, teacher) / n
        if f.bias is not None and loss.objective == "sigmoid":
            sign = 2.0 * matches.to(logits.dtype) - 1.0
            term = term - (1 - teacher_weight) * F.logsigmoid(sign * (logits + f.bias)).sum() / m
        yield term
    both_directions = loss.objective != "sigmoid" or loss.teacher is not None
    if not both_directions and not loss.text_contrast:
        return
    for rows in _row_blocks(texts, max(n, m)):
        f = features()
        term = 0.0 * f.scale
        if both_directions:
            logits = similarity(f.scale * f.text[rows], f.image)
            teacher = None if loss.teacher is None else loss.teacher(sample_ids, caption_ids[rows]).T.to(logits.dtype)
            term = one_direction(logits, positive(ALL, rows).T, teacher) / m
        if loss.text_contrast:
            contrast = text_contrast_of_rows(f, sample_ids[image_index], caption_ids, rows)
            term = term + (1 - teacher_weight) * loss.text_contrast * contrast
        yield term


def _row_blocks(rows: slice, columns: int) -> Iterator[slice]:
    size = max(1, TERM_LOGITS // columns)
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


OBJECTIVES = {"infonce": infonce, "multi": infonce, "sigmoid": sigmoid}


def positives(
    objective: str,
    sample_ids: Tensor,
    caption_ids: Tensor,
    image_index: Tensor,
    images: slice = ALL,
    texts: slice = ALL,
) -> Tensor:
    """(n, m) bool: which pairs are positive; for plain infonce only each image's own captions.

    Else caption j describes image i if its image or one of that image's captions is the same.
    """
    if objective == "infonce":
        return torch.arange(len(sample_ids), device=image_index.device)[images, None] == image_index[texts]
    if images == texts == ALL and image_index.device.type == "cpu" and not is_fake(image_index):
        return _same_pairs_by_repeats(sample_ids, caption_ids, image_index)
    return _same_pairs(sample_ids, caption_ids, image_index, images, texts)


def _same_pairs(sample_ids: Tensor, caption_ids: Tensor, image_index: Tensor, images: slice, texts: slice) -> Tensor:
    """The rows `images` and columns `texts`, without a synchronization."""
    image_ids, text_images = sample_ids[images], image_index[texts]
    rows, columns = len(image_ids), len(text_images)
    same_image = image_ids[:, None] == sample_ids[text_images]
    # `column`: for each caption of the batch, a caption of this block that is equal; if there is none, one column more.
    number = numbered(caption_ids)
    places = torch.arange(columns, device=number.device)
    column = torch.full_like(number, columns).scatter_(0, number[texts], places)[number]
    row = image_index - (images.start or 0)
    row = torch.where((row >= 0) & (row < rows), row, rows)
    has_caption = torch.zeros((rows + 1) * (columns + 1), dtype=torch.bool, device=row.device)
    has_caption.scatter_(0, row * (columns + 1) + column, True)
    return same_image | has_caption.view(rows + 1, columns + 1)[:rows, column[texts]]


def numbered(values: Tensor) -> Tensor:
    """Equal values get the same number below their count; without counting the distinct ones, which would sync."""
    order = values.argsort()
    changes = values[order].diff(prepend=values[order[:1]]) != 0
    return torch.empty_like(order).scatter_(0, order, changes.cumsum(0))


def _same_pairs_by_repeats(sample_ids: Tensor, caption_ids: Tensor, image_index: Tensor) -> Tensor:
    """All pairs, where reading values is free (CPU): only images and captions that occur twice are compared."""
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
    return text_contrast_of_rows(features, sample_ids[image_index], caption_ids, ALL)


def text_contrast_of_rows(features: Features, image_ids: Tensor, caption_ids: Tensor, rows: slice) -> Tensor:
    """The part of `text_contrast` that belongs to some captions; `image_ids` (m,) are the ids of their images."""
    same_image = image_ids[rows, None] == image_ids
    same_caption = caption_ids[rows, None] == caption_ids  # itself and duplicates: neither positive nor negative
    positive = same_image & ~same_caption
    counts = positive.sum(dim=1)
    # A row without positives keeps its logits: a row of only -inf would have a NaN gradient.
    ignored = same_caption & (counts > 0)[:, None]
    logits = similarity(features.scale * features.text[rows], features.text).masked_fill(ignored, float("-inf"))
    log_probability = logits.log_softmax(dim=1).masked_fill(~positive, 0.0)
    per_row = torch.where(counts > 0, log_probability.sum(dim=1) / counts.clamp(min=1), 0.0)
    return -per_row.sum() / _captions_with_positives(image_ids, caption_ids).clamp(min=1)


def _captions_with_positives(image_ids: Tensor, caption_ids: Tensor) -> Tensor:
    """How many captions have a different caption of the same image in the batch."""
    number = numbered(image_ids)
    both = numbered(number * len(number) + numbered(caption_ids))

    def occurrences(values: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter_add_(0, values, torch.ones_like(values))[values]

    return (occurrences(number) > occurrences(both)).sum()


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
