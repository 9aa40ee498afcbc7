"""The encoder of an exported ONNX folder in onnxruntime. Does not import torch."""

from __future__ import annotations

import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from m1clip.data.images import Preprocess, to_square
from m1clip.errors import UserError
from m1clip.hardware.machine_info import decode_threads
from m1clip.inference.inputs import LoadingProcess
from m1clip.inference.model import Model
from m1clip.io import read_small
from m1clip.schema import format_version, matches_schema
from m1clip.text.base import TOKENIZER_FILE, Tokenizer, by_length
from m1clip.text.tokenizers import MAX_TOKENIZER_BYTES, from_record

if TYPE_CHECKING:
    import torch

    from m1clip.config import TrainConfig
    from m1clip.data.captions import CaptionTable
    from m1clip.data.prepare import Split
    from m1clip.data.types import ImageRef
    from m1clip.model.clip import CLIP

IMAGE_BATCH = 8  # images that a graph takes at a time
TEXT_BATCH = 256
SPLIT_IMAGES = 16  # the same for the images of a split, which are decoded already
SPLIT_TEXTS = 64
ONNX_FORMAT = 1
SETTINGS = "preprocess.json"
EXPORT_AGAIN_HINT = "export the model again with m1clip export"
SETTINGS_SCHEMA = {
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


class ArrayEncoder(ABC):
    """Runs a model on the CPU outside of torch: `pixels` and `tokens` compute numpy arrays."""

    tokenizer: Tokenizer
    preprocess: Preprocess
    context_length: int
    embed_dim: int
    logit_scale: float
    device = "cpu"

    @abstractmethod
    def pixels(self, pixels: np.ndarray) -> np.ndarray:
        """(n, size, size, 3) uint8 -> (n, embed_dim) float32 unit vectors."""

    @abstractmethod
    def tokens(
        self, tokens: np.ndarray, lengths: np.ndarray, max_batch: int | None = None
    ) -> np.ndarray:
        """(n, context_length) token ids -> (n, embed_dim) float32 unit vectors."""

    @abstractmethod
    def describe(self) -> str:
        """What runs the model, for its repr."""

    @property
    def clip(self) -> CLIP:
        """Raise a UserError: there is no torch module."""
        raise UserError(
            f"{self.describe()}: this model has no torch module; load the model that was exported"
        )

    def images(self, images: Iterable[np.ndarray], total: int, max_batch: int | None) -> np.ndarray:
        """(total, embed_dim) vectors of (size, size, 3) uint8 images."""
        vectors = np.empty((total, self.embed_dim), np.float32)
        remaining = iter(images)
        done = 0
        while batch := list(itertools.islice(remaining, max_batch or IMAGE_BATCH)):
            vectors[done : done + len(batch)] = self.pixels(np.stack(batch))
            done += len(batch)
        return vectors

    def files(
        self, refs: Sequence[ImageRef], failures: dict[int, str]
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """(indices into `refs`, their vectors), in chunks.

        Unreadable images are added to `failures`.
        """
        # Not needed to load a model.
        from m1clip.data.decoding import DecodeMethod, decode_images, processes_for

        image_size = self.preprocess.image_size
        resize = self.preprocess.resize
        method = DecodeMethod(decode_threads(), processes_for(refs))
        blocks = decode_images(refs, image_size, resize, failures, method)
        return ((indices, self.pixels(block)) for indices, block in blocks)

    def split_images(self, split: Split, rows: range) -> np.ndarray:
        """(rows, embed_dim) vectors of some images of a split."""
        batches = [
            np.array(rows[start : start + SPLIT_IMAGES])
            for start in range(0, len(rows), SPLIT_IMAGES)
        ]
        return np.concatenate([self.pixels(split.images.read(batch)) for batch in batches])

    def captions(self, table: CaptionTable, rows: range) -> np.ndarray:
        """(rows, embed_dim) vectors of some captions."""
        part = slice(rows.start, rows.stop)
        return self.tokens(table.tokens[part], table.lengths[part], SPLIT_TEXTS)

    def use_device(self, requested: str, run: TrainConfig | None = None) -> None:
        """Raise a UserError for another device than the CPU."""
        if requested not in ("auto", "cpu"):
            raise UserError(
                f"{self.describe()}: runs on the CPU; use --device cpu, or the model that was"
                " exported"
            )

    def to(self, device: str | torch.device) -> None:
        """Raise a UserError for another device than the CPU."""
        if str(device) != "cpu":
            raise UserError(
                f"{self.describe()}: runs on the CPU only; load the model that was exported"
            )

    def save(self, path: Path) -> None:
        """Raise a UserError: there are no weights to write."""
        raise UserError(
            f"{self.describe()}: cannot be saved as a model folder; copy the exported folder"
            " instead"
        )


class OnnxEncoder(ArrayEncoder):
    """Runs the graphs of `m1clip export` in onnxruntime."""

    def __init__(self, folder: Path, threads: int = 0) -> None:
        """Open a folder with ONNX graphs; `threads` 0 uses all cores."""
        self._process = LoadingProcess()
        settings = read_settings(folder)
        try:
            self.preprocess = ArrayPreprocess.from_dict(settings["image"])
            record = settings["tokenizer"]
            if record.get("kind") == "fast":  # the same file as for other programs
                path = next(folder.rglob(TOKENIZER_FILE), folder / TOKENIZER_FILE)
                record = {
                    **record,
                    "tokenizer": json.loads(read_small(path, MAX_TOKENIZER_BYTES, folder)),
                }
            self.tokenizer = from_record(record)
        except OSError as error:
            raise UserError(
                f"{error.filename}: cannot be read ({error.strerror}); {EXPORT_AGAIN_HINT}"
            ) from None
        except (UserError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{folder}: {error}; {EXPORT_AGAIN_HINT}") from None
        self.context_length = settings["context_length"]
        self.embed_dim = settings["embed_dim"]
        self.logit_scale = float(settings["logit_scale"])
        self.tokenizer.context_length = self.context_length
        self.tokenizer.arrays = True
        self._folder = folder
        self._threads = threads
        self._image_graph = settings["image_graph"]
        texts = {"tensor(int64)": [None], "tensor(int32)": [None]}
        self._text = _session(folder, settings["text_graph"], texts, self.embed_dim, threads)

    def describe(self) -> str:
        """The folder."""
        return str(self._folder)

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
        """(n, size, size, 3) uint8 as the graph takes them: unchanged or normalized."""
        if self._image.get_inputs()[0].type == "tensor(uint8)":
            return pixels
        mean, std = (
            np.array(values, np.float32) for values in (self.preprocess.mean, self.preprocess.std)
        )
        return ((pixels.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2)

    def tokens(
        self, tokens: np.ndarray, lengths: np.ndarray, max_batch: int | None = None
    ) -> np.ndarray:
        """(n, context_length) token ids -> (n, embed_dim) float32 unit vectors."""
        self._process.require_same("an ONNX model")
        vectors = np.empty((len(tokens), self.embed_dim), np.float32)
        for rows, cut in by_length(tokens, lengths, max_batch or TEXT_BATCH):
            vectors[rows] = _run(self._text, cut)
        return vectors


def load_onnx(folder: Path, device: str, image_size: int | None, precision: str) -> Model:
    """The model in an exported ONNX folder; see `m1clip.load`."""
    if device != "cpu" or image_size is not None or precision not in ("auto", "fp32"):
        raise UserError(
            f"{folder}: an ONNX folder runs on the CPU in fp32, with the image size of its export"
        )
    return Model(OnnxEncoder(folder))


def read_settings(folder: Path) -> dict[str, Any]:
    """The checked contents of preprocess.json."""
    path = folder / SETTINGS
    try:
        settings = json.loads(read_small(path, inside=folder))
        version = format_version(settings)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {EXPORT_AGAIN_HINT}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: not written by m1clip export; {EXPORT_AGAIN_HINT}") from None
    if version > ONNX_FORMAT:
        raise UserError(
            f"{path}: written by a newer m1clip (format {version}, this one reads {ONNX_FORMAT}):"
            " upgrade"
        )
    if not matches_schema(settings, SETTINGS_SCHEMA):
        raise UserError(f"{path}: values are missing or of the wrong type; {EXPORT_AGAIN_HINT}")
    return dict(settings)


def _session(
    folder: Path, name: str, shapes: dict[str, list[Any]], embed_dim: int, threads: int
) -> Any:
    """A checked session; `shapes` are those of one input, by its type.

    onnxruntime rejects external data outside the folder and operators that it does not have.
    """
    path = folder / name
    # realpath, as Path.resolve raises RuntimeError for a link to itself.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise UserError(f"{folder / SETTINGS}: {name} is outside the folder; {EXPORT_AGAIN_HINT}")
    # onnxruntime would wait for another process to write into a FIFO.
    if os.path.lexists(path) and not path.is_file():
        raise UserError(f"{path}: not a regular file; {EXPORT_AGAIN_HINT}")
    try:
        import onnxruntime
    except ImportError:
        raise UserError("an ONNX folder needs onnxruntime: pip install 'm1clip[export]'") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    # Would take the cores from others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # noqa: BLE001  its errors have no common class
        reason = " ".join(str(error).split()).rpartition("rror: ")[2].rpartition("failed:")[2][:200]
        raise UserError(
            f"{path}: onnxruntime cannot open it ({reason}); {EXPORT_AGAIN_HINT}"
        ) from None
    graph_input = session.get_inputs()
    made = session.get_outputs()
    fits = (
        len(graph_input) == len(made) == 1
        and graph_input[0].type in shapes
        and made[0].type == "tensor(float)"
    )
    sides = (
        [side if isinstance(side, int) else None for side in graph_input[0].shape] if fits else []
    )
    if (
        not fits
        or sides != [None, *shapes[graph_input[0].type]]
        or made[0].shape[1:] != [embed_dim]
    ):
        raise UserError(
            f"{path}: not a graph of m1clip export, or for another {SETTINGS}; {EXPORT_AGAIN_HINT}"
        )
    return session


def _run(session: Any, values: np.ndarray) -> np.ndarray:
    graph_input = session.get_inputs()[0]
    if graph_input.type == "tensor(int32)":
        values = values.astype(np.int32)
    (vectors,) = session.run(None, {graph_input.name: np.ascontiguousarray(values)})
    return np.asarray(vectors)
