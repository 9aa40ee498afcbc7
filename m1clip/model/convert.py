"""open_clip's and Hugging Face's CLIP: their tensor names as tables, and their configs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from m1clip.errors import UserError
from m1clip.model.presets import Activation, CLIPConfig, with_fields
from m1clip.model.weights import Tensors

# One tensor per line: our name, their name. "*" is weight and bias, {i} the number of a block, {qkv} three tensors that
# we keep as one, and "^T" a transposed matrix.
_OPENCLIP = """
    image_tower.cls                             visual.class_embedding
    image_tower.positions                       visual.positional_embedding
    image_tower.patch.weight                    visual.conv1.weight
    image_tower.norm_pre.*                      visual.ln_pre.*
    image_tower.norm.*                          visual.ln_post.*
    image_head.weight                           visual.proj^T
    text_tower.tokens.weight                    token_embedding.weight
    text_tower.positions                        positional_embedding
    text_tower.norm.*                           ln_final.*
    text_head.weight                            text_projection^T
    logit_scale                                 logit_scale
    logit_bias                                  logit_bias
"""
_OPENCLIP_BLOCK = """
    {ours}.norm1.*                              {theirs}.ln_1.*
    {ours}.attn.qkv.weight                      {theirs}.attn.in_proj_weight
    {ours}.attn.qkv.bias                        {theirs}.attn.in_proj_bias
    {ours}.attn.out.*                           {theirs}.attn.out_proj.*
    {ours}.norm2.*                              {theirs}.ln_2.*
    {ours}.mlp.up.*                             {theirs}.mlp.c_fc.*
    {ours}.mlp.down.*                           {theirs}.mlp.c_proj.*
"""
_HF = """
    image_tower.cls                             vision_model.embeddings.class_embedding
    image_tower.positions                       vision_model.embeddings.position_embedding.weight
    image_tower.patch.weight                    vision_model.embeddings.patch_embedding.weight
    image_tower.norm_pre.*                      vision_model.pre_layrnorm.*
    image_tower.norm.*                          vision_model.post_layernorm.*
    image_head.weight                           visual_projection.weight
    text_tower.tokens.weight                    text_model.embeddings.token_embedding.weight
    text_tower.positions                        text_model.embeddings.position_embedding.weight
    text_tower.norm.*                           text_model.final_layer_norm.*
    text_head.weight                            text_projection.weight
    logit_scale                                 logit_scale
"""
_HF_BLOCK = """
    {ours}.norm1.*                              {theirs}.layer_norm1.*
    {ours}.attn.qkv.*                           {theirs}.self_attn.{qkv}_proj.*
    {ours}.attn.out.*                           {theirs}.self_attn.out_proj.*
    {ours}.norm2.*                              {theirs}.layer_norm2.*
    {ours}.mlp.up.*                             {theirs}.mlp.fc1.*
    {ours}.mlp.down.*                           {theirs}.mlp.fc2.*
"""


class Format(NamedTuple):
    """How a library names the tensors of a CLIP."""

    table: str
    block: str
    vision_blocks: str
    text_blocks: str
    ignored: tuple[str, ...]  # endings of names: buffers that follow from the config


# The last three are in OpenAI's own files.
OPENCLIP = Format(
    _OPENCLIP,
    _OPENCLIP_BLOCK,
    "visual.transformer.resblocks.{i}",
    "transformer.resblocks.{i}",
    ("attn_mask", "input_resolution", "context_length", "vocab_size"),
)
HUGGING_FACE = Format(
    _HF, _HF_BLOCK, "vision_model.encoder.layers.{i}", "text_model.encoder.layers.{i}", ("embeddings.position_ids",)
)


class Row(NamedTuple):
    """One tensor of ours, and the one or three tensors of theirs that it is made from."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool


def rows(names: Format, config: CLIPConfig) -> Iterator[Row]:
    """Every tensor of a model with this config."""
    vision, text = config.own_towers
    lines = [line.split() for line in names.table.strip().splitlines()]
    for tower, blocks, count in (
        ("image_tower", names.vision_blocks, vision.layers),
        ("text_tower", names.text_blocks, text.layers),
    ):
        for i in range(count):
            ours, theirs = f"{tower}.transformer.blocks.{i}", blocks.replace("{i}", str(i))
            block = names.block.replace("{ours}", ours).replace("{theirs}", theirs)
            lines += [line.split() for line in block.strip().splitlines()]
    for ours, theirs in lines:
        if ours == "logit_bias" and not config.logit_bias:
            continue
        for part in ("weight", "bias") if "*" in ours else ("",):
            name = theirs.removesuffix("^T").replace("*", part)
            each = tuple(name.replace("{qkv}", letter) for letter in "qkv") if "{qkv}" in name else (name,)
            yield Row(ours.replace("*", part), each, theirs.endswith("^T"))


