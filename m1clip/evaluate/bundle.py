"""A model as a folder: shape and preprocessing, tokenizer, weights. Nothing downstream asks for a second path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from m1clip.data.augment import render
from m1clip.data.images import decode
from m1clip.data.preprocess import Preprocess, to_square
from m1clip.errors import UserError
from m1clip.files import whole_folder, write_json
from m1clip.model.clip import Clip
from m1clip.model.positions import resize_positions
from m1clip.model.shape import ClipShape
from m1clip.text import load_tokenizer
from m1clip.text.base import Tokenizer

FORMAT = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
POSITIONS = "image.positions"

Picture = str | Path | Image.Image | np.ndarray


class Bundle:
    """Model, tokenizer and preprocessing together: pictures and sentences in, unit vectors out."""

    def __init__(self, model: Clip, tokenizer: Tokenizer, preprocess: Preprocess) -> None:
        self.model, self.tokenizer, self.preprocess = model, tokenizer, preprocess

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.logit_scale.device

    @torch.inference_mode()
    def encode_images(self, pictures: Sequence[Picture], batch: int = 64) -> Tensor:
        """(n, embed_dim) unit vectors of paths, PIL pictures or (h, w, 3) uint8 arrays."""
        self.model.eval()
        parts = []
        for start in range(0, len(pictures), batch):
            squares = [self._square(picture) for picture in pictures[start : start + batch]]
            pixels = torch.from_numpy(np.stack(squares)).to(self.device)
            parts.append(self.model.encode_image(render(pixels, None, self.preprocess)))
        return torch.cat(parts) if parts else torch.empty(0, self.model.shape.embed_dim)

    @torch.inference_mode()
    def encode_texts(self, texts: Sequence[str], batch: int = 256) -> Tensor:
        """(n, embed_dim) unit vectors of sentences."""
        self.model.eval()
        parts = []
        for start in range(0, len(texts), batch):
            rows = self.tokenizer(texts[start : start + batch], self.model.shape.context_length)
            parts.append(self.model.encode_text(torch.from_numpy(rows).long().to(self.device)))
        return torch.cat(parts) if parts else torch.empty(0, self.model.shape.embed_dim)

    def save(self, folder: Path) -> None:
        """Write the model folder; an older one there is replaced only when the new one is whole."""
        with whole_folder(folder) as partial:
            weights = {name: t.detach().cpu().contiguous() for name, t in self.model.state_dict().items()}
            save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
            shape, preprocess = self.model.shape.to_dict(), self.preprocess.to_dict()
            write_json(partial / CONFIG, {"format": FORMAT, "shape": shape, "preprocess": preprocess})
            self.tokenizer.save(partial)

    def _square(self, picture: Picture) -> np.ndarray:
        size, resize = self.preprocess.image_size, self.preprocess.resize
        if isinstance(picture, str | Path):
            picture = decode(Path(picture), size, str(picture))  # as training decodes it
        elif isinstance(picture, np.ndarray):
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
                raise UserError(
                    f"an array must be (height, width, 3) uint8, not {picture.shape} {picture.dtype}"
                )
            picture = Image.fromarray(picture)
        return to_square(picture, size, resize)


def load(path: str | Path, device: str = "cpu", image_size: int | None = None) -> Bundle:
    """Load a model folder, or the best model of a run folder; `image_size` makes it see pictures at another size."""
    folder = model_folder(Path(path))
    trained, preprocess = _read_config(folder / CONFIG)
    shape = trained if image_size is None else replace(trained, image_size=image_size)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size != shape.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {shape.vocab_size}"
        )
    model = empty_clip(shape, tokenizer.eot_id, torch.device(device))
    try:
        weights = load_file(folder / WEIGHTS, device=device)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS}: not a readable safetensors file ({error})") from None
    if shape.grid != trained.grid and shape.positions == "learned":
        # Sincos ones are not among the weights: they are made for the new shape already.
        _resize_learned(weights, trained, shape)
    assign_weights(model, weights, str(folder / WEIGHTS))
    return Bundle(model.eval(), tokenizer, replace(preprocess, image_size=shape.image_size))


def empty_clip(shape: ClipShape, eot_id: int, device: torch.device) -> Clip:
    """A Clip whose weights are about to be loaded: memory is taken, no random start is drawn."""
    with torch.device("meta"):
        model = Clip(shape, eot_id)
    model.to_empty(device=device)
    model.image.reset_positions(shape)
    return model


def assign_weights(model: Clip, weights: dict[str, Tensor], where: str) -> None:
    """Copy tensors into the model; a missing, unknown or misshapen one is an error that names it."""
    own = model.state_dict()
    for odd in sorted(set(own) ^ set(weights)):
        raise UserError(f"{where}: {'missing' if odd in own else 'unknown'} tensor '{odd}'")
    for name, tensor in weights.items():
        if own[name].shape != tensor.shape:
            raise UserError(
                f"{where}: '{name}' is {tuple(tensor.shape)}, the model wants {tuple(own[name].shape)}"
            )
    model.load_state_dict(weights)


def model_folder(path: Path) -> Path:
    """The model folder meant by a path: itself, or best/ or model/ of a run."""
    for folder in (path, path / "best", path / "model"):
        if (folder / WEIGHTS).is_file():
            return folder
    raise UserError(f"{path}: no trained model there (looked for {WEIGHTS}, best/{WEIGHTS}, model/{WEIGHTS})")


def _resize_learned(weights: dict[str, Tensor], trained: ClipShape, shape: ClipShape) -> None:
    positions = weights.get(POSITIONS)
    # Missing or misshapen: `assign_weights` says so in words.
    if positions is not None and positions.shape == (trained.image_tokens, trained.vision_width):
        weights[POSITIONS] = resize_positions(positions.float(), shape.grid).to(positions.dtype)


def _read_config(path: Path) -> tuple[ClipShape, Preprocess]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        version, shape, preprocess = int(config["format"]), config["shape"], config["preprocess"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a model config ({type(error).__name__}: {error})") from None
    if version > FORMAT:
        raise UserError(
            f"{path}: written by a newer m1clip (format {version}, this one reads {FORMAT}): upgrade"
        )
    if not isinstance(shape, dict) or not isinstance(preprocess, dict):
        raise UserError(f"{path}: not a model config (shape and preprocess must be objects)")
    try:
        made = ClipShape.from_dict(shape), Preprocess.from_dict(preprocess)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if made[0].image_size != made[1].image_size:
        raise UserError(
            f"{path}: the model takes pictures of {made[0].image_size} pixels, "
            f"the preprocessing makes {made[1].image_size}"
        )
    return made
