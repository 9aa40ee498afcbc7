"""The table of sizes. A preset is a whole shape; any field can be overridden in the config."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from m1clip.config import ModelConfig
from m1clip.errors import UserError
from m1clip.io import check_limits, validated

if TYPE_CHECKING:
    from m1clip.model.layers import AttentionKind


Pooling = Literal["cls", "mean"]
Positions = Literal["learned", "sincos"]
Activation = Literal["gelu", "quick_gelu"]
Init = Literal["clip", "zero"]
Stem = Literal["patch", "conv"]
MAX_GRID = 256


@dataclass(frozen=True, kw_only=True)
class ClipShape:
    """Every number that decides the parameters of a CLIP; the whole standard family can be written so."""

    image_size: int = 224
    patch_size: int = 16
    vision_width: int = 768
    vision_layers: int = 12
    vision_heads: int = 12
    text_width: int = 512
    text_layers: int = 12
    text_heads: int = 8
    context_length: int = 77
    vocab_size: int = 49408
    embed_dim: int = 512
    mlp_ratio: float = 4.0
    pooling: Pooling = "cls"
    positions: Positions = "learned"
    activation: Activation = "gelu"
    vision_pre_norm: bool = True
    stem: Stem = "patch"
    patch_bias: bool = False
    projection_bias: bool = False
    logit_bias: bool = False
    dropout: float = 0.0
    init: Init = "clip"

    def __post_init__(self) -> None:
        check_limits(self, "model.")
        for name in ("image_size", "patch_size", "vision_width", "vision_layers", "vision_heads", "text_width",
                     "text_layers", "text_heads", "context_length", "vocab_size", "embed_dim"):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} must be at least 1, not {getattr(self, name)}")
        if self.image_size % self.patch_size:
            raise UserError(
                f"model.image_size {self.image_size} is not a multiple of model.patch_size {self.patch_size}: "
                f"try {self.image_size // self.patch_size * self.patch_size or self.patch_size}"
            )
        if self.grid > MAX_GRID:
            raise UserError(
                f"model.image_size {self.image_size} in patches of {self.patch_size} makes {self.grid} patches per "
                f"side, more than {MAX_GRID}: take a larger model.patch_size"
            )
        for tower in ("vision", "text"):
            width, heads = getattr(self, f"{tower}_width"), getattr(self, f"{tower}_heads")
            if width % heads:
                raise UserError(f"model.{tower}_width {width} cannot be split into {heads} heads")
            if not 1 <= width * self.mlp_ratio < float("inf"):
                raise UserError(f"model.mlp_ratio must be above 0 (4 is usual), not {self.mlp_ratio:g}")
        if self.positions == "sincos" and self.vision_width % 4:
            raise UserError(f"model.vision_width {self.vision_width} must be a multiple of 4 for sincos positions")
        if self.stem == "conv" and (self.patch_size < 2 or self.patch_size & (self.patch_size - 1)):
            raise UserError(
                f"model.stem conv halves the side again and again: model.patch_size must be 2, 4, 8, 16 or 32, "
                f"not {self.patch_size}"
            )
        if self.stem == "conv" and self.vision_width * 2 < self.patch_size:
            raise UserError(f"model.vision_width {self.vision_width} is too small for a conv stem")
        if self.context_length < 3:
            raise UserError("model.context_length must be at least 3: start mark, one token, end mark")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout must lie in [0, 1), not {self.dropout}")

    @property
    def grid(self) -> int:
        """Patches along one side."""
        return self.image_size // self.patch_size

    @property
    def image_tokens(self) -> int:
        """Length of the image tower's sequence."""
        return self.grid**2 + (self.pooling == "cls")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ClipShape:
        """The inverse of `to_dict`; an unknown or missing key or a wrong type is an error, never a guess."""
        values = {"stem": "patch", **values}  # models of version 0.1 say nothing of it
        return cls(**validated(cls, values, "model shape"))


def stem_channels(shape: ClipShape) -> tuple[int, ...]:
    """Channels after each convolution of a conv stem: doubled at each halving, the tower's width at the end."""
    halvings = shape.patch_size.bit_length() - 1
    return tuple(max(1, shape.vision_width >> (halvings - 1 - number)) for number in range(halvings))


def flops_per_pair(shape: ClipShape, text_tokens: int) -> float:
    """Multiply-adds x 2 of one forward and backward pass (3 x forward) for one image and one caption."""

    def tower(tokens: int, width: int, layers: int) -> float:
        matrices = (4 + 2 * shape.mlp_ratio) * width**2 * tokens
        attention = 2 * tokens**2 * width
        return 2 * layers * (matrices + attention)

    patch = 2.0 * shape.grid**2 * 3 * shape.patch_size**2 * shape.vision_width
    later = 0.0
    if shape.stem == "conv":
        channels, side = (3, *stem_channels(shape)), shape.image_size
        layers = []
        for before, after in itertools.pairwise(channels):
            side //= 2
            layers.append(2.0 * side**2 * 9 * before * after)
        patch, later = layers[0], sum(layers[1:])
    heads = 2 * shape.embed_dim * (shape.vision_width + shape.text_width)
    image = tower(shape.image_tokens, shape.vision_width, shape.vision_layers)
    text = tower(text_tokens, shape.text_width, shape.text_layers)
    # The first layer needs no gradient for the pixels, so it costs two products and not three.
    return 3 * (image + text + heads + later) + 2 * patch


# What learns fastest from few images: a stem of convolutions, no class token, fixed 2-D positions, silent residual
# branches at the start.
_SMALL_DATA = {"pooling": "mean", "positions": "sincos", "init": "zero", "stem": "conv"}
# The prior art: biases on the patch layer and the projections, no norm before the first block.
_PRIOR_ART = {"vision_pre_norm": False, "patch_bias": True, "projection_bias": True}


def _vit(vision: tuple[int, int, int], text: tuple[int, int, int], embed: int, patch: int, **rest: object) -> ClipShape:
    names = ("vision_width", "vision_layers", "vision_heads", "text_width", "text_layers", "text_heads")
    values: dict[str, object] = dict(zip(names, (*vision, *text), strict=True))
    return ClipShape(**values, embed_dim=embed, patch_size=patch, **rest)  # type: ignore[arg-type]


PRESETS: dict[str, ClipShape] = {
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


def preset(name: str) -> ClipShape:
    """The shape of a preset; an unknown name is an error that offers the nearest one."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
    raise UserError(f"no model preset is called '{name}': did you mean '{near}'? (all: {', '.join(PRESETS)})")


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
    return dataclasses.replace(config, **values, attention_image=attention_image, attention_text=attention_text)
