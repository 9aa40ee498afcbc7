"""The loss of a run and its gradients: at once or in blocks, for all rows or those of one rank."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from m1clip.losses import fused
from m1clip.losses.positives import ALL, captions_with_positives, targets
from m1clip.losses.registry import Ids, Loss, text_contrast_rows
from m1clip.model.backward import backward_from
from m1clip.model.clip import Features
from m1clip.model.members import vectors_by_member

TEACHER_WEIGHT = 0.5  # of the distillation loss; the rest of the loss has the other half
MAX_LOGITS = 1 << 26  # a larger loss is computed in blocks; 256 MB of float32
TERM_LOGITS = 1 << 23  # logits of one block: 32 MB of float32
# Maximum rows of a matmul. Its gradients are sums over rows, and MPS computes longer sums wrong on
# M1 and M2 (pytorch#193487).
MAX_ROWS = 32_766
# With as many pairs, the matmul of the logits is in autocast's precision; the rest never is.
HALF_PRECISION_PAIRS = 1 << 20

# Sample ids (n,), caption ids (m,) -> logits (n, m).
TeacherLogits = Callable[[Tensor, Tensor], Tensor]
# Opens a context, such as autocast.
Context = Callable[[], AbstractContextManager[object]]


class Rows(NamedTuple):
    """The rows of a batch that belong to one process."""

    images: slice
    captions: slice


class TorchOps:
    """The operations of a row term (registry.Ops) in torch."""

    @staticmethod
    def cast(x: Tensor, like: Tensor) -> Tensor:
        """Convert to the dtype of another tensor, or to float32 if that is wider."""
        return x.to(torch.promote_types(like.dtype, torch.float32))

    @staticmethod
    def log_softmax(x: Tensor) -> Tensor:
        """Normalize each row."""
        return x.log_softmax(dim=1)

    @staticmethod
    def log_sum_exp(x: Tensor) -> Tensor:
        """Return the logarithm of the summed exponentials of each row."""
        return x.logsumexp(dim=1, keepdim=True)

    @staticmethod
    def log_sigmoid(x: Tensor) -> Tensor:
        """Take the logarithm of the sigmoid, without overflow."""
        return F.logsigmoid(x)

    @staticmethod
    def masked_fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
        """Replace the elements where the mask is true."""
        return x.masked_fill(mask, value)


TORCH = TorchOps()


def similarity(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot products (n, m) of vectors (n, d) and (m, d)."""
    if max(len(a), len(b)) <= MAX_ROWS:
        return a @ b.T
    parts = b.split(MAX_ROWS)
    blocks = []
    for rows in a.split(MAX_ROWS):
        blocks.append(torch.cat([rows @ part.T for part in parts], dim=1))
    return torch.cat(blocks)


def distillation_rows(logits: Tensor, teacher: Tensor) -> Tensor:
    """Sum the KL divergence from the teacher's logits over the rows, in nats."""
    student = logits.log_softmax(dim=1)
    return F.kl_div(student, teacher.log_softmax(dim=1), reduction="sum", log_target=True)


def distillation(features: Features, teacher: Tensor) -> Tensor:
    """Average the KL divergence from a teacher's logits (n, m) over both directions."""
    logits = similarity(features.scale * features.image, features.text)
    n, m = logits.shape
    by_image = distillation_rows(logits, teacher) / n
    by_caption = distillation_rows(logits.T, teacher.T) / m
    return (by_image + by_caption) / 2


