"""Heads of the model in the box as the start of new heads on the same towers, for those who have few images."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load as tensors_from_bytes

from m1clip.errors import UserError
from m1clip.model.named import BOXED, CONFIG, GENERAL, HEADS, boxed_files
from m1clip.model.presets import CLIPConfig
from m1clip.model.weights import Tensors

SAME_AS_GENERAL = ("image_tower", "text_tower", "embed_dim")  # of a model whose heads fit
WIDER_PARTS = ("up.weight", "up.bias")  # of a hidden layer: its rows
NARROW_PART = "down.weight"  # its columns


def fits_general(shape: CLIPConfig) -> bool:
    """Whether heads of this shape can start from those of `general`: the same towers and embeddings."""
    try:
        config = json.loads(boxed_files(GENERAL)[CONFIG])["model"]
    except (UserError, ValueError, KeyError):
        return False
    known = CLIPConfig.from_dict(config)
    hidden = known.image_head.hidden
    wide_enough = min(shape.image_head.hidden, shape.text_head.hidden) >= hidden
    return wide_enough and all(
        getattr(known, name) == getattr(shape, name) for name in SAME_AS_GENERAL
    )


def general_heads(shape: CLIPConfig) -> Tensors:
    """The heads and the temperature of `general`, with a hidden layer as wide as that of the shape.

    New hidden units have random inputs and no outputs yet, so the heads compute the same.
    """
    assert GENERAL in BOXED
    heads = {key: t.float() for key, t in tensors_from_bytes(boxed_files(GENERAL)[HEADS]).items()}
    draw = torch.Generator().manual_seed(0)
    for side in ("image_head", "text_head"):
        hidden = getattr(shape, side).hidden
        for part in WIDER_PARTS:
            known = heads[f"{side}.{part}"]
            more = torch.zeros(hidden - len(known), *known.shape[1:])
            if known.ndim == 2:
                more.normal_(std=known.shape[1] ** -0.5, generator=draw)
            heads[f"{side}.{part}"] = torch.cat([known, more])
        known = heads[f"{side}.{NARROW_PART}"]
        more = torch.zeros(len(known), hidden - known.shape[1])
        heads[f"{side}.{NARROW_PART}"] = torch.cat([known, more], dim=1)
    return heads