WRAPPER = "module."  # what torch's data-parallel wrappers put before every name
TEXT_PREFIX = "text."  # open_clip's newer class keeps the text tower as a module of its own
TEXT_PARTS = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.", "text_projection", "attn_mask")


def without_prefixes(weights: Tensors) -> Tensors:
    """Names without `module.`, and without the `text.` of open_clip's newer class."""
    if weights and all(name.startswith(WRAPPER) for name in weights):
        weights = {name.removeprefix(WRAPPER): tensor for name, tensor in weights.items()}
    if "token_embedding.weight" in weights:
        return weights
    return {
        name.removeprefix(TEXT_PREFIX) if name.startswith(tuple(TEXT_PREFIX + p for p in TEXT_PARTS)) else name: t
        for name, t in weights.items()
    }


def to_ours(weights: Tensors, names: Format, config: CLIPConfig, where: str) -> Tensors:
    """Their tensors under our names, in float32; a missing or unknown tensor is an error that names it."""
    ours: Tensors = {}
    used: set[str] = set()
    for row in rows(names, config):
        missing = [name for name in row.theirs if name not in weights]
        if missing:
            raise UserError(f"{where}: missing tensor '{missing[0]}'")
        used.update(row.theirs)
        parts = [weights[name].float() for name in row.theirs]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        ours[row.ours] = tensor.T.contiguous() if row.transposed else tensor
    for name in sorted(set(weights) - used):
        if not name.endswith(names.ignored):
            raise UserError(f"{where}: unknown tensor '{name}'")
    return ours


def to_theirs(weights: Tensors, names: Format, config: CLIPConfig) -> Tensors:
    """The inverse of `to_ours`."""
    theirs: Tensors = {}
    for row in rows(names, config):
        tensor = weights[row.ours].T if row.transposed else weights[row.ours]
        parts = tensor.chunk(len(row.theirs)) if len(row.theirs) > 1 else (tensor,)
        theirs |= {name: part.contiguous() for name, part in zip(row.theirs, parts, strict=True)}
    return theirs


HEAD_WIDTH = 64  # open_clip's, where its config does not say
NORM_EPS = 1e-5
OPENCLIP_VISION = {"layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size"}
OPENCLIP_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"}
OPENCLIP_MODEL = {
    "embed_dim",
    "quick_gelu",
    "vision_cfg",
    "text_cfg",
    "init_logit_bias",
    "init_logit_scale",
    "custom_text",
}
# Settings of open_clip that change nothing at these values, or are true of every model here.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "ls_init_value": (None,),
    "patch_dropout": (0, 0.0),
    "attentional_pool": (False,),
    "timm_model_name": (None, ""),
    "hf_model_name": (None, ""),
    "hf_tokenizer_name": (None, ""),
    "no_ln_pre": (False,),
    "pool_type": ("tok", "argmax"),
    "pos_embed_type": ("learnable",),
    "final_ln_after_pool": (False,),
    "output_tokens": (False,),
    "embed_cls": (False,),
    "pad_id": (0,),
    "no_causal_mask": (False,),
    "proj_bias": (False,),
    "tokenizer_kwargs": (None,),
    "hf_model_pretrained": (True, False, None),
    "cast_dtype": (None,),
    "tokenizer_mode": (None,),
}
# Hugging Face's setting -> ours; the defaults are what transformers assumes where a config is silent.
HF_VISION = {
    "hidden_size": ("vision_width", 768),
    "num_hidden_layers": ("vision_layers", 12),
    "image_size": ("image_size", 224),
    "num_attention_heads": ("vision_heads", 12),
    "patch_size": ("patch_size", 32),
}
HF_TEXT = {
    "hidden_size": ("text_width", 512),
    "num_hidden_layers": ("text_layers", 12),
    "vocab_size": ("vocab_size", 49408),
    "num_attention_heads": ("text_heads", 8),
    "max_position_embeddings": ("context_length", 77),
}


