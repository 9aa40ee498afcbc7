"""`Model`, the public API: images and texts in, unit vectors out. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from PIL import Image

from m1clip.data.images import READ_TIMEOUT, BadImage, Preprocess, map_with_timeout
from m1clip.errors import UserError
from m1clip.hardware.machine_info import decode_threads
from m1clip.inference.inputs import (
    IMAGE_TYPES,
    IMAGES_EXPECTED,
    IN_MEMORY,
    NOT_FINITE,
    TEXTS_EXPECTED,
    count,
    default_templates,
    labels_of,
    many,
    model_path,
    sentences,
    square,
)
from m1clip.text.base import Tokenizer

if TYPE_CHECKING:
    import torch

    from m1clip.config import TrainConfig
    from m1clip.data.captions import CaptionTable
    from m1clip.data.prepare import Split
    from m1clip.data.types import ImageRef
    from m1clip.inference.inputs import ImageInput
    from m1clip.model.clip import CLIP

# A float32 tensor on the CPU from an encoder in torch, an array from one in onnxruntime. `Model`
# uses only the operations that both have.
Array: TypeAlias = Any


class Encoder(Protocol):
    """What runs a model: `TorchEncoder` or `OnnxEncoder`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Converts texts to token ids."""

    @property
    def preprocess(self) -> Preprocess:
        """Converts an image to the input of the image tower."""

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a text, including start and EOT tokens."""

    @property
    def embed_dim(self) -> int:
        """Length of a vector."""

    @property
    def logit_scale(self) -> float:
        """What cosine similarities are multiplied by to get logits."""

    @property
    def clip(self) -> CLIP:
        """The torch module; UserError if the model does not run in torch."""

    @property
    def device(self) -> torch.device | str:
        """Where the model runs."""

    def images(self, images: Iterable[np.ndarray], total: int, max_batch: int | None) -> Array:
        """(total, embed_dim) vectors of (size, size, 3) uint8 images."""

    def tokens(self, tokens: np.ndarray, lengths: np.ndarray, max_batch: int | None) -> Array:
        """(n, embed_dim) vectors of (n, context_length) token ids.

        `lengths` (n,) include the EOT token.
        """

    def files(
        self, refs: Sequence[ImageRef], failures: dict[int, str]
    ) -> Iterator[tuple[list[int], Array]]:
        """(indices into `refs`, their vectors), in chunks.

        Unreadable images are added to `failures`.
        """

    def split_images(self, split: Split, rows: range) -> Array:
        """(rows, embed_dim) vectors of some images of a split."""

    def captions(self, table: CaptionTable, rows: range) -> Array:
        """(rows, embed_dim) vectors of some captions."""

    def use_device(self, requested: str, run: TrainConfig | None = None) -> None:
        """Run on the device that --device requests.

        On the device of its `run` with the settings of the run.
        """

    def to(self, device: str | torch.device) -> None:
        """Move the weights to a device."""

    def save(self, path: Path) -> None:
        """Write a model folder."""

    def describe(self) -> str:
        """What runs the model, for its repr."""


