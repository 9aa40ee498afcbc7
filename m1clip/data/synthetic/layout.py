"""Where each object stands: circles that do not touch, in the half that the position names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from m1clip.data.synthetic.background import VARIANTS
from m1clip.data.synthetic.palette import COLOURS
from m1clip.data.synthetic.randomness import PLACEMENT, generator
from m1clip.data.synthetic.scene import Scene, Thing

DIAMETER = {"small": 0.18, "large": 0.285}  # shares of the picture's side
SIZE_JITTER = 0.04
COLOUR_NOISE = 9
_MARGIN = 0.01
_GAP = 0.012  # between two circles; four large ones in a zigzag still have it
_REACH = 0.22
_MOST_ACROSS, _MOST_ALONG = 0.3, 0.12  # how near a group's middle may come to the picture's diagonals


@dataclass(frozen=True, slots=True)
class Instance:
    """One object: which thing it belongs to, its centre and diameter (shares of the side), its colour."""

    thing: int
    x: float
    y: float
    diameter: float
    rgb: tuple[float, float, float]


def _rest(count: int, diameter: float) -> list[tuple[float, float]]:
    """Resting centres (across, along) in a half that is 0.5 wide and 1 long: spread, in a zigzag."""
    low, high = diameter / 2 + _MARGIN, 0.5 - diameter / 2 - _MARGIN
    middle = (low + high) / 2
    swing = (high - low) / 2 if count > 3 else 0.0
    free = 1 - diameter - 2 * _MARGIN
    spacing = free / 3 if count > 3 else min(free / max(1, count - 1), diameter * 1.25)
    start = 0.5 - spacing * (count - 1) / 2
    return [(middle + (swing if i % 2 else -swing), start + spacing * i) for i in range(count)]


def _readable(centres: list[tuple[float, float]], distance: float) -> bool:
    """Nothing touches, and the middle of the group leaves no doubt between, say, left and top."""
    number = len(centres)
    across, along = (sum(axis) / number for axis in zip(*centres, strict=True))
    if across > _MOST_ACROSS or abs(along - 0.5) > _MOST_ALONG:
        return False
    return all(math.dist(centres[i], centres[j]) >= distance for i in range(number) for j in range(i))


def _centres(thing: Thing, diameter: float, moves: list[list[float]]) -> list[tuple[float, float]]:
    """Jittered centres; the jitter is halved until all is readable, so no draw is ever thrown away."""
    rest = _rest(thing.count, diameter)
    low = diameter / 2 + _MARGIN
    reach = _REACH
    placed = rest
    for _ in range(6):
        placed = [
            (min(max(a + reach * da, low), 0.5 - low), min(max(b + reach * db, low), 1 - low))
            for (a, b), (da, db) in zip(rest, moves, strict=False)
        ]
        if _readable(placed, diameter + _GAP):
            break
        reach /= 2
    else:
        placed = rest
    far = thing.position in ("right", "bottom")
    across = [((1 - a) if far else a, b) for a, b in placed]
    return across if thing.position in ("left", "right") else [(b, a) for a, b in across]


def place(scene: Scene, seed: int) -> tuple[int, list[Instance]]:
    """The background's variant and all objects, the same for every picture size."""
    rng = generator(PLACEMENT, seed)
    variant = int(rng.integers(VARIANTS))
    # one block of numbers, because a call to the generator costs more than the numbers
    noise = rng.uniform(-1, 1, size=(2, 4, 6)).tolist()
    instances: list[Instance] = []
    for index, thing in enumerate(scene.things):
        rows = noise[index]
        diameter = DIAMETER[thing.size] * (1 + SIZE_JITTER * rows[0][5])
        base = COLOURS[thing.colour]
        for (x, y), row in zip(_centres(thing, diameter, [r[:2] for r in rows]), rows, strict=False):
            red, green, blue = (
                min(255.0, max(0.0, c + COLOUR_NOISE * n)) for c, n in zip(base, row[2:5], strict=True)
            )
            instances.append(Instance(index, x, y, diameter, (red, green, blue)))
    return variant, instances
