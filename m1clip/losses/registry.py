"""Each loss once. `LOSSES` gives the choices and help of `--loss`, the training step and the tests.

A loss is written as its row term: some rows of logits -> the summed loss of those rows. The loss
of a batch, of a block of rows, of one rank's rows (run_loss.py) and the loss in MLX follow from it,
so a new entry here works everywhere. Only MLX does not train a loss that needs a bias.

The command line reads this module, so it does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # heavy imports
    from torch import Tensor

Array = Any  # a tensor of torch, or an array of MLX


class Ops(Protocol):
    """The operations that torch and MLX write differently.

    A row term uses these and what both libraries write alike: the operators of Python (`+`, `*`,
    `**`, `@`, `<`, `&`, `~`), slices, `x[:, None]`, `x.T`, `x.shape`, `x.abs()`, and `x.sum(...)`
    and `x.mean(...)` with `axis` and `keepdims`. The operations return new arrays, have a gradient,
    and read no values. Nor may a row term (no `if` on a value, no `.item()`): on an accelerator it
    would wait for the device, and MLX compiles the step.

    An operation that is missing is added to this class, to `TorchOps` (run_loss.py) and to `MLXOps`
    (mlx/step.py).

    Logits are float32, whatever the precision of the towers; float64 in some tests.
    """

    @staticmethod
    def cast(x: Array, like: Array) -> Array:
        """Convert to the dtype of another array, or to float32 if that is wider.

        Bools become 0 and 1, so `cast(positive, logits)` is a target.
        """

    @staticmethod
    def log_softmax(x: Array) -> Array:
        """Normalize each row of a matrix: the exponentials of a row add up to 1."""

    @staticmethod
    def log_sum_exp(x: Array) -> Array:
        """Reduce each row of a matrix to the logarithm of its summed exponentials: (rows, 1)."""

    @staticmethod
    def log_sigmoid(x: Array) -> Array:
        """Take the logarithm of the sigmoid of each element, finite for every finite element."""

    @staticmethod
    def masked_fill(x: Array, mask: Array, value: float) -> Array:
        """Replace the elements where the mask is true; they pass on no gradient."""


class Ids(NamedTuple):
    """Which images and captions of a batch belong together."""

    sample_ids: Tensor  # (n,) of the images
    caption_ids: Tensor  # (m,) equal for equal texts
    image_index: Tensor  # (m,) the row of each caption's image
    mixed: Tensor | None = None  # (n,) the part of each image that shows its partner (CutMix)


# (ops, logits (rows, columns), positive (rows, columns) bool, or targets from 0 to 1 for a loss that
# takes them) -> the summed loss of the rows
RowTerm = Callable[..., Array]
# (ids, rows of images, columns of captions) -> (rows, columns) bool: which pairs match
Positives = Callable[[Ids, slice, slice], "Tensor"]
# (model.clip.Features of a batch, positive (n, m) bool, dtype of the matmuls) -> the loss of the
# batch
FusedLoss = Callable[..., "Tensor"]


@dataclass(frozen=True)
class Imported:
    """A function of another module of this package, imported when it is called: it needs torch."""

    module: str
    name: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        function = getattr(import_module(f"m1clip.losses.{self.module}"), self.name)
        return function(*arguments, **options)


# Match each image with its own captions only.
OWN_CAPTIONS = Imported("positives", "own_captions")
# Match each image also with captions of the same image, and with captions equal to its own.
SAME_IMAGE_OR_CAPTION = Imported("positives", "same_image_or_caption")


@dataclass(frozen=True)
class Loss:
    """A loss between n images and m captions.

    By default it is the mean over all images (each against all captions) and the mean over all
    captions (each against all images), averaged. A pairwise loss treats each pair on its own, so
    the rows of the images contain everything; their sum is divided by the number of captions.
    """

    help: str
    row_term: RowTerm
    positives: Positives
    pairwise: bool = False
    needs_bias: bool = False  # the logits include the model's bias
    # Numbers from 0 to 1 instead of bools, as CutMix needs; such a loss can be smoothed.
    takes_targets: bool = False
    # An optimization, never needed: the same loss of a batch in one pass, faster on the CPU.
    fused: FusedLoss | None = None

    def smoothed(self, smoothing: float) -> Loss:
        """The same, with this part of each row's target spread over all columns."""
        if not smoothing:
            return self
        assert self.takes_targets, "resolve.py rejects label smoothing of other losses"
        fused = None if self.fused is None else partial(self.fused, smoothing=smoothing)
        return replace(self, row_term=partial(self.row_term, smoothing=smoothing), fused=fused)

    def image_rows(self, ops: Ops, logits: Array, positive: Array, n: int, m: int) -> Array:
        """Return what some images contribute to the loss, given their rows of the logits."""
        return self.row_term(ops, logits, positive) / (m if self.pairwise else 2 * n)

    def caption_rows(self, ops: Ops, logits: Array, positive: Array, m: int) -> Array:
        """Return what some captions contribute; not for a pairwise loss, where it is nothing."""
        return self.row_term(ops, logits, positive) / (2 * m)

    def of_logits(self, ops: Ops, logits: Array, positive: Array) -> Array:
        """Return the loss of a batch from all logits (n, m)."""
        n, m = logits.shape
        loss = self.image_rows(ops, logits, positive, n, m)
        if self.pairwise:
            return loss
        return loss + self.caption_rows(ops, logits.T, positive.T, m)


