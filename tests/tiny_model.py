"""A tiny CLIP for tests."""

from collections.abc import Iterable
from typing import Any

import torch

from m1clip.data.images import Preprocess
from m1clip.inference.model import Model
from m1clip.inference.torch_encoder import TorchEncoder
from m1clip.model.clip import CLIP, build_clip
from m1clip.model.presets import CLIPConfig, with_fields
from m1clip.text.tokenizers import make_tokenizer

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


def tiny_model(kind: str, captions: Iterable[str] = (), **changes: Any) -> Model:
    """The same with a tokenizer of a kind for these captions."""
    tokenizer = make_tokenizer(kind, captions)
    clip = tiny_clip(vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id, **changes)
    return Model(
        TorchEncoder(clip.eval(), tokenizer, Preprocess(image_size=32, mean=(0.5, 0.4, 0.3)))
    )