def config_from_openclip(config: dict[str, Any], where: str) -> CLIPConfig:
    """The config behind a `model_cfg`; a setting that our towers do not have is an error that names it."""
    vision, text = config.get("vision_cfg"), config.get("text_cfg")
    if not isinstance(vision, dict) or not isinstance(text, dict):
        raise UserError(f"{where}: no vision_cfg and text_cfg; is it an open_clip config?")
    for part, known in ((config, OPENCLIP_MODEL), (vision, OPENCLIP_VISION), (text, OPENCLIP_TEXT)):
        for key, value in part.items():
            if key not in known and value not in HARMLESS.get(key, ()):
                raise UserError(f"{where}: '{key}: {str(value)[:40]}' is not supported by m1clip")
    try:
        width, size = int(vision["width"]), vision.get("image_size", 224)
        sides = {size} if isinstance(size, int) else set(size)
        if len(sides) != 1:
            raise UserError(f"{where}: image_size {size} is not a square")
        ratios = float(vision.get("mlp_ratio", 4.0)), float(text.get("mlp_ratio", 4.0))
        _check_ratios(*ratios, where)
        return with_fields(
            CLIPConfig(),
            image_size=int(sides.pop()),
            patch_size=int(vision["patch_size"]),
            vision_width=width,
            vision_layers=int(vision["layers"]),
            vision_heads=width // int(vision.get("head_width", HEAD_WIDTH)),
            text_width=int(text["width"]),
            text_layers=int(text["layers"]),
            text_heads=int(text["heads"]),
            context_length=int(text.get("context_length", 77)),
            vocab_size=int(text.get("vocab_size", 49408)),
            embed_dim=int(config["embed_dim"]),
            mlp_ratio=ratios[0],
            activation="quick_gelu" if config.get("quick_gelu") else "gelu",
            logit_bias=config.get("init_logit_bias") is not None,
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where}: not a complete open_clip config ({type(error).__name__}: {error})") from None


def config_from_tensors(weights: Tensors, activation: Activation, where: str) -> CLIPConfig:
    """The config of open_clip weights without one: all but the activation and the heads follows from the tensors."""

    def blocks(prefix: str) -> int:
        return len({name[len(prefix) :].split(".")[0] for name in weights if name.startswith(prefix)})

    try:
        patch, table = weights["visual.conv1.weight"], weights["token_embedding.weight"]
        tokens = weights["visual.positional_embedding"].shape[0] - 1
        width, text_width = patch.shape[0], table.shape[1]
        hidden = weights["visual.transformer.resblocks.0.mlp.c_fc.weight"].shape[0]
        return with_fields(
            CLIPConfig(),
            image_size=round(tokens**0.5) * patch.shape[2],
            patch_size=patch.shape[2],
            vision_width=width,
            vision_layers=blocks("visual.transformer.resblocks."),
            vision_heads=width // HEAD_WIDTH,
            text_width=text_width,
            text_layers=blocks("transformer.resblocks."),
            text_heads=text_width // HEAD_WIDTH,
            context_length=weights["positional_embedding"].shape[0],
            vocab_size=table.shape[0],
            embed_dim=weights["text_projection"].shape[1],
            mlp_ratio=hidden / width,
            activation=activation,
            logit_bias="logit_bias" in weights,
        )
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise UserError(f"{where}: missing or misshapen tensor ({error}); is it an open_clip ViT?") from None


