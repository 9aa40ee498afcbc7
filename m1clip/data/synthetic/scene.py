"""What a synthetic image can show: kinds of objects, colours, backgrounds, and the scene made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources

import numpy as np

Point = tuple[float, float]
Rgb = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """One filled polygon."""

    layer: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object."""

    category: str
    plural: str
    shapes: tuple[Shape, ...]


def _shapes(text: str) -> list[Shape]:
    layer, form, *words = text.split()
    values = [float(value) for word in words for value in word.split(",")]
    if form == "petals":
        count, x, y, reach, radius = values
        turns = [math.tau * i / count - math.pi / 2 for i in range(int(count))]
        middles = [(x + reach * math.cos(a), y + reach * math.sin(a)) for a in turns]
        return [Shape(layer, _oval(*middle, radius, radius)) for middle in middles]
    if form == "oval":
        return [Shape(layer, _oval(*values))]
    if form == "line":
        return [Shape(layer, _line(*values))]
    if form == "box":
        left, top, right, bottom = values
        return [Shape(layer, ((left, top), (right, top), (right, bottom), (left, bottom)))]
    return [Shape(layer, tuple(zip(values[::2], values[1::2], strict=True)))]


def _oval(x: float, y: float, rx: float, ry: float, start: float = 0, stop: float = 360) -> tuple[Point, ...]:
    """An ellipse, or the part between two angles (degrees, clockwise from the right)."""
    steps = max(12, int(stop - start) // 10)
    angles = [math.radians(start + (stop - start) * i / steps) for i in range(steps + 1)]
    return tuple((x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles)


def _line(width: float, x1: float, y1: float, x2: float, y2: float) -> tuple[Point, ...]:
    length = math.dist((x1, y1), (x2, y2))
    nx, ny = -(y2 - y1) / length * width / 2, (x2 - x1) / length * width / 2
    return (x1 + nx, y1 + ny), (x2 + nx, y2 + ny), (x2 - nx, y2 - ny), (x1 - nx, y1 - ny)


def _read_kinds() -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    text = resources.files("m1clip.data.synthetic").joinpath("objects.txt").read_text(encoding="utf-8")
    for line in text.replace(";\n", ";").splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            name, plural, category = line.split(", ")
        else:
            shapes = [shape for text in line.split(";") for shape in _shapes(text)]
            kinds[name] = Kind(category, plural, tuple(shapes))
    return kinds


KINDS = _read_kinds()
CATEGORIES = ("nature", "animals", "urban", "food")
KIND_NAMES = tuple(KINDS)

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

DARK_RGB: Rgb = (58, 46, 48)
LIGHT_RGB: Rgb = (246, 236, 208)

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

OUTLINE: dict[str, Rgb] = {"morning": DARK_RGB, "day": DARK_RGB, "evening": (44, 30, 44), "night": LIGHT_RGB}


COUNTS = (1, 2, 3, 4)
SIZES = ("small", "large")
POSITIONS = ("left", "right", "top", "bottom")
# Two things always face each other, in reading order.
AXES = (("left", "right"), ("top", "bottom"))
TIMES = tuple(SKIES)
COLOUR_NAMES = tuple(COLOURS)


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

    Two things are in reading order, so that equal facts are equal scenes.
    """

    things: tuple[Thing, ...]
    time: str

    def __post_init__(self) -> None:
        if self.time not in TIMES:
            raise ValueError(f"time {self.time!r} is not one of {', '.join(TIMES)}")
        if len(self.things) == 2:
            first, second = self.things
            if (first.position, second.position) not in AXES:
                raise ValueError("two things must be at (left, right) or (top, bottom), in that order")
            if first.kind == second.kind or first.colour == second.colour:
                raise ValueError("two things must differ in kind and in colour")
        elif len(self.things) != 1:
            raise ValueError(f"a scene has one or two things, not {len(self.things)}")

    @property
    def category(self) -> str:
        """The category of the first thing, which the ground shows."""
        return self.things[0].category


# One number per purpose, so that two purposes never share a random stream.
SCENES, PLACEMENT, CAPTIONS, NEGATIVES, IMAGE = range(1, 6)


def generator(purpose: int, *numbers: int) -> np.random.Generator:
    """A Philox generator keyed by a purpose and any non-negative integers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((purpose, *numbers))))


def derive(purpose: int, *numbers: int) -> int:
    """A 64-bit seed from integers."""
    high, low = np.random.SeedSequence((purpose, *numbers)).generate_state(2)
    return int(high) << 32 | int(low)
