"""Image towers from timm, where it can be imported: `timm:NAME`, kept whole by its name, arguments and weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.model.foreign.files import read_tensors

TIMM = "timm"
PREFIX = "timm:"


def timm() -> Any:
    """The library, or how to get it. It needs a torchvision that loads, which not every machine has."""
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise UserError(
            f"a timm tower needs timm and torchvision: pip install timm torchvision ({error})"
        ) from None
    except RuntimeError as error:  # torchvision's compiled part was built for another torch
        raise UserError(f"timm is installed, but cannot be imported: {str(error).splitlines()[0]}") from None


class TimmTower(nn.Module):
    """Pictures to the pooled features that timm's own classifier would read."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__()
        self.model = _built(told["name"], told.get("arguments", {}))
        seen = told["preprocess"]
        with torch.inference_mode():
            size, weight = seen["image_size"], next(self.model.parameters())
            self.model.eval()
            self.width = self.model(torch.zeros(1, 3, size, size, device=weight.device)).shape[1]

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalised pixels -> (n, width)."""
        features: Tensor = self.model(pixels)
        return features


def _built(name: str, arguments: dict[str, Any]) -> nn.Module:
    library = timm()
    if not library.is_model(name):
        near = library.list_models(f"*{name.partition('.')[0][:8]}*")[:3]
        raise UserError(f"timm:{name}: timm has no model of this name (near: {', '.join(near) or 'none'})")
    model: nn.Module = library.create_model(name, pretrained=False, num_classes=0, **arguments)
    return model


def load_timm(tower: str, download: bool) -> tuple[str, dict[str, Tensor]]:
    """(config, weights) of `timm:NAME=FILE`, or of `timm:NAME` with the weights of timm's hub.

    From the hub only what is on this machine already, unless a download was asked for.
    """
    name, _, file = tower.removeprefix(PREFIX).partition("=")
    model = _built(name, {})
    config = json.dumps(
        {TIMM: {"name": name, "arguments": {}, "preprocess": _preprocess(model)}}, sort_keys=True
    )
    theirs = read_tensors(Path(file)) if file else _from_hub(tower, name, download)
    head = getattr(model, "pretrained_cfg", {}).get("classifier") or "head.fc"
    heads = (head,) if isinstance(head, str) else tuple(head)
    own = model.state_dict()
    for odd in sorted(set(own) ^ set(theirs)):
        if odd in own:
            raise UserError(f"{tower}: missing tensor '{odd}'")
        if not odd.startswith(tuple(f"{part}." for part in heads)):
            raise UserError(f"{tower}: unknown tensor '{odd}'")
    kept = {key: theirs[key] for key in own}
    return config, {f"model.{key}": t.float() if t.is_floating_point() else t for key, t in kept.items()}


def _preprocess(model: nn.Module) -> dict[str, Any]:
    """Size, mean and deviation from timm's own data config."""
    data = importlib.import_module("timm.data").resolve_model_data_config(model)
    return {"image_size": int(data["input_size"][1]), "mean": list(data["mean"]), "std": list(data["std"])}


def _from_hub(tower: str, name: str, download: bool) -> dict[str, Tensor]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    settings = timm().get_pretrained_cfg(name)
    where = getattr(settings, "hf_hub_id", None)
    if not where:
        raise UserError(
            f"{tower}: timm knows no weights on the hub for it; give a file: {tower}=FILE.safetensors"
        )
    try:
        file = hf_hub_download(where, "model.safetensors", local_files_only=not download)
    except LocalEntryNotFoundError:
        raise UserError(
            f"{tower}: its weights are not on this machine; give {tower}=FILE.safetensors, or --transfer.download"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"{tower}: {str(error).strip().splitlines()[0][:160]}") from None
    return read_tensors(Path(file))
