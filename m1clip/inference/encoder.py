"""A model as a folder: shape and preprocessing, tokenizer, weights. Nothing downstream asks for a second path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from m1clip.data.augment import Views, render
from m1clip.data.cache import Progress, decode_images
from m1clip.data.captions import CaptionTable
from m1clip.data.images import Preprocess, decode, to_square
from m1clip.data.prepare import Split
from m1clip.data.types import ImageRef
from m1clip.errors import UserError
from m1clip.io import atomic_folder, format_version, read_small, write_json
from m1clip.model.clip import CLIP
from m1clip.model.convert import assign_weights, check_weights, empty_clip, fit_positions, read_tensors, write_tensors
from m1clip.model.folder import Parts, kind_of, read_foreign
from m1clip.model.lora import merged_state
from m1clip.model.presets import Activation, ClipShape
from m1clip.model.pretrained import OWN, TowerClip, TowerShape, check_sizes, empty_towers, read_config
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import load_tokenizer

FORMAT = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
SHAPE, TOWERS = "shape", "towers"  # what the config calls a model on towers of ours, and on towers of others

ImageInput = str | Path | Image.Image | np.ndarray | Tensor
IMAGES = "encode_images takes a path, a PIL image, a (height, width, 3) uint8 array or tensor, or a list of these"
TEXTS = "encode_texts takes a text, or a list of texts"


class Bundle:
    """Model, tokenizer and preprocessing together: images and sentences in, unit vectors out."""

    def __init__(self, model: CLIP, tokenizer: Tokenizer, preprocess: Preprocess) -> None:
        self.model, self.tokenizer, self.preprocess = model, tokenizer, preprocess

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.logit_scale.device

    @torch.inference_mode()
    def encode_images(self, inputs: ImageInput | Iterable[ImageInput], batch: int = 64) -> Tensor:
        """(n, embed_dim) unit vectors of one image (n = 1) or many.

        An image is a path, a PIL image, a (height, width, 3) uint8 array, or a uint8 tensor of that shape or of
        (3, height, width). Many are a list or other iterable of these, or an array or tensor with one more dimension.
        """
        self.model.eval()
        parts, images = [], _many(inputs, ImageInput, IMAGES)
        for start in range(0, len(images), batch):
            squares = [self.square(image) for image in images[start : start + batch]]
            pixels = torch.from_numpy(np.stack(squares)).to(self.device)
            parts.append(self.model.encode_image(render(pixels, None, self.preprocess)))
        return torch.cat(parts) if parts else torch.empty(0, self.model.shape.embed_dim)

    @torch.inference_mode()
    def encode_texts(self, texts: str | Iterable[str], batch: int = 256) -> Tensor:
        """(n, embed_dim) unit vectors of one text (n = 1) or many."""
        self.model.eval()
        parts, sentences = [], _many(texts, str, TEXTS)
        for start in range(0, len(sentences), batch):
            rows = self.tokenizer(sentences[start : start + batch], self.model.shape.context_length)
            parts.append(self.model.encode_text(torch.from_numpy(rows).long().to(self.device)))
        return torch.cat(parts) if parts else torch.empty(0, self.model.shape.embed_dim)

    def save(self, folder: Path) -> None:
        """Write the model folder; an older one there is replaced only when the new one is whole."""
        with atomic_folder(folder) as partial:
            weights = {name: t.detach().cpu() for name, t in merged_state(self.model).items()}
            write_tensors(partial / WEIGHTS, weights, {"format": "pt"})
            kind = TOWERS if isinstance(self.model, TowerClip) else SHAPE
            shape, preprocess = self.model.shape.to_dict(), self.preprocess.to_dict()
            write_json(partial / CONFIG, {"format": FORMAT, kind: shape, "preprocess": preprocess})
            self.tokenizer.save(partial)

    def square(self, image: ImageInput) -> np.ndarray:
        """(size, size, 3) uint8, as training sees it."""
        size, resize = self.preprocess.image_size, self.preprocess.resize
        if isinstance(image, str | Path):
            image = decode(Path(image), size, str(image))  # as training decodes it
        elif isinstance(image, np.ndarray | Tensor):
            image = Image.fromarray(_array(image))
        elif min(image.size) == 0:
            raise UserError(f"a PIL image of {image.width} x {image.height} has no pixels")
        return to_square(image, size, resize)


def _many(values: Any, kind: Any, takes: str) -> list[Any]:
    """One value or an iterable of them as a list; anything that is not of this kind is a UserError."""
    batched = isinstance(values, np.ndarray | Tensor) and (
        values.ndim == 4 or (isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "OU")
    )
    if isinstance(values, kind) and not batched:
        return [values]
    several = isinstance(values, Iterable) and not isinstance(values, bytes | bytearray | Mapping)
    if not several or (isinstance(values, np.ndarray | Tensor) and not batched):
        raise UserError(f"{takes}, not {type(values).__name__}")
    items = list(values)
    for number, item in enumerate(items, start=1):
        if not isinstance(item, kind):
            raise UserError(f"{takes}; number {number} of {len(items)} is of type {type(item).__name__}")
    return items


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


def load(
    path: str | Path, device: str = "cpu", image_size: int | None = None, activation: Activation | None = None
) -> Bundle:
    """Load a model folder, the best model of a run, or a model of others (open_clip, Hugging Face).

    `image_size` makes it see images at another size; `activation` is for foreign weights without a config.
    """
    return assemble(read_parts(Path(path), activation), device, image_size)


def read_parts(path: Path, activation: Activation | None = None) -> Parts:
    """Shape, weights, tokenizer and preprocessing of a model, whoever wrote it."""
    parts = _read_own(path) if kind_of(path) is None else read_foreign(path, activation)
    # Against the weights on the meta device: no memory is taken yet for the sizes that a config claims.
    model: CLIP
    with torch.device("meta"):
        if isinstance(parts.shape, ClipShape):
            model = CLIP(parts.shape, parts.tokenizer.eot_id)
        else:
            towers = [read_config(text) for text in (parts.shape.image_config, parts.shape.text_config)]
            theirs = [config for config in towers if config and OWN not in config]
            for config in theirs:
                check_sizes(config, parts.weights, parts.where)
            if theirs:
                return parts  # libraries may compute with real numbers when they build a model
            model = TowerClip(parts.shape, parts.tokenizer.pad_id)
    check_weights(model, parts.weights, parts.where)
    return parts


def _read_own(path: Path) -> Parts:
    folder = model_folder(path)
    shape, preprocess = _read_config(folder / CONFIG)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size != shape.vocab_size:
        raise UserError(f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {shape.vocab_size}")
    weights = read_tensors(folder / WEIGHTS)
    return Parts(shape, weights, tokenizer, preprocess, str(folder / WEIGHTS))


def assemble(parts: Parts, device: str = "cpu", image_size: int | None = None) -> Bundle:
    """The model that the parts make, for images of another size if that is asked for."""
    shape = parts.shape if image_size is None else replace(parts.shape, image_size=image_size)
    weights = dict(parts.weights)
    model: CLIP
    if isinstance(shape, TowerShape):
        try:
            model = empty_towers(shape, parts.tokenizer.pad_id, torch.device(device))
        except UserError:
            raise
        except Exception as error:  # libraries raise nearly anything for a config that makes no sense
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
            raise UserError(f"{parts.where}: its towers cannot be built ({reason})") from error
    else:
        assert isinstance(parts.shape, ClipShape)
        fit_positions(weights, parts.shape, shape)
        model = empty_clip(shape, parts.tokenizer.eot_id, torch.device(device))
    assign_weights(model, weights, parts.where)
    return Bundle(model.eval(), parts.tokenizer, replace(parts.preprocess, image_size=shape.image_size))


def model_folder(path: Path) -> Path:
    """The model folder meant by a path: itself, or best/ or model/ of a run."""
    for folder in (path, path / "best", path / "model"):
        if (folder / WEIGHTS).is_file():
            return folder
    raise UserError(f"{path}: no trained model there (looked for {WEIGHTS}, best/{WEIGHTS}, model/{WEIGHTS})")


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run that was written to last, among those that have a model."""
    found = [path.parent.parent for path in runs.glob(f"*/*/{WEIGHTS}") if path.parent.name in ("best", "model")]
    if not found:
        raise UserError(f"no trained model in {runs}/: train one, or name one with --model")
    return max(found, key=lambda run: (run / "run.jsonl").stat().st_mtime if (run / "run.jsonl").exists() else 0)


