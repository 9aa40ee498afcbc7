"""Tensors of others under our names, and ours under theirs: by the tables in names.py, strictly."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.io import read_small
from m1clip.model.clip import CLIP
from m1clip.model.presets import Activation, ClipShape
from m1clip.model.towers import resize_positions

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


Tensors = dict[str, Tensor]
WRAPPER = "module."  # what torch's data-parallel wrappers put before every name
TEXT_PREFIX = "text."  # open_clip's newer class keeps the text tower as a module of its own
TEXT_PARTS = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.", "text_projection", "attn_mask")


def rows(table: Table, shape: ClipShape) -> Iterator[Row]:
    """Every row that a model of this shape has, with the numbers of its blocks filled in."""
    for row in table.once:
        if not row.needs or getattr(shape, row.needs):
            yield row
    for block, count in ((table.vision_block, shape.vision_layers), (table.text_block, shape.text_layers)):
        for i in range(count):
            for row in block:
                names = tuple(name.format(i=i) for name in row.theirs)
                yield row._replace(ours=row.ours.format(i=i), theirs=names)


def plain_names(weights: Tensors) -> Tensors:
    """Names without what wrappers put before them: `module.`, and open_clip's `text.` of its newer class."""
    if weights and all(name.startswith(WRAPPER) for name in weights):
        weights = {name.removeprefix(WRAPPER): tensor for name, tensor in weights.items()}
    if "token_embedding.weight" in weights:
        return weights
    return {
        name.removeprefix(TEXT_PREFIX) if name.startswith(tuple(TEXT_PREFIX + p for p in TEXT_PARTS)) else name: t
        for name, t in weights.items()
    }


def to_ours(weights: Tensors, table: Table, shape: ClipShape, where: str) -> Tensors:
    """Our names, in float32; a tensor that is missing, or that nothing asks for, is an error that names it."""
    ours: Tensors = {}
    used: set[str] = set()
    for row in rows(table, shape):
        missing = [name for name in row.theirs if name not in weights]
        if missing:
            raise UserError(f"{where}: missing tensor '{missing[0]}'")
        used.update(row.theirs)
        parts = [weights[name].float() for name in row.theirs]
        ours[row.ours] = _transposed(torch.cat(parts) if row.way == "stack" else parts[0], row)
    for name in sorted(set(weights) - used):
        if not name.endswith(table.ignored):
            raise UserError(f"{where}: unknown tensor '{name}'")
    return ours


def to_theirs(weights: Tensors, table: Table, shape: ClipShape) -> Tensors:
    """The inverse of `to_ours`."""
    theirs: Tensors = {}
    for row in rows(table, shape):
        parts = weights[row.ours].chunk(len(row.theirs)) if row.way == "stack" else [weights[row.ours]]
        for name, part in zip(row.theirs, parts, strict=True):
            theirs[name] = _transposed(part, row).contiguous()
    return theirs


def _transposed(tensor: Tensor, row: Row) -> Tensor:
    return tensor.T.contiguous() if row.way == "transpose" else tensor


POSITIONS = "image.positions"
TOKENS = "text.tokens.weight"
MAX_HEADER_BYTES = 2**24  # that of a model with 100,000 tensors
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; a full disk is an OSError, as everywhere, and not the library's own kind of error."""
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:
        number = SYSTEM_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def read_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """All tensors of a safetensors file; what is no such file, whoever wrote it, is one clear line."""
    try:
        # Looked at before it is opened: a pipe in its place would be waited for without end.
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise OSError("not a plain file")
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > min(MAX_HEADER_BYTES, facts.st_size):
            raise OSError(f"its header claims {header:,} bytes")
        return load_file(path, device=device)
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None


def empty_clip(shape: ClipShape, eot_id: int, device: torch.device) -> CLIP:
    """A CLIP whose weights are about to be loaded: memory is taken, no random start is drawn."""
    with torch.device("meta"):
        model = CLIP(shape, eot_id)
    model.to_empty(device=device)
    model.image.reset_positions(shape)
    return model


