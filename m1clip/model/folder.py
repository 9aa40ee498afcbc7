"""Models of others as files: open_clip's and Hugging Face's folders, and open_clip weights alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from m1clip.data.images import OPENAI_MEAN, OPENAI_STD, Preprocess
from m1clip.errors import UserError
from m1clip.io import atomic_folder, read_small, write_json, write_text
from m1clip.model.convert import (
    HUGGING_FACE,
    INDEX,
    OPENCLIP,
    SAFETENSORS,
    TORCH,
    check_expressible,
    hf_config,
    openclip_config,
    plain_names,
    read_checkpoint,
    read_json,
    shape_from_hf,
    shape_from_openclip,
    shape_from_tensors,
    to_ours,
    to_theirs,
)
from m1clip.model.presets import Activation, ClipShape
from m1clip.model.pretrained import TowerShape
from m1clip.text.base import Tokenizer
from m1clip.text.bpe import BpeTokenizer, hugging_face_files

Format = Literal["openclip", "hf"]
OPENCLIP_CONFIG = "open_clip_config.json"
OPENCLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
HF_WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin")
BICUBIC = 3  # Pillow's number for it, as Hugging Face writes it


class Parts(NamedTuple):
    """What a model folder holds, whoever wrote it."""

    shape: ClipShape | TowerShape
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    preprocess: Preprocess
    where: str


def kind_of(path: Path) -> Literal["openclip", "hf", "file"] | None:
    """Which of the foreign kinds a path is, or none: by what lies there, never by its name."""
    if path.is_file() and (path.suffix in SAFETENSORS + TORCH or path.name.endswith(".index.json")):
        return "file"
    if (path / OPENCLIP_CONFIG).is_file():
        return "openclip"
    if (path / "config.json").is_file():
        try:
            config = json.loads(read_small(path / "config.json"))
        except (OSError, ValueError, RecursionError):
            return None
        return "hf" if isinstance(config, dict) and config.get("model_type") == "clip" else None
    return None


def read_foreign(path: Path, activation: Activation | None = None) -> Parts:
    """A model of others as ours; `activation` is for weights that come without a config."""
    kind = kind_of(path)
    if kind == "hf":
        return _read_hf(path)
    if kind == "openclip":
        return _read_openclip(path / OPENCLIP_CONFIG, _first(path, OPENCLIP_WEIGHTS))
    beside = path.with_name(OPENCLIP_CONFIG)
    if beside.is_file():
        return _read_openclip(beside, path)
    if activation is None:
        raise UserError(
            f"{path}: weights without a config do not show their activation; put {OPENCLIP_CONFIG} beside them, or "
            f"say --activation quick_gelu (OpenAI's own and the -quickgelu models) or --activation gelu (others)"
        )
    weights = plain_names(read_checkpoint(path))
    shape = shape_from_tensors(weights, activation, str(path))
    return _openclip_parts(shape, weights, Preprocess(image_size=shape.image_size), path)


def _read_openclip(config: Path, weights: Path) -> Parts:
    told = read_json(config)
    model = told.get("model_cfg")
    shape = shape_from_openclip(model if isinstance(model, dict) else told, str(config))
    seen = told.get("preprocess_cfg") or {}
    resize = seen.get("resize_mode", "shortest")
    if seen.get("interpolation", "bicubic") != "bicubic" or resize not in ("shortest", "squash"):
        raise UserError(f"{config}: preprocessing {seen} is not one that m1clip has (bicubic, shortest or squash)")
    preprocess = Preprocess(
        image_size=shape.image_size,
        mean=_three(seen.get("mean", OPENAI_MEAN), config),
        std=_three(seen.get("std", OPENAI_STD), config),
        resize=resize,
    )
    return _openclip_parts(shape, plain_names(read_checkpoint(weights)), preprocess, weights)


def _openclip_parts(shape: ClipShape, theirs: dict[str, Tensor], preprocess: Preprocess, where: Path) -> Parts:
    weights = to_ours(theirs, OPENCLIP, shape, str(where))
    return Parts(shape, weights, _clip_tokenizer(shape, where), preprocess, str(where))


def _read_hf(folder: Path) -> Parts:
    shape = shape_from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
    file = _first(folder, HF_WEIGHTS)
    weights = to_ours(read_checkpoint(file), HUGGING_FACE, shape, str(file))
    seen_at = folder / "preprocessor_config.json"
    seen = read_json(seen_at) if seen_at.is_file() else {}
    if seen.get("resample", BICUBIC) != BICUBIC:
        raise UserError(f"{seen_at}: resample {seen['resample']} is not bicubic ({BICUBIC}), which m1clip has")
    crop = seen.get("crop_size", shape.image_size)
    crop = crop.get("height") if isinstance(crop, dict) else crop
    size = seen.get("size", shape.image_size)
    size = size.get("shortest_edge", size.get("height")) if isinstance(size, dict) else size
    if not crop == size == shape.image_size:
        raise UserError(f"{seen_at}: resizes to {size} and crops to {crop}, the model takes {shape.image_size} pixels")
    mean, std = seen.get("image_mean", OPENAI_MEAN), seen.get("image_std", OPENAI_STD)
    preprocess = Preprocess(
        image_size=shape.image_size, mean=_three(mean, seen_at), std=_three(std, seen_at), resize="shortest-floor"
    )
    return Parts(shape, weights, _clip_tokenizer(shape, folder), preprocess, str(file))


def write_foreign(to: Format, folder: Path, parts: Parts) -> None:
    """A folder that open_clip (`local-dir:`) or transformers (`CLIPModel.from_pretrained`) loads as its own."""
    shape = parts.shape
    if isinstance(shape, TowerShape):
        raise UserError(f"a model on {shape.image_tower} and {shape.text_tower} has no form in {to}")
    check_expressible(shape, to)
    if not isinstance(parts.tokenizer, BpeTokenizer) or parts.tokenizer.kept is not None:
        raise UserError(f"only CLIP's full vocabulary of 49,408 pieces can be written as {to}")
    with atomic_folder(folder) as partial:
        if to == "openclip":
            _write_openclip(partial, parts, shape)
        else:
            _write_hf(partial, parts, shape, parts.tokenizer)


def _write_openclip(folder: Path, parts: Parts, shape: ClipShape) -> None:
    save_file(to_theirs(parts.weights, OPENCLIP, shape), folder / OPENCLIP_WEIGHTS[0], {"format": "pt"})
    seen = parts.preprocess
    preprocess = {
        "size": seen.image_size, "mode": "RGB", "mean": list(seen.mean), "std": list(seen.std),
        "interpolation": "bicubic", "resize_mode": seen.resize.removesuffix("-floor"), "fill_color": 0,
    }  # fmt: skip
    write_json(folder / OPENCLIP_CONFIG, {"model_cfg": openclip_config(shape), "preprocess_cfg": preprocess})


def _write_hf(folder: Path, parts: Parts, shape: ClipShape, tokenizer: BpeTokenizer) -> None:
    if parts.preprocess.resize == "squash":
        raise UserError("this model squashes images into a square, which a CLIPImageProcessor does not")
    save_file(to_theirs(parts.weights, HUGGING_FACE, shape), folder / HF_WEIGHTS[0], {"format": "pt"})
    write_json(folder / "config.json", hf_config(shape, tokenizer.sot_id, tokenizer.eot_id))
    size = parts.preprocess.image_size
    seen: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": size},
        "resample": BICUBIC, "do_center_crop": True, "crop_size": {"height": size, "width": size},
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True,
        "image_mean": list(parts.preprocess.mean), "image_std": list(parts.preprocess.std),
    }  # fmt: skip
    write_json(folder / "preprocessor_config.json", seen)
    for name, text in hugging_face_files(shape.context_length).items():
        write_text(folder / name, text)


def _clip_tokenizer(shape: ClipShape, where: Path) -> BpeTokenizer:
    tokenizer = BpeTokenizer()
    if shape.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{where}: a vocabulary of {shape.vocab_size:,}; of others' models those with CLIP's own "
            f"{tokenizer.vocab_size:,} pieces can be read"
        )
    return tokenizer


def _first(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder}: no weights there (looked for {', '.join(names)})")


def _three(values: Any, where: Path) -> tuple[float, float, float]:
    numbers = list(values) if isinstance(values, list | tuple) else []
    if len(numbers) != 3 or not all(isinstance(value, int | float) for value in numbers):
        raise UserError(f"{where}: mean and std must be 3 numbers each, not {str(values)[:40]}")
    return float(numbers[0]), float(numbers[1]), float(numbers[2])