def config_from_hf(config: dict[str, Any], where: str) -> CLIPConfig:
    """The config behind the config.json of a CLIPModel."""
    vision, text = (config.get(part) or {} for part in ("vision_config", "text_config"))
    activations = [part.get("hidden_act", "quick_gelu") for part in (vision, text)]
    if activations[0] != activations[1] or activations[0] not in ("gelu", "quick_gelu"):
        raise UserError(
            f"{where}: hidden_act is {activations[0]} and {activations[1]}: m1clip has gelu or quick_gelu, the same in "
            f"both towers"
        )
    given: dict[str, Any] = {"activation": activations[0], "embed_dim": config.get("projection_dim", 512)}
    ratios = []
    for part, table in ((vision, HF_VISION), (text, HF_TEXT)):
        if part.get("layer_norm_eps", NORM_EPS) != NORM_EPS:
            raise UserError(f"{where}: layer_norm_eps is {part['layer_norm_eps']}, m1clip has {NORM_EPS}")
        values = {ours: part.get(theirs, default) for theirs, (ours, default) in table.items()}
        for name, value in values.items():
            if type(value) is not int or value < 1:
                raise UserError(f"{where}: {name} must be an integer above 0, not {str(value)[:40]}")
        width = part.get("hidden_size", table["hidden_size"][1])
        hidden = part.get("intermediate_size", 4 * table["hidden_size"][1])
        if type(hidden) is not int:
            raise UserError(f"{where}: intermediate_size must be an integer, not {str(hidden)[:40]}")
        ratios.append(hidden / width)
        given |= values
    _check_ratios(ratios[0], ratios[1], where)
    if type(given["embed_dim"]) is not int:
        raise UserError(f"{where}: projection_dim must be an integer, not {str(given['embed_dim'])[:40]}")
    return with_fields(CLIPConfig(), mlp_ratio=ratios[0], **given)


def _check_ratios(vision: float, text: float, where: str) -> None:
    if vision != text:
        raise UserError(f"{where}: the MLPs of the towers are {vision:g} and {text:g} times as wide")


def check_expressible(config: CLIPConfig, to: str) -> None:
    """Raise UserError for settings that the formats cannot express."""
    vision, text = config.image_tower, config.text_tower
    if vision.kind != "vit" or text.kind != "transformer":
        names = " and ".join(getattr(tower, "name", tower.kind) for tower in (vision, text))
        raise UserError(f"a model on {names} cannot be exported to {to}; use --to safetensors")
    odd = {
        "stem": vision.stem if vision.stem != "patch" else None,
        "pooling": vision.pooling if vision.pooling != "cls" else None,
        "vision_pre_norm": None if vision.pre_norm else False,
        "patch_bias": vision.patch_bias or None,
        "projection_bias": config.image_head.bias or None,
        "logit_bias": (config.logit_bias and to == "hf") or None,
        "heads": config.image_head.kind if config.image_head.kind != "projection" else None,
    }
    found = [f"{name} {value}" for name, value in odd.items() if value is not None]
    if found:
        raise UserError(
            f"this model cannot be exported to {to}, which does not support {', '.join(found)}; use --to safetensors, "
            f"or one of the presets ViT-S-16 to ViT-L-14"
        )


def openclip_config(config: CLIPConfig) -> dict[str, Any]:
    """The `model_cfg` of open_clip."""
    vision, text = config.own_towers
    made: dict[str, Any] = {
        "embed_dim": config.embed_dim,
        "quick_gelu": vision.activation == "quick_gelu",
        "vision_cfg": {
            "image_size": vision.image_size,
            "layers": vision.layers,
            "width": vision.width,
            "head_width": vision.width // vision.heads,
            "patch_size": vision.patch_size,
            "mlp_ratio": vision.mlp_ratio,
        },
        "text_cfg": {
            "context_length": text.context_length,
            "vocab_size": text.vocab_size,
            "width": text.width,
            "heads": text.heads,
            "layers": text.layers,
            "mlp_ratio": text.mlp_ratio,
        },
    }
    if config.logit_bias:
        made["init_logit_bias"] = -10.0
    return made


def hf_config(config: CLIPConfig, sot_id: int, eot_id: int) -> dict[str, Any]:
    """The config.json of a CLIPModel."""
    vision, text = config.own_towers
    parts: list[dict[str, Any]] = [
        {
            "hidden_size": tower.width,
            "intermediate_size": int(tower.width * tower.mlp_ratio),
            "num_hidden_layers": tower.layers,
            "num_attention_heads": tower.heads,
            "hidden_act": tower.activation,
            "layer_norm_eps": NORM_EPS,
            "projection_dim": config.embed_dim,
        }
        for tower in (vision, text)
    ]
    parts[0] |= {"model_type": "clip_vision_model", "image_size": vision.image_size, "patch_size": vision.patch_size}
    parts[1] |= {
        "model_type": "clip_text_model",
        "max_position_embeddings": text.context_length,
        "vocab_size": text.vocab_size,
        "bos_token_id": sot_id,
        "eos_token_id": eot_id,
        "pad_token_id": eot_id,
    }
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.embed_dim,
        "vision_config": parts[0],
        "text_config": parts[1],
    }
