"""Encode images and texts: `Encoder` runs a model in batches, `Model` is the public API."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from m1clip.data.augment import render, same_view
from m1clip.data.cache import Progress, decode_images
from m1clip.data.captions import rounded
from m1clip.data.images import Preprocess, decode, to_square
from m1clip.data.prepare import Split
from m1clip.data.types import ImageRef
from m1clip.errors import UserError
from m1clip.model.clip import CLIP
from m1clip.model.folder import CONFIG, open_device, read_model, write_model
from m1clip.text.base import Tokenizer

Context = Callable[[], AbstractContextManager[object]]
Tower = Callable[[Tensor], Tensor]
ImageInput = str | Path | Image.Image | np.ndarray | Tensor
IMAGES = "encode_image takes a path, a PIL image, a (height, width, 3) uint8 array or tensor, or a list of these"
TEXTS = "encode_text takes a text, or a list of texts"
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
        order = np.argsort(lengths, kind="stable")
        for start in range(0, len(order), self.text_batch):
            rows = order[start : start + self.text_batch]
            cut = tokens[rows, : rounded(int(lengths[rows].max()), tokens.shape[1])]
            with self.autocast():
                yield rows, self.text(torch.from_numpy(cut.astype(np.int64)).to(self.device)).float().cpu()


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
    image_index, caption_ids = (torch.from_numpy(each[:texts]) for each in (captions.image_index, captions.caption_ids))
    labels = None if captions.labels is None else torch.from_numpy(captions.labels[:image_rows])
    return SplitFeatures(torch.cat(image), text, image_index, caption_ids, labels)


class Model:
    """A trained model: images and texts in, unit vectors out.

    `preprocess(image)` converts a PIL image to the model's input tensor, `tokenizer(texts)` texts to token ids;
    `clip` is the torch module.
    """

    def __init__(self, clip: CLIP, tokenizer: Tokenizer, preprocess: Preprocess) -> None:
        self.clip, self.tokenizer, self.preprocess = clip, tokenizer, preprocess
        tokenizer.context_length = clip.config.context_length

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
        encoder, many, batch_size = self._encoder(), _many(images, ImageInput, IMAGES), _count(batch_size)
        parts = [
            encoder.pixels(np.stack([self.square(image) for image in many[start : start + batch_size]]))
            for start in range(0, len(many), batch_size)
        ]
        return _finite(torch.cat(parts)) if parts else torch.empty(0, self.clip.config.embed_dim)

    def encode_text(self, texts: str | Iterable[str], batch_size: int = 256) -> Tensor:
        """(n, embed_dim) float32 unit vectors of one text (n = 1) or many."""
        many = _many(texts, str, TEXTS)
        if not many:
            return torch.empty(0, self.clip.config.embed_dim)
        tokens = self.tokenizer.tokenize(many, self.clip.config.context_length)
        lengths = self.tokenizer.lengths(tokens)
        return _finite(in_order(self._encoder(_count(batch_size)).tokens(tokens, lengths)))

    def similarity(self, images: ImageInput | Iterable[ImageInput], texts: str | Iterable[str]) -> Tensor:
        """(images, texts) cosine similarities."""
        return self.encode_image(images) @ self.encode_text(texts).T

    def classify(
        self, images: ImageInput | Iterable[ImageInput], labels: Sequence[str], templates: Sequence[str] = ("{}",)
    ) -> list[list[tuple[str, float]]]:
        """For each image, (label, probability) from the most to the least probable.

        A template is a sentence with {} for the label; multiple templates are averaged.
        """
        labels = _many(labels, str, "classify takes a list of labels")
        if len(labels) < 2:
            raise UserError("classify needs two or more labels")
        logits = self.clip.scale().detach().cpu() * self.encode_image(images) @ self.class_vectors(labels, templates).T
        return [
            [(labels[place], float(row[place])) for place in row.argsort(descending=True).tolist()]
            for row in logits.softmax(dim=1)
        ]

    def class_vectors(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """(classes, embed_dim) unit vectors: the mean over the templates, each of which must contain {}."""
        templates = _many(templates, str, "templates are a list of sentences") or ["{}"]
        for template in templates:
            if "{}" not in template:
                raise UserError(f"template '{template}': has no {{}} for the name of the class")
        sentences = [template.replace("{}", name) for name in names for template in templates]
        vectors = self.encode_text(sentences).view(len(names), len(templates), -1)
        return F.normalize(vectors.mean(dim=1), dim=-1)

    def to(self, device: str | torch.device) -> Model:
        """Move the weights to a device."""
        self.clip.to(open_device(device))
        return self

    def save(self, folder: str | Path) -> None:
        """Write a model folder; an older one there is replaced only when the new one is complete."""
        path = _path(folder)
        if path.exists() and not (path / CONFIG).is_file() and (path.is_file() or any(path.iterdir())):
            raise UserError(f"{path}: exists and is not a model folder; choose another folder")
        write_model(path, self.clip, self.tokenizer, self.preprocess)

    def square(self, image: ImageInput) -> np.ndarray:
        """(size, size, 3) uint8, as in training."""
        size, resize = self.preprocess.image_size, self.preprocess.resize
        if isinstance(image, str | Path):
            image = decode(Path(image), size, str(image))
        elif isinstance(image, np.ndarray | Tensor):
            image = Image.fromarray(_array(image))
        elif min(image.size) == 0:
            raise UserError(f"a PIL image of {image.width} x {image.height} has no pixels")
        return to_square(image, size, resize)


def load(path: str | Path, device: str = "cpu", image_size: int | None = None) -> Model:
    """Load a model folder, the best model of a run, or a model of open_clip or Hugging Face.

    `image_size` is for images of another size.
    """
    saved = read_model(_path(path)).resized(image_size)
    return Model(saved.build(device), saved.tokenizer, saved.preprocess)


def _path(value: str | Path) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"a model is given by the path of its folder, not {type(value).__name__}")
    return Path(value)


def _many(values: Any, kind: Any, takes: str) -> list[Any]:
    """One value or an iterable of them as a list; a UserError for anything else."""
    array = isinstance(values, np.ndarray | Tensor)
    batched = array and (
        values.ndim == 4 or (isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "OU")
    )
    if isinstance(values, kind) and not batched:
        return [values]
    if not isinstance(values, Iterable) or isinstance(values, bytes | bytearray | Mapping) or (array and not batched):
        raise UserError(f"{takes}, not {type(values).__name__}")
    items = list(values)
    for number, item in enumerate(items, start=1):
        if not isinstance(item, kind):
            raise UserError(f"{takes}; number {number} of {len(items)} is of type {type(item).__name__}")
    return items


def _count(batch_size: int) -> int:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
    return batch_size


def _finite(vectors: Tensor) -> Tensor:
    if not vectors.isfinite().all():
        raise UserError("the model computes NaN: its weights are too large or damaged; use another model")
    return vectors


def _array(image: np.ndarray | Tensor) -> np.ndarray:
    """(height, width, 3) uint8; a tensor may have its channels first, as torchvision's have."""
    shape, dtype = tuple(image.shape), image.dtype
    if isinstance(image, Tensor) and dtype == torch.uint8:
        image = (image.permute(1, 2, 0) if len(shape) == 3 and shape[0] == 3 else image).cpu().numpy()
    if isinstance(image, Tensor) or dtype not in (np.uint8, torch.uint8) or image.ndim != 3 or image.shape[2] != 3:
        kind = "a tensor" if isinstance(dtype, torch.dtype) else "an array"
        raise UserError(f"{kind} must be (height, width, 3) uint8, not {shape} {dtype}")
    if image.size == 0:
        raise UserError(f"an image of shape {shape} has no pixels")
    return np.ascontiguousarray(image)