def check_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """A tensor that is missing, unknown, misshapen or not finite is an error; the model may be on the meta device."""
    own = model.state_dict()
    for odd in sorted(set(own) ^ set(weights)):
        raise UserError(f"{where}: {'missing' if odd in own else 'unknown'} tensor '{odd}'")
    for name, tensor in weights.items():
        if own[name].shape != tensor.shape:
            raise UserError(f"{where}: '{name}' is {tuple(tensor.shape)}, the model wants {tuple(own[name].shape)}")
        if not _is_finite(tensor):
            raise UserError(
                f"{where}: '{name}' holds NaN or infinity; the training diverged or the file is damaged: use another "
                f"model or an earlier checkpoint"
            )


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # NaN passes through aminmax, which needs no second tensor of this size; it is missing for float8.
    lowest, highest = (tensor if tensor.element_size() > 1 else tensor.float()).aminmax()
    return bool(lowest.isfinite() & highest.isfinite())


def assign_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Check tensors and copy them into the model."""
    check_weights(model, weights, where)
    model.load_state_dict(weights)


def fit_positions(weights: dict[str, Tensor], trained: ClipShape, shape: ClipShape) -> None:
    """Interpolate learned positions to the grid of `shape`; sincos ones are not among the weights."""
    positions = weights.get(POSITIONS)
    if shape.grid == trained.grid or shape.positions != "learned" or positions is None:
        return
    # Misshapen: `assign_weights` says so in words.
    if positions.shape == (trained.image_tokens, trained.vision_width):
        weights[POSITIONS] = resize_positions(positions.float(), shape.grid).to(positions.dtype)


def other_tokens(weights: dict[str, Tensor], sources: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The weights with another token table: row i is the mean of the old rows `sources[i]`."""
    table = weights[TOKENS]
    flat = torch.tensor([old for group in sources for old in group], device=table.device)
    starts = torch.tensor([0, *(len(group) for group in sources[:-1])], device=table.device).cumsum(0)
    rows = torch.nn.functional.embedding_bag(flat, table.float(), starts, mode="mean")
    return {**weights, TOKENS: rows.to(table.dtype)}


INDEX = "model.safetensors.index.json"
SAFETENSORS = (".safetensors",)
TORCH = (".pt", ".pth", ".bin", ".ckpt")
STATE = ("state_dict", "model", "model_state_dict")  # where a training checkpoint keeps the weights


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of the shards that an index names."""
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    if path.suffix in SAFETENSORS:
        return read_tensors(path)
    if path.suffix in TORCH:
        return _read_torch(path)
    raise UserError(f"{path}: weights are read from {', '.join(SAFETENSORS + TORCH)}, not '{path.suffix}'")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; anything else is an error that names the file."""
    try:
        value = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable JSON file ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


def _read_shards(path: Path) -> dict[str, Tensor]:
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise UserError(f"{path}: has no weight_map from tensors to files")
    weights: dict[str, Tensor] = {}
    for name in sorted(set(table.values())):
        # A file beside the index, whatever the index says: it may come from anyone.
        own = Path(name).name
        if own in ("", "..") or not own.isprintable():
            raise UserError(f"{path}: {name!a} is no name of a file")
        shard = path.with_name(own)
        if not shard.is_file():
            raise UserError(f"{shard}: missing; {path.name} names it")
        weights |= read_tensors(shard)
    for name in sorted(set(table) ^ set(weights)):
        raise UserError(f"{path}: '{name}' is {'not in its file' if name in table else 'in a file but not named'}")
    return weights


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        if not path.is_file():
            raise OSError("not a plain file")
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    # Bytes of a stranger make torch's reader raise nearly anything: KeyError, IndexError, AssertionError, ...
    except Exception as error:  # noqa: BLE001
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{path}: cannot be read as plain tensors ({reason}); only those are read, since anything else in such "
            f"a file could run code: convert it to safetensors where it was made"
        ) from None
    for key in STATE:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{path}: holds no table of tensors")
    # OpenAI's own files hold a few numbers beside the tensors.
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


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
                raise UserError(f"{where}: '{key}: {str(value)[:40]}' is a kind of model that m1clip does not have")
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
        raise UserError(f"{where}: hidden_size and intermediate_size must be numbers above 0 ({error})") from None
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
    wanted = {"stem": "patch", "pooling": "cls", "vision_pre_norm": True, "patch_bias": False, "projection_bias": False}
    if to == "hf":
        wanted["logit_bias"] = False
    odd = [f"{name} {getattr(shape, name)}" for name, value in wanted.items() if getattr(shape, name) != value]
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
