"""The table of sizes. A preset is a whole shape; any field can be overridden in the config."""

from __future__ import annotations

import difflib

from m1clip.errors import UserError
from m1clip.model.shape import ClipShape

# What learns fastest from few pictures: a stem of convolutions, no class token, fixed 2-D positions, silent residual
# branches at the start.
_SMALL_DATA = {"pooling": "mean", "positions": "sincos", "init": "zero", "stem": "conv"}
# The prior art: biases on the patch layer and the projections, no norm before the first block.
_PRIOR_ART = {"vision_pre_norm": False, "patch_bias": True, "projection_bias": True}


def _vit(
    vision: tuple[int, int, int], text: tuple[int, int, int], embed: int, patch: int, **rest: object
) -> ClipShape:
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
