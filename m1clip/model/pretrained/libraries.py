"""Models that open_clip or transformers builds, as two towers ending in the shared space.

Nothing is downloaded, and no code that comes with weights is executed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from m1clip.errors import UserError, first_line
from m1clip.io import read_small
from m1clip.model.hub_files import cached_snapshot
from m1clip.model.pretrained.transformers import NOT_SETTINGS, PROBE_SIZE, transformers
from m1clip.model.towers import Tower, fill_after_eot
from m1clip.model.weights import Tensors

INSTALL_OPENCLIP = "pip install 'm1clip[openclip]'"
Side = Literal["image", "text"]
# Towers that stand in for the other one, which is not needed.
SMALL_VISION = {"image_size": 8, "patch_size": 8, "width": 64, "layers": 1}
SMALL_TEXT = {"context_length": 4, "vocab_size": 8, "width": 64, "heads": 1, "layers": 1}
HF_CONFIG = "hf_config"  # of a text tower of transformers, in our settings


class LibraryParts(NamedTuple):
    """A model of a library in our terms."""

    image_settings: str
    text_settings: str
    embed_dim: int
    weights: Tensors
    has_bias: bool


def open_clip() -> Any:
    """The library, or how to install it."""
    try:
        return importlib.import_module("open_clip")
    except (ImportError, RuntimeError) as error:  # the second: a torchvision for another torch
        raise UserError(
            f"this model needs open_clip: {INSTALL_OPENCLIP} ({first_line(error)})"
        ) from None


# --- open_clip ---


def _openclip_model(settings: dict[str, Any]) -> nn.Module:
    """A model with the right parameters and arbitrary values in them."""
    library = open_clip()
    text = dict(settings["text_cfg"])
    with contextlib.ExitStack() as stack:
        hf_config = text.pop(HF_CONFIG, None)
        if hf_config is not None:
            # The library reads the config of such a tower from a folder or from the hub.
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            (Path(folder) / "config.json").write_text(json.dumps(hf_config), encoding="utf-8")
            text |= {"hf_model_name": folder, "hf_model_pretrained": False}
        try:
            model: nn.Module = library.CustomTextCLIP(**{**settings, "text_cfg": text})
        except UserError:
            raise
        except Exception as error:  # the libraries raise all kinds of errors for their settings
            raise UserError(f"open_clip cannot build this model: {first_line(error)}") from error
    return model


class OpenClipImageTower(Tower):
    """The image tower of open_clip, with its projection."""

    def __init__(self, settings: str) -> None:
        super().__init__()
        values = json.loads(settings)
        self.width = values["embed_dim"]
        self.model = _openclip_model(values).visual

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, size, size) normalized pixels -> (n, embed_dim)."""
        features: Tensor = self.model(pixels)  # type: ignore[operator]
        return features


class OpenClipTextTower(Tower):
    """The text tower of open_clip, with its projection.

    Texts are filled up as its tokenizers do.
    """

    def __init__(self, settings: str, eot_id: int, fill_id: int, context_length: int) -> None:
        super().__init__()
        values = json.loads(settings)
        self.width = values["embed_dim"]
        self.eot_id = eot_id
        self.fill_id = fill_id
        self.context_length = context_length
        self.model = _openclip_model(values).text

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, length) token ids -> (n, embed_dim)."""
        filled = fill_after_eot(tokens, self.eot_id, self.fill_id, self.context_length)
        features: Tensor = self.model(filled)  # type: ignore[operator]
        return features


def openclip_settings(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A `model_cfg` from which open_clip builds a model without the hub.

    UserError for what cannot be built so.
    """
    where = folder / "open_clip_config.json"
    vision = model.get("vision_cfg")
    text = model.get("text_cfg")
    if not isinstance(vision, dict) or not isinstance(text, dict):
        raise UserError(f"{where}: vision_cfg and text_cfg must be objects")
    if "multimodal_cfg" in model or "audio_cfg" in model:
        raise UserError(f"{where}: a model that writes captions (CoCa) or hears is not supported")
    name = vision.get("timm_model_name") or ""
    if not isinstance(name, str) or ":" in name or "/" in name:
        raise UserError(f"{where}: timm_model_name {str(name)[:60]} is not a name of timm")
    if text.get("tokenizer_mode") or text.get("tokenizer_type"):
        raise UserError(f"{where}: a tokenizer of this kind is not supported")
    vision = {**vision, "timm_model_pretrained": False}
    text = dict(text)
    if text.get("hf_model_name"):
        text[HF_CONFIG] = _hf_config(folder, str(text["hf_model_name"]))
    ignored = ("custom_text", "init_logit_scale", "init_logit_bias")
    rest = {key: value for key, value in model.items() if key not in ignored}
    return {**rest, "vision_cfg": vision, "text_cfg": text}


