"""Encode images and texts: `Encoder` runs a model in batches, `Model` is the public API."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.augment import render, same_view
from m1clip.data.cache import Progress, decode_images
from m1clip.data.captions import CaptionTable
from m1clip.data.images import Preprocess
from m1clip.data.prepare import Split
from m1clip.data.types import ImageRef
from m1clip.errors import UserError
from m1clip.inference.inputs import (
    IMAGE,
    IMAGES,
    NOT_FINITE,
    TEXTS,
    count,
    labels_of,
    many,
    model_path,
    sentences,
    square,
)
from m1clip.model.clip import CLIP
from m1clip.model.folder import CONFIG, open_device, read_model, write_model
from m1clip.text.base import Tokenizer, by_length

if TYPE_CHECKING:
    from m1clip.inference.inputs import ImageInput

Context = Callable[[], AbstractContextManager[object]]
Tower = Callable[[Tensor], Tensor]
# (left, top, side as a fraction, mirrored): the complete image first, then crops of it.
VIEWS = (
    (0.0, 0.0, 1.0, False),
    (0.0, 0.0, 1.0, True),
    (0.0, 0.0, 0.8, False),
    (0.2, 0.2, 0.8, True),
    (0.2, 0.0, 0.8, False),
    (0.0, 0.2, 0.8, True),
)


@dataclass(frozen=True)
class Encoder:
    """Runs a model, or only its towers, over images and texts."""

    image: Tower  # (n, 3, size, size) normalized pixels -> (n, width)
    text: Tower  # (n, length) token ids -> (n, width)
    preprocess: Preprocess
    device: torch.device
    autocast: Context = nullcontext
    text_batch: int = 256

    @torch.inference_mode()
    def pixels(self, pixels: np.ndarray, view: int = 0) -> Tensor:
        """(n, side, side, 3) uint8 -> (n, width) float32 on the CPU."""
        views = same_view(len(pixels), *VIEWS[view]) if view else None
        with self.autocast():
            images = render(torch.from_numpy(pixels).to(self.device), views, self.preprocess)
            return self.image(images).float().cpu()

    def files(
        self, refs: Sequence[ImageRef], failures: dict[int, str], progress: Progress, view: int = 0
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(indices into `refs`, their vectors), in chunks; unreadable images are added to `failures`."""
        side, resize = self.preprocess.image_size, self.preprocess.resize
        threads = max(2, (os.cpu_count() or 2) // 2)
        for items, block in decode_images(refs, side, resize, failures, progress, threads):
            yield items, self.pixels(block, view)

    @torch.inference_mode()
    def tokens(self, tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor]]:
        """(rows of `tokens`, their vectors), batch by batch: sorted by length, to reduce padding."""
        for rows, cut in by_length(tokens, lengths, self.text_batch):
            with self.autocast():
                yield rows, self.text(torch.from_numpy(cut).to(self.device)).float().cpu()


def in_order(parts: Iterable[tuple[np.ndarray, Tensor]]) -> Tensor:
    """All vectors of `Encoder.tokens` in the order of the texts."""
    rows, vectors = zip(*parts, strict=True)
    found = torch.cat(vectors)
    ordered = torch.empty_like(found)
    ordered[torch.from_numpy(np.concatenate(rows))] = found
    return ordered


class SplitFeatures(NamedTuple):
    """Vectors of a split on the CPU."""

    image: Tensor  # (images, d)
    text: Tensor  # (captions, d)
    image_index: Tensor  # (captions,) the image that each caption describes
    caption_ids: Tensor  # (captions,) equal captions have equal ids
    labels: Tensor | None  # (images,) the class, for class folders


@torch.inference_mode()
def encode_split(
    model: CLIP, split: Split, preprocess: Preprocess, batch: int, autocast: Context, image_rows: int | None = None
) -> SplitFeatures:
    """Every image and every caption of a split, or of its first `image_rows`; features of frozen towers are reused."""
    images, captions = split.images, split.captions
    image_rows = len(images) if image_rows is None else image_rows
    texts = int(captions.first[image_rows])
    training, device = model.training, model.logit_scale.device
    encoder = Encoder(model.encode_image, model.encode_text, preprocess, device, autocast, 4 * batch)
    model.eval()
    image = []
    for start in range(0, image_rows, batch):
        rows = np.arange(start, min(start + batch, image_rows))
        if split.image_features is None:
            image.append(encoder.pixels(images.read(rows)))
        else:
            with autocast():
                features = torch.from_numpy(split.image_features.read(rows)).to(device).float()
                image.append(model.project_image(features).cpu())
    if captions.features is None:
        text = in_order(encoder.tokens(captions.tokens[:texts], captions.lengths[:texts]))
    else:
        with autocast():
            rows = np.arange(texts)
            parts = [captions.features.read(rows[at : at + 4 * batch]) for at in range(0, texts, 4 * batch)]
            text = torch.cat([model.project_text(torch.from_numpy(part).to(device).float()).cpu() for part in parts])
    model.train(training)
    return split_features(torch.cat(image), text, captions)


