"""SigLIP and SigLIP 2 (fixed resolution): tensor names and configs of both libraries."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from m1clip.errors import UserError
from m1clip.model.convert import (
    BLOCK_TENSORS,
    Format,
    Settings,
    count,
    pairs,
    read_settings,
    write_settings,
)
from m1clip.model.presets import (
    Activation,
    CLIPConfig,
    HeadConfig,
    TextTowerConfig,
    VisionTowerConfig,
)

# Columns and marks as in convert.py.
_SIGLIP_TENSORS = """
    image_tower.positions      visual.trunk.pos_embed^1            vision_model.embeddings.position_embedding.weight
    image_tower.patch.*        visual.trunk.patch_embed.proj.*     vision_model.embeddings.patch_embedding.*
    image_tower.norm.*         visual.trunk.norm.*                 vision_model.post_layernorm.*
    image_tower.pool.query     visual.trunk.attn_pool.latent^11    vision_model.head.probe^11
    image_tower.pool.qkv.*     visual.trunk.attn_pool.{q,kv}.*     vision_model.head.attention.in_proj_*
    image_tower.pool.out.*     visual.trunk.attn_pool.proj.*       vision_model.head.attention.out_proj.*
    image_tower.pool.norm.*    visual.trunk.attn_pool.norm.*       vision_model.head.layernorm.*
    image_tower.pool.mlp.up.*  visual.trunk.attn_pool.mlp.fc1.*    vision_model.head.mlp.fc1.*
    image_tower.pool.mlp.down.* visual.trunk.attn_pool.mlp.fc2.*   vision_model.head.mlp.fc2.*
    text_tower.tokens.weight   text.token_embedding.weight         text_model.embeddings.token_embedding.weight
    text_tower.positions       text.positional_embedding           text_model.embeddings.position_embedding.weight
    text_tower.norm.*          text.ln_final.*                     text_model.final_layer_norm.*
    text_head.*                text.text_projection.*              text_model.head.*
    logit_scale                logit_scale                         logit_scale^1
    logit_bias                 logit_bias                          logit_bias^1
"""
_TIMM_BLOCK = """
    norm1.*                    norm1.*
    attn.qkv.*                 attn.qkv.*
    attn.out.*                 attn.proj.*
    norm2.*                    norm2.*
    mlp.up.*                   mlp.fc1.*
    mlp.down.*                 mlp.fc2.*
