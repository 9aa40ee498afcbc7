"""Towers that m1clip builds itself from the files of transformers: DINOv2 and BERT.

They are read from a folder, or from the cache of Hugging Face after `m1clip download`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from m1clip.errors import UserError
from m1clip.model.hub_files import HF_WEIGHTS, MODEL_CONFIG
from m1clip.model.pretrained.bert import BertSize, bert_size, from_bert
from m1clip.model.pretrained.dinov2 import DinoSize, dino_size, from_dinov2
from m1clip.model.weights import Tensors, read_checkpoint, read_json
from m1clip.schema import validate

Size = TypeVar("Size", BertSize, DinoSize)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of pixels


def native_size(folder: Path) -> DinoSize | BertSize | None:
    """The sizes of a tower that m1clip builds itself; None for what transformers builds."""
    file = folder / MODEL_CONFIG
    if not file.is_file():
        return None
    config = read_json(file)
    try:
        return dino_size(config) or bert_size(config)
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{file}: {error}") from None


def settings_of(size: DinoSize | BertSize) -> str:
    """The sizes as `settings` of a tower's config."""
    return json.dumps(dataclasses.asdict(size), sort_keys=True)


def size_from(kind: type[Size], settings: str, name: str) -> Size:
    """The inverse of `settings_of`; UserError for anything else."""
    try:
        values = json.loads(settings)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"the settings of {name} must be a JSON object")
    return kind(**validate(kind, values, f"the settings of {name}"))


def read_dinov2(
    folder: Path, size: DinoSize, image_size: int, normalization: Normalization
) -> Tensors:
    """The weights of a DINOv2 for images of this size, with pixels that are normalized by `normalization`."""
    processor = _processor(folder)
    mean, std = (
        tuple(processor.get(key, default))
        for key, default in zip(("image_mean", "image_std"), IMAGENET, strict=True)
    )
    numbers = (*mean, *std)
    if len(numbers) != 6 or not all(isinstance(value, int | float) for value in numbers):
        raise UserError(f"{folder}: image_mean and image_std must be three numbers each")
    path = weights_file(folder)
    try:
        return from_dinov2(_floats(path), size, image_size, (mean, std), normalization)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{path}: not the weights of this DINOv2 ({error})") from None


def read_bert(folder: Path, size: BertSize) -> tuple[Tensors, int]:
    """(weights, size of the vocabulary) of a BERT."""
    path = weights_file(folder)
    try:
        weights = from_bert(_floats(path), size.layers)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{path}: not the weights of this BERT ({error})") from None
    return weights, len(weights["tokens.weight"])


def trained_image_size(folder: Path) -> int:
    """The side of the images that a tower of a folder is used with; 224 where it is not known."""
    processor = _processor(folder)
    size = processor.get("crop_size", processor.get("size"))
    size = next(iter(size.values()), None) if isinstance(size, dict) else size
    return size if isinstance(size, int) and size > 0 else 224


def weights_file(folder: Path) -> Path:
    """The file with the weights; safetensors first."""
    for name in HF_WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder}: no weights found (looked for {', '.join(HF_WEIGHTS)})")


def _processor(folder: Path) -> dict[str, Any]:
    file = folder / "preprocessor_config.json"
    return read_json(file) if file.is_file() else {}


def _floats(path: Path) -> Tensors:
    """All tensors in single precision: files are often in half."""
    return {name: tensor.float() for name, tensor in read_checkpoint(path).items()}