def _hf_config(folder: Path, name: str) -> dict[str, Any]:
    """The config of a transformers text tower: next to the weights, or in the Hub's cache."""
    snapshot = Path(name) if Path(name).is_dir() else cached_snapshot(name)
    for path in (folder / "config.json", *([] if snapshot is None else [snapshot / "config.json"])):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            config = json.loads(read_small(path))
            if isinstance(config, dict) and isinstance(config.get("model_type"), str):
                return config
    raise UserError(
        f"{folder}: its text tower is {name[:80]}, whose config is not here: m1clip download"
        f" {name[:80]}"
    )


def openclip_parts(settings: dict[str, Any], weights: Tensors) -> LibraryParts:
    """The towers of an open_clip model, and its tensors under our names."""
    image = {**settings, "text_cfg": SMALL_TEXT}
    text = {**settings, "vision_cfg": SMALL_VISION}
    ours: Tensors = {}
    for name, stored in weights.items():
        tensor = stored.float() if stored.is_floating_point() else stored
        if name.startswith("visual."):
            ours[f"image_tower.model.{name.removeprefix('visual.')}"] = tensor
        elif name in ("logit_scale", "logit_bias"):
            ours[name] = tensor.reshape(())
        else:
            ours[f"text_tower.model.{name.removeprefix('text.')}"] = tensor
    return LibraryParts(
        json.dumps(image, sort_keys=True),
        json.dumps(text, sort_keys=True),
        int(settings["embed_dim"]),
        ours,
        "logit_bias" in weights,
    )


# --- transformers ---

SCALES = ("logit_scale", "logit_bias", "temperature")  # parameters of the complete model
FEATURES: dict[Side, str] = {"image": "get_image_features", "text": "get_text_features"}


def _features(output: Any) -> Tensor:
    """The features that a method returns: a tensor, or since transformers 5 an output with them."""
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features


def _side_of_transformers(settings: str) -> tuple[nn.Module, int]:
    """Build one side of a model with arbitrary weights, and return it with its feature width."""
    library = transformers()
    values = json.loads(settings)
    config = dict(values["config"])
    try:
        built = library.AutoConfig.for_model(config.pop("model_type"), **config)
        model: nn.Module = library.AutoModel.from_config(built)
    except Exception as error:  # the library raises all kinds of errors for its settings
        raise UserError(f"transformers cannot build this model: {first_line(error)}") from error
    return keep_children(model, values["parts"]), int(values["width"])


def keep_children(model: nn.Module, parts: list[str]) -> nn.Module:
    """The model with only these parts, and without the scale of its logits."""
    for name in [name for name, _ in model.named_children() if name not in parts]:
        setattr(model, name, None)
    for name in SCALES:
        if name in model._parameters:
            model._parameters[name] = None
    return model