"""
OPENCLIP_SIGLIP = Format(
    pairs(_SIGLIP_TENSORS, 1),
    ("visual.trunk.blocks", pairs(_TIMM_BLOCK, 1)),
    ("text.transformer.resblocks", pairs(BLOCK_TENSORS, 1)),
    ("attn_mask",),
)
HUGGING_FACE_SIGLIP = Format(
    pairs(_SIGLIP_TENSORS, 2),
    ("vision_model.encoder.layers", pairs(BLOCK_TENSORS, 2)),
    ("text_model.encoder.layers", pairs(BLOCK_TENSORS, 2)),
    ("embeddings.position_ids",),
)
SIGLIP_NORM_EPS = 1e-6
SIGLIP_CONTEXT = 64
INITIAL_BIAS = -10.0
# Hugging Face's name of an activation -> ours.
ACTIVATIONS: dict[str, Activation] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
}
HF_SIGLIP_SETTINGS: Settings = {
    "vision_config": {
        "image_size": ("image_size", 224),
        "patch_size": ("patch_size", 16),
        "hidden_size": ("vision_width", 768),
        "num_hidden_layers": ("vision_layers", 12),
        "num_attention_heads": ("vision_heads", 12),
        "intermediate_size": ("vision_hidden", 3072),
    },
    "text_config": {
        "max_position_embeddings": ("context_length", SIGLIP_CONTEXT),
        "vocab_size": ("vocab_size", 32000),
        "hidden_size": ("text_width", 768),
        "num_hidden_layers": ("text_layers", 12),
        "num_attention_heads": ("text_heads", 12),
        "intermediate_size": ("text_hidden", 3072),
    },
}


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio from which `hidden` follows exactly."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def is_siglip(config: CLIPConfig) -> bool:
    """Whether a model has the layers of SigLIP, of any size."""
    vision = config.image_tower
    text = config.text_tower
    return (
        isinstance(vision, VisionTowerConfig)
        and isinstance(text, TextTowerConfig)
        and (vision.pooling, vision.stem, vision.positions) == ("map", "patch", "learned")
        and (vision.patch_bias, vision.pre_norm) == (True, False)
        and text.pooling == "last"
        and config.image_head.kind == "identity"
        and (config.text_head.kind, config.text_head.bias) == ("projection", True)
        and config.logit_bias
    )


def _siglip(vision: VisionTowerConfig, text: TextTowerConfig) -> CLIPConfig:
    return CLIPConfig(
        image_tower=vision,
        text_tower=text,
        image_head=HeadConfig(kind="identity"),
        text_head=HeadConfig(bias=True),
        embed_dim=vision.width,
        logit_bias=True,
    )


# --- Hugging Face ---


def config_from_hf_siglip(
    config: dict[str, Any], eot_id: int, fill_id: int, where: str
) -> CLIPConfig:
    """The config behind the config.json of a SiglipModel; the ids are those of its tokenizer."""
    values = read_settings(config, HF_SIGLIP_SETTINGS, where)
    vision = config["vision_config"]
    text = config["text_config"]
    if vision.get("vision_use_head", True) is not True:
        raise UserError(f"{where}: vision_use_head is off; m1clip needs SigLIP's attention pooling")
    embed_dim = count(
        text.get("projection_size") or values["text_width"], "text_config.projection_size", where
    )
    if embed_dim != values["vision_width"]:
        raise UserError(
            f"{where}: images have {values['vision_width']} dimensions, texts {embed_dim}"
        )
    return _siglip(
        VisionTowerConfig(
            image_size=values["image_size"],
            patch_size=values["patch_size"],
            width=values["vision_width"],
            layers=values["vision_layers"],
            heads=values["vision_heads"],
            mlp_ratio=mlp_ratio(values["vision_hidden"], values["vision_width"]),
            activation=_activation(vision, where),
            norm_eps=_norm_eps(vision, where),
            pooling="map",
            pre_norm=False,
            patch_bias=True,
        ),
        TextTowerConfig(
            context_length=values["context_length"],
            vocab_size=values["vocab_size"],
            width=values["text_width"],
            layers=values["text_layers"],
            heads=values["text_heads"],
            mlp_ratio=mlp_ratio(values["text_hidden"], values["text_width"]),
            activation=_activation(text, where),
            norm_eps=_norm_eps(text, where),
            pooling="last",
            eot_id=eot_id,
            fill_id=fill_id,
        ),
    )


def _activation(part: dict[str, Any], where: str) -> Activation:
    name = part.get("hidden_act", "gelu_pytorch_tanh")
    if name not in ACTIVATIONS:
        raise UserError(
            f"{where}: hidden_act {str(name)[:40]} is not supported (supported:"
            f" {', '.join(ACTIVATIONS)})"
        )
    return ACTIVATIONS[name]


def _norm_eps(part: dict[str, Any], where: str, name: str = "layer_norm_eps") -> float:
    eps = part.get(name, SIGLIP_NORM_EPS)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise UserError(f"{where}: {name} must be between 0 and 1, not {str(eps)[:40]}")
    return eps


def hf_siglip_config(config: CLIPConfig) -> dict[str, Any]:
    """The config.json of a SiglipModel."""
    vision, text = config.own_towers
    derived = {"vision_hidden": vision.hidden, "text_hidden": text.hidden}
    sections = write_settings(config, HF_SIGLIP_SETTINGS, derived)
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    for section, tower in zip(sections.values(), (vision, text), strict=True):
        section |= {
            "hidden_act": names[tower.activation],
            "layer_norm_eps": tower.norm_eps,
            "attention_dropout": 0.0,
        }
    sections["vision_config"] |= {"model_type": "siglip_vision_model"}
    sections["text_config"] |= {
        "model_type": "siglip_text_model",
        "projection_size": config.embed_dim,
        "pad_token_id": text.fill_id,
        "eos_token_id": text.eot_id,
        "bos_token_id": text.eot_id,
    }
    return {"architectures": ["SiglipModel"], "model_type": "siglip", **sections}


# --- open_clip ---


class TimmSize(NamedTuple):
    """The sizes of one of timm's SigLIP towers."""

    width: int
    layers: int
    heads: int
    mlp_ratio: float


