"""What `encode_image`, `encode_text` and `classify` accept, in torch and in onnxruntime.

Does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from m1clip.data.images import Preprocess, decode, to_square
from m1clip.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    ImageInput = str | Path | bytes | bytearray | Image.Image | np.ndarray | Tensor

# The sentences of a class name; on validation, general is right more often with them than with the
# name alone or with sentences about photos only (docs/lab-general.md).
TEMPLATES = ("{}", "a {}", "the {}", "a photo of a {}.")
NAME_WORDS = 2  # the most words of a label that `default_templates` makes sentences of
ARTICLES = ("a", "an", "the")
IMAGE_TYPES = (str, Path, bytes, bytearray, Image.Image, np.ndarray)  # and tensors
IMAGES_EXPECTED = (
    "encode_image takes a path, the bytes of an image file, a PIL image, a (height, width, 3) uint8"
    " array or tensor, or a list of these"
)
IN_MEMORY = "the bytes of an image"
TEXTS_EXPECTED = "encode_text takes a text, or a list of texts"
NOT_FINITE = "the model computes NaN: its weights are too large or damaged; use another model"


class LoadingProcess:
    """The process that loaded a model; that of a pickled copy is the process that reads it."""

    def __init__(self) -> None:
        self._id = os.getpid()

    def __reduce__(self) -> tuple[type[LoadingProcess], tuple[()]]:
        return LoadingProcess, ()

    def is_forked(self) -> bool:
        """Whether this process was forked after loading: it then lacks the threads of the model."""
        return os.getpid() != self._id

    def require_same(self, name: str) -> None:
        """Raise a UserError in a forked process, where the model would wait forever."""
        if self.is_forked():
            raise UserError(
                f"{name} cannot be used in a process that was forked after it was loaded; load it"
                ' in the worker, or start workers with multiprocessing.get_context("spawn")'
            )


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # not imported: then nothing is a tensor
    return torch is not None and isinstance(value, torch.Tensor)


def many(values: Any, kind: Any, takes: str) -> list[Any]:
    """One value or an iterable of them as a list; a UserError for anything else."""
    array = isinstance(values, np.ndarray) or _is_tensor(values)
    batched = array and (
        values.ndim == 4
        or (isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "OU")
    )
    if _is(values, kind) and not batched:
        return [values]
    if (
        not isinstance(values, Iterable)
        or isinstance(values, bytes | bytearray | Mapping)
        or (array and not batched)
    ):
        raise UserError(f"{takes}, not {type(values).__name__}")
    items = list(values)
    for number, item in enumerate(items, start=1):
        if not _is(item, kind):
            raise UserError(
                f"{takes}; number {number} of {len(items)} is of type {type(item).__name__}"
            )
    return items


def _is(value: object, kind: Any) -> bool:
    return isinstance(value, kind) or (kind is IMAGE_TYPES and _is_tensor(value))


def count(batch_size: int | None) -> int | None:
    """The batch size, None for automatic; UserError if it is not a positive integer."""
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise UserError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
    return batch_size


def square(image: ImageInput, preprocess: Preprocess) -> np.ndarray:
    """(size, size, 3) uint8, as in training."""
    size = preprocess.image_size
    resize = preprocess.resize
    if isinstance(image, str | Path):
        image = decode(Path(image), size, str(image))
    elif isinstance(image, bytes | bytearray):
        image = decode(bytes(image), size, IN_MEMORY)
    elif not isinstance(image, Image.Image):
        array = _array(image)
        if array.shape[:2] == (size, size):
            return array
        image = Image.fromarray(array)
    elif min(image.size) == 0:
        raise UserError(f"a PIL image of {image.width} x {image.height} has no pixels")
    return to_square(image, size, resize)


def _array(image: Any) -> np.ndarray:
    """(height, width, 3) uint8; a tensor may have its channels first, as torchvision's have."""
    shape = tuple(image.shape)
    dtype = str(image.dtype).removeprefix("torch.")
    tensor = _is_tensor(image)
    if dtype == "uint8" and tensor:
        image = (
            (image.permute(1, 2, 0) if len(shape) == 3 and shape[0] == 3 else image).cpu().numpy()
        )
    if dtype != "uint8" or image.ndim != 3 or image.shape[2] != 3:
        kind = "a tensor" if tensor else "an array"
        raise UserError(f"{kind} must be (height, width, 3) uint8, not {shape} {dtype}")
    if image.size == 0:
        raise UserError(f"an image of shape {shape} has no pixels")
    return np.ascontiguousarray(image)


def labels_of(labels: Sequence[str]) -> list[str]:
    """The labels of `classify`: at least two."""
    names: list[str] = many(labels, str, "classify takes a list of labels")
    if len(names) < 2:
        raise UserError("classify needs two or more labels")
    return names


def default_templates(labels: Sequence[str]) -> tuple[str, ...]:
    """TEMPLATES if all labels are names of one or two words, else ("{}",).

    "a dog" and "two dogs on a beach" would not fit into the sentences.
    """
    names = [label.split() for label in labels]
    fits = all(
        len(words) <= NAME_WORDS and not any(word.lower() in ARTICLES for word in words[:1])
        for words in names
    )
    return TEMPLATES if fits else ("{}",)


def sentences(names: Sequence[str], templates: Sequence[str]) -> list[list[str]]:
    """For each name, its sentences: one per template, each of which must contain {}."""
    templates = many(templates, str, "templates must be a list of sentences") or ["{}"]
    for template in templates:
        if "{}" not in template:
            raise UserError(f"template '{template}': has no {{}} for the name of the class")
    return [[template.replace("{}", name) for template in templates] for name in names]


def model_path(value: str | Path) -> Path:
    """The path of a model folder."""
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"load takes the path of a model folder, not {type(value).__name__}")
    return Path(value)
