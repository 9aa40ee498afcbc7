"""Model configurations and presets."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from m1clip.config import ModelConfig
from m1clip.errors import UserError
from m1clip.formatting import did_you_mean
from m1clip.schema import check_limits, validate

if TYPE_CHECKING:
    from m1clip.text.base import Tokenizer

Activation = Literal["gelu", "quick_gelu", "gelu_tanh"]
Init = Literal["clip", "zero"]
AttentionKind = Literal["auto", "bmm", "sdpa"]
SIZE_FIELDS = (
    "image_size",
    "patch_size",
    "width",
    "layers",
    "heads",
    "context_length",
    "vocab_size",
    "embed_dim",
    "members",
)
MAX_GRID = 256
# Pretrained towers that m1clip builds, and that can be side by side.
NATIVE_KINDS = ("efficientnet-lite0", "efficientnet-lite2", "dinov2", "minilm", "bert")
MAX_TOWERS = 8
LIBRARY_KINDS = ("transformers", "open_clip", "transformers-clip")  # towers that a library builds


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(f"model: {message}")


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Checks its sizes when it is created."""

    def __post_init__(self) -> None:
        check_limits(self, "model: ")
        for name in SIZE_FIELDS:
            _check(
                getattr(self, name, 1) >= 1,
                f"{name} must be at least 1, not {getattr(self, name, 1)}",
            )


@dataclass(frozen=True, kw_only=True)
class _Transformer(_Part):
    """What our two towers have in common."""

    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_ratio: float = 4.0
    activation: Activation = "gelu"
    norm_eps: float = 1e-5
    init: Init = "clip"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(
            self.width % self.heads == 0,
            f"a width of {self.width} cannot be split into {self.heads} heads",
        )
        _check(
            1 <= self.width * self.mlp_ratio < float("inf"),
            f"mlp_ratio {self.mlp_ratio:g} must be above 0 (usual: 4)",
        )
        _check(0 < self.norm_eps < 1, f"norm_eps {self.norm_eps:g} must be between 0 and 1")

    @property
    def hidden(self) -> int:
        """Width of the hidden layer of an MLP."""
        return int(self.width * self.mlp_ratio)


@dataclass(frozen=True, kw_only=True)
class VisionTowerConfig(_Transformer):
    """Our image tower: a vision transformer.

    Its feature is read at a class token, or is the mean over the patches, or is what a learned
    query reads from them ("map", SigLIP's attention pooling).
    """

    kind: Literal["vit"] = "vit"
    image_size: int = 224
    patch_size: int = 16
    pooling: Literal["cls", "mean", "map"] = "cls"
    positions: Literal["learned", "sincos"] = "learned"
    pre_norm: bool = True
    stem: Literal["patch", "conv"] = "patch"
    patch_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.image_size
        patch = self.patch_size
        nearest = size // patch * patch or patch
        # SigLIP's own model of 384 pixels in patches of 14 ignores the last six rows and columns.
        _check(
            size % patch == 0 or (self.pooling == "map" and self.stem == "patch" and size > patch),
            f"image_size {size} is not a multiple of patch_size {patch}: try {nearest}",
        )
        _check(
            self.grid <= MAX_GRID,
            f"{self.grid} patches per side are more than {MAX_GRID}: use a larger patch_size",
        )
        _check(
            self.positions == "learned" or self.width % 4 == 0,
            "sincos positions need a width that is a multiple of 4",
        )
        if self.stem == "conv":
            power = patch > 1 and patch & (patch - 1) == 0
            _check(
                power,
                f"a conv stem halves the image: patch_size must be 2, 4, 8, 16 or 32, not {patch}",
            )
            _check(self.width * 2 >= patch, f"a width of {self.width} is too small for a conv stem")

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
        """Channels after each convolution of a conv stem, doubled each time up to the width."""
        halvings = self.patch_size.bit_length() - 1
        return tuple(max(1, self.width >> (halvings - 1 - number)) for number in range(halvings))


