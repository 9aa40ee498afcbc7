"""Towers that the library transformers builds, from a folder.

No code that comes with weights is executed, and nothing is downloaded: `m1clip download` does that.
"""

import importlib
import json
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.model.presets import PretrainedImageConfig, PretrainedTextConfig
from m1clip.model.towers import Tower
from m1clip.model.weights import Tensors
from m1clip.schema import LIMITS

TRAINED_POOLER = ("clip", "siglip")  # text models that were trained through their pooler
INSTALL_HF = "pip install 'm1clip[hf]'"
PROBE_SIZE = 64  # side of a dummy image, to find the feature width of a tower


def transformers() -> Any:
    """The library, or how to install it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(f"this tower needs transformers: {INSTALL_HF} ({error})") from None


def _transformers_model(settings: str) -> nn.Module:
    """A model with the right parameters and arbitrary values in them."""
    library = transformers()
    values = json.loads(settings)
    try:
        config = library.AutoConfig.for_model(values.pop("model_type"), **values)
        model: nn.Module = library.AutoModel.from_config(config)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"transformers cannot build this tower: {str(error).splitlines()[0][:120]}"
        ) from None
    return model


@torch.inference_mode()
def _feature_width(tower: Tower, example: Tensor) -> int:
    return int(tower(example.to(next(tower.parameters()).device)).shape[1])


class TransformersImageTower(Tower):
    """Images to features: class token next to the mean of the patches, or a pooled feature map."""

    def __init__(self, settings: str) -> None:
        super().__init__()
        self.model = _transformers_model(settings)
        size = getattr(self.model.config, "image_size", None) or PROBE_SIZE
        size = size if isinstance(size, int) else size[0]
        rows: list[int] = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda layer, inputs: rows.append(inputs[0].numel() // layer.in_features)
            )
            for layer in self.modules()
            if isinstance(layer, nn.Linear)
        ]
        self.width = _feature_width(self, torch.zeros(1, 3, size, size))
        self.tokens_per_image = max(rows, default=1)
        for hook in hooks:
            hook.remove()

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalized pixels -> (n, width)."""
        last: Tensor = self.model(pixel_values=pixels).last_hidden_state
        if last.ndim == 4:  # (n, channels, h, w)
            return last.mean(dim=(2, 3))
        return torch.cat([last[:, 0], last[:, 1:].mean(dim=1)], dim=1)


class TransformersTextTower(Tower):
    """Token ids to the mean of the last layer, or to the pooler's output if it was trained."""

    def __init__(self, settings: str, pad_id: int) -> None:
        super().__init__()
        self.model = _transformers_model(settings)
        self.pad_id = pad_id
        self.pooled = str(json.loads(settings)["model_type"]).startswith(TRAINED_POOLER)
        self.width = _feature_width(self, torch.ones(1, 3, dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, length) token ids -> (n, width)."""
        if self.pooled:
            pooled: Tensor = self.model(input_ids=tokens).pooler_output
            return pooled
        real = tokens != self.pad_id
        # On the meta device only shapes are known, and transformers reads the values of a mask.
        mask = None if tokens.is_meta else real.long()
        last = self.model(input_ids=tokens, attention_mask=mask).last_hidden_state
        weight = real[..., None].to(last.dtype)
        mean: Tensor = (last * weight).sum(dim=1) / weight.sum(dim=1)
        return mean


# Settings that create one module each.
MODULE_COUNT = re.compile("layers|depth|blocks|stages|groups|experts")
SIZE = re.compile("(size|sizes|dim|dims|width|widths|channels|features)$")
USUAL_SIZE = 4096  # settings of parts that are not used may have their defaults
MAX_NUMBER = 2**22  # for numbers that are neither, such as token ids


def check_settings(
    config: PretrainedImageConfig | PretrainedTextConfig, weights: Tensors, where: str
) -> None:
    """Raise UserError for sizes in a library's settings that do not match the weights."""
    try:
        settings = json.loads(config.settings)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise UserError(f"{where}: the settings of {config.name} must be a JSON object")
    largest = max((side for tensor in weights.values() for side in tensor.shape), default=0)
    pending: list[tuple[str, Any]] = list(settings.items())
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict | list):
            pending += value.items() if isinstance(value, dict) else [(key, item) for item in value]
        elif isinstance(value, int):
            limit: float = LIMITS["image_size"] if key == "image_size" else MAX_NUMBER
            if MODULE_COUNT.search(key):
                limit = max(64, len(weights))
            elif SIZE.search(key) and key != "image_size":
                limit = max(USUAL_SIZE, largest)
            if value > limit:
                raise UserError(f"{where}: {key} is {value:,}, more than the weights have")


NOT_SETTINGS = ("architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype")


def load_transformers(folder: Path, part: Literal["vision", "text"]) -> tuple[str, Tensors, int]:
    """(settings, weights, padding id) from a folder; for a CLIP, only the requested part."""
    library = transformers()
    try:
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
        config = getattr(config, f"{part}_config", None) or config
        # Safetensors alone: other weight files could run code when they are read.
        model = library.AutoModel.from_pretrained(
            folder, config=config, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise UserError(
            f"{folder}: no {part} tower that transformers can load ({reason})"
        ) from None
    values = json.loads(model.config.to_json_string(use_diff=False))
    settings = {
        key: value for key, value in values.items() if key not in NOT_SETTINGS and value is not None
    }
    weights = {f"model.{key}": tensor.float() for key, tensor in model.state_dict().items()}
    return (
        json.dumps(settings, sort_keys=True),
        weights,
        getattr(model.config, "pad_token_id", None) or 0,
    )


def tower_file(folder: Path, file: str) -> Path | None:
    """A file next to a tower's weights, if there is one."""
    return folder / file if (folder / file).is_file() else None
