"""Towers from transformers: any AutoModel that takes pictures or token ids, kept whole by its config and weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from m1clip.errors import UserError

POOLED = ("clip", "siglip")  # text models that were trained by what their pooler gives
UNTOLD = ("architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype")
SIDE = 64  # of the picture that shows how wide a tower is


def transformers() -> Any:
    """The library, or how to get it."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise UserError("this tower needs transformers: pip install 'm1clip[hf]'") from None


def _built(config: str) -> nn.Module:
    """A model with the right tensors and no particular values in them."""
    library = transformers()
    values = json.loads(config)
    try:
        made = library.AutoConfig.for_model(values.pop("model_type"), **values)
        model: nn.Module = library.AutoModel.from_config(made)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"transformers cannot build this tower: {str(error).splitlines()[0][:120]}") from None
    return model


class HfImageTower(nn.Module):
    """Pictures to features: class token and mean of the patches side by side, or the mean over a feature map."""

    def __init__(self, config: str) -> None:
        super().__init__()
        self.model = _built(config)
        with torch.inference_mode():
            weight = next(self.model.parameters())
            size = getattr(self.model.config, "image_size", None) or SIDE
            size = size if isinstance(size, int) else size[0]
            self.width = self(torch.zeros(1, 3, size, size, device=weight.device)).shape[1]

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalised pixels -> (n, width)."""
        last: Tensor = self.model(pixel_values=pixels).last_hidden_state
        if last.ndim == 4:  # (n, channels, h, w)
            return last.mean(dim=(2, 3))
        return torch.cat([last[:, 0], last[:, 1:].mean(dim=1)], dim=1)


class HfTextTower(nn.Module):
    """Token ids to the mean of the last layer over the tokens, or to what the pooler gives where that was trained."""

    def __init__(self, config: str, pad_id: int) -> None:
        super().__init__()
        self.model, self.pad_id = _built(config), pad_id
        self.pooled = str(json.loads(config)["model_type"]).startswith(POOLED)
        with torch.inference_mode():
            weight = next(self.model.parameters())
            self.width = self(torch.ones(1, 3, dtype=torch.long, device=weight.device)).shape[1]

    def forward(self, ids: Tensor) -> Tensor:
        """(n, length) token ids -> (n, width)."""
        there = ids != self.pad_id
        if self.pooled:
            pooled: Tensor = self.model(input_ids=ids).pooler_output
            return pooled
        last = self.model(input_ids=ids, attention_mask=there.long()).last_hidden_state
        weight = there[..., None].to(last.dtype)
        mean: Tensor = (last * weight).sum(dim=1) / weight.sum(dim=1)
        return mean


class LoadedTower(NamedTuple):
    """A tower as its maker left it."""

    config: str  # JSON, enough to build it again
    weights: dict[str, Tensor]
    pad_id: int


def load_tower(name: str, part: Literal["vision", "text"], download: bool = False) -> LoadedTower:
    """A tower from a folder or, where no such folder is, by its name on the hub; of a CLIP only the part asked for.

    Of the hub only what is on this machine already is read, unless a download was asked for.
    """
    library, local = transformers(), {"local_files_only": not download}
    try:
        config = library.AutoConfig.from_pretrained(name, **local)
        config = getattr(config, f"{part}_config", None) or config
        # Safetensors alone: other weight files could run code when they are read.
        model = library.AutoModel.from_pretrained(name, config=config, use_safetensors=True, **local)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        remedy = "" if download or Path(name).is_dir() else "; --transfer.download fetches it from the hub"
        raise UserError(f"{name}: no {part} tower that transformers can load ({reason}){remedy}") from None
    values = json.loads(model.config.to_json_string(use_diff=False))
    plain = {key: value for key, value in values.items() if key not in UNTOLD and value is not None}
    weights = {f"model.{key}": tensor.float() for key, tensor in model.state_dict().items()}
    return LoadedTower(
        json.dumps(plain, sort_keys=True), weights, getattr(model.config, "pad_token_id", None) or 0
    )


def tower_file(name: str, file: str, download: bool = False) -> Path | None:
    """A file that lies beside a tower's weights; None where there is none."""
    if Path(name).is_dir():
        return Path(name) / file if (Path(name) / file).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(name, file, local_files_only=not download))
    except (HfHubHTTPError, OSError, ValueError):
        return None
