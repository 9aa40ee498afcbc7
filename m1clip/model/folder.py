"""Model folders (config, preprocessing, tokenizer, weights), also of open_clip and Hugging Face."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tomllib
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load as tensors_from_bytes

from m1clip.config import device_name
from m1clip.data.images import BILINEAR, OPENAI_MEAN, OPENAI_STD, Preprocess
from m1clip.errors import UserError, first_line
from m1clip.io import atomic_folder, read_small, write_json
from m1clip.model.clip import CLIP, build_clip, empty_clip
from m1clip.model.convert import (
    HUGGING_FACE_CLIP,
    OPENCLIP,
    UnsupportedSetting,
    config_from_hf,
    config_from_openclip,
    to_ours,
    without_prefixes,
    without_wrapper,
)
from m1clip.model.hub_files import HF_WEIGHTS, OPENCLIP_CONFIG, OPENCLIP_WEIGHTS
from m1clip.model.lora import merged_state
from m1clip.model.named import BOXED, HEADS, boxed_files, boxed_name, require_towers, resolve
from m1clip.model.presets import CLIPConfig, HeadConfig, PretrainedImageConfig, PretrainedTextConfig
from m1clip.model.pretrained.libraries import (
    INSTALL_OPENCLIP,
    LibraryParts,
    openclip_parts,
    openclip_settings,
    transformers_parts,
)
from m1clip.model.pretrained.registry import load_image_tower, load_text_tower
from m1clip.model.pretrained.transformers import INSTALL_HF, check_settings
from m1clip.model.siglip import (
    HUGGING_FACE_SIGLIP,
    OPENCLIP_SIGLIP,
    config_from_hf_siglip,
    config_from_openclip_siglip,
    openclip_siglip_parts,
)
from m1clip.model.weights import (
    Tensors,
    assign_weights,
    check_weights,
    fit_positions,
    read_checkpoint,
    read_json,
    read_tensors,
    write_tensors,
)
from m1clip.runlog import NAME as LOG
from m1clip.runlog import has_finished, is_agreed
from m1clip.schema import format_version
from m1clip.text.base import TOKENIZER_FILE, Tokenizer
from m1clip.text.bpe import BpeTokenizer
from m1clip.text.sentencepiece import sentencepiece_json
from m1clip.text.tokenizers import (
    CLEANINGS,
    MAX_TOKENIZER_BYTES,
    FastTokenizer,
    load_tokenizer,
    token_id,
    with_cleaning,
    wordpiece_tokenizer,
)

MODEL_FORMAT = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOWER_PREFIXES = ("image_tower.", "text_tower.")  # how the names of their weights begin
# Pillow's numbers for them, as Hugging Face writes them
BICUBIC = 3
LINEAR = 2
IMAGE_PROCESSOR = "preprocessor_config.json"
SENTENCEPIECE = "spiece.model"
HALF = (0.5, 0.5, 0.5)
LIBRARY_CONTEXT = 77  # tokens of a text at most, for models of transformers


@dataclass(frozen=True)
class SavedModel:
    """What a model folder contains, in whatever format it is written."""

    config: CLIPConfig
    weights: Tensors
    tokenizer: Tokenizer
    preprocess: Preprocess
    where: str

    def build(self, device: str = "cpu") -> CLIP:
        """The model on a device, in evaluation mode."""
        torch_device = open_device(device)
        try:
            model = empty_clip(self.config, torch_device)
        except UserError:
            raise
        except Exception as error:  # libraries raise all kinds of errors for invalid settings
            raise UserError(
                f"{self.where}: its towers cannot be built ({first_line(error)})"
            ) from error
        assign_weights(model, self.weights, self.where)
        return model.eval()

    def resized(self, image_size: int | None) -> SavedModel:
        """The same model for images of another size: learned positions are interpolated."""
        config = self.config.resized(image_size)
        preprocess = replace(self.preprocess, image_size=config.image_size)
        return replace(
            self,
            config=config,
            preprocess=preprocess,
            weights=fit_positions(self.weights, self.config, config),
        )

    def with_projections(self) -> SavedModel:
        """The same model, with an identity projection on each side that has no head."""
        changes: dict[str, HeadConfig] = {}
        weights = dict(self.weights)
        for name in ("image_head", "text_head"):
            if getattr(self.config, name).kind == "identity":
                changes[name] = HeadConfig()
                weights[f"{name}.weight"] = torch.eye(self.config.embed_dim)
        if not changes:
            return self
        config = replace(self.config, **changes)  # type: ignore[arg-type]
        return replace(self, config=config, weights=weights)


def open_device(name: str | torch.device) -> torch.device:
    """The device with this name, or "gpu"; UserError where there is none."""
    try:
        return torch.empty(0, device=device_name(name) if isinstance(name, str) else name).device
    except (RuntimeError, AssertionError, TypeError):  # the second: a torch without CUDA
        raise UserError(
            f"device {str(name)[:40]!r}: not available here; give cpu, gpu, cuda or mps"
        ) from None


def write_model(folder: Path, model: CLIP, tokenizer: Tokenizer, preprocess: Preprocess) -> None:
    """Write a model folder; an older one there is replaced only when the new one is complete."""
    write_weights(folder, model.config, merged_state(model), tokenizer, preprocess)


def write_weights(
    folder: Path, config: CLIPConfig, weights: Tensors, tokenizer: Tokenizer, preprocess: Preprocess
) -> None:
    """Write a model folder of the weights of a model, as `write_model` does."""
    with atomic_folder(folder) as partial:
        write_model_files(partial, config, weights, tokenizer, preprocess)


def copy_model(source: Path, folder: Path) -> None:
    """Write a model folder with the files of another one.

    The weights are not copied where the file system can give a file two names: no program of this
    package changes them in place.
    """
    with atomic_folder(folder) as partial:
        for file in source.iterdir():
            copy = partial / file.name
            if file.name == WEIGHTS:
                with contextlib.suppress(OSError):
                    os.link(file, copy)
                    continue
            shutil.copyfile(file, copy)


def write_model_files(
    folder: Path, config: CLIPConfig, weights: Tensors, tokenizer: Tokenizer, preprocess: Preprocess
) -> None:
    write_tensors(folder / WEIGHTS, weights, {"format": "pt"})
    values = {"format": MODEL_FORMAT, "model": config.to_dict(), "preprocess": preprocess.to_dict()}
    write_json(folder / CONFIG, values)
    tokenizer.save(folder)


def write_boxed(folder: Path, model: CLIP, preprocess: Preprocess) -> None:
    """Write the files of a model in this package: a config and all weights but those of the towers.

    Matrices are written in float16, statistics and biases as they are.
    """
    heads = {
        name: tensor.detach().cpu().half() if tensor.ndim == 2 else tensor.detach().cpu()
        for name, tensor in model.state_dict().items()
        if not name.startswith(TOWER_PREFIXES)
    }
    write_tensors(folder / HEADS, heads, {"format": "pt"})
    config = {
        "format": MODEL_FORMAT,
        "model": model.config.to_dict(),
        "preprocess": preprocess.to_dict(),
    }
    write_json(folder / CONFIG, config)


def read_model(path: Path) -> SavedModel:
    """Read a model by name or path: ours, a run, or one of open_clip or Hugging Face."""
    path = resolve(path)
    name = boxed_name(path)
    if name is not None:
        saved = _read_boxed(name)
    elif path.is_file():
        saved = _read_openclip(path.with_name(OPENCLIP_CONFIG), path)
    elif (path / OPENCLIP_CONFIG).is_file():
        saved = _read_openclip(path / OPENCLIP_CONFIG, _first_file(path, OPENCLIP_WEIGHTS))
    elif _third_party_config(path).get("model_type") == "clip":
        saved = _read_hf(path)
    elif _third_party_config(path).get("model_type") == "siglip":
        saved = _read_hf_siglip(path)
    elif has_both_sides(_third_party_config(path)):
        saved = _read_transformers(path)
    else:
        _reject_other_architecture(path)
        saved = _read_own(model_folder(path))
    for tower in saved.config.from_libraries:
        check_settings(tower, saved.weights, saved.where)
    if not saved.config.from_libraries:
        # Checked on the meta device, before memory is allocated for the sizes that a config claims.
        with torch.device("meta"):
            check_weights(build_clip(saved.config), saved.weights, saved.where)
    return saved


def model_folder(path: Path) -> Path:
    """The model folder that a path means: itself, or best/ or model/ of a run."""
    for folder in (path, path / "best", path / "model"):
        if (folder / WEIGHTS).is_file():
            return folder
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    looked = f"looked for {WEIGHTS}, best/{WEIGHTS}, model/{WEIGHTS}"
    raise UserError(f"{path}: no trained model found ({looked})")


def check_exists(model: str | Path) -> None:
    """Raise UserError if there is no such model or run; its content is not checked."""
    if boxed_name(model) is None:
        path = resolve(model)
        if not path.exists() or (path / "config.toml").is_file():
            model_folder(path)


def newest_run(runs: Path = Path("runs"), of_photos: bool = False) -> Path | None:
    """The finished run that was written to last, of those that have a model; None if there is none.

    A run of the Label page counts once the user has chosen to search with its model. `of_photos`:
    only a run that was not trained on synthetic images alone.
    """
    runs_with_model = {
        path.parent.parent
        for path in runs.glob(f"*/*/{WEIGHTS}")
        if path.parent.name in ("best", "model")
    }
    newest_first = sorted(runs_with_model, key=_last_written, reverse=True)
    return next(
        (
            run
            for run in newest_first
            if _may_be_default(run) and not (of_photos and _is_synthetic(run))
        ),
        None,
    )


def _last_written(run: Path) -> float:
    log = run / LOG
    return log.stat().st_mtime if log.exists() else 0


def _may_be_default(run: Path) -> bool:
    # Without a log it is a model that was put there.
    return is_agreed(run) and (not (run / LOG).exists() or has_finished(run))


def _is_synthetic(run: Path) -> bool:
    """Whether a run was trained on synthetic images alone."""
    try:
        data = tomllib.loads(read_small(run / "config.toml").decode()).get("data", {})
    except (OSError, ValueError):
        return False  # not a run of this program, but perhaps a model
    return isinstance(data, dict) and data.get("source") == ["synthetic"]


def _read_boxed(name: str) -> SavedModel:
    """A model whose heads are in this package and whose towers are in other packages."""
    require_towers(name)
    files = boxed_files(name)
    heads_path = BOXED[name].folder / HEADS
    config, preprocess = _parse_config(json.loads(files[CONFIG]), heads_path.with_name(CONFIG))
    image_tower, text_tower = BOXED[name].towers
    _, image_weights, _ = load_image_tower(image_tower, config.image_size)
    _, text_weights, tokenizer = load_text_tower(text_tower, config.context_length)
    weights = {f"image_tower.{key}": tensor for key, tensor in image_weights.items()}
    weights |= {f"text_tower.{key}": tensor for key, tensor in text_weights.items()}
    weights |= {key: tensor.float() for key, tensor in tensors_from_bytes(files[HEADS]).items()}
    _check_tokenizer(config, tokenizer, heads_path.parent)
    return SavedModel(config, weights, tokenizer, preprocess, str(heads_path))


def _check_tokenizer(config: CLIPConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Raise UserError if a tokenizer is not that of the text tower."""
    for name in ("vocab_size", "eot_id", "pad_id"):
        expected = getattr(config.text_tower, name, None)
        if name == "vocab_size" and isinstance(tokenizer, FastTokenizer) and expected:
            # The tables of other libraries may have more rows than there are tokens.
            expected = expected if tokenizer.vocab_size > expected else tokenizer.vocab_size
        if expected is not None and expected != getattr(tokenizer, name):
            raise UserError(
                f"{folder}: {name} is {getattr(tokenizer, name)} in the tokenizer, {expected}"
                " in the model"
            )