class TransformersClipImageTower(Tower):
    """`get_image_features` of a model of transformers."""

    def __init__(self, settings: str) -> None:
        super().__init__()
        self.model, self.width = _side_of_transformers(settings)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, size, size) normalized pixels -> (n, embed_dim)."""
        output = self.model.get_image_features(pixel_values=pixels)  # type: ignore[operator]
        return _features(output)


class TransformersClipTextTower(Tower):
    """`get_text_features` of a model of transformers; what follows the EOT token is masked."""

    def __init__(self, settings: str, eot_id: int) -> None:
        super().__init__()
        self.eot_id = eot_id
        self.model, self.width = _side_of_transformers(settings)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, length) token ids -> (n, embed_dim)."""
        mask = mask_of(tokens, self.eot_id)
        output = self.model.get_text_features(  # type: ignore[operator]
            input_ids=tokens, attention_mask=mask
        )
        return _features(output)


def mask_of(tokens: Tensor, eot_id: int) -> Tensor:
    """(n, length) int64: 1 up to the first EOT token of each text."""
    eot = (tokens == eot_id).int().argmax(dim=1, keepdim=True)
    return (torch.arange(tokens.shape[1], device=tokens.device) <= eot).long()


def transformers_parts(folder: Path, eot_id: int) -> LibraryParts:
    """Split a transformers model with image and text features into two towers."""
    library = transformers()
    try:
        model = library.AutoModel.from_pretrained(
            str(folder), use_safetensors=True, local_files_only=True
        ).eval()
    except Exception as error:  # the library raises all kinds of errors for damaged folders
        raise UserError(f"{folder}: transformers cannot load it ({first_line(error)})") from error
    kind = type(model).__name__
    if not all(hasattr(model, method) for method in FEATURES.values()):
        raise UserError(
            f"{folder}: {kind} of transformers has no features of images and texts in one space "
            f"({' and '.join(FEATURES.values())})"
        )
    values = json.loads(model.config.to_json_string(use_diff=False))
    config = {
        key: value for key, value in values.items() if key not in NOT_SETTINGS and value is not None
    }
    side = image_side(model.config)
    tokens = torch.tensor([[2, 3, eot_id]])
    examples: dict[Side, dict[str, Tensor]] = {
        "image": {"pixel_values": torch.zeros(1, 3, side, side)},
        "text": {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
    }
    state = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    settings: dict[Side, str] = {}
    weights: Tensors = {}
    widths: dict[Side, int] = {}
    for name, example in examples.items():
        parts, widths[name] = _used_parts(model, FEATURES[name], example, folder)
        record = {"config": config, "parts": parts, "width": widths[name]}
        settings[name] = json.dumps(record, sort_keys=True)
        others = {child for child, _ in model.named_children()} - set(parts)
        weights |= {
            f"{name}_tower.model.{key}": tensor
            for key, tensor in state.items()
            if key.partition(".")[0] not in others and key not in SCALES
        }
    width = widths["image"]
    if width != widths["text"]:
        raise UserError(
            f"{folder}: {kind} has image features of {width} numbers and text features of"
            f" {widths['text']}"
        )
    scale = state.get("logit_scale")
    if scale is None and "temperature" in state:
        scale = -state["temperature"].log()
    weights["logit_scale"] = torch.tensor(math.log(100)) if scale is None else scale.reshape(())
    if "logit_bias" in state:
        weights["logit_bias"] = state["logit_bias"].reshape(())
    return LibraryParts(settings["image"], settings["text"], width, weights, "logit_bias" in state)


def image_side(config: Any) -> int:
    """The side of the images that a config of transformers is for."""
    size = getattr(getattr(config, "vision_config", config), "image_size", None) or PROBE_SIZE
    return size if isinstance(size, int) else int(size[0])


@torch.inference_mode()
def _used_parts(
    model: nn.Module, method: str, example: dict[str, Tensor], folder: Path
) -> tuple[list[str], int]:
    """The parts of a model that one of its methods runs, and the width of what it returns."""
    used: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: used.add(name.partition(".")[0]))
        for name, module in model.named_modules()
        if name
    ]
    try:
        features = _features(getattr(model, method)(**example))
    except Exception as error:  # the library raises all kinds of errors
        raise UserError(f"{folder}: {method} failed ({first_line(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()
    if features.ndim != 2:
        raise UserError(f"{folder}: {method} returns {tuple(features.shape)}, not one vector each")
    return sorted(used), int(features.shape[1])
