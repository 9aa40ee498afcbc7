"""open_clip's and Hugging Face's CLIP: their tensor names as tables, and their configs."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from m1clip.errors import UserError
from m1clip.model.presets import CLIPConfig, field_value, with_fields
from m1clip.model.weights import Tensors

# One tensor per line: ours, open_clip's, Hugging Face's ("-": none). "*" is weight and bias, {qkv}
# three tensors that we keep as one, {q,kv} two, "^T" a transposed matrix, and "^1" a tensor with a
# leading dimension of 1, "^11" with two.
_TENSORS = """
    image_tower.cls            visual.class_embedding        vision_model.embeddings.class_embedding
    image_tower.positions      visual.positional_embedding   vision_model.embeddings.position_embedding.weight
    image_tower.patch.weight   visual.conv1.weight           vision_model.embeddings.patch_embedding.weight
    image_tower.norm_pre.*     visual.ln_pre.*               vision_model.pre_layrnorm.*
    image_tower.norm.*         visual.ln_post.*              vision_model.post_layernorm.*
    image_head.weight          visual.proj^T                 visual_projection.weight
    text_tower.tokens.weight   token_embedding.weight        text_model.embeddings.token_embedding.weight
    text_tower.positions       positional_embedding          text_model.embeddings.position_embedding.weight
    text_tower.norm.*          ln_final.*                    text_model.final_layer_norm.*
    text_head.weight           text_projection^T             text_projection.weight
    logit_scale                logit_scale                   logit_scale
    logit_bias                 logit_bias                    -
"""
BLOCK_TENSORS = """
    norm1.*                    ln_1.*                        layer_norm1.*
    attn.qkv.*                 attn.in_proj_*                self_attn.{qkv}_proj.*
    attn.out.*                 attn.out_proj.*               self_attn.out_proj.*
    norm2.*                    ln_2.*                        layer_norm2.*
    mlp.up.*                   mlp.c_fc.*                    mlp.fc1.*
    mlp.down.*                 mlp.c_proj.*                  mlp.fc2.*