@dataclass(frozen=True, kw_only=True)
class TextTowerConfig(_Transformer):
    """Our text tower: a causal transformer that is read at the EOT token.

    With pooling "eot+mean", the mean of the token embeddings is added. Otherwise, with residual
    branches that start at zero, every text has the same features at first. With pooling "last"
    (SigLIP), every token sees every other one, each text is filled up to the context length with
    `fill_id`, and the last position is read.
    """

    kind: Literal["transformer"] = "transformer"
    context_length: int = 77
    vocab_size: int = 49408
    eot_id: int = 49407
    fill_id: int = 0  # after the EOT token; has an effect with pooling "last" alone
    pooling: Literal["eot", "eot+mean", "last"] = "eot"
    width: int = 512
    heads: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(
            self.context_length >= 3,
            "context_length must be at least 3: start token, one token, EOT token",
        )
        inside = 0 <= self.eot_id < self.vocab_size
        _check(inside, f"eot_id {self.eot_id} is outside the vocabulary of {self.vocab_size}")
        inside = 0 <= self.fill_id < self.vocab_size
        _check(inside, f"fill_id {self.fill_id} is outside the vocabulary of {self.vocab_size}")

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return self.pooling != "last"


def _check_parts(kind: str, parts: tuple[Any, ...]) -> None:
    """Check which towers are side by side."""
    count = range(2, MAX_TOWERS + 1) if kind == "concat" else range(1)
    _check(len(parts) in count, f"a tower of kind {kind} with {len(parts)} parts")
    for part in parts:
        _check(part.kind in NATIVE_KINDS, f"{part.kind} cannot be side by side with other towers")


@dataclass(frozen=True, kw_only=True)
class PretrainedImageConfig(_Part):
    kind: Literal[
        "efficientnet-lite0",
        "efficientnet-lite2",
        "efficientnet-lite0+lite2",
        "dinov2",
        "concat",
        "transformers",
        "open_clip",
        "transformers-clip",
    ] = "efficientnet-lite0"
    name: str = "efficientnet-lite0"  # as the user gave it
    settings: str = ""  # JSON of its sizes, or of what a library builds it from
    image_size: int = 224
    parts: tuple[PretrainedImageConfig, ...] = ()  # of a "concat"
    patches = 0  # patch dropout is for our own tower

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = not self.kind.startswith("efficientnet") or self.image_size >= 32
        _check(fits, f"{self.kind} takes images of at least 32 pixels, not {self.image_size}")
        _check_parts(self.kind, self.parts)
        largest = max((part.image_size for part in self.parts), default=self.image_size)
        _check(largest == self.image_size, "the image size of towers is not that of the largest")


@dataclass(frozen=True, kw_only=True)
class PretrainedTextConfig(_Part):
    kind: Literal["minilm", "bert", "concat", "transformers", "open_clip", "transformers-clip"] = (
        "minilm"
    )
    name: str = "minilm"
    settings: str = ""
    context_length: int = 64
    vocab_size: int = 30522
    pad_id: int = 0
    eot_id: int | None = None  # of complete models of libraries, as `fill_id`
    fill_id: int = 0
    parts: tuple[PretrainedTextConfig, ...] = ()  # of a "concat"; all read the same tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_parts(self.kind, self.parts)
        tokens = {(part.vocab_size, part.pad_id) for part in self.parts}
        own = {(self.vocab_size, self.pad_id)}
        _check(not self.parts or tokens == own, "towers side by side must read the same tokens")


