"""Model configurations and presets."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from m1clip.config import ModelConfig
from m1clip.errors import UserError
from m1clip.io import check_limits, validated

if TYPE_CHECKING:
    from m1clip.text.base import Tokenizer

Pooling = Literal["cls", "mean"]
Positions = Literal["learned", "sincos"]
Activation = Literal["gelu", "quick_gelu"]
Init = Literal["clip", "zero"]
Stem = Literal["patch", "conv"]
HeadKind = Literal["projection", "linear", "mlp", "adapter"]
AttentionKind = Literal["bmm", "sdpa"]
MAX_GRID = 256


@dataclass(frozen=True, kw_only=True)
class VisionTowerConfig:
    """Our image tower: a vision transformer."""

    kind: Literal["vit"] = "vit"
    image_size: int = 224
    patch_size: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_ratio: float = 4.0
    pooling: Pooling = "cls"
    positions: Positions = "learned"
    activation: Activation = "gelu"
    pre_norm: bool = True
    stem: Stem = "patch"
    patch_bias: bool = False
    dropout: float = 0.0
    init: Init = "clip"
    builtin = True  # built by code of m1clip, not by a library

    def __post_init__(self) -> None:
        _check_transformer(self, "vision", ("image_size", "patch_size"))
        if self.image_size % self.patch_size:
            raise UserError(
                f"model.image_size {self.image_size} is not a multiple of model.patch_size {self.patch_size}: "
                f"try {self.image_size // self.patch_size * self.patch_size or self.patch_size}"
            )
        if self.grid > MAX_GRID:
            raise UserError(
                f"model.image_size {self.image_size} in patches of {self.patch_size} makes {self.grid} patches per "
                f"side, more than {MAX_GRID}: choose a larger model.patch_size"
            )
        if self.positions == "sincos" and self.width % 4:
            raise UserError(f"model.vision_width {self.width} must be a multiple of 4 for sincos positions")
        if self.stem == "conv" and (self.patch_size < 2 or self.patch_size & (self.patch_size - 1)):
            raise UserError(
                f"model.stem conv halves the image repeatedly: model.patch_size must be 2, 4, 8, 16 or 32, "
                f"not {self.patch_size}"
            )
        if self.stem == "conv" and self.width * 2 < self.patch_size:
            raise UserError(f"model.vision_width {self.width} is too small for a conv stem")

    @property
    def grid(self) -> int:
        """Patches along one side."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Patches of an image; the augmentation may drop some."""
        return self.grid**2

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self.patches + (self.pooling == "cls")

    @property
    def stem_channels(self) -> tuple[int, ...]:
        """Channels after each convolution of a conv stem: doubled at each halving, the tower's width at the end."""
        halvings = self.patch_size.bit_length() - 1
        return tuple(max(1, self.width >> (halvings - 1 - number)) for number in range(halvings))


@dataclass(frozen=True, kw_only=True)
class TextTowerConfig:
    """Our text tower: a causal transformer that is read at the EOT token."""

    kind: Literal["transformer"] = "transformer"
    context_length: int = 77
    vocab_size: int = 49408
    eot_id: int = 49407
    width: int = 512
    layers: int = 12
    heads: int = 8
    mlp_ratio: float = 4.0
    activation: Activation = "gelu"
    dropout: float = 0.0
    init: Init = "clip"
    builtin = True

    def __post_init__(self) -> None:
        _check_transformer(self, "text", ("vocab_size",))
        if self.context_length < 3:
            raise UserError("model.context_length must be at least 3: start token, one token, EOT token")
        if not 0 <= self.eot_id < self.vocab_size:
            raise UserError(f"model.eot_id {self.eot_id} is outside the vocabulary of {self.vocab_size}")

    @property
    def tokens(self) -> int:
        """Length of the longest sequence."""
        return self.context_length


