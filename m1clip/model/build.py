"""From the config's words to a shape: the preset, what was changed in it, and what the data decides."""

from __future__ import annotations

import dataclasses

from m1clip.config import ModelConfig
from m1clip.model.attention import AttentionKind
from m1clip.model.presets import preset
from m1clip.model.shape import ClipShape

_SHAPE_FIELDS = {item.name for item in dataclasses.fields(ClipShape)}


def shape_of(config: ModelConfig, vocab_size: int | None = None, logit_bias: bool = False) -> ClipShape:
    """The preset with the config's changes; the vocabulary comes from the tokenizer, the bias from the objective."""
    given = {
        item.name: getattr(config, item.name)
        for item in dataclasses.fields(config)
        if item.name in _SHAPE_FIELDS and getattr(config, item.name) is not None
    }
    if vocab_size is not None:
        given["vocab_size"] = vocab_size
    return dataclasses.replace(preset(config.preset), logit_bias=logit_bias, **given)


def resolved(
    config: ModelConfig, shape: ClipShape, attention_image: AttentionKind, attention_text: AttentionKind
) -> ModelConfig:
    """The config with nothing left open, so that it says the same when the table or the machine changes."""
    names = {item.name for item in dataclasses.fields(config)} & _SHAPE_FIELDS
    values = {name: getattr(shape, name) for name in names}
    return dataclasses.replace(
        config, **values, attention_image=attention_image, attention_text=attention_text
    )
