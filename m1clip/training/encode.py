"""The first seam of a training step: encode a batch all at once, or in chunks with the exact
gradient.

A contrastive loss needs all features of a batch at once, but only the towers' activations are
large. In chunks (GradCache, arXiv 2101.06983) the batch is encoded without a graph, the loss is
computed once over all features, and then each chunk is re-encoded with a graph and backpropagates
the gradient of its features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from m1clip.data import randomness as rnd
from m1clip.data.augment import paste_boxes, render
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.formatting import ceil_div
from m1clip.hardware.device import Autocast, Device, Precision, autocast
from m1clip.losses.positives import with_partners
from m1clip.model.backward import backward_from
from m1clip.model.clip import CLIP
from m1clip.model.heads import Head, hash64

DROPOUT_ATTRIBUTES = ("p", "drop_prob", "dropout", "dropout_prob", "attention_dropout", "layerdrop")
DROPOUT_STREAM = 1 << 16  # a random stream separate from the data's
INSPECTED_ROWS = 32  # rows of a non-finite step to inspect at a time
ONE_ROW = slice(0, 1)

Mark = Callable[[str], None]  # begins a phase of the step
DONE = ""  # the phase after the last one of a step
# Called before each backward pass with whether it is the last one of its parameters.
Passes = Callable[[bool], None]


def ignore_mark(phase: str) -> None:
    """Measure nothing."""


class EncodedBatch(Protocol):
    """The features of a batch, and the way back."""

    features: list[Tensor]  # images (n, d), captions (m, d)

    def backward(self, gradients: Sequence[Tensor], before_pass: Passes) -> None:
        """Add to every parameter what follows from the gradients of the features."""


@dataclass
class EncodedAtOnce:
    """Features with their graph: one backward pass."""

    features: list[Tensor]
    mark: Mark

    def backward(self, gradients: Sequence[Tensor], before_pass: Passes) -> None:
        before_pass(True)
        self.mark("backward")
        backward_from(self.features, gradients)
        self.features = []  # frees what is left of the graph before the update


@dataclass
class EncodedInChunks:
    """Features without a graph: each chunk is encoded again for its backward pass."""

    features: list[Tensor]
    towers: Sequence[ChunkedTower]
    mark: Mark
    autocast: Autocast
    no_autocast: Autocast  # for backward passes

    def backward(self, gradients: Sequence[Tensor], before_pass: Passes) -> None:
        with self.autocast():
            for tower, gradient in zip(self.towers, gradients, strict=True):
                self._backward_of(tower, gradient, before_pass)

    def _backward_of(self, tower: ChunkedTower, gradient: Tensor, before_pass: Passes) -> None:
        zero = torch.zeros_like(gradient[ONE_ROW])
        passes = [(rows, gradient[rows]) for rows in tower.chunks] + [
            (ONE_ROW, zero)
        ] * tower.idle_calls
        for number, (rows, part) in enumerate(passes, start=1):
            self.mark("preprocess")
            encode, inputs = tower.call(rows)
            self.mark("forward")
            encoded = encode(*inputs)
            before_pass(number == len(passes))
            self.mark("backward")
            with self.no_autocast():
                backward_from([encoded], [part])


class TowerCall(NamedTuple):
    """A call of the model that has been prepared: `encode(*inputs)` gives unit vectors."""

    encode: Callable[..., Tensor]
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class ChunkedTower:
    """One encoder and the chunks of its input.

    `call(rows)` gives the same features for the same rows each time.
    """

    call: Callable[[slice], TowerCall]
    chunks: list[slice]
    idle_calls: int = (
        0  # without a result: with sharded weights, all ranks call a tower equally often
    )


class BatchEncoder:
    """Encodes the batches of a training step with the model that is trained."""

    def __init__(
        self,
        model: CLIP,
        device: Device,
        precision: Precision,
        preprocess: Preprocess,
        seed: int,
        compile: bool = False,
        rank: int = 0,
    ) -> None:
        self.model = model
        self.device = device
        self.precision = precision
        self.preprocess = preprocess
        self.seed = seed
        self.rank = rank
        self.autocast = autocast(device, precision)
        self.no_autocast = autocast(device, precision, enabled=False)
        self.has_dropout = has_dropout(model)
        # Compiled code may draw different dropout masks with and without an autograd graph.
        self.first_pass_with_graph = compile and self.has_dropout
        compiled: Callable[[Any], Any] = torch.compile if compile else lambda function: function
        self.encode_image = compiled(model.encode_view)
        self.encode_text = compiled(model.encode_text)
        self.project_image = compiled(model.project_image)
        self.project_text = compiled(model.project_text)

    def forward(
        self,
        batch: Batch,
        step: int,
        chunk: int = 0,
        most_calls: Callable[[list[int]], list[int]] = lambda calls: calls,
        mark: Mark = ignore_mark,
    ) -> EncodedBatch:
        """Encode a batch on the device: all at once with a graph, or `chunk` images at a time
        without one.

        `most_calls` gives the calls of each tower that all ranks must make, for those that this
        rank needs.
        """
        mark("forward")
        image_tower, text_tower = self._towers(batch, step, chunk, most_calls)
        if not chunk:
            self._seed_dropout(step, 0)
        features: list[Tensor] = []
        # One autocast context per pass: its cache of cast weights saves a cast per chunk, but casts
        # made without a graph must not be reused in the pass that needs one.
        with self.autocast(), torch.set_grad_enabled(not chunk or self.first_pass_with_graph):
            # Text first: the backward pass then starts with the larger tower and frees its
            # activations.
            for tower in (text_tower, image_tower):
                encoded: list[Tensor] = []
                for rows in tower.chunks + [ONE_ROW] * tower.idle_calls:
                    mark("preprocess")
                    encode, inputs = tower.call(rows)
                    mark("forward")
                    vectors = encode(*inputs)
                    if len(encoded) >= len(tower.chunks):
                        vectors = vectors[:0]  # an idle call
                    encoded.append(vectors.detach() if chunk else vectors)
                features.append(encoded[0] if len(encoded) == 1 else torch.cat(encoded))
        text, image = features
        if not chunk:
            return EncodedAtOnce([image, text], mark)
        towers = (image_tower, text_tower)
        return EncodedInChunks([image, text], towers, mark, self.autocast, self.no_autocast)

    def _towers(
        self, batch: Batch, step: int, chunk: int, most_calls: Callable[[list[int]], list[int]]
    ) -> list[ChunkedTower]:
        """Both encoders with their input in slices: as few as the device takes, or chunks."""
        image_keys, text_keys = self.dropout_keys(batch, step)

        def call_of_images(rows: slice) -> TowerCall:
            if chunk:  # else `forward` has seeded the dropout of the batch
                self._seed_dropout(step, 2 * rows.start)
            return self.image_call(batch, rows, image_keys)

        def call_of_texts(rows: slice) -> TowerCall:
            if chunk:
                self._seed_dropout(step, 2 * rows.start + 1)
            return self.text_call(batch, rows, text_keys)

        images, captions = len(batch), len(batch.caption_ids)
        max_images, max_texts = self._max_rows(batch)
        text_groups = batch.text_rows()
        if chunk:
            max_images = min(chunk, max_images)
            max_texts = min(ceil_div(chunk * captions, images), max_texts)
            text_groups = [slice(0, captions)]
        image_slices = split(slice(0, images), max_images)
        text_slices = [part for rows in text_groups for part in split(rows, max_texts)]
        image_calls, text_calls = most_calls([len(image_slices), len(text_slices)])
        return [
            ChunkedTower(call_of_images, image_slices, image_calls - len(image_slices)),
            ChunkedTower(call_of_texts, text_slices, text_calls - len(text_slices)),
        ]

    def _max_rows(self, batch: Batch) -> tuple[int, int]:
        """How many images and how many captions the device may encode in one call."""
        rules = self.device.capabilities
        image_tokens = (
            self.model.image_tower.tokens_per_image if batch.image_features is None else 1
        )
        text_tokens = 1 if batch.tokens is None else batch.tokens.shape[1]
        max_images = rules.max_batch_rows(image_tokens) or len(batch)
        return max_images, rules.max_batch_rows(text_tokens) or len(batch.caption_ids)

    def image_call(self, batch: Batch, rows: slice, keys: Tensor | None = None) -> TowerCall:
        """Prepare to encode some images, from pixels or from the features of a frozen tower.

        Dropout by `keys`.
        """
        dropout = () if keys is None else (keys[rows],)
        if batch.image_features is not None:
            return TowerCall(self.project_image, (batch.image_features[rows], *dropout))
        pixels = normalized_pixels(batch, self.preprocess, rows)
        kept_patches = None if batch.kept_patches is None else batch.kept_patches[rows]
        return TowerCall(self.encode_image, (pixels, kept_patches, *dropout))

    def text_call(self, batch: Batch, rows: slice, keys: Tensor | None = None) -> TowerCall:
        """Prepare to encode some captions, from tokens or from the features of a frozen tower.

        Dropout by `keys`.
        """
        dropout = () if keys is None else (keys[rows],)
        if batch.text_features is not None:
            return TowerCall(self.project_text, (batch.text_features[rows], *dropout))
        return TowerCall(self.encode_text, (batch.texts(rows), *dropout))

    def dropout_keys(self, batch: Batch, step: int) -> list[Tensor | None]:
        """A random number for each image and each caption, from which the masks of its head follow,
        on any rank.
        """
        if not self.has_dropout:
            return [None, None]
        word = int(rnd.bits(self.seed, step, np.array(0), DROPOUT_STREAM).astype(np.int64))
        images, captions = hash64(batch.sample_ids ^ word), hash64(batch.caption_ids ^ ~word)
        keys = images, hash64(captions ^ batch.sample_ids[batch.image_index])
        heads = self.model.image_head, self.model.text_head
        return [
            key if isinstance(head, Head) else None for key, head in zip(keys, heads, strict=True)
        ]

    def _seed_dropout(self, step: int, draw: int) -> None:
        """Make the dropout of third-party towers a function of step, rank and position, the same in
        both passes.
        """
        if not self.has_dropout:
            return
        seed = int(rnd.bits(self.seed, step, np.array(draw), DROPOUT_STREAM + self.rank))
        if self.device.kind == "cpu":
            # torch.manual_seed would also keep the seed for each kind of GPU, with a formatted
            # stack: 5 ms.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    @torch.no_grad()
    def nonfinite_rows(self, batch: Batch) -> list[int]:
        """Rows whose image or captions have non-finite features.

        [] if all rows do: then the model is at fault.
        """
        batch = batch.to(self.device.torch)
        rows = len(batch)
        bad = torch.zeros(rows, dtype=torch.bool, device=self.device.torch)
        with self.autocast():
            for part in split(slice(0, rows), INSPECTED_ROWS):
                encode, inputs = self.image_call(batch, part)
                bad[part] = ~encode(*inputs).isfinite().all(dim=1)
            for part in split(slice(0, len(batch.caption_ids)), INSPECTED_ROWS):
                encode, inputs = self.text_call(batch, part)
                bad[batch.image_index[part][~encode(*inputs).isfinite().all(dim=1)]] = True
        indices: list[int] = bad.nonzero().flatten().tolist()
        return indices if len(indices) < rows else []

    def loss_context(self, batch: Batch) -> Autocast:
        """Return the precision that a large loss may use for its matmul (losses/run_loss.py).

        With cached features the loss dominates the step. With towers, autocast is not worth the
        rounding error.
        """
        return self.autocast if batch.image_features is not None else nullcontext

    def for_check(self, model: CLIP) -> BatchEncoder:
        """The encoder of a copy of the model, without dropout and compilation."""
        encoder = copy.copy(self)
        encoder.model = model
        encoder.has_dropout = False
        encoder.first_pass_with_graph = False
        encoder.encode_image, encoder.encode_text = model.encode_view, model.encode_text
        encoder.project_image, encoder.project_text = model.project_image, model.project_text
        return encoder


def split(rows: slice, size: int) -> list[slice]:
    """The rows in slices of at most `size`."""
    return [
        slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)
    ]


def normalized_pixels(batch: Batch, preprocess: Preprocess, rows: slice = slice(None)) -> Tensor:
    """(n, 3, size, size): the input of the image tower."""
    if batch.boxes is None:
        return _render(batch, preprocess, rows)
    start, stop, _ = rows.indices(len(batch))
    wide = with_partners(rows, len(batch))
    pasted = paste_boxes(_render(batch, preprocess, wide), batch.boxes[wide])
    return pasted[start - wide.start : stop - wide.start]


def _render(batch: Batch, preprocess: Preprocess, rows: slice) -> Tensor:
    views = None if batch.views is None else batch.views[rows]
    return render(batch.pixels(rows), views, preprocess)


def has_dropout(model: CLIP) -> bool:
    """Whether a forward pass of the model draws random numbers, in our own or in third-party
    modules.
    """
    values = (
        getattr(module, name, 0.0) for module in model.modules() for name in DROPOUT_ATTRIBUTES
    )
    return any(isinstance(value, float) and value > 0 for value in values)