def infonce_rows(ops: Ops, logits: Array, positive: Array, smoothing: float = 0.0) -> Array:
    """Cross-entropy; the target of a row is spread over its positives, by their weights.

    A part of it (`smoothing`) is spread over all columns.
    """
    target = ops.cast(positive, logits)
    target = target / target.sum(axis=1, keepdims=True)
    target = (1 - smoothing) * target + smoothing / logits.shape[1]
    return -(target * ops.log_softmax(logits)).sum()


def sigmoid_rows(ops: Ops, logits: Array, positive: Array) -> Array:
    """Binary classification of each pair."""
    sign = 2.0 * ops.cast(positive, logits) - 1.0
    return -ops.log_sigmoid(sign * logits).sum()


LOSSES: dict[str, Loss] = {
    "infonce": Loss(
        help="CLIP's loss, where each image matches only its own captions",
        row_term=infonce_rows,
        positives=OWN_CAPTIONS,
        takes_targets=True,
        fused=Imported("fused", "infonce"),
    ),
    "sigmoid": Loss(
        help="SigLIP's loss, with a bias, and with the matches of multi-positive",
        row_term=sigmoid_rows,
        positives=SAME_IMAGE_OR_CAPTION,
        pairwise=True,
        needs_bias=True,
    ),
    "multi-positive": Loss(
        help="infonce where every true pair of a batch counts as right: copies of an image share "
        "their captions, and an image matches a caption equal to one of its own",
        row_term=infonce_rows,
        positives=SAME_IMAGE_OR_CAPTION,
        takes_targets=True,
        fused=Imported("fused", "infonce"),
    ),
}
DEFAULT_LOSS = "multi-positive"


def text_contrast_rows(ops: Ops, logits: Array, same_image: Array, same_caption: Array) -> Array:
    """Contrast captions with each other: (rows, m) logits -> the summed loss of the rows.

    Other captions of the same image are positives. A caption itself and its duplicates are neither
    positive nor negative. A row without positives has no loss.
    """
    positive = same_image & ~same_caption
    counts = positive.sum(axis=1)
    has_positives = counts > 0
    # A row without positives keeps its logits: a row of only -inf would have a NaN gradient.
    ignored = same_caption & has_positives[:, None]
    log_probability = ops.log_softmax(ops.masked_fill(logits, ignored, float("-inf")))
    per_row = ops.masked_fill(log_probability, ~positive, 0.0).sum(axis=1)
    return -(per_row / ops.masked_fill(counts, ~has_positives, 1)).sum()
