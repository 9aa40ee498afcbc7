"""Sky for the time of day, ground for the category; drawn once for each size and variant."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from m1clip.data.synthetic.palette import GROUNDS, SKIES, Rgb

VARIANTS = 4
_FACTOR = 4
_STARS = ((8, 10), (22, 30), (35, 8), (47, 22), (58, 44), (66, 12), (90, 34), (12, 50), (78, 52), (40, 46))


def horizon(variant: int) -> float:
    """Where the ground begins, as a share of the height."""
    return 0.66 + 0.03 * variant


def _mix(a: Rgb, b: Rgb, share: float) -> Rgb:
    red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
    return red, green, blue


def _sky_lights(canvas: ImageDraw.ImageDraw, time: str, side: int, level: float) -> None:
    """Faint discs and stars in the sky's own hues, so that no object can be mistaken for them."""
    top, low, _ = SKIES[time]
    unit = side / 100

    def disc(x: float, y: float, radius: float, colour: Rgb) -> None:
        canvas.ellipse(
            [(x - radius) * unit, (y - radius) * unit, (x + radius) * unit, (y + radius) * unit], colour
        )

    if time == "night":
        for x, y in _STARS:
            disc(x, y, 0.7, (170, 178, 214))
        disc(84, 14, 8, (196, 200, 214))
        disc(80.5, 12, 7, _mix(top, low, 0.15))
    elif time == "day":
        disc(85, 13, 8, (255, 248, 206))
    else:
        x = 22 if time == "morning" else 76
        for radius, share in ((20, 0.25), (13, 0.6)):
            disc(x, level * 100, radius, _mix(low, (255, 250, 224), share))


def _ground(canvas: ImageDraw.ImageDraw, category: str, side: int, level: float, light: float) -> None:
    base, mark = (_mix((0, 0, 20), colour, light) for colour in GROUNDS[category])
    y, unit = level * side, side / 100
    depth = side - y
    canvas.rectangle([0, y, side, side], base)
    if category == "nature":  # tufts of grass
        for row in range(3):
            for column in range(-1, 11):
                x, foot = (column * 10 + row * 4) * unit, y + depth * (0.28 + 0.3 * row)
                canvas.polygon([(x, foot), (x + 1.5 * unit, foot - 5 * unit), (x + 3 * unit, foot)], mark)
                canvas.polygon(
                    [(x + 2 * unit, foot), (x + 5 * unit, foot - 4 * unit), (x + 5 * unit, foot)], mark
                )
    elif category == "animals":  # furrows that meet far away
        for step in range(-8, 9):
            x = side / 2 + step * 6 * unit
            spread = side / 2 + step * 16 * unit
            canvas.polygon([(x, y), (x + unit, y), (spread + 4 * unit, side), (spread, side)], mark)
    elif category == "urban":  # a dashed line and a kerb
        canvas.rectangle([0, y, side, y + 2.5 * unit], mark)
        for column in range(4):
            x = (4 + column * 26) * unit
            canvas.rectangle([x, y + depth * 0.5, x + 15 * unit, y + depth * 0.5 + 3 * unit], mark)
    else:  # a checked cloth, wider towards the viewer
        for row in range(4):
            near, far = y + depth * ((row + 1) / 4) ** 1.3, y + depth * (row / 4) ** 1.3
            for column in range(-8 + row % 2, 8, 2):
                feet = [
                    side / 2 + c * (9 + 7 * ((row + e) / 4) ** 1.3) * unit
                    for e in (0, 1)
                    for c in (column, column + 1)
                ]
                canvas.polygon([(feet[0], far), (feet[1], far), (feet[3], near), (feet[2], near)], mark)


@lru_cache(maxsize=256)
def background(time: str, category: str, size: int, variant: int) -> np.ndarray:
    """(size, size, 3) uint8, read-only because the cache hands it to everyone."""
    side, level = size * _FACTOR, horizon(variant)
    top, low, light = SKIES[time]
    share = np.minimum(1, np.arange(side) / (level * side))[:, None]
    column = np.array(top) + share * (np.array(low) - np.array(top))  # (side, 3)
    image = Image.fromarray(np.repeat(column.round().astype(np.uint8)[:, None], side, axis=1))
    canvas = ImageDraw.Draw(image)
    _sky_lights(canvas, time, side, level)
    _ground(canvas, category, side, level, light)
    pixels = np.array(image.reduce(_FACTOR))
    pixels.flags.writeable = False
    return pixels
