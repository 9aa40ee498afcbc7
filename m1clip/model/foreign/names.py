"""Whose tensor is called what: tables from our names to theirs, and nothing else.

A row is (our name, their name or names, how). `{i}` stands for the number of a block. Ways:
same, transpose, and stack (three matrices of theirs, one below the other, are one fused matrix of ours).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Way = Literal["same", "transpose", "stack"]


class Row(NamedTuple):
    """One tensor of ours and where it is found."""

    ours: str
    theirs: tuple[str, ...]
    way: Way = "same"
    needs: str = ""  # the field of the shape that must be true for the tensor to exist


class Table(NamedTuple):
    """A whole model: rows that exist once, and rows of each block of the two towers."""

    once: tuple[Row, ...]
    vision_block: tuple[Row, ...]
    text_block: tuple[Row, ...]
    ignored: tuple[str, ...]  # buffers that follow from the shape, as endings of names


def _both(ours: str, theirs: str) -> tuple[Row, Row]:
    """The weight and the bias of a layer."""
    return Row(f"{ours}.weight", (f"{theirs}.weight",)), Row(f"{ours}.bias", (f"{theirs}.bias",))


def _openclip_block(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        *_both(f"{ours}.norm1", f"{theirs}.ln_1"),
        Row(f"{ours}.attn.qkv.weight", (f"{theirs}.attn.in_proj_weight",)),
        Row(f"{ours}.attn.qkv.bias", (f"{theirs}.attn.in_proj_bias",)),
        *_both(f"{ours}.attn.out", f"{theirs}.attn.out_proj"),
        *_both(f"{ours}.norm2", f"{theirs}.ln_2"),
        *_both(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc"),
        *_both(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj"),
    )


def _hf_block(ours: str, theirs: str) -> tuple[Row, ...]:
    def stacked(part: str) -> Row:
        names = tuple(f"{theirs}.self_attn.{name}_proj.{part}" for name in "qkv")
        return Row(f"{ours}.attn.qkv.{part}", names, "stack")

    return (
        *_both(f"{ours}.norm1", f"{theirs}.layer_norm1"),
        stacked("weight"),
        stacked("bias"),
        *_both(f"{ours}.attn.out", f"{theirs}.self_attn.out_proj"),
        *_both(f"{ours}.norm2", f"{theirs}.layer_norm2"),
        *_both(f"{ours}.mlp.up", f"{theirs}.mlp.fc1"),
        *_both(f"{ours}.mlp.down", f"{theirs}.mlp.fc2"),
    )


_VISION, _TEXT = "image.transformer.blocks.{i}", "text.transformer.blocks.{i}"

OPENCLIP = Table(
    once=(
        Row("image.cls", ("visual.class_embedding",)),
        Row("image.positions", ("visual.positional_embedding",)),
        Row("image.patch.weight", ("visual.conv1.weight",)),
        *_both("image.norm_pre", "visual.ln_pre"),
        *_both("image.norm", "visual.ln_post"),
        Row("image_projection.weight", ("visual.proj",), "transpose"),
        Row("text.tokens.weight", ("token_embedding.weight",)),
        Row("text.positions", ("positional_embedding",)),
        *_both("text.norm", "ln_final"),
        Row("text_projection.weight", ("text_projection",), "transpose"),
        Row("logit_scale", ("logit_scale",)),
        Row("logit_bias", ("logit_bias",), needs="logit_bias"),
    ),
    vision_block=_openclip_block(_VISION, "visual.transformer.resblocks.{i}"),
    text_block=_openclip_block(_TEXT, "transformer.resblocks.{i}"),
    # The last three stand in OpenAI's own files.
    ignored=("attn_mask", "input_resolution", "context_length", "vocab_size"),
)

HUGGING_FACE = Table(
    once=(
        Row("image.cls", ("vision_model.embeddings.class_embedding",)),
        Row("image.positions", ("vision_model.embeddings.position_embedding.weight",)),
        Row("image.patch.weight", ("vision_model.embeddings.patch_embedding.weight",)),
        *_both("image.norm_pre", "vision_model.pre_layrnorm"),
        *_both("image.norm", "vision_model.post_layernorm"),
        Row("image_projection.weight", ("visual_projection.weight",)),
        Row("text.tokens.weight", ("text_model.embeddings.token_embedding.weight",)),
        Row("text.positions", ("text_model.embeddings.position_embedding.weight",)),
        *_both("text.norm", "text_model.final_layer_norm"),
        Row("text_projection.weight", ("text_projection.weight",)),
        Row("logit_scale", ("logit_scale",)),
    ),
    vision_block=_hf_block(_VISION, "vision_model.encoder.layers.{i}"),
    text_block=_hf_block(_TEXT, "text_model.encoder.layers.{i}"),
    ignored=("embeddings.position_ids",),
)