class Model:
    """A trained model: images and texts in, unit vectors out.

    `encoder` runs it in torch or in onnxruntime. In torch, vectors are tensors on the CPU, and
    `clip` is the torch module; in onnxruntime, they are numpy arrays. `preprocess(image)` converts
    a PIL image to the model's input, `tokenizer(texts)` texts to token ids. May be used by many
    threads at the same time.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def __repr__(self) -> str:
        """What the model takes and gives: Model(64 px images, ... on cpu)."""
        return (
            f"Model({self.preprocess.image_size} px images, texts of {self.context_length} tokens"
            f" -> {self.embed_dim} dimensions; {self.encoder.describe()})"
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """Converts texts to token ids."""
        return self.encoder.tokenizer

    @property
    def preprocess(self) -> Preprocess:
        """Converts a PIL image to the model's input."""
        return self.encoder.preprocess

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a text, including start and EOT tokens."""
        return self.encoder.context_length

    @property
    def embed_dim(self) -> int:
        """Length of a vector."""
        return self.encoder.embed_dim

    @property
    def clip(self) -> CLIP:
        """The torch module; UserError if the model does not run in torch."""
        return self.encoder.clip

    @property
    def device(self) -> torch.device | str:
        """Where the model runs."""
        return self.encoder.device

    def encode_image(
        self, images: ImageInput | Iterable[ImageInput], batch_size: int | None = None
    ) -> Array:
        """(n, embed_dim) float32 unit vectors of one image (n = 1) or many.

        An image is a path, the bytes of an image file, a PIL image, a (height, width, 3) uint8
        array, or a uint8 tensor of that shape or of (3, height, width). Many are a list or other
        iterable of these, or an array or tensor with one more dimension. `batch_size` limits how
        many are computed at a time.
        """
        inputs = many(images, IMAGE_TYPES, IMAGES_EXPECTED)
        max_batch = count(batch_size)
        return _finite(self.encoder.images(self._squares(inputs), len(inputs), max_batch))

    def _squares(self, images: Sequence[ImageInput]) -> Iterator[np.ndarray]:
        """Decode ahead in threads; arrays have nothing to decode."""
        decoded = any(
            isinstance(image, str | Path | bytes | bytearray | Image.Image) for image in images
        )
        if len(images) == 1 or not decoded:
            yield from map(self.square, images)
            return
        squares = map_with_timeout(images, self.square, threads=decode_threads())
        for image, pixels in zip(images, squares, strict=True):
            if pixels is None:
                where = IN_MEMORY if isinstance(image, bytes | bytearray) else str(image)
                raise BadImage(where, f"the read did not finish within {READ_TIMEOUT:g} s")
            yield pixels

    def encode_text(self, texts: str | Iterable[str], batch_size: int | None = None) -> Array:
        """(n, embed_dim) float32 unit vectors of one text (n = 1) or many."""
        tokens = self.tokenizer.tokenize(many(texts, str, TEXTS_EXPECTED), self.context_length)
        lengths = self.tokenizer.lengths(tokens)
        return _finite(self.encoder.tokens(tokens, lengths, count(batch_size)))

    def similarity(
        self, images: ImageInput | Iterable[ImageInput], texts: str | Iterable[str]
    ) -> Array:
        """(images, texts) cosine similarities."""
        return self.encode_image(images) @ self.encode_text(texts).T

    def classify(
        self,
        images: ImageInput | Iterable[ImageInput],
        labels: Sequence[str],
        templates: Sequence[str] = (),
    ) -> list[list[tuple[str, float]]]:
        """For each image, (label, probability) from the most to the least probable.

        A template is a sentence with {} for the label; multiple templates are averaged. By default,
        names of one or two words are averaged over the templates of `m1clip eval --classes`, and
        labels are taken as they are if any is longer or has an article.
        """
        labels = labels_of(labels)
        classes = self.class_vectors(labels, templates or default_templates(labels))
        logits = np.asarray(self.encoder.logit_scale * self.encode_image(images) @ classes.T)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return [
            [(labels[index], float(row[index])) for index in np.argsort(-row, kind="stable")]
            for row in weights / weights.sum(axis=1, keepdims=True)
        ]

    def class_vectors(self, names: Sequence[str], templates: Sequence[str]) -> Array:
        """(classes, embed_dim) unit vectors: means over templates, which must contain {}."""
        groups = sentences(names, templates)
        vectors = self.encode_text([text for group in groups for text in group])
        means = vectors.reshape(len(groups), len(groups[0]), -1).mean(1)
        lengths = (means * means).sum(1) ** 0.5
        return means / lengths.clip(1e-12)[:, None]

    def to(self, device: str | torch.device) -> Model:
        """Move the weights to a device."""
        self.encoder.to(device)
        return self

    def save(self, folder: str | Path) -> None:
        """Write a model folder.

        An older one there is replaced only when the new one is complete.
        """
        self.encoder.save(model_path(folder))

    def square(self, image: ImageInput) -> np.ndarray:
        """(size, size, 3) uint8, as in training."""
        return square(image, self.preprocess)


def _finite(vectors: Array) -> Array:
    if not np.isfinite(np.asarray(vectors)).all():
        raise UserError(NOT_FINITE)
    return vectors
