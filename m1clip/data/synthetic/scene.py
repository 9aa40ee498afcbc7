"""What an image shows: the attributes, and nothing that a caption does not say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Point = tuple[float, float]

BODY, DARK, LIGHT, HOLE = "body", "dark", "light", "hole"


@dataclass(frozen=True, slots=True)
class Shape:
    """One filled polygon; `layer` says whether it takes the object's colour or a fixed neutral."""

    layer: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """An object: its category, its words, its shapes from back to front."""

    category: str
    singular: str
    plural: str
    shapes: tuple[Shape, ...]


def _poly(layer: str, *points: Point) -> Shape:
    return Shape(layer, points)


def _box(layer: str, left: float, top: float, right: float, bottom: float) -> Shape:
    return Shape(layer, ((left, top), (right, top), (right, bottom), (left, bottom)))


def _oval(layer: str, x: float, y: float, rx: float, ry: float, start: int = 0, stop: int = 360) -> Shape:
    """An ellipse, or the part of it between two angles (degrees, clockwise from the right)."""
    steps = max(12, (stop - start) // 10)
    angles = [math.radians(start + (stop - start) * i / steps) for i in range(steps + 1)]
    return Shape(layer, tuple((x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles))


def _line(layer: str, width: float, start: Point, end: Point) -> Shape:
    length = math.dist(start, end)
    nx = -(end[1] - start[1]) / length * width / 2
    ny = (end[0] - start[0]) / length * width / 2
    corners = ((start[0] + nx, start[1] + ny), (end[0] + nx, end[1] + ny))
    return Shape(layer, (*corners, (end[0] - nx, end[1] - ny), (start[0] - nx, start[1] - ny)))


def _petals(count: int, x: float, y: float, reach: float, radius: float) -> tuple[Shape, ...]:
    turns = [math.tau * i / count - math.pi / 2 for i in range(count)]
    return tuple(_oval(BODY, x + reach * math.cos(a), y + reach * math.sin(a), radius, radius) for a in turns)


def _eyes(left: float, right: float, y: float, radius: float) -> tuple[Shape, ...]:
    return tuple(_oval(DARK, x, y, radius, radius * 1.25) for x in (left, right))


KINDS: dict[str, Kind] = {
    # nature
    "tree": Kind("nature", "tree", "trees", (
        _poly(DARK, (43, 60), (57, 60), (61, 100), (39, 100)),
        _oval(BODY, 50, 26, 26, 24), _oval(BODY, 29, 47, 22, 20), _oval(BODY, 71, 47, 22, 20),
        _oval(BODY, 50, 50, 26, 20), _oval(LIGHT, 41, 22, 8, 5),
    )),
    "flower": Kind("nature", "flower", "flowers", (
        _line(DARK, 8, (50, 50), (50, 102)), _oval(DARK, 63, 82, 14, 6), _oval(DARK, 37, 90, 14, 6),
        *_petals(5, 50, 32, 20, 16), _oval(DARK, 50, 32, 11, 11), _oval(LIGHT, 50, 32, 6, 6),
    )),
    "mushroom": Kind("nature", "mushroom", "mushrooms", (
        _poly(LIGHT, (39, 52), (61, 52), (67, 96), (33, 96)),
        _oval(BODY, 50, 56, 46, 46, 180, 360),
        _oval(LIGHT, 30, 40, 7, 6), _oval(LIGHT, 54, 26, 8, 7), _oval(LIGHT, 74, 44, 7, 6),
    )),
    "leaf": Kind("nature", "leaf", "leaves", (
        _line(DARK, 8, (80, 80), (100, 100)),
        _poly(BODY, (2, 2), (30, 3), (60, 14), (82, 38), (90, 66), (86, 88), (66, 92), (38, 84), (14, 62),
            (3, 32)),
        _line(DARK, 5, (20, 20), (88, 88)),
        _line(DARK, 4, (44, 44), (48, 20)), _line(DARK, 4, (44, 44), (20, 48)),
        _line(DARK, 4, (64, 64), (72, 38)), _line(DARK, 4, (64, 64), (38, 72)),
    )),
    "cactus": Kind("nature", "cactus", "cacti", (
        _oval(BODY, 50, 14, 13, 13, 180, 360), _box(BODY, 37, 14, 63, 88),
        _oval(BODY, 17, 34, 9, 9, 180, 360), _box(BODY, 8, 34, 26, 66), _box(BODY, 8, 52, 40, 66),
        _oval(BODY, 83, 24, 9, 9, 180, 360), _box(BODY, 74, 24, 92, 56), _box(BODY, 60, 42, 92, 56),
        _line(DARK, 4, (45, 20), (45, 84)), _line(DARK, 4, (55, 20), (55, 84)),
        _poly(DARK, (24, 84), (76, 84), (70, 102), (30, 102)),
    )),
    "cloud": Kind("nature", "cloud", "clouds", (
        _oval(BODY, 20, 56, 20, 18), _oval(BODY, 42, 40, 24, 24), _oval(BODY, 68, 46, 20, 19),
        _oval(BODY, 84, 60, 16, 14), _box(BODY, 20, 54, 84, 74),
        _line(DARK, 5, (22, 80), (16, 96)), _line(DARK, 5, (50, 80), (44, 96)),
        _line(DARK, 5, (78, 80), (72, 96)),
    )),
    # animals
    "cat": Kind("animals", "cat", "cats", (
        _poly(BODY, (10, 56), (12, 6), (48, 32)), _poly(BODY, (90, 56), (88, 6), (52, 32)),
        _poly(LIGHT, (18, 36), (19, 18), (33, 29)), _poly(LIGHT, (82, 36), (81, 18), (67, 29)),
        _oval(BODY, 50, 58, 42, 35), *_eyes(34, 66, 52, 6),
        _poly(DARK, (43, 66), (57, 66), (50, 74)), _line(DARK, 3, (50, 72), (50, 82)),
        _line(DARK, 3, (36, 72), (8, 66)), _line(DARK, 3, (36, 77), (12, 82)),
        _line(DARK, 3, (64, 72), (92, 66)), _line(DARK, 3, (64, 77), (88, 82)),
    )),
    "fish": Kind("animals", "fish", "fish", (
        _poly(BODY, (66, 50), (102, 24), (94, 50), (102, 76)), _poly(BODY, (30, 34), (52, 12), (64, 36)),
        _oval(BODY, 40, 50, 40, 25), _oval(LIGHT, 20, 44, 7, 7), _oval(DARK, 19, 44, 4, 4),
        _line(DARK, 4, (36, 32), (36, 68)), _line(LIGHT, 5, (52, 32), (52, 68)),
        _poly(DARK, (44, 52), (60, 60), (46, 66)),
    )),
    "bird": Kind("animals", "bird", "birds", (
        _line(DARK, 5, (44, 74), (42, 98)), _line(DARK, 5, (58, 74), (60, 98)),
        _poly(DARK, (88, 22), (108, 34), (86, 40)),
        _poly(BODY, (34, 44), (-4, 22), (2, 44), (-2, 58), (34, 66)),
        _oval(BODY, 50, 56, 32, 23), _oval(BODY, 74, 30, 18, 18), _poly(BODY, (58, 34), (84, 44), (78, 66)),
        _oval(DARK, 79, 27, 4, 4), _poly(LIGHT, (62, 48), (26, 46), (16, 54), (34, 66), (52, 66)),
    )),
    "rabbit": Kind("animals", "rabbit", "rabbits", (
        _oval(BODY, 35, 28, 11, 30), _oval(BODY, 65, 28, 11, 30),
        _oval(LIGHT, 35, 26, 5, 20), _oval(LIGHT, 65, 26, 5, 20),
        _oval(BODY, 50, 72, 32, 28), *_eyes(38, 62, 66, 5), _oval(LIGHT, 50, 82, 14, 9),
        _poly(DARK, (44, 76), (56, 76), (50, 83)),
    )),
    "turtle": Kind("animals", "turtle", "turtles", (
        _oval(LIGHT, 90, 56, 13, 11), _oval(DARK, 95, 53, 3, 3), _poly(LIGHT, (8, 66), (-8, 76), (16, 76)),
        _box(LIGHT, 18, 66, 34, 86), _box(LIGHT, 58, 66, 74, 86), _oval(BODY, 45, 70, 40, 46, 180, 360),
        _line(DARK, 5, (4, 70), (86, 70)), _poly(DARK, (45, 34), (60, 44), (54, 60), (36, 60), (30, 44)),
        _poly(BODY, (45, 39), (55, 46), (51, 56), (39, 56), (35, 46)),
    )),
    "snail": Kind("animals", "snail", "snails", (
        _line(DARK, 4, (14, 52), (4, 26)), _line(DARK, 4, (20, 52), (24, 26)),
        _poly(LIGHT, (6, 54), (16, 46), (28, 54), (34, 76), (100, 84), (100, 92), (12, 92), (6, 80)),
        _oval(DARK, 14, 58, 3, 3),
        _oval(BODY, 62, 48, 34, 34), _oval(DARK, 62, 50, 22, 22), _oval(BODY, 64, 50, 17, 17),
        _oval(DARK, 62, 52, 9, 9), _oval(BODY, 63, 52, 5, 5),
    )),
    # urban
    "car": Kind("urban", "car", "cars", (
        _poly(BODY, (0, 68), (0, 50), (18, 44), (32, 22), (70, 22), (84, 44), (100, 50), (100, 68)),
        _poly(LIGHT, (28, 43), (37, 28), (48, 28), (48, 43)),
        _poly(LIGHT, (53, 43), (53, 28), (66, 28), (75, 43)),
        _oval(DARK, 24, 68, 14, 14), _oval(LIGHT, 24, 68, 6, 6), _oval(DARK, 76, 68, 14, 14),
        _oval(LIGHT, 76, 68, 6, 6),
        _box(LIGHT, 93, 50, 100, 57),
    )),
    "bus": Kind("urban", "bus", "buses", (
        _box(BODY, 0, 14, 100, 78), _box(LIGHT, 6, 23, 22, 43), _box(LIGHT, 27, 23, 43, 43),
        _box(LIGHT, 48, 23, 64, 43), _box(LIGHT, 72, 23, 95, 68), _line(DARK, 4, (83, 23), (83, 68)),
        _line(DARK, 4, (0, 52), (68, 52)), _oval(DARK, 22, 78, 12, 12), _oval(DARK, 58, 78, 12, 12),
    )),
    "house": Kind("urban", "house", "houses", (
        _box(DARK, 70, 6, 82, 36), _box(BODY, 14, 44, 86, 96), _poly(DARK, (2, 48), (50, 6), (98, 48)),
        _poly(BODY, (30, 44), (50, 26), (70, 44)),
        _box(DARK, 56, 64, 74, 96), _box(LIGHT, 24, 58, 44, 78), _line(DARK, 3, (34, 58), (34, 78)),
    )),
    "tower": Kind("urban", "tower", "towers", (
        _poly(BODY, (34, 26), (66, 26), (72, 100), (28, 100)), _box(BODY, 24, 12, 76, 30),
        _box(BODY, 24, 0, 36, 14), _box(BODY, 44, 0, 56, 14), _box(BODY, 64, 0, 76, 14),
        _line(DARK, 4, (24, 30), (76, 30)), _box(DARK, 45, 40, 55, 56),
        _oval(DARK, 50, 82, 9, 9, 180, 360), _box(DARK, 41, 82, 59, 100),
    )),
    "lamp": Kind("urban", "lamp", "lamps", (
        _line(BODY, 10, (50, 44), (50, 96)), _box(BODY, 34, 92, 66, 102), _box(DARK, 38, 54, 62, 60),
        _poly(BODY, (22, 14), (78, 14), (64, 54), (36, 54)),
        _poly(LIGHT, (40, 22), (60, 22), (55, 46), (45, 46)),
        _poly(DARK, (16, 16), (50, -6), (84, 16)),
    )),
    "boat": Kind("urban", "boat", "boats", (
        _line(DARK, 5, (48, 0), (48, 68)), _poly(BODY, (52, 4), (92, 58), (52, 58)),
        _poly(LIGHT, (44, 14), (44, 58), (14, 58)),
        _poly(BODY, (0, 66), (100, 66), (80, 96), (20, 96)), _line(DARK, 5, (10, 77), (90, 77)),
    )),
    # food
    "apple": Kind("food", "apple", "apples", (
        _line(DARK, 7, (50, 32), (56, 4)), _poly(DARK, (56, 18), (70, 4), (88, 6), (76, 20)),
        _oval(BODY, 34, 60, 30, 34), _oval(BODY, 66, 60, 30, 34), _oval(BODY, 50, 66, 26, 32),
        _oval(LIGHT, 24, 48, 6, 10),
    )),
    "pizza": Kind("food", "pizza", "pizzas", (
        _poly(BODY, (4, 18), (96, 18), (50, 104)),
        _poly(DARK, (0, 8), (24, 2), (50, 0), (76, 2), (100, 8), (98, 22), (50, 16), (2, 22)),
        _oval(LIGHT, 36, 36, 9, 8), _oval(LIGHT, 64, 42, 9, 8), _oval(LIGHT, 48, 64, 8, 8),
        _oval(DARK, 52, 30, 3, 3), _oval(DARK, 46, 50, 3, 3), _oval(DARK, 52, 80, 3, 3),
    )),
    "cake": Kind("food", "cake", "cakes", (
        *(_box(LIGHT, x - 5, 12, x + 5, 40) for x in (28, 50, 72)),
        *(_oval(DARK, x, 8, 5, 7) for x in (28, 50, 72)),
        _box(BODY, 10, 34, 90, 96), _box(LIGHT, 10, 34, 90, 40),
        *(_oval(LIGHT, x, 40, 8, 8) for x in (18, 34, 50, 66, 82)), _line(DARK, 4, (10, 70), (90, 70)),
        _box(DARK, 2, 92, 98, 98),
    )),
    "carrot": Kind("food", "carrot", "carrots", (
        _line(DARK, 9, (72, 28), (76, -2)), _line(DARK, 9, (72, 28), (94, 6)),
        _line(DARK, 9, (72, 28), (102, 24)),
        _oval(BODY, 68, 32, 19, 19), _poly(BODY, (54, 18), (82, 46), (0, 100)),
        _line(DARK, 4, (46, 32), (58, 42)), _line(DARK, 4, (66, 62), (54, 52)),
        _line(DARK, 4, (32, 54), (42, 64)),
    )),
    "ice cream": Kind("food", "ice cream", "ice creams", (
        _poly(LIGHT, (22, 50), (78, 50), (50, 106)), _line(DARK, 4, (36, 52), (58, 88)),
        _line(DARK, 4, (64, 52), (42, 88)),
        _oval(BODY, 33, 40, 19, 17), _oval(BODY, 67, 40, 19, 17), _oval(BODY, 50, 20, 21, 20),
        _oval(BODY, 50, 40, 20, 18),
        _oval(DARK, 50, 0, 6, 6),
    )),
    "mug": Kind("food", "mug", "mugs", (
        _oval(BODY, 70, 54, 26, 25), _oval(HOLE, 71, 54, 14, 13), _box(BODY, 8, 18, 70, 84),
        _oval(BODY, 39, 84, 31, 8),
        _oval(DARK, 39, 18, 31, 9), _box(LIGHT, 8, 46, 70, 58),
    )),
}  # fmt: skip

CATEGORIES: tuple[str, ...] = ("nature", "animals", "urban", "food")
KIND_NAMES: tuple[str, ...] = tuple(KINDS)


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

PALETTE_DARK: Rgb = (58, 46, 48)
PALETTE_LIGHT: Rgb = (246, 236, 208)

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

OUTLINE: dict[str, Rgb] = {
    "morning": PALETTE_DARK,
    "day": PALETTE_DARK,
    "evening": (44, 30, 44),
    "night": PALETTE_LIGHT,
}


COUNTS = (1, 2, 3, 4)
SIZES = ("small", "large")
POSITIONS = ("left", "right", "top", "bottom")
# two things always face each other, in reading order
AXES = (("left", "right"), ("top", "bottom"))
TIMES: tuple[str, ...] = tuple(SKIES)
COLOUR_NAMES: tuple[str, ...] = tuple(COLOURS)


@dataclass(frozen=True, slots=True)
class Thing:
    """One to four equal objects in one half of the image."""

    kind: str
    colour: str
    count: int
    size: str
    position: str

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("kind", self.kind, KINDS),
            ("colour", self.colour, COLOURS),
            ("count", self.count, COUNTS),
            ("size", self.size, SIZES),
            ("position", self.position, POSITIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} {value!r} is not one of {', '.join(map(str, allowed))}")

    @property
    def category(self) -> str:
        """nature, animals, urban or food."""
        return KINDS[self.kind].category


@dataclass(frozen=True, slots=True)
class Scene:
    """One thing, or two that face each other (left and right, or top and bottom), at a time of day.

    Two things stand in reading order, so that equal facts are equal scenes.
    """

    things: tuple[Thing, ...]
    time: str

    def __post_init__(self) -> None:
        if self.time not in TIMES:
            raise ValueError(f"time {self.time!r} is not one of {', '.join(TIMES)}")
        if len(self.things) == 2:
            first, second = self.things
            if (first.position, second.position) not in AXES:
                raise ValueError("two things must stand at (left, right) or (top, bottom), in that order")
            if first.kind == second.kind or first.colour == second.colour:
                raise ValueError("two things must differ in kind and in colour")
        elif len(self.things) != 1:
            raise ValueError(f"a scene has one or two things, not {len(self.things)}")

    @property
    def category(self) -> str:
        """The category of the first thing, which the ground shows."""
        return self.things[0].category


# one number a purpose, so that two purposes never share a stream
SCENES, PLACEMENT, CAPTIONS, NEGATIVES, IMAGE = range(1, 6)


def generator(purpose: int, *numbers: int) -> np.random.Generator:
    """A Philox generator keyed by a purpose and any non-negative integers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((purpose, *numbers))))


def derive(purpose: int, *numbers: int) -> int:
    """A 64-bit seed from integers: what one image's randomness hangs on."""
    high, low = np.random.SeedSequence((purpose, *numbers)).generate_state(2)
    return int(high) << 32 | int(low)