def split_features(image: Tensor, text: Tensor, captions: CaptionTable) -> SplitFeatures:
    """Features with their captions."""
    index, ids = (torch.from_numpy(each[: len(text)]) for each in (captions.image_index, captions.caption_ids))
    labels = None if captions.labels is None else torch.from_numpy(captions.labels[: len(image)])
    return SplitFeatures(image, text, index, ids, labels)


class Model:
    """A trained model: images and texts in, unit vectors out.

    `preprocess(image)` converts a PIL image to the model's input tensor, `tokenizer(texts)` texts to token ids;
    `clip` is the torch module.
    """

    def __init__(self, clip: CLIP, tokenizer: Tokenizer, preprocess: Preprocess) -> None:
        self.clip, self.tokenizer, self.preprocess = clip, tokenizer, preprocess
        tokenizer.context_length = clip.config.context_length

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a text, including start and EOT tokens."""
        return self.clip.config.context_length

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.clip.logit_scale.device

    def _encoder(self, text_batch: int = 256) -> Encoder:
        clip = self.clip.eval()
        return Encoder(clip.encode_image, clip.encode_text, self.preprocess, self.device, text_batch=text_batch)

    def encode_image(self, images: ImageInput | Iterable[ImageInput], batch_size: int = 64) -> Tensor:
        """(n, embed_dim) float32 unit vectors of one image (n = 1) or many.

        An image is a path, a PIL image, a (height, width, 3) uint8 array, or a uint8 tensor of that shape or of
        (3, height, width). Many are a list or other iterable of these, or an array or tensor with one more dimension.
        """
        encoder, found, batch_size = self._encoder(), many(images, IMAGE, IMAGES), count(batch_size)
        parts = [
            encoder.pixels(np.stack([self.square(image) for image in found[start : start + batch_size]]))
            for start in range(0, len(found), batch_size)
        ]
        return _finite(torch.cat(parts)) if parts else torch.empty(0, self.clip.config.embed_dim)

    def encode_text(self, texts: str | Iterable[str], batch_size: int = 256) -> Tensor:
        """(n, embed_dim) float32 unit vectors of one text (n = 1) or many."""
        found = many(texts, str, TEXTS)
        if not found:
            return torch.empty(0, self.clip.config.embed_dim)
        tokens = self.tokenizer.tokenize(found, self.clip.config.context_length)
        lengths = self.tokenizer.lengths(tokens)
        return _finite(in_order(self._encoder(count(batch_size)).tokens(tokens, lengths)))

    def similarity(self, images: ImageInput | Iterable[ImageInput], texts: str | Iterable[str]) -> Tensor:
        """(images, texts) cosine similarities."""
        return self.encode_image(images) @ self.encode_text(texts).T

    def classify(
        self, images: ImageInput | Iterable[ImageInput], labels: Sequence[str], templates: Sequence[str] = ("{}",)
    ) -> list[list[tuple[str, float]]]:
        """For each image, (label, probability) from the most to the least probable.

        A template is a sentence with {} for the label; multiple templates are averaged.
        """
        labels = labels_of(labels)
        logits = self.clip.scale().detach().cpu() * self.encode_image(images) @ self.class_vectors(labels, templates).T
        return [
            [(labels[place], float(row[place])) for place in row.argsort(descending=True).tolist()]
            for row in logits.softmax(dim=1)
        ]

    def class_vectors(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """(classes, embed_dim) unit vectors: the mean over the templates, each of which must contain {}."""
        groups = sentences(names, templates)
        vectors = self.encode_text([text for group in groups for text in group]).view(len(groups), len(groups[0]), -1)
        return F.normalize(vectors.mean(dim=1), dim=-1)

    def to(self, device: str | torch.device) -> Model:
        """Move the weights to a device."""
        self.clip.to(open_device(device))
        return self

    def save(self, folder: str | Path) -> None:
        """Write a model folder; an older one there is replaced only when the new one is complete."""
        path = model_path(folder)
        if path.exists() and not (path / CONFIG).is_file() and (path.is_file() or any(path.iterdir())):
            raise UserError(f"{path}: exists and is not a model folder; choose another folder")
        write_model(path, self.clip, self.tokenizer, self.preprocess)

    def square(self, image: ImageInput) -> np.ndarray:
        """(size, size, 3) uint8, as in training."""
        return square(image, self.preprocess)


def load(path: str | Path, device: str = "cpu", image_size: int | None = None) -> Model:
    """Load a model folder, the best model of a run, or a model of open_clip or Hugging Face.

    `image_size` is for images of another size.
    """
    saved = read_model(model_path(path)).resized(image_size)
    return Model(saved.build(device), saved.tokenizer, saved.preprocess)


def _finite(vectors: Tensor) -> Tensor:
    if not vectors.isfinite().all():
        raise UserError(NOT_FINITE)
    return vectors