@dataclass(frozen=True, kw_only=True)
class HeadConfig(_Part):
    """What maps a tower's features to the shared space: one matrix, or an adapter.

    The kind "identity" is for towers whose features are in the shared space.
    """

    kind: Literal["projection", "adapter", "identity"] = "projection"
    bias: bool = False  # of a projection; an adapter has one
    hidden: int = 0  # of an adapter
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        min_hidden = int(self.kind == "adapter")
        _check(
            self.hidden >= min_hidden, f"hidden must be at least {min_hidden}, not {self.hidden}"
        )
        _check(0 <= self.dropout < 1, "dropout must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class CLIPConfig(_Part):
    """Everything that determines the parameters of a CLIP."""

    image_tower: VisionTowerConfig | PretrainedImageConfig = field(
        default_factory=VisionTowerConfig
    )
    text_tower: TextTowerConfig | PretrainedTextConfig = field(default_factory=TextTowerConfig)
    image_head: HeadConfig = field(default_factory=HeadConfig)
    text_head: HeadConfig = field(default_factory=HeadConfig)
    embed_dim: int = 512  # of all members
    logit_bias: bool = False
    members: int = 1  # models of this shape side by side (model/members.py)
    # Whether the vector of an image is the mean of its own and its mirror image's, outside of
    # training (`CLIP.encode_image`).
    mirror: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.members == 1:
            return
        _check(
            self.embed_dim % self.members == 0,
            f"an embed_dim of {self.embed_dim} cannot be split among {self.members} members",
        )
        parts = (self.image_tower, self.text_tower, self.image_head, self.text_head)
        _check(
            [part.kind for part in parts] == ["vit", "transformer", "projection", "projection"],
            f"{self.members} members need towers and heads of our own",
        )

    @property
    def from_libraries(self) -> list[Any]:
        """The towers that transformers or open_clip builds."""
        return [
            tower for tower in (self.image_tower, self.text_tower) if tower.kind in LIBRARY_KINDS
        ]

    @property
    def own_towers(self) -> tuple[VisionTowerConfig, TextTowerConfig]:
        """Both towers of a model that uses our own ones."""
        vision = self.image_tower
        text = self.text_tower
        assert isinstance(vision, VisionTowerConfig)
        assert isinstance(text, TextTowerConfig)
        return vision, text

    @property
    def image_size(self) -> int:
        return self.image_tower.image_size

    @property
    def context_length(self) -> int:
        return self.text_tower.context_length

    @property
    def vocab_size(self) -> int:
        return self.text_tower.vocab_size

    def resized(self, image_size: int | None) -> CLIPConfig:
        """The same for images of another size."""
        if image_size in (None, self.image_size):
            return self
        fixed = ("open_clip", "transformers-clip", "dinov2", "concat")
        if self.image_tower.kind in fixed:
            raise UserError(
                f"the image size of {self.image_tower.kind}'s towers is fixed: {self.image_size}"
            )
        if type(image_size) is not int:
            raise UserError(f"image_size must be an integer, not {str(image_size)[:40]!r}")
        return replace(self, image_tower=replace(self.image_tower, image_size=image_size))

    to_dict = asdict  # plain values, for JSON

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CLIPConfig:
        """The inverse of `to_dict`.

        An unknown or missing key or a wrong type is an error, never a guess.
        """
        parts: dict[str, Any] = {}
        for name, kinds in _PART_TYPES.items():
            part = values.get(name)
            if not isinstance(part, dict):
                raise UserError(f"model: {name} must be an object")
            made = next(
                (part_type for part_type in kinds[:-1] if part.get("kind") == part_type.kind),
                kinds[-1],
            )
            parts[name] = _part_from_dict(made, part, f"model: {name}")
        return cls(**validate(cls, {"members": 1, "mirror": False, **values, **parts}, "model"))


# What the config.json of an older model may lack, and what it means there: the model `general` is
# one.
_LATER_FIELDS = {"norm_eps": 1e-5, "fill_id": 0, "parts": ()}


def _part_from_dict(made: Any, values: dict[str, Any], where: str) -> Any:
    """A part of a model, and the towers of which it consists."""
    absent: dict[str, Any] = {
        key: value for key, value in _LATER_FIELDS.items() if hasattr(made, key)
    }
    if made is PretrainedTextConfig:
        absent["eot_id"] = None
    values = {**absent, **values}
    inner = values.get("parts", ())
    if inner:
        if not isinstance(inner, list | tuple) or len(inner) > MAX_TOWERS:
            raise UserError(f"{where}: parts must be a list of at most {MAX_TOWERS} towers")
        if not all(isinstance(item, dict) and not item.get("parts") for item in inner):
            raise UserError(f"{where}: a part must be an object without parts of its own")
        towers = tuple(_part_from_dict(made, item, f"{where}: parts") for item in inner)
        values["parts"] = towers
    return made(**validate(made, values, where))


_PART_TYPES: dict[str, tuple[Any, ...]] = {
    "image_tower": (VisionTowerConfig, PretrainedImageConfig),
    "text_tower": (TextTowerConfig, PretrainedTextConfig),
    "image_head": (HeadConfig,),
    "text_head": (HeadConfig,),
}


def flops_per_pair(config: CLIPConfig, text_tokens: int) -> float:
    """FLOPs of one forward and backward pass (3 x forward) of our towers for one pair."""
    vision, text = config.own_towers

    def tower(tokens: int, part: VisionTowerConfig | TextTowerConfig) -> float:
        matrices = (4 + 2 * part.mlp_ratio) * part.width**2 * tokens
        attention = 2 * tokens**2 * part.width
        return 2 * part.layers * (matrices + attention)

    patch = 2.0 * vision.patches * 3 * vision.patch_size**2 * vision.width
    later = 0.0
    if vision.stem == "conv":
        side = vision.image_size
        layers = []
        for before, after in itertools.pairwise((3, *vision.stem_channels)):
            side //= 2
            layers.append(2.0 * side**2 * 9 * before * after)
        patch = layers[0]
        later = sum(layers[1:])
    heads = 2 * config.embed_dim / config.members * (vision.width + text.width)
    if vision.pooling == "map":
        heads += 4 * vision.width**2 * vision.tokens
    # The first layer needs no gradient for the pixels, so it costs two matmuls and not three.
    layers_above = tower(vision.tokens, vision) + tower(text_tokens, text) + heads + later
    return config.members * (3 * layers_above + 2 * patch)


# Learns fastest from few images: a convolutional stem, no class token, fixed 2-D positions,
# residual branches that start at zero, MLPs half as wide as usual, and the mean of the token
# embeddings; and images are encoded with their mirror images (docs/recipe.md).
_SMALL_DATA: dict[str, Any] = {
    "pooling": "mean",
    "positions": "sincos",
    "init": "zero",
    "stem": "conv",
}
_SMALL_DATA |= {"mlp_ratio": 2.0, "text_pooling": "eot+mean", "mirror": True}
# The original project: biases on the patch layer and the projections, no norm before the first
# block.
_ORIGINAL = {"vision_pre_norm": False, "patch_bias": True, "projection_bias": True}


def _vit(
    vision: tuple[int, int], text: tuple[int, int], embed: int, patch: int, **rest: Any
) -> CLIPConfig:
    sizes = dict(
        zip(
            ("vision_width", "vision_layers", "text_width", "text_layers"),
            (*vision, *text),
            strict=True,
        )
    )
    sizes |= {
        f"{tower}_heads": sizes[f"{tower}_width"] // ATTENTION_HEAD_WIDTH
        for tower in ("vision", "text")
    }
    return with_fields(CLIPConfig(), embed_dim=embed, patch_size=patch, **sizes, **rest)


ATTENTION_HEAD_WIDTH = 64  # of an attention head, in every preset

# Setting of `ModelConfig` -> the fields of a CLIPConfig on our own towers that it sets.
FIELDS_OF_SETTING: dict[str, tuple[tuple[str, str], ...]] = {
    **{
        f"vision_{name}": (("image_tower", name),)
        for name in ("width", "layers", "heads", "pre_norm")
    },
    **{
        name: (("image_tower", name),)
        for name in ("image_size", "patch_size", "pooling", "positions", "stem", "patch_bias")
    },
    **{f"text_{name}": (("text_tower", name),) for name in ("width", "layers", "heads", "pooling")},
    **{name: (("text_tower", name),) for name in ("context_length", "vocab_size", "eot_id")},
    **{
        name: (("image_tower", name), ("text_tower", name))
        for name in ("mlp_ratio", "activation", "init")
    },
    "projection_bias": (("image_head", "bias"), ("text_head", "bias")),
}


OWN_FIELDS = ("embed_dim", "logit_bias", "members", "mirror")  # of a CLIPConfig itself


def with_fields(config: CLIPConfig, **values: Any) -> CLIPConfig:
    """The config of a model on our own towers, changed by values named as in `ModelConfig`."""
    if "vocab_size" in values:
        values = {"eot_id": values["vocab_size"] - 1, **values}
    own = {name: values.pop(name) for name in OWN_FIELDS if name in values}
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        for part, item in FIELDS_OF_SETTING[name]:
            changes.setdefault(part, {})[item] = value
    return replace(
        config,
        **own,
        **{part: replace(getattr(config, part), **new) for part, new in changes.items()},
    )


def field_value(config: CLIPConfig, name: str) -> Any:
    """The value of a config on our own towers under its name in `ModelConfig`."""
    part, item = FIELDS_OF_SETTING[name][0]
    return getattr(getattr(config, part), item)


PRESETS: dict[str, CLIPConfig] = {
    #             vision (width, layers)  text     embed  patch
    "tiny": _vit((256, 4), (256, 2), 256, 16, image_size=112, context_length=32, **_SMALL_DATA),
    "original": _vit((512, 12), (512, 12), 512, 16, vocab_size=33, **_ORIGINAL),
    "original-documented": _vit((768, 12), (512, 6), 512, 16, vocab_size=33, **_ORIGINAL),
    "ViT-S-16": _vit((384, 12), (384, 12), 384, 16),
    "ViT-B-32": _vit((768, 12), (512, 12), 512, 32),
    "ViT-B-16": _vit((768, 12), (512, 12), 512, 16),
    "ViT-L-14": _vit((1024, 24), (768, 12), 768, 14),
    "200M": _vit((832, 14), (640, 12), 640, 16),
    "500M": _vit((1152, 24), (768, 14), 768, 16),
    "1B": _vit((1408, 32), (1024, 16), 1024, 14),
}


def list_presets() -> list[str]:
    """The names of all model presets, for `--model` and `m1clip.train(model=...)`."""
    return list(PRESETS)


def preset(name: str) -> CLIPConfig:
    """The config of a preset; an unknown name is an error that offers a similar one."""
    if name in PRESETS:
        return PRESETS[name]
    raise UserError(
        f"unknown model preset '{name}'{did_you_mean(name, PRESETS)} (all: {', '.join(PRESETS)})"
    )


def clip_config(
    model: ModelConfig, tokenizer: Tokenizer | None = None, **values: Any
) -> CLIPConfig:
    """The preset with the config's changes; the vocabulary comes from the tokenizer."""
    names = {item.name for item in dataclasses.fields(model)} & {*FIELDS_OF_SETTING, *OWN_FIELDS}
    fields = {name: getattr(model, name) for name in names if getattr(model, name) is not None}
    for tower in ("vision", "text"):
        if f"{tower}_width" in fields:
            fields[f"{tower}_heads"] = max(1, fields[f"{tower}_width"] // ATTENTION_HEAD_WIDTH)
    if tokenizer is not None:
        fields |= {"vocab_size": tokenizer.vocab_size, "eot_id": tokenizer.eot_id}
    if fields.get("members", 1) > 1 and "embed_dim" not in fields:
        fields["embed_dim"] = preset(model.name).embed_dim * fields["members"]
    return with_fields(preset(model.name), **fields, **values)


def model_config(model: ModelConfig, config: CLIPConfig) -> ModelConfig:
    """The inverse of `clip_config`: sizes and stem of our own towers are written out.

    The rest is the preset's.
    """
    values: dict[str, Any] = {}
    own = {
        "image_tower": config.image_tower.kind == "vit",
        "text_tower": config.text_tower.kind == "transformer",
    }
    for item in dataclasses.fields(model):
        for part, name in FIELDS_OF_SETTING.get(item.name, ()):
            if own.get(part, all(own.values())):
                values.setdefault(item.name, getattr(getattr(config, part), name))
    if all(own.values()):
        own_names = ("embed_dim", "members", "mirror")
        values |= {name: getattr(config, name) for name in own_names}
    return replace(model, **values)
