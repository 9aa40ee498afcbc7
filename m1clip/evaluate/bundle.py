"""A model as a folder: shape and preprocessing, tokenizer, weights. Nothing downstream asks for a second path."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from m1clip.data.augment import render
from m1clip.data.images import decode
from m1clip.data.preprocess import Preprocess, to_square
from m1clip.errors import UserError
from m1clip.evaluate.foreign import Parts, kind_of, read_foreign
from m1clip.files import format_version, read_small, whole_folder, write_json
from m1clip.model.clip import Clip
from m1clip.model.lora import merged_state
from m1clip.model.pretrained.build import OWN, check_sizes, read_config
from m1clip.model.pretrained.clip import TowerClip, empty_towers
from m1clip.model.pretrained.shape import TowerShape
from m1clip.model.shape import Activation, ClipShape
from m1clip.model.weights import (
    assign_weights,
    check_weights,
    empty_clip,
    fit_positions,
    read_tensors,
    write_tensors,
)
from m1clip.text import load_tokenizer
from m1clip.text.base import Tokenizer

FORMAT = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
SHAPE, TOWERS = "shape", "towers"  # what the config calls a model on towers of ours, and on towers of others

Picture = str | Path | Image.Image | np.ndarray | Tensor
IMAGES = (
    "encode_images takes a path, a PIL image, a (height, width, 3) uint8 array or tensor, or a list of these"
)
TEXTS = "encode_texts takes a text, or a list of texts"


class Bundle:
    """Model, tokenizer and preprocessing together: pictures and sentences in, unit vectors out."""

    def __init__(self, model: Clip, tokenizer: Tokenizer, preprocess: Preprocess) -> None:
        self.model, self.tokenizer, self.preprocess = model, tokenizer, preprocess

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.logit_scale.device

    @torch.inference_mode()
    def encode_images(self, images: Picture | Iterable[Picture], batch: int = 64) -> Tensor:
        """(n, embed_dim) unit vectors of one image (n = 1) or many.

        An image is a path, a PIL image, a (height, width, 3) uint8 array, or a uint8 tensor of that shape or of
        (3, height, width). Many are a list or other iterable of these, or an array or tensor with one more dimension.
        """
        self.model.eval()
        parts, pictures = [], _many(images, Picture, IMAGES)
        for start in range(0, len(pictures), batch):
            squares = [self.square(picture) for picture in pictures[start : start + batch]]
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
        with whole_folder(folder) as partial:
            weights = {name: t.detach().cpu() for name, t in merged_state(self.model).items()}
            write_tensors(partial / WEIGHTS, weights, {"format": "pt"})
            kind = TOWERS if isinstance(self.model, TowerClip) else SHAPE
            shape, preprocess = self.model.shape.to_dict(), self.preprocess.to_dict()
            write_json(partial / CONFIG, {"format": FORMAT, kind: shape, "preprocess": preprocess})
            self.tokenizer.save(partial)

    def square(self, picture: Picture) -> np.ndarray:
        """(size, size, 3) uint8, as training sees it."""
        size, resize = self.preprocess.image_size, self.preprocess.resize
        if isinstance(picture, str | Path):
            picture = decode(Path(picture), size, str(picture))  # as training decodes it
        elif isinstance(picture, np.ndarray | Tensor):
            picture = Image.fromarray(_array(picture))
        elif min(picture.size) == 0:
            raise UserError(f"a PIL image of {picture.width} x {picture.height} has no pixels")
        return to_square(picture, size, resize)


def _many(values: Any, kind: Any, takes: str) -> list[Any]:
    """One value or an iterable of them as a list; anything that is not of this kind is a UserError."""
    batched = isinstance(values, np.ndarray | Tensor) and (
        values.ndim == 4
        or (isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "OU")
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
    if (
        isinstance(image, Tensor)
        or dtype not in (np.uint8, torch.uint8)
        or image.ndim != 3
        or image.shape[2] != 3
    ):
        kind = "a tensor" if isinstance(dtype, torch.dtype) else "an array"
        raise UserError(f"{kind} must be (height, width, 3) uint8, not {shape} {dtype}")
    if image.size == 0:
        raise UserError(f"an image of shape {shape} has no pixels")
    return np.ascontiguousarray(image)


def load(
    path: str | Path, device: str = "cpu", image_size: int | None = None, activation: Activation | None = None
) -> Bundle:
    """Load a model folder, the best model of a run, or a model of others (open_clip, Hugging Face).

    `image_size` makes it see pictures at another size; `activation` is for foreign weights without a config.
    """
    return assemble(read_parts(Path(path), activation), device, image_size)


def read_parts(path: Path, activation: Activation | None = None) -> Parts:
    """Shape, weights, tokenizer and preprocessing of a model, whoever wrote it."""
    parts = _read_own(path) if kind_of(path) is None else read_foreign(path, activation)
    # Against the weights on the meta device: no memory is taken yet for the sizes that a config claims.
    model: Clip
    with torch.device("meta"):
        if isinstance(parts.shape, ClipShape):
            model = Clip(parts.shape, parts.tokenizer.eot_id)
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
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {shape.vocab_size}"
        )
    weights = read_tensors(folder / WEIGHTS)
    return Parts(shape, weights, tokenizer, preprocess, str(folder / WEIGHTS))


def assemble(parts: Parts, device: str = "cpu", image_size: int | None = None) -> Bundle:
    """The model that the parts make, for pictures of another size if that is asked for."""
    shape = parts.shape if image_size is None else replace(parts.shape, image_size=image_size)
    weights = dict(parts.weights)
    model: Clip
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
    found = [
        path.parent.parent for path in runs.glob(f"*/*/{WEIGHTS}") if path.parent.name in ("best", "model")
    ]
    if not found:
        raise UserError(f"no trained model in {runs}/: train one, or name one with --model")
    return max(
        found, key=lambda run: (run / "run.jsonl").stat().st_mtime if (run / "run.jsonl").exists() else 0
    )


def _read_config(path: Path) -> tuple[ClipShape | TowerShape, Preprocess]:
    try:
        config = json.loads(read_small(path))
        version, preprocess, on_towers = format_version(config), config["preprocess"], TOWERS in config
        shape = config[TOWERS if on_towers else SHAPE]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: not a model config ({reason})") from None
    if version > FORMAT:
        raise UserError(
            f"{path}: written by a newer m1clip (format {version}, this one reads {FORMAT}): upgrade"
        )
    if not isinstance(shape, dict) or not isinstance(preprocess, dict):
        raise UserError(f"{path}: not a model config (shape and preprocess must be objects)")
    try:
        made = (TowerShape if on_towers else ClipShape).from_dict(shape), Preprocess.from_dict(preprocess)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if made[0].image_size != made[1].image_size:
        raise UserError(
            f"{path}: the model takes pictures of {made[0].image_size} pixels, "
            f"the preprocessing makes {made[1].image_size}"
        )
    return made