TIMM_SIZES = {
    "base": TimmSize(768, 12, 12, 4.0),
    "large": TimmSize(1024, 24, 16, 4.0),
    "so400m": TimmSize(1152, 27, 16, 3.7362),
    "giantopt": TimmSize(1536, 40, 16, 4.0),
}
TIMM_NAME = re.compile(r"vit_(base|large|so400m|giantopt)_patch(\d+)_siglip_(\d+)")
# (size, patch, image) of the names for which timm uses the tanh approximation of GELU, as SigLIP
# was trained.
TIMM_TANH = {
    *(("base", 32, 256), ("large", 16, 512)),
    *(("so400m", 16, side) for side in (256, 384, 512)),
    *(("giantopt", 16, side) for side in (256, 384)),
}
# Arguments of timm's towers that we can express -> fields of our config.
TIMM_ARGUMENTS = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "embed_dim": "width",
    "depth": "layers",
    "num_heads": "heads",
    "mlp_ratio": "mlp_ratio",
    "act_layer": "activation",
}
OPENCLIP_TEXT: Settings = {
    "text_cfg": {
        "context_length": ("context_length", 77),
        "vocab_size": ("vocab_size", 49408),
        "width": ("width", 512),
        "heads": ("heads", 8),
        "layers": ("layers", 12),
    }
}
VISION_KNOWN = {"image_size", "timm_model_name", "timm_model_pretrained", "timm_model_kwargs"}
VISION_REQUIRED = {"timm_pool": "map", "timm_proj": "none"}
TEXT_KNOWN = {
    *OPENCLIP_TEXT["text_cfg"],
    *("hf_tokenizer_name", "tokenizer_kwargs", "mlp_ratio", "norm_kwargs", "act_kwargs", "pad_id"),
}
TEXT_REQUIRED = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}


