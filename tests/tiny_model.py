"""A tiny CLIP for tests."""

from __future__ import annotations

from typing import Any

import torch

from m1clip.model.clip import CLIP, build_clip
from m1clip.model.presets import CLIPConfig, with_fields

TINY: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "vision_width": 32,
    "vision_layers": 2,
    "vision_heads": 2,
    "text_width": 32,
    "text_layers": 2,
    "text_heads": 2,
    "context_length": 16,
    "vocab_size": 20,
    "embed_dim": 16,
}


def tiny_config(**changes: Any) -> CLIPConfig:
    """32 pixels in patches of 8, two blocks of width 32 in both towers, 20 tokens."""
    return with_fields(CLIPConfig(), **TINY | changes)


def tiny_clip(**changes: Any) -> CLIP:
    """The model of `tiny_config`, always with the same weights."""
    torch.manual_seed(0)
    return build_clip(tiny_config(**changes))