def _read_own(folder: Path) -> SavedModel:
    config, preprocess = _parse_config(read_json(folder / CONFIG), folder / CONFIG)
    tokenizer = load_tokenizer(folder)
    _check_tokenizer(config, tokenizer, folder)
    return SavedModel(
        config, read_tensors(folder / WEIGHTS), tokenizer, preprocess, str(folder / WEIGHTS)
    )


def _parse_config(record: dict[str, Any], path: Path) -> tuple[CLIPConfig, Preprocess]:
    try:
        version = format_version(record)
        model = record["model"]
        preprocess = record["preprocess"]
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: not a model config ({type(error).__name__}: {error})") from None
    if version > MODEL_FORMAT:
        raise UserError(
            f"{path}: written by a newer m1clip (format {version}, this one reads {MODEL_FORMAT}):"
            " upgrade"
        )
    if not isinstance(model, dict) or not isinstance(preprocess, dict):
        raise UserError(f"{path}: not a model config (model and preprocess must be objects)")
    try:
        config = CLIPConfig.from_dict(model)
        checked = Preprocess.from_dict(preprocess)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if config.image_size != checked.image_size:
        sizes = (
            f"the model takes images of {config.image_size} pixels, the preprocessing makes"
            f" {checked.image_size}"
        )
        raise UserError(f"{path}: {sizes}")
    return config, checked


