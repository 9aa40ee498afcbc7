"""An exported ONNX folder in onnxruntime, without torch: the API of `Model`, with numpy arrays for tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from m1clip.data.images import Preprocess, to_square
from m1clip.errors import UserError
from m1clip.inference.inputs import (
    IMAGE,
    IMAGES,
    NOT_FINITE,
    TEXTS,
    LoadingProcess,
    count,
    labels_of,
    many,
    sentences,
    square,
)
from m1clip.io import format_version, matches_schema, read_small
from m1clip.text.base import FILE_NAME, by_length
from m1clip.text.tokenizers import MAX_BYTES, from_record

if TYPE_CHECKING:
    from m1clip.inference.inputs import ImageInput

FORMAT = 1
SETTINGS = "preprocess.json"
REMEDY = "export the model again with m1clip export"
SCHEMA = {
    "image_graph": str,
    "text_graph": str,
    "image": dict,
    "tokenizer": dict,
    "context_length": lambda value: type(value) is int and 2 <= value <= 4096,
    "embed_dim": lambda value: type(value) is int and 1 <= value <= 2**14,
    "logit_scale": lambda value: type(value) is float and 0 < value <= 1000,
}


def is_onnx_folder(path: Path) -> bool:
    """Whether a path looks like an export of ours, complete or not."""
    return any((path / name).is_file() for name in (SETTINGS, "image.onnx", "text.onnx"))


@dataclass(frozen=True, kw_only=True)
class ArrayPreprocess(Preprocess):
    """The preprocessing that is not in the graph."""

    def __call__(self, image: Image.Image) -> np.ndarray:  # type: ignore[override]
        """A PIL image -> (image_size, image_size, 3) uint8; the graph normalizes it."""
        return to_square(image, self.image_size, self.resize)


class OnnxModel:
    """A model in onnxruntime on the CPU: images and texts in, unit vectors out, as numpy arrays.

    `preprocess(image)` converts a PIL image to the pixels that the graph takes, `tokenizer(texts)` texts to token ids.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        """Open a folder with ONNX graphs of `m1clip export`; `threads` 0 uses all cores."""
        self._process = LoadingProcess()
        settings = read_settings(folder)
        try:
            self.preprocess = ArrayPreprocess.from_dict(settings["image"])
            record = settings["tokenizer"]
            if record.get("kind") == "fast":  # the same file as for other programs
                path = next(folder.rglob(FILE_NAME), folder / FILE_NAME)
                record = {**record, "tokenizer": json.loads(read_small(path, MAX_BYTES, folder))}
            self.tokenizer = from_record(record)
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({error.strerror}); {REMEDY}") from None
        except (UserError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{folder}: {error}; {REMEDY}") from None
        self.tokenizer.context_length, self.tokenizer.arrays = settings["context_length"], True
        self.context_length, self.embed_dim = settings["context_length"], settings["embed_dim"]
        self.logit_scale = float(settings["logit_scale"])
        self._folder, self._threads, self._image_graph = folder, threads, settings["image_graph"]
        texts = {"tensor(int64)": [None], "tensor(int32)": [None]}
        self._text = _session(folder, settings["text_graph"], texts, self.embed_dim, threads)

    def __repr__(self) -> str:
        """What the model takes and gives, and its folder."""
        return (
            f"OnnxModel({self.preprocess.image_size} px images, texts of {self.context_length} tokens -> "
            f"{self.embed_dim} dimensions; {self._folder})"
        )

    @cached_property
    def _image(self) -> Any:
        """Opened when it is needed: a search by text is faster without it."""
        size = self.preprocess.image_size
        shapes = {"tensor(uint8)": [size, size, 3], "tensor(float)": [3, size, size]}
        return _session(self._folder, self._image_graph, shapes, self.embed_dim, self._threads)

    def pixels(self, pixels: np.ndarray) -> np.ndarray:
        """(n, size, size, 3) uint8 -> (n, embed_dim) float32 unit vectors."""
        self._process.require_same("an ONNX model")
        return _run(self._image, self.graph_input(pixels))

    def graph_input(self, pixels: np.ndarray) -> np.ndarray:
        """(n, size, size, 3) uint8 as the graph takes them: unchanged, or normalized, where the graph does not."""
        if self._image.get_inputs()[0].type == "tensor(uint8)":
            return pixels
        mean, std = (np.array(each, np.float32) for each in (self.preprocess.mean, self.preprocess.std))
        return ((pixels.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2)

    def tokens(self, tokens: np.ndarray, lengths: np.ndarray, batch_size: int = 256) -> np.ndarray:
        """(n, context_length) token ids -> (n, embed_dim) float32 unit vectors."""
        self._process.require_same("an ONNX model")
        vectors = np.empty((len(tokens), self.embed_dim), np.float32)
        for rows, cut in by_length(tokens, lengths, batch_size):
            vectors[rows] = _run(self._text, cut)
        return vectors

    def encode_image(self, images: ImageInput | Iterable[ImageInput], batch_size: int | None = None) -> np.ndarray:
        """(n, embed_dim) float32 unit vectors of one image (n = 1) or many; takes what `Model.encode_image` takes."""
        found, batch_size = many(images, IMAGE, IMAGES), count(batch_size) or 8
        parts = [np.empty((0, self.embed_dim), np.float32)]
        for start in range(0, len(found), batch_size):
            parts.append(self.pixels(np.stack([self.square(image) for image in found[start : start + batch_size]])))
        return _finite(np.concatenate(parts))

    def encode_text(self, texts: str | Iterable[str], batch_size: int | None = None) -> np.ndarray:
        """(n, embed_dim) float32 unit vectors of one text (n = 1) or many."""
        tokens = self.tokenizer.tokenize(many(texts, str, TEXTS), self.context_length)
        return _finite(self.tokens(tokens, self.tokenizer.lengths(tokens), count(batch_size) or 256))

    def similarity(self, images: ImageInput | Iterable[ImageInput], texts: str | Iterable[str]) -> np.ndarray:
        """(images, texts) cosine similarities."""
        return self.encode_image(images) @ self.encode_text(texts).T

    def classify(
        self, images: ImageInput | Iterable[ImageInput], labels: Sequence[str], templates: Sequence[str] = ("{}",)
    ) -> list[list[tuple[str, float]]]:
        """For each image, (label, probability) from the most to the least probable."""
        labels = labels_of(labels)
        logits = self.logit_scale * self.encode_image(images) @ self.class_vectors(labels, templates).T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return [
            [(labels[place], float(row[place])) for place in np.argsort(-row, kind="stable")]
            for row in weights / weights.sum(axis=1, keepdims=True)
        ]

    def class_vectors(self, names: Sequence[str], templates: Sequence[str]) -> np.ndarray:
        """(classes, embed_dim) unit vectors: the mean over the templates, each of which must contain {}."""
        groups = sentences(names, templates)
        vectors = self.encode_text([text for group in groups for text in group])
        means = vectors.reshape(len(groups), len(groups[0]), -1).mean(axis=1)
        return means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)

    def square(self, image: ImageInput) -> np.ndarray:
        """(size, size, 3) uint8, as in training."""
        return square(image, self.preprocess)


def read_settings(folder: Path) -> dict[str, Any]:
    """The checked contents of preprocess.json."""
    path = folder / SETTINGS
    try:
        settings = json.loads(read_small(path, inside=folder))
        version = format_version(settings)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: not written by m1clip export; {REMEDY}") from None
    if version > FORMAT:
        raise UserError(f"{path}: written by a newer m1clip (format {version}, this one reads {FORMAT}): upgrade")
    if not matches_schema(settings, SCHEMA):
        raise UserError(f"{path}: values are missing or of the wrong type; {REMEDY}")
    return dict(settings)


def _session(folder: Path, name: str, shapes: dict[str, list[Any]], embed_dim: int, threads: int) -> Any:
    """A checked session; `shapes` are those of one input, by its type.

    onnxruntime refuses external data outside the folder and operators that it does not have.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{folder / SETTINGS}: {name} is outside the folder; {REMEDY}")
    try:
        import onnxruntime
    except ImportError:
        raise UserError("an ONNX folder needs onnxruntime: pip install 'm1clip[export]'") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # would take the cores from others
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  its errors have no common class
        reason = " ".join(str(error).split()).rpartition("rror: ")[2].rpartition("failed:")[2][:200]
        raise UserError(f"{path}: onnxruntime cannot open it ({reason}); {REMEDY}") from None
    given, made = session.get_inputs(), session.get_outputs()
    fits = len(given) == len(made) == 1 and given[0].type in shapes and made[0].type == "tensor(float)"
    sides = [side if isinstance(side, int) else None for side in given[0].shape] if fits else []
    if not fits or sides != [None, *shapes[given[0].type]] or made[0].shape[1:] != [embed_dim]:
        raise UserError(f"{path}: not a graph of m1clip export, or for another {SETTINGS}; {REMEDY}")
    return session


def _run(session: Any, values: np.ndarray) -> np.ndarray:
    given = session.get_inputs()[0]
    if given.type == "tensor(int32)":
        values = values.astype(np.int32)
    (vectors,) = session.run(None, {given.name: np.ascontiguousarray(values)})
    return np.asarray(vectors)


def _finite(vectors: np.ndarray) -> np.ndarray:
    if not np.isfinite(vectors).all():
        raise UserError(NOT_FINITE)
    return vectors
