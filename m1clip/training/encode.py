"""The first seam of a training step: encode a batch all at once, or in chunks with the exact gradient.

A contrastive loss needs all features of a batch at once, but only the towers' activations are large. In chunks
(GradCache, arXiv 2101.06983) the batch is encoded without a graph, the loss is computed once over all features, and
then each chunk is re-encoded with a graph and backpropagates the gradient of its features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from m1clip.data import randomness as rnd
from m1clip.data.augment import render
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.formatting import ceil_div
from m1clip.hardware.device import Autocast, Device, Precision, autocast
from m1clip.model.clip import CLIP
from m1clip.model.heads import Head, mixed

DROPOUT_ATTRIBUTES = ("p", "drop_prob", "dropout", "dropout_prob", "attention_dropout", "layerdrop")
DROPOUT_STREAM = 1 << 16  # a random stream separate from the data's
INSPECTED_ROWS = 32  # rows of a non-finite step to inspect at a time
ONE_ROW = slice(0, 1)

Mark = Callable[[str], None]  # begins a phase of the step
# Told before each backward pass whether it is the last one of its parameters.
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
        torch.autograd.backward(self.features, gradients)


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
            self.mark("forward")
            encoded = tower.encode(rows)
            before_pass(number == len(passes))
            self.mark("backward")
            with self.no_autocast():
                encoded.backward(part)


@dataclass(frozen=True)
class ChunkedTower:
    """One encoder and the chunks of its input; `encode(rows)` gives the same features for the same rows each time."""

    encode: Callable[[slice], Tensor]
    chunks: list[slice]
    idle_calls: int = (
        0  # without a result: with sharded weights, all ranks call a tower equally often
    )

    def features(self) -> Tensor:
        """The features of all rows."""
        if len(self.chunks) == 1 and not self.idle_calls:
            return self.encode(self.chunks[0])
        encoded = [self.encode(rows) for rows in self.chunks]
        encoded += [self.encode(ONE_ROW)[:0] for _ in range(self.idle_calls)]
        return torch.cat(encoded)

    def features_only(self) -> Tensor:
        """The features of all rows without their graph, freed chunk by chunk where one was made."""
        encoded = [self.encode(rows).detach() for rows in self.chunks]
        for _ in range(self.idle_calls):
            self.encode(ONE_ROW)
        return torch.cat(encoded)


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
        self.preprocess = preprocess
        self.seed = seed
        self.rank = rank
        self.autocast = autocast(device, precision)
        self.no_autocast = autocast(device, precision, enabled=False)
        self.has_dropout = has_dropout(model)
        # Compiled code may draw different dropout masks with and without an autograd graph.
        self.first_pass_with_graph = compile and self.has_dropout
        compiled: Callable[[Any], Any] = torch.compile if compile else lambda function: function
        self.encode_image = compiled(model.encode_image)
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
        """Encode a batch on the device: all at once with a graph, or `chunk` images at a time without one.

        `most_calls` gives the calls of each tower that all ranks must make, for those that this rank needs.
        """
        mark("forward")
        towers = self._towers(batch, step, chunk, most_calls)
        if chunk:
            # One autocast context per pass: its cache of cast weights saves a cast per chunk, but casts made without
            # a graph must not be reused in the pass that needs one.
            with self.autocast(), torch.set_grad_enabled(self.first_pass_with_graph):
                features = [tower.features_only() for tower in towers]
            return EncodedInChunks(features, towers, mark, self.autocast, self.no_autocast)
        self._seed_dropout(step, 0)
        with self.autocast():
            # Text first: the backward pass then starts with the larger tower and frees its activations.
            text = towers[1].features()
            image = towers[0].features()
        return EncodedAtOnce([image, text], mark)

    def _towers(
        self, batch: Batch, step: int, chunk: int, most_calls: Callable[[list[int]], list[int]]
    ) -> list[ChunkedTower]:
        """Both encoders with their input in slices: as few as the device takes, or chunks."""
        image_keys, text_keys = self.dropout_keys(batch, step)

        def chunk_of_images(rows: slice) -> Tensor:
            self._seed_dropout(step, 2 * rows.start)
            return self.images(batch, rows, image_keys)

        def chunk_of_texts(rows: slice) -> Tensor:
            self._seed_dropout(step, 2 * rows.start + 1)
            return self.texts(batch, rows, text_keys)

        encode_images: Callable[[slice], Tensor] = chunk_of_images
        encode_texts: Callable[[slice], Tensor] = chunk_of_texts
        if not chunk:  # `forward` has seeded the dropout of the batch
            encode_images = partial(self.images, batch, keys=image_keys)
            encode_texts = partial(self.texts, batch, keys=text_keys)
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
            ChunkedTower(encode_images, image_slices, image_calls - len(image_slices)),
            ChunkedTower(encode_texts, text_slices, text_calls - len(text_slices)),
        ]

    def _max_rows(self, batch: Batch) -> tuple[int, int]:
        """How many images and how many captions the device may encode in one call."""
        rules = self.device.rules
        image_tokens = (
            self.model.image_tower.tokens_per_image if batch.image_features is None else 1
        )
        text_tokens = 1 if batch.tokens is None else batch.tokens.shape[1]
        max_images = rules.rows_at_once(image_tokens) or len(batch)
        return max_images, rules.rows_at_once(text_tokens) or len(batch.caption_ids)

    def images(self, batch: Batch, rows: slice = slice(None), keys: Tensor | None = None) -> Tensor:
        """Unit vectors of some images, from pixels or from the features of a frozen tower; dropout by `keys`."""
        dropout = () if keys is None else (keys[rows],)
        if batch.image_features is not None:
            return self.project_image(batch.image_features[rows], *dropout)
        kept = None if batch.kept_patches is None else batch.kept_patches[rows]
        return self.encode_image(normalized_pixels(batch, self.preprocess, rows), kept, *dropout)

    def texts(self, batch: Batch, rows: slice, keys: Tensor | None = None) -> Tensor:
        """Unit vectors of some captions, from tokens or from the features of a frozen tower; dropout by `keys`."""
        dropout = () if keys is None else (keys[rows],)
        if batch.text_features is not None:
            return self.project_text(batch.text_features[rows], *dropout)
        return self.encode_text(batch.texts(rows), *dropout)

    def dropout_keys(self, batch: Batch, step: int) -> list[Tensor | None]:
        """A random number for each image and each caption, from which the masks of its head follow, on any rank."""
        if not self.has_dropout:
            return [None, None]
        word = int(rnd.bits(self.seed, step, np.array(0), DROPOUT_STREAM).astype(np.int64))
        images, captions = mixed(batch.sample_ids ^ word), mixed(batch.caption_ids ^ ~word)
        keys = images, mixed(captions ^ batch.sample_ids[batch.image_index])
        heads = self.model.image_head, self.model.text_head
        return [
            key if isinstance(head, Head) else None for key, head in zip(keys, heads, strict=True)
        ]

    def _seed_dropout(self, step: int, draw: int) -> None:
        """Make the dropout of third-party towers a function of step, rank and position, the same in both passes."""
        if self.has_dropout:
            torch.manual_seed(
                int(rnd.bits(self.seed, step, np.array(draw), DROPOUT_STREAM + self.rank))
            )

    @torch.no_grad()
    def nonfinite_rows(self, batch: Batch) -> list[int]:
        """Rows whose image or captions have non-finite features; [] if all rows do: then the model is at fault."""
        batch = batch.to(self.device.torch)
        rows = len(batch)
        bad = torch.zeros(rows, dtype=torch.bool, device=self.device.torch)
        with self.autocast():
            for part in split(slice(0, rows), INSPECTED_ROWS):
                bad[part] = ~self.images(batch, part).isfinite().all(dim=1)
            for part in split(slice(0, len(batch.caption_ids)), INSPECTED_ROWS):
                text = self.texts(batch, part)
                bad[batch.image_index[part][~text.isfinite().all(dim=1)]] = True
        found: list[int] = bad.nonzero().flatten().tolist()
        return found if len(found) < rows else []

    def loss_context(self, batch: Batch) -> Autocast:
        """The precision of the objective: with cached features it dominates the step, so it runs in autocast.

        With towers, autocast is not worth the rounding error.
        """
        return self.autocast if batch.image_features is not None else nullcontext

    def for_check(self, model: CLIP) -> BatchEncoder:
        """The encoder of a copy of the model, without dropout and compilation."""
        encoder = copy.copy(self)
        encoder.model = model
        encoder.has_dropout = False
        encoder.first_pass_with_graph = False
        encoder.encode_image, encoder.encode_text = model.encode_image, model.encode_text
        encoder.project_image, encoder.project_text = model.project_image, model.project_text
        return encoder


def split(rows: slice, size: int) -> list[slice]:
    """The rows in slices of at most `size`."""
    return [
        slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)
    ]


def normalized_pixels(batch: Batch, preprocess: Preprocess, rows: slice = slice(None)) -> Tensor:
    """(n, 3, size, size): the input of the image tower."""
    return render(
        batch.pixels(rows), None if batch.views is None else batch.views[rows], preprocess
    )


def has_dropout(model: CLIP) -> bool:
    """Whether a forward pass of the model draws random numbers, in our own or in third-party modules."""
    values = (
        getattr(module, name, 0.0) for module in model.modules() for name in DROPOUT_ATTRIBUTES
    )
    return any(isinstance(value, float) and value > 0 for value in values)
