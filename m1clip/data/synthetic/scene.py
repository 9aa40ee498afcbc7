"""What a synthetic image shows: one or two things at a time of day.

`scene.toml` has the colors, shapes and words.
"""

import math
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

Point = tuple[float, float]
Polygon = tuple[Point, ...]
Rgb = tuple[int, int, int]
SCENE_TABLES: dict[str, Any] = tomllib.loads(
    resources.files(__package__).joinpath("scene.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object: its polygons with their layers, from back to front, in the unit circle."""

    plural: str
    category: str
    shapes: tuple[tuple[str, Polygon], ...]


def _read_kind(plural: str, category: str, shapes: str) -> Kind:
    words = [shape.split() for shape in shapes.split(";")]
    polygons = [
        (layer, polygon) for layer, form, *numbers in words for polygon in _polygons(form, numbers)
    ]
    # Scaled into the unit circle, so that objects whose circles do not touch do not overlap.
    xs, ys = zip(*(point for _, polygon in polygons for point in polygon), strict=True)
    x0, y0 = (min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2
    radius = max(math.hypot(x - x0, y - y0) for x, y in zip(xs, ys, strict=True))
    fitted = (
        (layer, tuple(((x - x0) / radius, (y - y0) / radius) for x, y in polygon))
        for layer, polygon in polygons
    )
    return Kind(plural, category, tuple(fitted))


def _polygons(form: str, words: list[str]) -> list[Polygon]:
    values = [float(value) for word in words for value in word.split(",")]
    if form == "petals":
        count, x, y, reach, radius = values
        angles = [math.tau * i / count - math.pi / 2 for i in range(int(count))]
        return [
            _oval(x + reach * math.cos(a), y + reach * math.sin(a), radius, radius) for a in angles
        ]
    if form == "oval":
        return [_oval(*values)]
    if form == "line":
        width, x1, y1, x2, y2 = values
        length = math.dist((x1, y1), (x2, y2))
        nx, ny = -(y2 - y1) / length * width / 2, (x2 - x1) / length * width / 2
        return [((x1 + nx, y1 + ny), (x2 + nx, y2 + ny), (x2 - nx, y2 - ny), (x1 - nx, y1 - ny))]
    if form == "box":
        left, top, right, bottom = values
        return [((left, top), (right, top), (right, bottom), (left, bottom))]
    return [tuple(zip(values[::2], values[1::2], strict=True))]


def _oval(x: float, y: float, rx: float, ry: float, start: float = 0, stop: float = 360) -> Polygon:
    """An ellipse, or the part between two angles (degrees, clockwise from the right)."""
    steps = max(12, int(stop - start) // 10)
    angles = [math.radians(start + (stop - start) * i / steps) for i in range(steps + 1)]
    return tuple((x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles)


KINDS = {name: _read_kind(**kind) for name, kind in SCENE_TABLES["kinds"].items()}
COLORS: dict[str, Rgb] = {name: tuple(rgb) for name, rgb in SCENE_TABLES["colors"].items()}
OUTLINE: dict[str, Rgb] = {
    name: tuple(sky["outline"]) for name, sky in SCENE_TABLES["times"].items()
}
# The values of each attribute of a scene.
VALUES: dict[str, tuple[Any, ...]] = {
    "color": tuple(COLORS),
    "count": (1, 2, 3, 4),
    "size": tuple(SCENE_TABLES["words"]["sizes"]),
    "position": tuple(SCENE_TABLES["positions"]),
    "kind": tuple(KINDS),
    "time": tuple(SCENE_TABLES["times"]),
}
# Two things always face each other, in reading order.
AXES = (("left", "right"), ("top", "bottom"))


@dataclass(frozen=True, slots=True)
class Thing:
    """One to four equal objects in one half of the image."""

    kind: str
    color: str
    count: int
    size: str
    position: str

    @property
    def category(self) -> str:
        """nature, animals, urban or food."""
        return KINDS[self.kind].category


@dataclass(frozen=True, slots=True)
class Scene:
    """One thing, or two that face each other and differ in kind and color, at a time of day.

    Two things are in reading order, so that equal facts are equal scenes.
    """

    things: tuple[Thing, ...]
    time: str

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