@dataclass(frozen=True)
class RunLoss:
    """The loss of a run: an objective of LOSSES, a loss between captions, and a teacher.

    A training step needs only `loss_and_grads`, whether it encodes the batch at once or in
    micro-batches, and whether it has all rows of the batch or those of one rank.
    """

    objective: Loss
    text_contrast: float = 0.0  # weight of the loss between captions
    teacher: TeacherLogits | None = None
    fused: bool = True  # use the fused forms on the CPU
    members: int = 1  # of the model: the loss is the mean of theirs (model/members.py)

    def loss_and_grads(
        self,
        features: Features,
        ids: Ids,
        rows: Rows | None = None,
        *,
        autocast: Context = nullcontext,
        backward: Callable[[Tensor], None] = Tensor.backward,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the detached loss, and its gradients [(n, d), (m, d)] by image and text features.

        `features` and `ids` are those of the complete batch. The gradients of scale and bias are
        added to the parameters they come from. Graphs of the image and text features are not used:
        continue with `torch.autograd.backward([image, text], gradients)`.

        `rows` are the rows of this process; None: all. Loss and gradients are then those of its
        rows against all features, and add up to those of the batch over the processes.

        A small loss is computed at once. A large one, or that of a rank, is computed in blocks with
        a backward pass after each, so that its memory grows with the batch and not with its square.
        `backward` is called with each block's loss; it may scale the loss (fp16), and then all
        gradients are scaled.

        Everything is computed in the precision of the features, float32. Only the matmul of a loss
        that is computed at once, and has at least HALF_PRECISION_PAIRS logits, is in the precision
        of `autocast`.
        """
        if self.members > 1:
            return self._of_members(features, ids, rows, autocast, backward)
        leaves = self._leaves(features)
        if rows is None:
            rows = Rows(slice(0, len(ids.sample_ids)), slice(0, len(ids.caption_ids)))
        with without_autocast(leaves.image.device):
            if self._fits(ids, rows):
                loss = self.value(leaves, ids, autocast)
                backward(loss)
                total = loss.detach()
            else:
                total = torch.zeros_like(leaves.scale)
                for term in self._terms(leaves, ids, rows):
                    backward(term)
                    total += term.detach()
        _backward_into(features.scale, leaves.scale)
        if features.bias is not None and leaves.bias is not None:
            _backward_into(features.bias, leaves.bias)
        return total, [_gradient(leaves.image), _gradient(leaves.text)]

    def value(self, features: Features, ids: Ids, autocast: Context = nullcontext) -> Tensor:
        """Return the loss of a batch, with a graph; for the precision see `loss_and_grads`."""
        positive = targets(self.objective.positives, ids)
        with autocast():
            dtype = _matmul_dtype(features.image, positive.numel())
        with without_autocast(features.image.device):
            loss = self._objective(features, positive, dtype)
            if self.text_contrast:
                loss = loss + self.text_contrast * self._contrast(features, ids)
            if self.teacher is not None:
                teacher = self.teacher(ids.sample_ids, ids.caption_ids)
                by_teacher = distillation(features, teacher)
                loss = (1 - TEACHER_WEIGHT) * loss + TEACHER_WEIGHT * by_teacher
        return loss

    def _of_members(
        self,
        features: Features,
        ids: Ids,
        rows: Rows | None,
        autocast: Context,
        backward: Callable[[Tensor], None],
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the mean of the members' losses, and its gradients by the features of all."""
        own = replace(self, members=1)
        leaves = self._leaves(features)
        total = torch.zeros_like(leaves.scale)
        gradients = []
        by_member = zip(
            vectors_by_member(leaves.image.detach(), self.members),
            vectors_by_member(leaves.text.detach(), self.members),
            strict=True,
        )
        for image, text in by_member:
            loss, by_features = own.loss_and_grads(
                Features(image, text, leaves.scale, leaves.bias),
                ids,
                rows,
                autocast=autocast,
                backward=lambda term: backward(term / self.members),
            )
            total += loss / self.members
            gradients.append(by_features)
        _backward_into(features.scale, leaves.scale)
        if features.bias is not None and leaves.bias is not None:
            _backward_into(features.bias, leaves.bias)
        factor = self.members**0.5  # of a member's vector in that of the model
        joined = [torch.cat(side, dim=1) * factor for side in zip(*gradients, strict=True)]
        return total, joined

    def _leaves(self, features: Features) -> Features:
        """Make features the leaves of a new graph, without a bias that the loss does not use."""
        bias = None
        if self.objective.needs_bias:
            assert features.bias is not None, "this loss needs a model with a logit bias"
            bias = features.bias.detach().requires_grad_()
        return Features(
            features.image.detach().requires_grad_(),
            features.text.detach().requires_grad_(),
            features.scale.detach().requires_grad_(),
            bias,
        )

    def _fits(self, ids: Ids, rows: Rows) -> bool:
        """Whether the rows are the complete batch, with few enough logits to compute it at once."""
        n = len(ids.sample_ids)
        m = len(ids.caption_ids)
        return rows == (slice(0, n), slice(0, m)) and n * m <= MAX_LOGITS

    def _objective(self, features: Features, positive: Tensor, dtype: torch.dtype) -> Tensor:
        # The fused forms read values: on an accelerator this would synchronize, and a fake tensor
        # (training/memory.py) has none.
        fusible = features.image.device.type == "cpu" and not is_fake(features.image)
        if self.objective.fused is not None and self.fused and fusible:
            return self.objective.fused(features, positive, dtype)
        scaled = features.scale * features.image
        logits = similarity(scaled.to(dtype), features.text.to(dtype)).to(features.image.dtype)
        logits = self._with_bias(logits, features)
        loss: Tensor = self.objective.of_logits(TORCH, logits, positive)
        return loss

    def _contrast(self, features: Features, ids: Ids) -> Tensor:
        if self.fused and features.text.device.type == "cpu":
            image_ids = ids.sample_ids[ids.image_index]
            return fused.text_contrast(features.text, features.scale, image_ids, ids.caption_ids)
        return self._contrast_rows(features, ids, ALL)

    def _terms(self, features: Features, ids: Ids, rows: Rows) -> Iterator[Tensor]:
        """Yield the loss of some rows as terms of at most TERM_LOGITS logits.

        The terms of all rows add up to the loss of the batch.
        """
        n = len(ids.sample_ids)
        m = len(ids.caption_ids)
        for block in _row_blocks(rows.images, m):
            yield self._image_term(features, ids, block)
        if not self.objective.pairwise or self.teacher is not None or self.text_contrast:
            for block in _row_blocks(rows.captions, max(n, m)):
                yield self._caption_term(features, ids, block)

    def _image_term(self, features: Features, ids: Ids, rows: slice) -> Tensor:
        """Compute the loss of some images against all captions."""
        n = len(ids.sample_ids)
        m = len(ids.caption_ids)
        logits = similarity(features.scale * features.image[rows], features.text)  # (rows, m)
        positive = targets(self.objective.positives, ids, rows, ALL)
        biased = self._with_bias(logits, features)
        term: Tensor = self.objective.image_rows(TORCH, biased, positive, n, m)
        if self.teacher is not None:
            teacher = self.teacher(ids.sample_ids[rows], ids.caption_ids).to(logits.dtype)
            by_image = distillation_rows(logits, teacher) / (2 * n)
            term = (1 - TEACHER_WEIGHT) * term + TEACHER_WEIGHT * by_image
        return term

    def _caption_term(self, features: Features, ids: Ids, rows: slice) -> Tensor:
        """Compute the loss of some captions against all images, and against other captions."""
        m = len(ids.caption_ids)
        term = torch.zeros_like(features.scale)
        if self.text_contrast:
            term = term + self.text_contrast * self._contrast_rows(features, ids, rows)
        if self.objective.pairwise and self.teacher is None:
            return term
        logits = similarity(features.scale * features.text[rows], features.image)  # (rows, n)
        if not self.objective.pairwise:
            positive = targets(self.objective.positives, ids, ALL, rows).T
            biased = self._with_bias(logits, features)
            term = term + self.objective.caption_rows(TORCH, biased, positive, m)
        if self.teacher is not None:
            teacher = self.teacher(ids.sample_ids, ids.caption_ids[rows]).T.to(logits.dtype)
            by_caption = distillation_rows(logits, teacher) / (2 * m)
            term = (1 - TEACHER_WEIGHT) * term + TEACHER_WEIGHT * by_caption
        return term

    def _contrast_rows(self, features: Features, ids: Ids, rows: slice) -> Tensor:
        """Compute the loss of some captions against others, per caption that has a positive."""
        image_ids = ids.sample_ids[ids.image_index]
        same_image = image_ids[rows, None] == image_ids
        same_caption = ids.caption_ids[rows, None] == ids.caption_ids
        logits = similarity(features.scale * features.text[rows], features.text)
        total: Tensor = text_contrast_rows(TORCH, logits, same_image, same_caption)
        return total / captions_with_positives(ids)

    def _with_bias(self, logits: Tensor, features: Features) -> Tensor:
        if not self.objective.needs_bias:
            return logits
        assert features.bias is not None, "this loss needs a model with a logit bias"
        return logits + features.bias


def _matmul_dtype(image: Tensor, pairs: int) -> torch.dtype:
    """Return the precision in which the logits of a batch are multiplied."""
    kind = image.device.type
    if pairs >= HALF_PRECISION_PAIRS and _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return image.dtype


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    return (
        torch.autocast(device.type, enabled=False) if _has_autocast(device.type) else nullcontext()
    )


def _has_autocast(kind: str) -> bool:
    """Whether torch has autocast for a kind of device; the meta device has none."""
    return torch.amp.is_autocast_available(kind)


def _row_blocks(rows: slice, columns: int) -> Iterator[slice]:
    """Split rows into blocks of at most TERM_LOGITS logits."""
    size = max(1, TERM_LOGITS // columns)
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def _backward_into(tensor: Tensor, leaf: Tensor) -> None:
    """Continue the backward pass of a leaf in the graph of the tensor it was taken from."""
    if tensor.requires_grad:
        backward_from([tensor], [_gradient(leaf)])


def _gradient(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf; zeros on a rank without rows."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