def _check_transformer(config: VisionTowerConfig | TextTowerConfig, tower: str, more: tuple[str, ...]) -> None:
    check_limits(config, "model.")
    for name in (*more, "width", "layers", "heads"):
        value, shown = getattr(config, name), name if name in more else f"{tower}_{name}"
        if value < 1:
            raise UserError(f"model.{shown} must be at least 1, not {value}")
    if config.width % config.heads:
        raise UserError(f"model.{tower}_width {config.width} cannot be split into {config.heads} heads")
    if not 1 <= config.width * config.mlp_ratio < float("inf"):
        raise UserError(f"model.mlp_ratio must be above 0 (4 is usual), not {config.mlp_ratio:g}")
    if not 0 <= config.dropout < 1:
        raise UserError(f"model.dropout must be in [0, 1), not {config.dropout}")


@dataclass(frozen=True, kw_only=True)
class PretrainedImageConfig:
    """An image tower of a third party."""

    kind: Literal["efficientnet-lite0", "transformers"] = "efficientnet-lite0"
    name: str = "efficientnet-lite0"  # as the user gave it
    settings: str = ""  # JSON from which the library builds it
    image_size: int = 224
    patches = 0  # patch dropout is for our own tower

    def __post_init__(self) -> None:
        _check_pretrained(self, ("image_size",))
        if self.kind == "efficientnet-lite0" and self.image_size % 32:
            raise UserError(f"{self.kind} takes images whose side is a multiple of 32, not {self.image_size}")

    @property
    def builtin(self) -> bool:
        """Built by code of m1clip, not by a library."""
        return self.kind == "efficientnet-lite0"


@dataclass(frozen=True, kw_only=True)
class PretrainedTextConfig:
    """A text tower of a third party."""

    kind: Literal["minilm", "transformers"] = "minilm"
    name: str = "minilm"
    settings: str = ""
    context_length: int = 64
    vocab_size: int = 30522
    pad_id: int = 0

    def __post_init__(self) -> None:
        _check_pretrained(self, ("context_length", "vocab_size"))

    @property
    def builtin(self) -> bool:
        """Built by code of m1clip, not by a library."""
        return self.kind == "minilm"


