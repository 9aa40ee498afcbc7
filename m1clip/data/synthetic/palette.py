"""Every colour in a picture, as data: objects, details, skies, grounds."""

from __future__ import annotations

Rgb = tuple[int, int, int]

COLOURS: dict[str, Rgb] = {
    "red": (222, 36, 40),
    "orange": (255, 138, 10),
    "yellow": (255, 226, 40),
    "green": (46, 168, 62),
    "blue": (36, 92, 232),
    "purple": (136, 44, 190),
    "pink": (255, 142, 196),
    "white": (250, 250, 250),
}

DARK: Rgb = (58, 46, 48)
LIGHT: Rgb = (246, 236, 208)

# top and horizon of the sky, then how strongly its light falls on the ground
SKIES: dict[str, tuple[Rgb, Rgb, float]] = {
    "morning": ((252, 214, 190), (255, 244, 214), 0.94),
    "day": ((122, 194, 240), (204, 234, 250), 1.0),
    "evening": ((112, 82, 128), (226, 146, 112), 0.74),
    "night": ((14, 18, 46), (40, 52, 92), 0.42),
}

# base and marking of the ground
GROUNDS: dict[str, tuple[Rgb, Rgb]] = {
    "nature": ((140, 180, 112), (108, 150, 88)),
    "animals": ((206, 172, 122), (176, 138, 92)),
    "urban": ((142, 144, 152), (214, 214, 208)),
    "food": ((188, 132, 116), (228, 208, 192)),
}

OUTLINE: dict[str, Rgb] = {"morning": DARK, "day": DARK, "evening": (44, 30, 44), "night": LIGHT}
