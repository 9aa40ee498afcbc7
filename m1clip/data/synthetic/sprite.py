"""One object as blending weights, rasterised once for each kind and diameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw

from m1clip.data.synthetic.kinds import BODY, DARK, HOLE, KINDS, LIGHT
from m1clip.data.synthetic.palette import DARK as DARK_RGB
from m1clip.data.synthetic.palette import LIGHT as LIGHT_RGB
from m1clip.data.synthetic.palette import Rgb

_OUTLINE_SHARE = 0.035  # of the diameter, on each side
_LAYER = {HOLE: 0, BODY: 1, DARK: 2, LIGHT: 3}


@dataclass(frozen=True, slots=True)
class Sprite:
    """picture = picture * keep + colour * body + fixed; each (d, d, 1 or 3) float32."""

    keep: np.ndarray
    body: np.ndarray
    fixed: np.ndarray
    covered: np.ndarray  # (d, d) bool: where more than half belongs to the object


@cache
def _fitted(kind: str) -> tuple[tuple[int, tuple[tuple[float, float], ...]], ...]:
    """Shapes moved and scaled into the unit circle around (0, 0), so that circles apart are objects apart."""
    shapes = KINDS[kind].shapes
    xs, ys = zip(*(point for shape in shapes for point in shape.points), strict=True)
    x0, y0 = (min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2
    radius = max(math.hypot(x - x0, y - y0) for x, y in zip(xs, ys, strict=True))
    return tuple(
        (_LAYER[shape.layer], tuple(((x - x0) / radius, (y - y0) / radius) for x, y in shape.points))
        for shape in shapes
    )


@lru_cache(maxsize=4096)
def sprite(kind: str, diameter: int, outline: Rgb) -> Sprite:
    """The kind at a whole number of pixels, with its outline in the given colour."""
    # small objects need finer steps: about 128 samples across
    factor = max(4, math.ceil(128 / diameter))
    side = diameter * factor
    edge = max(0.45 * factor, _OUTLINE_SHARE * side)
    radius = side / 2 - edge
    layers, grown = Image.new("L", (side, side), 0), Image.new("L", (side, side), 0)
    paint, grow = ImageDraw.Draw(layers), ImageDraw.Draw(grown)
    for layer, points in _fitted(kind):
        corners = [(side / 2 + x * radius, side / 2 + y * radius) for x, y in points]
        paint.polygon(corners, fill=layer)
        grow.polygon(corners, fill=255 if layer else 0)
        # a line around the shape is the outline: many times cheaper than a maximum filter
        grow.line([*corners, *corners[:2]], fill=255, width=round(2 * edge), joint="curve")

    def weight(mask: Image.Image) -> np.ndarray:
        return np.asarray(mask.reduce(factor), np.float32)[:, :, None] / 255

    body, dark, light = (weight(layers.point(lambda v, k=k: 255 if v == k else 0)) for k in (1, 2, 3))
    cover = weight(grown)
    rim = np.clip(cover - body - dark - light, 0, 1)
    tones = np.array((DARK_RGB, LIGHT_RGB, outline), np.float32)
    fixed = dark * tones[0] + light * tones[1] + rim * tones[2]
    return Sprite(1 - cover, body, fixed, cover[:, :, 0] > 0.5)