def _check_pretrained(config: PretrainedImageConfig | PretrainedTextConfig, sizes: tuple[str, ...]) -> None:
    check_limits(config, f"{config.name}: ")
    for name in sizes:
        if getattr(config, name) < 1:
            raise UserError(f"{config.name}: {name} must be at least 1, not {getattr(config, name)}")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What maps a tower's features to the shared space; all but "projection" standardize the features first."""

    kind: HeadKind = "projection"
    bias: bool = False  # of a projection; the others have one
    hidden: int = 0  # of "mlp" and "adapter"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_limits(self, "head: ")
        least = int(self.kind in ("mlp", "adapter"))
        if self.hidden < least:
            raise UserError(f"head: hidden must be at least {least}, not {self.hidden}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"head: dropout must be in [0, 1), not {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class CLIPConfig:
    """Everything that determines the parameters of a CLIP."""

    image_tower: VisionTowerConfig | PretrainedImageConfig = field(default_factory=VisionTowerConfig)
    text_tower: TextTowerConfig | PretrainedTextConfig = field(default_factory=TextTowerConfig)
    image_head: HeadConfig = field(default_factory=HeadConfig)
    text_head: HeadConfig = field(default_factory=HeadConfig)
    embed_dim: int = 512
    logit_bias: bool = False

    def __post_init__(self) -> None:
        check_limits(self, "model.")
        if self.embed_dim < 1:
            raise UserError(f"model.embed_dim must be at least 1, not {self.embed_dim}")

    @property
    def own_towers(self) -> tuple[VisionTowerConfig, TextTowerConfig]:
        """Both towers, of a model on our own."""
        vision, text = self.image_tower, self.text_tower
        assert isinstance(vision, VisionTowerConfig)
        assert isinstance(text, TextTowerConfig)
        return vision, text

    @property
    def image_size(self) -> int:
        """Side of an image in pixels."""
        return self.image_tower.image_size

    @property
    def context_length(self) -> int:
        """Tokens of the longest text."""
        return self.text_tower.context_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.text_tower.vocab_size

    def resized(self, image_size: int | None) -> CLIPConfig:
        """The same for images of another size."""
        if image_size in (None, self.image_size):
            return self
        if type(image_size) is not int:
            raise UserError(f"image_size must be an integer, not {image_size!r}")
        return replace(self, image_tower=replace(self.image_tower, image_size=image_size))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CLIPConfig:
        """The inverse of `to_dict`; an unknown or missing key or a wrong type is an error, never a guess."""
        parts: dict[str, Any] = {}
        for name, kinds in _PARTS.items():
            part = values.get(name)
            if not isinstance(part, dict):
                raise UserError(f"model: {name} must be an object")
            made = next((each for each in kinds[:-1] if part.get("kind") == each.kind), kinds[-1])
            parts[name] = made(**validated(made, part, f"model: {name}"))
        return cls(**parts, **validated(_Scalars, {k: v for k, v in values.items() if k not in parts}, "model"))


@dataclass(frozen=True)
class _Scalars:
    embed_dim: int
    logit_bias: bool


_PARTS: dict[str, tuple[Any, ...]] = {
    "image_tower": (VisionTowerConfig, PretrainedImageConfig),
    "text_tower": (TextTowerConfig, PretrainedTextConfig),
    "image_head": (HeadConfig,),
    "text_head": (HeadConfig,),
}


def flops_per_pair(config: CLIPConfig, text_tokens: int) -> float:
    """FLOPs of one forward and backward pass (3 x forward) of our towers for one image and one caption."""
    vision, text = config.own_towers

    def tower(tokens: int, part: VisionTowerConfig | TextTowerConfig) -> float:
        matrices = (4 + 2 * part.mlp_ratio) * part.width**2 * tokens
        attention = 2 * tokens**2 * part.width
        return 2 * part.layers * (matrices + attention)

    patch = 2.0 * vision.patches * 3 * vision.patch_size**2 * vision.width
    later = 0.0
    if vision.stem == "conv":
        side, layers = vision.image_size, []
        for before, after in itertools.pairwise((3, *vision.stem_channels)):
            side //= 2
            layers.append(2.0 * side**2 * 9 * before * after)
        patch, later = layers[0], sum(layers[1:])
    heads = 2 * config.embed_dim * (vision.width + text.width)
    # The first layer needs no gradient for the pixels, so it costs two products and not three.
    return 3 * (tower(vision.tokens, vision) + tower(text_tokens, text) + heads + later) + 2 * patch


# Learns fastest from few images: a convolutional stem, no class token, fixed 2-D positions, residual branches
# that start at zero.
_SMALL_DATA = {"pooling": "mean", "positions": "sincos", "init": "zero", "stem": "conv"}
# The prior art: biases on the patch layer and the projections, no norm before the first block.
_PRIOR_ART = {"vision_pre_norm": False, "patch_bias": True, "projection_bias": True}


def _vit(vision: tuple[int, int, int], text: tuple[int, int, int], embed: int, patch: int, **rest: Any) -> CLIPConfig:
    names = ("vision_width", "vision_layers", "vision_heads", "text_width", "text_layers", "text_heads")
    sizes = dict(zip(names, (*vision, *text), strict=True))
    return with_fields(CLIPConfig(), embed_dim=embed, patch_size=patch, **sizes, **rest)


def _both(*names: str) -> dict[str, tuple[tuple[str, str], ...]]:
    return {name: (("image_tower", name), ("text_tower", name)) for name in names}


HEAD_WIDTH = 64  # of an attention head, in every preset

# Setting of `ModelConfig` -> the fields of a CLIPConfig on our own towers that it sets.
FIELDS: dict[str, tuple[tuple[str, str], ...]] = {
    **{f"vision_{name}": (("image_tower", name),) for name in ("width", "layers", "heads", "pre_norm")},
    **{name: (("image_tower", name),) for name in ("image_size", "patch_size", "pooling", "positions", "stem")},
    "patch_bias": (("image_tower", "patch_bias"),),
    **{f"text_{name}": (("text_tower", name),) for name in ("width", "layers", "heads")},
    **{name: (("text_tower", name),) for name in ("context_length", "vocab_size", "eot_id")},
    **_both("mlp_ratio", "activation", "dropout", "init"),
    "projection_bias": (("image_head", "bias"), ("text_head", "bias")),
}


def with_fields(config: CLIPConfig, **values: Any) -> CLIPConfig:
    """The config of a model on our own towers with other values, under the names of `ModelConfig`."""
    if "vocab_size" in values:
        values = {"eot_id": values["vocab_size"] - 1, **values}
    own = {name: values.pop(name) for name in ("embed_dim", "logit_bias") if name in values}
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        for part, item in FIELDS[name]:
            changes.setdefault(part, {})[item] = value
    return replace(config, **own, **{part: replace(getattr(config, part), **new) for part, new in changes.items()})


def field_value(config: CLIPConfig, name: str) -> Any:
    """The value of a config on our own towers under its name in `ModelConfig`."""
    part, item = FIELDS[name][0]
    return getattr(getattr(config, part), item)


PRESETS: dict[str, CLIPConfig] = {
    #             vision (width, layers, heads)  text                 embed  patch
    "tiny": _vit((256, 4, 4), (256, 2, 4), 256, 16, image_size=112, context_length=32, **_SMALL_DATA),
    "small": _vit((512, 12, 8), (512, 12, 8), 512, 16, vocab_size=33, **_PRIOR_ART),
    "documented": _vit((768, 12, 12), (512, 6, 8), 512, 16, vocab_size=33, **_PRIOR_ART),
    "ViT-S-16": _vit((384, 12, 6), (384, 12, 6), 384, 16),
    "ViT-B-32": _vit((768, 12, 12), (512, 12, 8), 512, 32),
    "ViT-B-16": _vit((768, 12, 12), (512, 12, 8), 512, 16),
    "ViT-L-14": _vit((1024, 24, 16), (768, 12, 12), 768, 14),
    "200M": _vit((832, 14, 13), (640, 12, 10), 640, 16),
    "500M": _vit((1152, 24, 18), (768, 14, 12), 768, 16),
    "1B": _vit((1408, 32, 22), (1024, 16, 16), 1024, 14),
}


def list_models() -> list[str]:
    """The names of all model presets, for `--model` and `m1clip.train(model=...)`."""
    return list(PRESETS)


def preset(name: str) -> CLIPConfig:
    """The config of a preset; an unknown name is an error that offers the nearest one."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
    raise UserError(f"unknown model preset '{name}': did you mean '{near}'? (all: {', '.join(PRESETS)})")


def clip_config(model: ModelConfig, tokenizer: Tokenizer | None = None, **values: Any) -> CLIPConfig:
    """The preset with the config's changes; the vocabulary comes from the tokenizer."""
    names = {item.name for item in dataclasses.fields(model)} & {*FIELDS, "embed_dim"}
    given = {name: getattr(model, name) for name in names if getattr(model, name) is not None}
    for tower in ("vision", "text"):
        if f"{tower}_width" in given:
            given[f"{tower}_heads"] = max(1, given[f"{tower}_width"] // HEAD_WIDTH)
    if tokenizer is not None:
        given |= {"vocab_size": tokenizer.vocab_size, "eot_id": tokenizer.eot_id}
    return with_fields(preset(model.name), **given, **values)


def model_config(model: ModelConfig, config: CLIPConfig) -> ModelConfig:
    """The inverse of `clip_config`: every setting written out that a tower of ours has, so that it stays the same
    when the table of presets changes.
    """
    values: dict[str, Any] = {}
    own = {"image_tower": config.image_tower.kind == "vit", "text_tower": config.text_tower.kind == "transformer"}
    for item in dataclasses.fields(model):
        for part, name in FIELDS.get(item.name, ()):
            if own.get(part, all(own.values())):
                values.setdefault(item.name, getattr(getattr(config, part), name))
    if all(own.values()):
        values["embed_dim"] = config.embed_dim
    return replace(model, **values)
