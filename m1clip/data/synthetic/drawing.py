"""Draw a scene: background, sprites and where each object goes."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from m1clip.data.synthetic.scene import (
    COLORS,
    KINDS,
    OUTLINE,
    PLACEMENT,
    SCENE_TABLES,
    Rgb,
    Scene,
    Thing,
    generator,
)

# Increase it when the same scene and seed give other pixels: it is part of cache keys.
VERSION = 1
SYNTHETIC_MARK = ("Software", "m1clip synthetic images")  # text in a PNG of a scene
MIN_SCENE_SIZE, MAX_SCENE_SIZE = 32, 224  # sides of images in which objects can be recognized

_OUTLINE_FRACTION = 0.035  # of the diameter, on each side
_POLYGON_LAYERS = ("hole", "body", "dark", "light")


@dataclass(frozen=True, slots=True)
class Sprite:
    """image = image * keep + color * body + fixed; each (d, d, 1 or 3) float32."""

    keep: np.ndarray
    body: np.ndarray
    fixed: np.ndarray


@lru_cache(maxsize=4096)
def sprite(kind: str, diameter: int, outline: Rgb) -> Sprite:
    """A kind of object at a diameter in pixels, with its outline in the given color."""
    # Supersampling: about 128 samples across, also for small objects.
    factor = max(4, math.ceil(128 / diameter))
    side = diameter * factor
    edge = max(0.45 * factor, _OUTLINE_FRACTION * side)
    radius = side / 2 - edge
    layers, grown = Image.new("L", (side, side), 0), Image.new("L", (side, side), 0)
    paint, grow = ImageDraw.Draw(layers), ImageDraw.Draw(grown)
    for layer, points in KINDS[kind].shapes:
        corners = [(side / 2 + x * radius, side / 2 + y * radius) for x, y in points]
        paint.polygon(corners, fill=_POLYGON_LAYERS.index(layer))
        grow.polygon(corners, fill=0 if layer == "hole" else 255)
        # A line around the shape is the outline: many times cheaper than a maximum filter.
        grow.line([*corners, *corners[:2]], fill=255, width=round(2 * edge), joint="curve")

    def weight(mask: Image.Image) -> np.ndarray:
        return np.asarray(mask.reduce(factor), np.float32)[:, :, None] / 255

    body, dark, light = (
        weight(layers.point(lambda v, k=k: 255 if v == k else 0)) for k in (1, 2, 3)
    )
    cover = weight(grown)
    rim = np.clip(cover - body - dark - light, 0, 1)
    tones = np.array((*SCENE_TABLES["tones"].values(), outline), np.float32)
    fixed = dark * tones[0] + light * tones[1] + rim * tones[2]
    return Sprite(1 - cover, body, fixed)


VARIANTS = 4  # heights of the horizon
_SUPERSAMPLING = 4
_STARS = (
    (8, 10),
    (22, 30),
    (35, 8),
    (47, 22),
    (58, 44),
    (66, 12),
    (90, 34),
    (12, 50),
    (78, 52),
    (40, 46),
)


def _mix(a: Rgb, b: Rgb, fraction: float) -> Rgb:
    red, green, blue = (round(x + (y - x) * fraction) for x, y in zip(a, b, strict=True))
    return red, green, blue


def _draw_sky_lights(canvas: ImageDraw.ImageDraw, time: str, side: int, level: float) -> None:
    """Sun, moon and stars in the hues of the sky, so that they cannot be mistaken for objects."""
    sky, unit = SCENE_TABLES["times"][time], side / 100

    def disc(x: float, y: float, radius: float, color: Rgb) -> None:
        canvas.ellipse(
            [(x - radius) * unit, (y - radius) * unit, (x + radius) * unit, (y + radius) * unit],
            color,
        )

    if time == "night":
        for x, y in _STARS:
            disc(x, y, 0.7, (170, 178, 214))
        disc(84, 14, 8, (196, 200, 214))
        disc(80.5, 12, 7, _mix(sky["top"], sky["horizon"], 0.15))
    elif time == "day":
        disc(85, 13, 8, (255, 248, 206))
    else:
        x = 22 if time == "morning" else 76
        for radius, strength in ((20, 0.25), (13, 0.6)):
            disc(x, level * 100, radius, _mix(sky["horizon"], (255, 250, 224), strength))


def _draw_ground(
    canvas: ImageDraw.ImageDraw, category: str, side: int, level: float, light: float
) -> None:
    base, mark = (_mix((0, 0, 20), color, light) for color in SCENE_TABLES["grounds"][category])
    y, unit = level * side, side / 100
    depth = side - y
    canvas.rectangle([0, y, side, side], base)
    if category == "nature":  # tufts of grass
        for row in range(3):
            for column in range(-1, 11):
                x, foot = (column * 10 + row * 4) * unit, y + depth * (0.28 + 0.3 * row)
                canvas.polygon(
                    [(x, foot), (x + 1.5 * unit, foot - 5 * unit), (x + 3 * unit, foot)], mark
                )
                canvas.polygon(
                    [(x + 2 * unit, foot), (x + 5 * unit, foot - 4 * unit), (x + 5 * unit, foot)],
                    mark,
                )
    elif category == "animals":  # furrows that meet at the horizon
        for step in range(-8, 9):
            x = side / 2 + step * 6 * unit
            spread = side / 2 + step * 16 * unit
            canvas.polygon([(x, y), (x + unit, y), (spread + 4 * unit, side), (spread, side)], mark)
    elif category == "urban":  # a curb and a dashed line
        canvas.rectangle([0, y, side, y + 2.5 * unit], mark)
        for column in range(4):
            x = (4 + column * 26) * unit
            canvas.rectangle([x, y + depth * 0.5, x + 15 * unit, y + depth * 0.5 + 3 * unit], mark)
    else:  # a checked cloth, wider towards the viewer
        for row in range(4):
            (far, far_width), (near, near_width) = (
                (y + depth * (edge / 4) ** 1.3, 9 + 7 * (edge / 4) ** 1.3)
                for edge in (row, row + 1)
            )
            for column in range(-8 + row % 2, 8, 2):
                ends = [(column, far, far_width), (column + 1, far, far_width)]
                ends += [(column + 1, near, near_width), (column, near, near_width)]
                canvas.polygon(
                    [(side / 2 + c * width * unit, foot) for c, foot, width in ends], mark
                )


@lru_cache(maxsize=256)
def background(time: str, category: str, size: int, variant: int) -> np.ndarray:
    """(size, size, 3) uint8, read-only because it is cached."""
    side, level = size * _SUPERSAMPLING, 0.66 + 0.03 * variant
    top, horizon = (np.array(SCENE_TABLES["times"][time][name]) for name in ("top", "horizon"))
    height = np.minimum(1, np.arange(side) / (level * side))[:, None]
    column = top + height * (horizon - top)  # (side, 3)
    image = Image.fromarray(np.repeat(column.round().astype(np.uint8)[:, None], side, axis=1))
    canvas = ImageDraw.Draw(image)
    _draw_sky_lights(canvas, time, side, level)
    _draw_ground(canvas, category, side, level, SCENE_TABLES["times"][time]["light"])
    pixels = np.array(image.reduce(_SUPERSAMPLING))
    pixels.flags.writeable = False
    return pixels


DIAMETER = {"small": 0.18, "large": 0.285}  # fractions of the image's side
SIZE_JITTER = 0.04
_COLOR_NOISE = 9
_IMAGE_MARGIN = 0.01
_CIRCLE_GAP = 0.012  # between two circles; four large ones in a zigzag still have it
_REACH = 0.22
# How close the center of a group may be to the diagonals of the image.
_MAX_ACROSS, _MAX_ALONG = (0.3, 0.12)


@dataclass(frozen=True, slots=True)
class Instance:
    """One object: its kind, center and diameter (fractions of the side), and color."""

    kind: str
    x: float
    y: float
    diameter: float
    rgb: tuple[float, ...]


def _regular_centers(count: int, diameter: float) -> list[tuple[float, float]]:
    """Centers (across, along) without jitter in a half of 0.5 x 1: in a line, four in a zigzag."""
    low, high = diameter / 2 + _IMAGE_MARGIN, 0.5 - diameter / 2 - _IMAGE_MARGIN
    middle = (low + high) / 2
    swing = (high - low) / 2 if count > 3 else 0.0
    free = 1 - diameter - 2 * _IMAGE_MARGIN
    spacing = free / 3 if count > 3 else min(free / max(1, count - 1), diameter * 1.25)
    start = 0.5 - spacing * (count - 1) / 2
    return [(middle + (swing if i % 2 else -swing), start + spacing * i) for i in range(count)]


def _readable(centers: list[tuple[float, float]], distance: float) -> bool:
    """Nothing touches, and the center of the group is clearly in one half."""
    number = len(centers)
    across, along = (sum(axis) / number for axis in zip(*centers, strict=True))
    if across > _MAX_ACROSS or abs(along - 0.5) > _MAX_ALONG:
        return False
    return all(
        math.dist(centers[i], centers[j]) >= distance for i in range(number) for j in range(i)
    )


def _centers(thing: Thing, diameter: float, moves: list[list[float]]) -> list[tuple[float, float]]:
    """Jittered centers (x, y); the jitter is halved until the group is readable."""
    regular = _regular_centers(thing.count, diameter)
    low = diameter / 2 + _IMAGE_MARGIN
    placed = regular
    for halvings in range(6):
        reach = _REACH / 2**halvings
        jittered = [
            (min(max(a + reach * da, low), 0.5 - low), min(max(b + reach * db, low), 1 - low))
            for (a, b), (da, db) in zip(regular, moves, strict=False)
        ]
        if _readable(jittered, diameter + _CIRCLE_GAP):
            placed = jittered
            break
    if thing.position in ("right", "bottom"):
        placed = [(1 - a, b) for a, b in placed]
    return placed if thing.position in ("left", "right") else [(b, a) for a, b in placed]


def place_instances(scene: Scene, seed: int) -> tuple[int, list[Instance]]:
    """The variant of the background and all objects, the same for every image size."""
    rng = generator(PLACEMENT, seed)
    variant = int(rng.integers(VARIANTS))
    # All random numbers in one call: the call costs more than the numbers.
    noise = rng.uniform(-1, 1, size=(2, 4, 6)).tolist()
    instances: list[Instance] = []
    for thing, rows in zip(scene.things, noise, strict=False):
        diameter = DIAMETER[thing.size] * (1 + SIZE_JITTER * rows[0][5])
        for (x, y), row in zip(
            _centers(thing, diameter, [r[:2] for r in rows]), rows, strict=False
        ):
            shifted = (
                c + _COLOR_NOISE * n for c, n in zip(COLORS[thing.color], row[2:5], strict=True)
            )
            rgb = tuple(min(255.0, max(0.0, value)) for value in shifted)
            instances.append(Instance(thing.kind, x, y, diameter, rgb))
    return variant, instances


def sprite_at(instance: Instance, time: str, size: int) -> tuple[Sprite, slice, slice]:
    """The sprite of an object, and the rows and columns it covers."""
    diameter = round(instance.diameter * size)
    top, left = round(instance.y * size - diameter / 2), round(instance.x * size - diameter / 2)
    # Rounding may push an object at the edge one pixel out.
    top, left = (min(max(edge, 0), size - diameter) for edge in (top, left))
    return (
        sprite(instance.kind, diameter, OUTLINE[time]),
        slice(top, top + diameter),
        slice(left, left + diameter),
    )


def draw(scene: Scene, size: int, seed: int) -> np.ndarray:
    """(size, size, 3) uint8, a pure function of the arguments."""
    variant, instances = place_instances(scene, seed)
    image = background(scene.time, scene.category, size, variant).copy()
    for instance in instances:
        shape, rows, columns = sprite_at(instance, scene.time, size)
        under = image[rows, columns]
        color = shape.body * np.array(instance.rgb, np.float32)
        image[rows, columns] = under * shape.keep + color + (shape.fixed + 0.5)
    return image