"""
Pairs = list[tuple[str, str]]  # our name, theirs


def pairs(table: str, column: int) -> Pairs:
    """Our names and those in a column of a table."""
    lines = [line.split() for line in table.strip().splitlines()]
    return [(cells[0], cells[column]) for cells in lines]


class Format(NamedTuple):
    """How a library names the tensors of a CLIP."""

    tensors: Pairs
    # The prefix of the blocks, and the names in one block, of either tower.
    vision_blocks: tuple[str, Pairs]
    text_blocks: tuple[str, Pairs]
    ignored: tuple[str, ...]  # endings of names: buffers that follow from the config


# The last three are in OpenAI's own files.
OPENCLIP_BUFFERS = ("attn_mask", "input_resolution", "context_length", "vocab_size")
OPENCLIP = Format(
    pairs(_TENSORS, 1),
    ("visual.transformer.resblocks", pairs(BLOCK_TENSORS, 1)),
    ("transformer.resblocks", pairs(BLOCK_TENSORS, 1)),
    OPENCLIP_BUFFERS,
)
HUGGING_FACE_CLIP = Format(
    pairs(_TENSORS, 2),
    ("vision_model.encoder.layers", pairs(BLOCK_TENSORS, 2)),
    ("text_model.encoder.layers", pairs(BLOCK_TENSORS, 2)),
    ("embeddings.position_ids",),
)
TENSOR_PARTS = re.compile("{(.*?)}")
SHAPE_MARK = re.compile(r"\^(T|1+)$")


class Row(NamedTuple):
    """One tensor of ours, and the tensors of theirs that it is made from."""

    ours: str
    theirs: tuple[str, ...]
    thirds: tuple[int, ...] = (1,)  # relative sizes of the tensors that are kept as one
    transposed: bool = False
    leading: int = 0  # dimensions of 1 that come first in theirs

    def to_ours(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Join and reshape their tensors."""
        tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        if tensor.shape[: self.leading] == (1,) * self.leading:
            tensor = tensor.reshape(tensor.shape[self.leading :])
        return tensor.T.contiguous() if self.transposed else tensor

    def to_theirs(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Split and reshape our tensor."""
        tensor = tensor.T if self.transposed else tensor
        tensor = tensor.reshape((1,) * self.leading + tuple(tensor.shape))
        if len(self.theirs) == 1:
            return [tensor.contiguous()]
        unit = len(tensor) // sum(self.thirds)
        return [part.contiguous() for part in tensor.split([unit * size for size in self.thirds])]


def rows(names: Format, config: CLIPConfig) -> Iterator[Row]:
    """Every tensor of a model with this config."""
    tensors = [pair for pair in names.tensors if pair[0] != "logit_bias" or config.logit_bias]
    blocks = (("image_tower", names.vision_blocks), ("text_tower", names.text_blocks))
    for (tower, (prefix, block)), part in zip(blocks, config.own_towers, strict=True):
        for i in range(part.layers):
            ours = f"{tower}.transformer.blocks.{i}"
            tensors += [(f"{ours}.{own}", f"{prefix}.{i}.{other}") for own, other in block]
    for ours, theirs in tensors:
        mark = SHAPE_MARK.search(theirs)
        shape = mark[1] if mark else ""
        name = SHAPE_MARK.sub("", theirs)
        parts_match = TENSOR_PARTS.search(name)
        parts = tuple(
            (parts_match[1].split(",") if "," in parts_match[1] else parts_match[1])
            if parts_match
            else ""
        )
        for kind in ("weight", "bias") if "*" in ours else ("",):
            full = name.replace("*", kind)
            source_names = tuple(TENSOR_PARTS.sub(part, full) for part in parts) or (full,)
            thirds = tuple(len(part) for part in parts) or (1,)
            yield Row(ours.replace("*", kind), source_names, thirds, shape == "T", shape.count("1"))


WRAPPER = "module."  # what torch's data-parallel wrappers put before every name
TEXT_PREFIX = "text."  # open_clip's newer class keeps the text tower as a module of its own
TEXT_PARTS = (
    "token_embedding.",
    "positional_embedding",
    "transformer.",
    "ln_final.",
    "text_projection",
    "attn_mask",
)


def without_wrapper(weights: Tensors) -> Tensors:
    """Names without `module.`."""
    if weights and all(name.startswith(WRAPPER) for name in weights):
        return {name.removeprefix(WRAPPER): tensor for name, tensor in weights.items()}
    return weights


def without_prefixes(weights: Tensors) -> Tensors:
    """Names without `module.`, and without the `text.` of open_clip's newer class."""
    weights = without_wrapper(weights)
    if "token_embedding.weight" in weights:
        return weights
    return {
        name.removeprefix(TEXT_PREFIX)
        if name.startswith(tuple(TEXT_PREFIX + p for p in TEXT_PARTS))
        else name: t
        for name, t in weights.items()
    }


def to_ours(weights: Tensors, names: Format, config: CLIPConfig, where: str) -> Tensors:
    """Their tensors under our names, in float32.

    A missing or unknown tensor is an error that names it.
    """
    ours: Tensors = {}
    used: set[str] = set()
    for row in rows(names, config):
        missing = [name for name in row.theirs if name not in weights]
        if missing:
            raise UserError(f"{where}: missing tensor '{missing[0]}'")
        used.update(row.theirs)
        ours[row.ours] = row.to_ours([weights[name].float() for name in row.theirs])
    for name in ("logit_scale", "logit_bias"):
        if name in ours and ours[name].numel() == 1:  # some files have a dimension of 1
            ours[name] = ours[name].reshape(())
    for name in sorted(set(weights) - used):
        if not name.endswith(names.ignored):
            raise UserError(f"{where}: unknown tensor '{name}'")
    return ours


def to_theirs(weights: Tensors, names: Format, config: CLIPConfig) -> Tensors:
    """The inverse of `to_ours`."""
    theirs: Tensors = {}
    for row in rows(names, config):
        theirs |= dict(zip(row.theirs, row.to_theirs(weights[row.ours]), strict=True))
    return theirs


NORM_EPS = 1e-5
# Their setting -> ours, and the value that the library assumes if a config does not set it.
Settings = dict[str, dict[str, tuple[str, int]]]


class UnsupportedSetting(UserError):
    """A setting of open_clip that our towers do not have; its own may."""


OPENCLIP_SETTINGS: Settings = {
    "vision_cfg": {
        "image_size": ("image_size", 224),
        "patch_size": ("patch_size", 16),
        "width": ("vision_width", 768),
        "layers": ("vision_layers", 12),
        "head_width": ("head_width", 64),
    },
    "text_cfg": {
        "context_length": ("context_length", 77),
        "vocab_size": ("vocab_size", 49408),
        "width": ("text_width", 512),
        "heads": ("text_heads", 8),
        "layers": ("text_layers", 12),
    },
}
HF_SETTINGS: Settings = {
    "vision_config": {
        "image_size": ("image_size", 224),
        "patch_size": ("patch_size", 32),
        "hidden_size": ("vision_width", 768),
        "num_hidden_layers": ("vision_layers", 12),
        "num_attention_heads": ("vision_heads", 12),
        "intermediate_size": ("vision_hidden", 3072),
    },
    "text_config": {
        "max_position_embeddings": ("context_length", 77),
        "vocab_size": ("vocab_size", 49408),
        "hidden_size": ("text_width", 512),
        "num_hidden_layers": ("text_layers", 12),
        "num_attention_heads": ("text_heads", 8),
        "intermediate_size": ("text_hidden", 2048),
    },
}
OPENCLIP_KNOWN = {
    "embed_dim",
    "quick_gelu",
    "init_logit_bias",
    "init_logit_scale",
    "custom_text",
    "mlp_ratio",
}
# Other settings of open_clip change nothing where they are off, or where they are these.
OPENCLIP_USUAL = [("pool_type", "tok"), ("pool_type", "argmax"), ("pos_embed_type", "learnable")]


def config_from_openclip(config: dict[str, Any], where: str) -> CLIPConfig:
    """The config behind a `model_cfg`.

    A setting that our towers do not have is an error that names it.
    """
    layers = (config.get("vision_cfg") or {}).get("layers")
    if isinstance(layers, list):
        raise UnsupportedSetting(f"{where}: a ResNet (layers {layers}) is not supported by m1clip")
    values = read_settings(config, OPENCLIP_SETTINGS, where)
    known_keys = OPENCLIP_KNOWN.union(OPENCLIP_SETTINGS, *OPENCLIP_SETTINGS.values())
    for key, value in [
        item
        for part in (config, *(config[name] for name in OPENCLIP_SETTINGS))
        for item in part.items()
    ]:
        if value and key not in known_keys and (key, value) not in OPENCLIP_USUAL:
            raise UnsupportedSetting(
                f"{where}: '{key}: {str(value)[:40]}' is not supported by m1clip"
            )
    ratios = [config[name].get("mlp_ratio", 4.0) for name in OPENCLIP_SETTINGS]
    return with_fields(
        CLIPConfig(),
        vision_heads=values["vision_width"] // values.pop("head_width"),
        embed_dim=count(config.get("embed_dim"), "embed_dim", where),
        mlp_ratio=_common(ratios, "mlp_ratio", (int, float), where),
        activation="quick_gelu" if config.get("quick_gelu") else "gelu",
        logit_bias=config.get("init_logit_bias") is not None,
        **values,
    )


def config_from_hf(config: dict[str, Any], where: str) -> CLIPConfig:
    """The config behind the config.json of a CLIPModel."""
    values = read_settings(config, HF_SETTINGS, where)
    parts = [config[name] for name in HF_SETTINGS]
    activation = _common(
        [part.get("hidden_act", "quick_gelu") for part in parts], "hidden_act", str, where
    )
    if activation not in ("gelu", "quick_gelu"):
        raise UserError(
            f"{where}: hidden_act {activation[:40]} is not supported (supported: gelu, quick_gelu)"
        )
    if any(part.get("layer_norm_eps", NORM_EPS) != NORM_EPS for part in parts):
        raise UserError(
            f"{where}: layer_norm_eps must be {NORM_EPS}; m1clip supports no other value"
        )
    ratios = [
        values.pop(f"{tower}_hidden") / values[f"{tower}_width"] for tower in ("vision", "text")
    ]
    return with_fields(
        CLIPConfig(),
        embed_dim=count(config.get("projection_dim", 512), "projection_dim", where),
        mlp_ratio=_common(ratios, "the ratio of intermediate_size to hidden_size", float, where),
        activation=activation,
        **values,
    )


def read_settings(config: dict[str, Any], settings: Settings, where: str) -> dict[str, int]:
    """The sizes in a third-party config under our names.

    A missing section has the library's defaults.
    """
    values = {}
    for section, names in settings.items():
        part = config.setdefault(section, {})
        if not isinstance(part, dict):
            raise UserError(f"{where}: {section} must be an object")
        for key, (ours, default) in names.items():
            values[ours] = count(part.get(key, default), f"{section}.{key}", where)
    return values


def count(value: Any, name: str, where: str) -> int:
    if type(value) is not int or value < 1:
        raise UserError(f"{where}: {name} must be an integer of at least 1, not {str(value)[:40]}")
    return value


def _common(values: list[Any], name: str, kind: Any, where: str) -> Any:
    """The value that both towers must have."""
    if not isinstance(values[0], kind) or values[0] != values[1]:
        values_text = " and ".join(str(value)[:40] for value in values)
        raise UserError(
            f"{where}: {name} is {values_text} in the two towers; m1clip needs one value for both"
        )
    return values[0]


def check_expressible(config: CLIPConfig, to: str) -> None:
    """Raise UserError for settings that the formats cannot express."""
    vision = config.image_tower
    text = config.text_tower
    if vision.kind != "vit" or text.kind != "transformer":
        names = " and ".join(getattr(tower, "name", tower.kind) for tower in (vision, text))
        raise UserError(f"a model on {names} cannot be exported to {to}; use --to onnx")
    needed = {
        "stem": "patch",
        "pooling": "cls",
        "vision_pre_norm": True,
        "patch_bias": False,
        "projection_bias": False,
        "text_pooling": "eot",
    }
    actual = {name: field_value(config, name) for name in needed}
    odd = [f"{name} {value}" for name, value in actual.items() if value != needed[name]]
    odd += [
        f"{name} {value}"
        for name, values, usual in (
            ("norm_eps", (vision.norm_eps, text.norm_eps), (NORM_EPS,)),
            ("activation", (vision.activation, text.activation), ("gelu", "quick_gelu")),
        )
        for value in dict.fromkeys(values)
        if value not in usual
    ]
    odd += [f"{config.image_head.kind} heads"] if config.image_head.kind != "projection" else []
    odd += ["logit_bias"] if config.logit_bias and to == "hf" else []
    odd += [f"{config.members} members"] if config.members > 1 else []
    odd += ["the mean with mirror images"] if config.mirror else []
    if odd:
        raise UserError(
            f"this model cannot be exported to {to}, which does not support {', '.join(odd)}; use"
            " --to onnx, or one of the presets ViT-S-16 to ViT-L-14"
        )


def openclip_config(config: CLIPConfig) -> dict[str, Any]:
    """The `model_cfg` of open_clip."""
    vision, text = config.own_towers
    sections = write_settings(
        config, OPENCLIP_SETTINGS, {"head_width": vision.width // vision.heads}
    )
    for section in sections.values():
        section["mlp_ratio"] = text.mlp_ratio
    bias = {"init_logit_bias": -10.0} if config.logit_bias else {}
    return {
        "embed_dim": config.embed_dim,
        "quick_gelu": text.activation == "quick_gelu",
        **sections,
        **bias,
    }


def hf_config(config: CLIPConfig, sot_id: int, eot_id: int) -> dict[str, Any]:
    """The config.json of a CLIPModel."""
    vision, text = config.own_towers
    hidden = {
        f"{name}_hidden": tower.hidden for name, tower in (("vision", vision), ("text", text))
    }
    sections = write_settings(config, HF_SETTINGS, hidden)
    special = {"bos_token_id": sot_id, "eos_token_id": eot_id, "pad_token_id": eot_id}
    sections["vision_config"] |= {"model_type": "clip_vision_model"}
    sections["text_config"] |= {"model_type": "clip_text_model", **special}
    for section in sections.values():
        section |= {
            "hidden_act": text.activation,
            "layer_norm_eps": NORM_EPS,
            "projection_dim": config.embed_dim,
        }
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.embed_dim,
        **sections,
    }


def write_settings(
    config: CLIPConfig, settings: Settings, derived: dict[str, int]
) -> dict[str, Any]:
    """The inverse of `read_settings`; `derived` are values that are not fields of our config."""
    return {
        section: {
            key: derived[ours] if ours in derived else field_value(config, ours)
            for key, (ours, _) in names.items()
        }
        for section, names in settings.items()
    }