def _third_party_config(folder: Path) -> dict[str, Any]:
    """The config.json that another library wrote; {} where there is none, or where it is ours."""
    try:
        config = json.loads(read_small(folder / CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) and "format" not in config else {}


def _reject_other_architecture(folder: Path) -> None:
    """Raise UserError that names the architecture of an unsupported transformers or timm model."""
    config = _third_party_config(folder)
    architecture = hint = ""
    if isinstance(config.get("model_type"), str):
        classes = config.get("architectures")
        names = (
            f" ({classes[0]})"
            if isinstance(classes, list) and classes and isinstance(classes[0], str)
            else ""
        )
        architecture = f"{config['model_type']}{names}, a model of transformers"
        hint = (
            f"; to train on its towers, frozen: m1clip train --image-tower {folder} or --text-tower"
            f" {folder}"
        )
    elif isinstance(config.get("architecture"), str):
        architecture = f"{config['architecture']}, a model of timm"
    if config.get("model_type") == "siglip2":
        raise UserError(
            f"{folder / CONFIG}: SigLIP 2 of variable resolution (NaFlex) is not supported; "
            f"use one of a fixed resolution, such as siglip2-base-patch16-256"
        )
    if architecture:
        supported = "CLIP and SigLIP of transformers and open_clip, and models of m1clip"
        raise UserError(f"{folder / CONFIG}: {architecture[:120]}; supported: {supported}{hint}")


def _read_openclip(config_file: Path, weights_file: Path) -> SavedModel:
    if not config_file.is_file():
        raise UserError(
            f"{weights_file}: weights without a config; put their {OPENCLIP_CONFIG} next to them"
            " (after open_clip's trainer: a copy of its model_configs/NAME.json)"
        )
    record = read_json(config_file)
    model = record.get("model_cfg")
    where = str(config_file)
    model = model if isinstance(model, dict) else record
    siglip = openclip_siglip_parts(model)
    if siglip is not None:
        cleaning = (siglip[1].get("tokenizer_kwargs") or {}).get("clean", "whitespace")
        tokenizer, fill_id = siglip_tokenizer(config_file.parent, cleaning)
        config = config_from_openclip_siglip(model, tokenizer.eot_id, fill_id, where)
        preprocess = _openclip_preprocess(config.image_size, record, config_file)
        weights = to_ours(
            without_wrapper(read_checkpoint(weights_file)),
            OPENCLIP_SIGLIP,
            config,
            str(weights_file),
        )
        _check_tokenizer(config, tokenizer, config_file.parent)
        return SavedModel(config, weights, tokenizer, preprocess, str(weights_file))
    try:
        config = config_from_openclip(model, where)
    except UnsupportedSetting as error:
        return _read_openclip_library(model, config_file, weights_file, record, error)
    preprocess = _openclip_preprocess(config.image_size, record, config_file)
    weights = to_ours(
        without_prefixes(read_checkpoint(weights_file)), OPENCLIP, config, str(weights_file)
    )
    return _saved(config, weights, preprocess, weights_file)


def _read_openclip_library(
    model: dict[str, Any],
    config_file: Path,
    weights_file: Path,
    record: dict[str, Any],
    reason: UnsupportedSetting,
) -> SavedModel:
    """A model that open_clip itself builds."""
    if find_spec("open_clip") is None:
        raise UserError(f"{reason} alone; with open_clip it is: {INSTALL_OPENCLIP}") from None
    folder = config_file.parent
    settings = openclip_settings(model, folder)
    text = settings["text_cfg"]
    tokenizer: Tokenizer = BpeTokenizer()
    fill_id = 0
    if text.get("hf_tokenizer_name"):
        options = text.get("tokenizer_kwargs") or {}
        odd = set(options) - {"clean", "trust_remote_code"}
        if odd:
            raise UserError(f"{config_file}: tokenizer_kwargs {sorted(odd)} are not supported")
        tokenizer, fill_id = folder_tokenizer(folder, options.get("clean", "whitespace"))
    parts = openclip_parts(settings, without_wrapper(read_checkpoint(weights_file)))
    side = settings["vision_cfg"].get("image_size", 224)
    context = text.get("context_length", 77)
    config = _library_config("open_clip", parts, tokenizer, side, context, fill_id, folder)
    preprocess = _openclip_preprocess(side, record, config_file)
    return SavedModel(config, parts.weights, tokenizer, preprocess, str(weights_file))


def _library_config(
    kind: Literal["open_clip", "transformers-clip"],
    parts: LibraryParts,
    tokenizer: Tokenizer,
    image_size: int,
    context_length: int,
    fill_id: int,
    folder: Path,
) -> CLIPConfig:
    """The config of a complete model of a library; there are no heads of ours."""
    head = HeadConfig(kind="identity")
    image = PretrainedImageConfig(
        kind=kind, name=folder.name, settings=parts.image_settings, image_size=image_size
    )
    text = PretrainedTextConfig(
        kind=kind,
        name=folder.name,
        settings=parts.text_settings,
        context_length=context_length,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        eot_id=tokenizer.eot_id,
        fill_id=fill_id,
    )
    return CLIPConfig(
        image_tower=image,
        text_tower=text,
        image_head=head,
        text_head=head,
        embed_dim=parts.embed_dim,
        logit_bias=parts.has_bias,
    )


def has_both_sides(config: dict[str, Any]) -> bool:
    """Whether a config.json of transformers has a part for images and one for texts."""
    return isinstance(config.get("model_type"), str) and all(
        isinstance(config.get(f"{part}_config"), dict) for part in ("vision", "text")
    )


def _read_transformers(folder: Path) -> SavedModel:
    """A model of transformers that has features of images and texts in one space."""
    record = read_json(folder / CONFIG)
    kind = record["model_type"]
    if kind == "siglip2":
        _reject_other_architecture(folder)
    if find_spec("transformers") is None:
        raise UserError(
            f"{folder / CONFIG}: {str(kind)[:60]} is a model of transformers, which is not"
            f" installed: {INSTALL_HF}"
        )
    tokenizer, fill_id = folder_tokenizer(folder, "none")
    parts = transformers_parts(folder, tokenizer.eot_id)
    vision = json.loads(parts.image_settings)["config"]
    text = record["text_config"]
    side = vision["vision_config"].get("image_size", 224)
    side = side if isinstance(side, int) else side[0]
    usual = text.get("max_position_embeddings", LIBRARY_CONTEXT)
    context = min(usual if isinstance(usual, int) else LIBRARY_CONTEXT, LIBRARY_CONTEXT)
    config = _library_config("transformers-clip", parts, tokenizer, side, context, fill_id, folder)
    preprocess = image_processor(folder / IMAGE_PROCESSOR, side)
    return SavedModel(config, parts.weights, tokenizer, preprocess, str(folder))


def folder_tokenizer(folder: Path, cleaning: str) -> tuple[FastTokenizer, int]:
    """The tokenizer of a folder of transformers, and the id of its padding."""
    path = folder / TOKENIZER_FILE
    settings_file = folder / "tokenizer_config.json"
    vocabulary = folder / "vocab.txt"
    settings = read_json(settings_file) if settings_file.is_file() else {}
    if not path.is_file() and vocabulary.is_file():
        words = read_small(vocabulary, MAX_TOKENIZER_BYTES).decode("utf-8").rstrip("\n").split("\n")
        try:
            tokenizer = wordpiece_tokenizer(words)
        except (KeyError, ValueError) as error:
            raise UserError(f"{vocabulary}: not a vocabulary of BERT ({error})") from None
        return tokenizer, tokenizer.pad_id
    if not path.is_file():
        raise UserError(
            f"{folder}: no {TOKENIZER_FILE}; put the one of the model's repository next to the"
            " weights"
        )
    try:
        text = read_small(path, MAX_TOKENIZER_BYTES).decode("utf-8")
        if cleaning not in CLEANINGS:
            raise ValueError(f"the cleaning {str(cleaning)[:40]!r} is not supported")
        fill_id = token_id(text, _token_name(settings.get("pad_token"), "<pad>")) or 0
        return FastTokenizer(with_cleaning(text, cleaning), fill_id), fill_id
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def _openclip_preprocess(image_size: int, record: dict[str, Any], config_file: Path) -> Preprocess:
    preprocess = record.get("preprocess_cfg") or {}
    resize = preprocess.get("resize_mode", "shortest")
    filtering = preprocess.get("interpolation", "bicubic")
    if filtering not in ("bicubic", "bilinear") or resize not in ("shortest", "squash"):
        raise UserError(
            f"{config_file}: unsupported preprocessing {preprocess} "
            f"(supported: bicubic or bilinear, shortest or squash)"
        )
    resize += BILINEAR if filtering == "bilinear" else ""
    return _preprocess(
        image_size, preprocess.get("mean"), preprocess.get("std"), resize, config_file
    )


def _read_hf(folder: Path) -> SavedModel:
    config = config_from_hf(read_json(folder / CONFIG), str(folder / CONFIG))
    weights_file = _first_file(folder, HF_WEIGHTS)
    seen_file = folder / IMAGE_PROCESSOR
    weights = to_ours(read_checkpoint(weights_file), HUGGING_FACE_CLIP, config, str(weights_file))
    preprocess = image_processor(seen_file, config.image_size)
    return _saved(config, weights, preprocess, weights_file)


def image_processor(
    path: Path, image_size: int, crops: bool = True, mean: Any = None, std: Any = None
) -> Preprocess:
    """The preprocessing of an image processor of transformers.

    `crops`, `mean` and `std` are its defaults.
    """
    preprocess = read_json(path) if path.is_file() else {}
    resample = preprocess.get("resample", BICUBIC)
    if resample not in (BICUBIC, LINEAR):
        raise UserError(
            f"{path}: resample {resample} is not supported (supported: {BICUBIC}, bicubic;"
            f" {LINEAR}, bilinear)"
        )
    crop, size = (preprocess.get(key, image_size) for key in ("crop_size", "size"))
    crop = crop.get("height") if isinstance(crop, dict) else crop
    squashes = not preprocess.get("do_center_crop", crops)
    size = size.get("shortest_edge", size.get("height")) if isinstance(size, dict) else size
    crop = size if squashes else crop
    if not crop == size == image_size:
        raise UserError(
            f"{path}: resizes to {size} and crops to {crop}, the model takes {image_size} pixels"
        )
    resize = ("squash" if squashes else "shortest-floor") + (BILINEAR if resample == LINEAR else "")
    mean = preprocess.get("image_mean", mean)
    std = preprocess.get("image_std", std)
    return _preprocess(image_size, mean, std, resize, path)


def _read_hf_siglip(folder: Path) -> SavedModel:
    tokenizer, fill_id = siglip_tokenizer(folder, None)
    path = folder / CONFIG
    config = config_from_hf_siglip(read_json(path), tokenizer.eot_id, fill_id, str(path))
    weights_file = _first_file(folder, HF_WEIGHTS)
    seen_file = folder / IMAGE_PROCESSOR
    weights = to_ours(read_checkpoint(weights_file), HUGGING_FACE_SIGLIP, config, str(weights_file))
    _check_tokenizer(config, tokenizer, folder)
    preprocess = image_processor(seen_file, config.image_size, crops=False, mean=HALF, std=HALF)
    return SavedModel(config, weights, tokenizer, preprocess, str(weights_file))


def siglip_tokenizer(folder: Path, cleaning: str | None) -> tuple[FastTokenizer, int]:
    """SigLIP's tokenizer in a folder, and the id that fills its texts up.

    `cleaning` None: as transformers cleans.
    """
    path = folder / TOKENIZER_FILE
    settings_file = folder / "tokenizer_config.json"
    if not path.is_file() and (folder / SENTENCEPIECE).is_file():
        path = folder / SENTENCEPIECE
    if not path.is_file():
        raise UserError(
            f"{folder}: no {TOKENIZER_FILE} and no {SENTENCEPIECE}; "
            f"put that of the model's repository next to the weights"
        )
    settings = read_json(settings_file) if settings_file.is_file() else {}
    try:
        data = read_small(path, MAX_TOKENIZER_BYTES)
        is_json = path.name == TOKENIZER_FILE
        text = data.decode("utf-8") if is_json else sentencepiece_json(data)
        gemma = token_id(text, "</s>") is None
        eos, pad = ("<eos>", "<pad>") if gemma else ("</s>", "</s>")
        eos, pad = (
            _token_name(settings.get(name), usual)
            for name, usual in (("eos_token", eos), ("pad_token", pad))
        )
        if cleaning is None:
            cleaning = "siglip2" if gemma else "siglip"
            if settings.get("tokenizer_class") in CLEANED_ALREADY:
                cleaning = "none"
        if cleaning not in CLEANINGS:
            raise ValueError(f"the cleaning {str(cleaning)[:40]!r} is not supported")
        fill_id = token_id(text, pad)
        if fill_id is None:
            raise ValueError(f"has no token {pad!r} to fill a text up")
        return FastTokenizer(with_cleaning(text, cleaning, eos), fill_id), fill_id
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


# Tokenizers that transformers runs as they are in the file.
CLEANED_ALREADY = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _token_name(value: Any, usual: str) -> str:
    """A token of a tokenizer_config.json, which is a name or an object with it."""
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else usual


def _saved(config: CLIPConfig, weights: Tensors, preprocess: Preprocess, where: Path) -> SavedModel:
    tokenizer = BpeTokenizer()
    if config.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{where}: a vocabulary of {config.vocab_size:,}; m1clip reads open_clip and Hugging"
            f" Face models with CLIP's own {tokenizer.vocab_size:,} tokens"
        )
    return SavedModel(config, weights, tokenizer, preprocess, str(where))


def _first_file(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder}: no weights found (looked for {', '.join(names)})")


def _preprocess(image_size: int, mean: Any, std: Any, resize: Any, where: Path) -> Preprocess:
    mean = OPENAI_MEAN if mean is None else mean
    std = OPENAI_STD if std is None else std
    try:
        values = {"image_size": image_size, "mean": mean, "std": std, "resize": resize}
        return Preprocess.from_dict(values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
