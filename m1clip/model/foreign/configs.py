"""Configs of others: open_clip's and Hugging Face's words for a shape, both ways, and what cannot be said in them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from m1clip.errors import UserError
from m1clip.model.foreign.files import read_json as read_json
from m1clip.model.shape import Activation, ClipShape

HEAD_WIDTH = 64  # open_clip's, where its config does not say
NORM_EPS = 1e-5
OPENCLIP_VISION = {"layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size"}
OPENCLIP_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"}
OPENCLIP_MODEL = {"embed_dim", "quick_gelu", "vision_cfg", "text_cfg", "init_logit_bias", "init_logit_scale",
                  "custom_text"}  # fmt: skip
# Settings of open_clip that change nothing at these values, or say what is true of every model here.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "ls_init_value": (None,), "patch_dropout": (0, 0.0), "attentional_pool": (False,), "timm_model_name": (None, ""),
    "hf_model_name": (None, ""), "hf_tokenizer_name": (None, ""), "no_ln_pre": (False,), "pool_type": ("tok", "argmax"),
    "pos_embed_type": ("learnable",), "final_ln_after_pool": (False,), "output_tokens": (False,), "embed_cls": (False,),
    "pad_id": (0,), "no_causal_mask": (False,), "proj_bias": (False,), "tokenizer_kwargs": (None,),
    "hf_model_pretrained": (True, False, None), "cast_dtype": (None,), "tokenizer_mode": (None,),
}  # fmt: skip
# What transformers assumes where a config is silent.
HF_VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
             "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}  # fmt: skip
HF_TEXT = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
           "max_position_embeddings": 77, "vocab_size": 49408, "hidden_act": "quick_gelu",
           "layer_norm_eps": 1e-5}  # fmt: skip


def shape_from_openclip(config: dict[str, Any], where: str) -> ClipShape:
    """The shape behind a `model_cfg`; a setting that our towers do not have is an error that names it."""
    vision, text = config.get("vision_cfg"), config.get("text_cfg")
    if not isinstance(vision, dict) or not isinstance(text, dict):
        raise UserError(f"{where}: no vision_cfg and text_cfg; is it an open_clip config?")
    for part, known in ((config, OPENCLIP_MODEL), (vision, OPENCLIP_VISION), (text, OPENCLIP_TEXT)):
        for key, value in part.items():
            if key not in known and value not in HARMLESS.get(key, ()):
                raise UserError(
                    f"{where}: '{key}: {str(value)[:40]}' is a kind of model that m1clip does not have"
                )
    try:
        width = int(vision["width"])
        return ClipShape(
            image_size=_square(vision.get("image_size", 224), where), patch_size=int(vision["patch_size"]),
            vision_width=width, vision_layers=int(vision["layers"]),
            vision_heads=width // int(vision.get("head_width", HEAD_WIDTH)),
            text_width=int(text["width"]), text_layers=int(text["layers"]), text_heads=int(text["heads"]),
            context_length=int(text.get("context_length", 77)), vocab_size=int(text.get("vocab_size", 49408)),
            embed_dim=int(config["embed_dim"]), mlp_ratio=_ratio(vision, text, where),
            activation="quick_gelu" if config.get("quick_gelu") else "gelu",
            logit_bias=config.get("init_logit_bias") is not None,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where}: not a whole open_clip config ({type(error).__name__}: {error})") from None


def shape_from_tensors(weights: dict[str, Tensor], activation: Activation, where: str) -> ClipShape:
    """The shape of open_clip weights without a config: all but the activation and the heads shows in the tensors."""
    try:
        patch, table = weights["visual.conv1.weight"], weights["token_embedding.weight"]
        tokens = weights["visual.positional_embedding"].shape[0] - 1
        width, text_width = patch.shape[0], table.shape[1]
        hidden = weights["visual.transformer.resblocks.0.mlp.c_fc.weight"].shape[0]
        return ClipShape(
            image_size=round(tokens**0.5) * patch.shape[2], patch_size=patch.shape[2], vision_width=width,
            vision_layers=_blocks(weights, "visual.transformer.resblocks."), vision_heads=width // HEAD_WIDTH,
            text_width=text_width, text_layers=_blocks(weights, "transformer.resblocks."),
            text_heads=text_width // HEAD_WIDTH, context_length=weights["positional_embedding"].shape[0],
            vocab_size=table.shape[0], embed_dim=weights["text_projection"].shape[1], mlp_ratio=hidden / width,
            activation=activation, logit_bias="logit_bias" in weights,
        )  # fmt: skip
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise UserError(
            f"{where}: missing or misshapen tensor ({error}); is it an open_clip model of the ViT kind?"
        ) from None


def shape_from_hf(config: dict[str, Any], where: str) -> ClipShape:
    """The shape behind the config.json of a CLIPModel."""
    vision = HF_VISION | (config.get("vision_config") or {})
    text = HF_TEXT | (config.get("text_config") or {})
    if vision["hidden_act"] != text["hidden_act"] or vision["hidden_act"] not in ("gelu", "quick_gelu"):
        raise UserError(f"{where}: hidden_act is {vision['hidden_act']} and {text['hidden_act']}: m1clip has gelu or "
                        f"quick_gelu, the same in both towers")  # fmt: skip
    for part in (vision, text):
        if part["layer_norm_eps"] != NORM_EPS:
            raise UserError(f"{where}: layer_norm_eps is {part['layer_norm_eps']}, m1clip has {NORM_EPS}")
    try:
        ratios = [part["intermediate_size"] / part["hidden_size"] for part in (vision, text)]
    except (TypeError, ArithmeticError) as error:
        raise UserError(
            f"{where}: hidden_size and intermediate_size must be numbers above 0 ({error})"
        ) from None
    if ratios[0] != ratios[1]:
        raise UserError(f"{where}: the MLPs of the towers are {ratios[0]:g} and {ratios[1]:g} times as wide")
    given = {
        "image_size": vision["image_size"], "patch_size": vision["patch_size"], "vision_width": vision["hidden_size"],
        "vision_layers": vision["num_hidden_layers"], "vision_heads": vision["num_attention_heads"],
        "text_width": text["hidden_size"], "text_layers": text["num_hidden_layers"],
        "text_heads": text["num_attention_heads"], "context_length": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"], "embed_dim": config.get("projection_dim", 512), "mlp_ratio": ratios[0],
        "activation": vision["hidden_act"],
    }  # fmt: skip
    return ClipShape.from_dict(ClipShape().to_dict() | given)


def check_expressible(shape: ClipShape, to: str) -> None:
    """Refuse what neither of the two can say; each field is named."""
    wanted = {
        "stem": "patch",
        "pooling": "cls",
        "vision_pre_norm": True,
        "patch_bias": False,
        "projection_bias": False,
    }
    if to == "hf":
        wanted["logit_bias"] = False
    odd = [
        f"{name} {getattr(shape, name)}" for name, value in wanted.items() if getattr(shape, name) != value
    ]
    if odd:
        raise UserError(
            f"this model cannot be written as {to}: it has {', '.join(odd)}, which that format has no words for; "
            f"--to safetensors keeps it whole, and the presets ViT-S-16 to ViT-L-14 can be written as {to}"
        )


def openclip_config(shape: ClipShape) -> dict[str, Any]:
    """The `model_cfg` of open_clip."""
    config: dict[str, Any] = {
        "embed_dim": shape.embed_dim,
        "quick_gelu": shape.activation == "quick_gelu",
        "vision_cfg": {
            "image_size": shape.image_size, "layers": shape.vision_layers, "width": shape.vision_width,
            "head_width": _head_width(shape), "patch_size": shape.patch_size, "mlp_ratio": shape.mlp_ratio,
        },
        "text_cfg": {
            "context_length": shape.context_length, "vocab_size": shape.vocab_size, "width": shape.text_width,
            "heads": shape.text_heads, "layers": shape.text_layers, "mlp_ratio": shape.mlp_ratio,
        },
    }  # fmt: skip
    if shape.logit_bias:
        config["init_logit_bias"] = -10.0
    return config


def hf_config(shape: ClipShape, sot_id: int, eot_id: int) -> dict[str, Any]:
    """The config.json of a CLIPModel."""
    common = {"hidden_act": shape.activation, "layer_norm_eps": NORM_EPS, "projection_dim": shape.embed_dim}
    vision = {
        "model_type": "clip_vision_model", "hidden_size": shape.vision_width,
        "intermediate_size": int(shape.vision_width * shape.mlp_ratio), "num_hidden_layers": shape.vision_layers,
        "num_attention_heads": shape.vision_heads, "image_size": shape.image_size, "patch_size": shape.patch_size,
    }  # fmt: skip
    text = {
        "model_type": "clip_text_model", "hidden_size": shape.text_width,
        "intermediate_size": int(shape.text_width * shape.mlp_ratio), "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.text_heads, "max_position_embeddings": shape.context_length,
        "vocab_size": shape.vocab_size, "bos_token_id": sot_id, "eos_token_id": eot_id, "pad_token_id": eot_id,
    }  # fmt: skip
    return {
        "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": shape.embed_dim,
        "vision_config": vision | common, "text_config": text | common,
    }  # fmt: skip


def _head_width(shape: ClipShape) -> int:
    return shape.vision_width // shape.vision_heads


def _ratio(vision: dict[str, Any], text: dict[str, Any], where: str) -> float:
    ratios = float(vision.get("mlp_ratio", 4.0)), float(text.get("mlp_ratio", 4.0))
    if ratios[0] != ratios[1]:
        raise UserError(f"{where}: the MLPs of the towers are {ratios[0]:g} and {ratios[1]:g} times as wide")
    return ratios[0]


def _square(size: Any, where: str) -> int:
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) != 1:
        raise UserError(f"{where}: image_size {size} is no square")
    return int(sides.pop())


def _blocks(weights: dict[str, Tensor], prefix: str) -> int:
    numbers = {name[len(prefix) :].split(".")[0] for name in weights if name.startswith(prefix)}
    return len(numbers)