def _read_config(path: Path) -> tuple[ClipShape | TowerShape, Preprocess]:
    try:
        config = json.loads(read_small(path))
        version, preprocess, on_towers = format_version(config), config["preprocess"], TOWERS in config
        shape = config[TOWERS if on_towers else SHAPE]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: not a model config ({reason})") from None
    if version > FORMAT:
        raise UserError(f"{path}: written by a newer m1clip (format {version}, this one reads {FORMAT}): upgrade")
    if not isinstance(shape, dict) or not isinstance(preprocess, dict):
        raise UserError(f"{path}: not a model config (shape and preprocess must be objects)")
    try:
        made = (TowerShape if on_towers else ClipShape).from_dict(shape), Preprocess.from_dict(preprocess)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if made[0].image_size != made[1].image_size:
        raise UserError(
            f"{path}: the model takes images of {made[0].image_size} pixels, "
            f"the preprocessing makes {made[1].image_size}"
        )
    return made


class Features(NamedTuple):
    """Features of a split on the CPU, in the order in which `held_out` takes them."""

    image: Tensor  # (images, d)
    text: Tensor  # (captions, d)
    owner: Tensor  # (captions,) the image that each caption describes
    keys: Tensor  # (captions,) equal captions have equal keys
    labels: Tensor | None  # (images,) the class, for class folders