def openclip_siglip_parts(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(vision_cfg, text_cfg) of a `model_cfg` that is SigLIP with nothing that we lack.

    None for any other.
    """
    vision = config.get("vision_cfg")
    text = config.get("text_cfg")
    if not isinstance(vision, dict) or not isinstance(text, dict):
        return None
    for part, required, allowed in (
        (vision, VISION_REQUIRED, VISION_KNOWN),
        (text, TEXT_REQUIRED, TEXT_KNOWN),
    ):
        if any(part.get(name) != value for name, value in required.items()):
            return None
        if any(value for name, value in part.items() if name not in {*allowed, *required}):
            return None
    arguments = vision.get("timm_model_kwargs") or {}
    name = vision.get("timm_model_name")
    fits = isinstance(name, str) and TIMM_NAME.fullmatch(name) is not None
    fits = fits and isinstance(arguments, dict) and not set(arguments) - set(TIMM_ARGUMENTS)
    return (vision, text) if fits else None


def config_from_openclip_siglip(
    config: dict[str, Any], eot_id: int, fill_id: int, where: str
) -> CLIPConfig:
    """The config behind a `model_cfg` for which `openclip_siglip_parts` is not None."""
    sections = openclip_siglip_parts(config)
    assert sections is not None
    vision, text = sections
    named = TIMM_NAME.fullmatch(vision["timm_model_name"])
    assert named is not None
    size = named[1]
    patch = int(named[2])
    side = int(named[3])
    shape: dict[str, Any] = TIMM_SIZES[size]._asdict()
    shape |= {"patch_size": patch, "image_size": side}
    shape["activation"] = "gelu_tanh" if (size, patch, side) in TIMM_TANH else "gelu"
    for name, value in (vision.get("timm_model_kwargs") or {}).items():
        shape[TIMM_ARGUMENTS[name]] = value
    if vision.get("image_size", shape["image_size"]) != shape["image_size"]:
        raise UserError(
            f"{where}: image_size {vision['image_size']} is not that of {vision['timm_model_name']}"
        )
    values: dict[str, Any] = {**read_settings({"text_cfg": text}, OPENCLIP_TEXT, where)}
    tanh = (text.get("act_kwargs") or {}).get("approximate") == "tanh"
    found_config = _siglip(
        VisionTowerConfig(
            **shape, norm_eps=SIGLIP_NORM_EPS, pooling="map", pre_norm=False, patch_bias=True
        ),
        TextTowerConfig(
            **values,
            mlp_ratio=text.get("mlp_ratio", 4.0),
            activation="gelu_tanh" if tanh else "gelu",
            norm_eps=_norm_eps(text.get("norm_kwargs") or {"eps": 1e-5}, where, "eps"),
            pooling="last",
            eot_id=eot_id,
            fill_id=fill_id,
        ),
    )
    if config.get("embed_dim") != found_config.embed_dim:
        raise UserError(
            f"{where}: embed_dim {config.get('embed_dim')} is not the width of the image tower, "
            f"{found_config.embed_dim}"
        )
    return found_config


def openclip_siglip_config(config: CLIPConfig) -> dict[str, Any]:
    """The `model_cfg` of open_clip: timm's tower of the same sizes, or one with arguments."""
    vision, text = config.own_towers
    arguments = {theirs: getattr(vision, ours) for theirs, ours in TIMM_ARGUMENTS.items()}
    size = next(
        (
            name
            for name, sizes in TIMM_SIZES.items()
            if (vision.width, vision.layers, vision.heads) == sizes[:3]
            and vision.hidden == int(sizes.width * sizes.mlp_ratio)
        ),
        "base",
    )
    name, base = _timm_name(size, vision.patch_size, vision.image_size)
    other = {key: value for key, value in arguments.items() if value != base[key]}
    if "mlp_ratio" in other and vision.hidden == int(vision.width * base["mlp_ratio"]):
        del other["mlp_ratio"]  # the same number written with fewer digits
    return {
        "embed_dim": config.embed_dim,
        "init_logit_bias": INITIAL_BIAS,
        "custom_text": True,
        "vision_cfg": {
            "image_size": vision.image_size,
            "timm_model_name": name,
            "timm_model_pretrained": False,
            "timm_pool": "map",
            "timm_proj": "none",
            **({"timm_model_kwargs": other} if other else {}),
        },
        "text_cfg": {
            **{key: getattr(text, ours) for key, (ours, _) in OPENCLIP_TEXT["text_cfg"].items()},
            "mlp_ratio": text.mlp_ratio,
            # open_clip reads the tokenizer from the folder itself; it needs any name here.
            "hf_tokenizer_name": "tokenizer.json",
            # The cleaning is part of tokenizer.json.
            "tokenizer_kwargs": {"clean": "whitespace"},
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
            "norm_kwargs": {"eps": text.norm_eps},
            **({"act_kwargs": {"approximate": "tanh"}} if text.activation == "gelu_tanh" else {}),
        },
    }


# The names that timm has: of each size, (patch, images).
TIMM_IMAGES: dict[str, dict[int, tuple[int, ...]]] = {
    "base": {32: (256,), 16: (224, 256, 384, 512)},
    "large": {16: (256, 384, 512)},
    "so400m": {14: (224, 378, 384), 16: (256, 384, 512)},
    "giantopt": {16: (256, 384)},
}


def _timm_name(size: str, patch: int, side: int) -> tuple[str, dict[str, Any]]:
    """A name that timm has, the same or similar, and its arguments."""
    patches = TIMM_IMAGES[size]
    nearest = patch if patch in patches else 16
    image = side if side in patches[nearest] else patches[nearest][0]
    width, layers, heads, ratio = TIMM_SIZES[size]
    base: dict[str, Any] = {
        "img_size": image,
        "patch_size": nearest,
        "embed_dim": width,
        "depth": layers,
        "num_heads": heads,
        "mlp_ratio": ratio,
        "act_layer": "gelu_tanh" if (size, nearest, image) in TIMM_TANH else "gelu",
    }
    return f"vit_{size}_patch{nearest}_siglip_{image}", base