@torch.inference_mode()
def encode_split(
    model: CLIP,
    split: Split,
    preprocess: Preprocess,
    batch: int,
    autocast: Callable[[], AbstractContextManager[object]],
    image_rows: int | None = None,
) -> Features:
    """Every image and every caption of a split, or of its first `image_rows`."""
    images, captions = split.images, split.captions
    image_rows = len(images) if image_rows is None else image_rows
    texts = int(captions.first[image_rows])
    training, device = model.training, model.logit_scale.device
    model.eval()
    image, text = [], []
    with autocast():
        for indices in _chunks(image_rows, batch):
            if split.image_features is not None:
                seen = torch.from_numpy(split.image_features.read(indices)).to(device)
            else:
                seen = render(torch.from_numpy(images.read(indices)).to(device), None, preprocess)
            image.append(model.encode_image(seen).cpu())
        # Sorted by length, so that short captions are not padded to the longest of the set.
        order = np.argsort(captions.lengths[:texts], kind="stable")
        for indices in _chunks(len(order), 4 * batch):
            text.append(model.encode_text(torch.from_numpy(_told(captions, order[indices])).to(device)).cpu())
    model.train(training)
    sorted_text = torch.cat(text)
    features = torch.empty_like(sorted_text)
    features[torch.from_numpy(order)] = sorted_text
    owner, keys = (torch.from_numpy(each[:texts]) for each in (captions.owner, captions.keys))
    labels = None if captions.labels is None else torch.from_numpy(captions.labels[:image_rows])
    return Features(torch.cat(image), features, owner, keys, labels)


def _told(captions: CaptionTable, chosen: np.ndarray) -> np.ndarray:
    """Features of the captions where a tower has made them, else their tokens."""
    if captions.features is not None:
        return captions.features.read(chosen)
    return captions.rows(chosen).astype(np.int64)


def _chunks(count: int, size: int) -> list[np.ndarray]:
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


Tower = Callable[[Tensor], Tensor]
Context = Callable[[], AbstractContextManager[object]]
# (left, top, side as a share, mirrored): the whole image first, then what a look at it from elsewhere shows.
VIEWS = (
    (0.0, 0.0, 1.0, False),
    (0.0, 0.0, 1.0, True),
    (0.0, 0.0, 0.8, False),
    (0.2, 0.2, 0.8, True),
    (0.2, 0.0, 0.8, False),
    (0.0, 0.2, 0.8, True),
)
CAPTIONS = 256  # at once
FLUSH_CAPTIONS = 16  # batches of captions in one write


@torch.inference_mode()
def image_features(
    tower: Tower, refs: Sequence[ImageRef], preprocess: Preprocess, view: int, device: torch.device,
    autocast: Context, bad: dict[int, str], progress: Progress,
) -> Iterator[tuple[list[int], np.ndarray]]:  # fmt: skip
    """Rows of one view of each image, chunk by chunk; what cannot be read goes into `bad` with the reason."""
    side, resize = preprocess.image_size, preprocess.resize
    threads = max(2, (os.cpu_count() or 2) // 2)
    for items, block in decode_images(refs, side, resize, bad, progress, threads):
        pixels = torch.from_numpy(block).to(device)
        with autocast():
            made = tower(render(pixels, _view(view, len(pixels)), preprocess))
        yield items, made.float().cpu().numpy()


@torch.inference_mode()
def caption_features(
    tower: Tower, rows: np.ndarray, lengths: np.ndarray, device: torch.device, autocast: Context, progress: Progress
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Rows of width numbers for each row of token ids; short captions first, none padded to the longest of all."""
    order = np.argsort(lengths, kind="stable")
    places: list[int] = []
    made: list[Tensor] = []
    progress(0, len(order))
    for start in range(0, len(order), CAPTIONS):
        chosen = order[start : start + CAPTIONS]
        ids = torch.from_numpy(rows[chosen, : int(lengths[chosen].max())].astype(np.int64)).to(device)
        with autocast():
            made.append(tower(ids).float().cpu())
        places += chosen.tolist()
        if len(made) == FLUSH_CAPTIONS:
            yield places, torch.cat(made).numpy()
            places, made = [], []
        progress(start + len(chosen), len(order))
    if made:
        yield places, torch.cat(made).numpy()


def _view(number: int, count: int) -> Views | None:
    left, top, side, mirrored = VIEWS[number]
    if number == 0:
        return None
    boxes = np.tile(np.array([left, top, side, side], np.float32), (count, 1))
    return Views(boxes, np.full(count, mirrored), np.ones((count, 2), np.float32))
