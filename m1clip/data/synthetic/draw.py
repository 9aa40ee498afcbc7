"""From a scene to pixels, and to the map of which pixel belongs to which object."""

from __future__ import annotations

import numpy as np

from m1clip.data.synthetic.background import background
from m1clip.data.synthetic.layout import Instance, place
from m1clip.data.synthetic.palette import OUTLINE
from m1clip.data.synthetic.scene import Scene
from m1clip.data.synthetic.sprite import Sprite, sprite
from m1clip.errors import UserError

# raise it whenever the same scene and seed would give other pixels: caches are keyed by it
VERSION = 1
SMALLEST, LARGEST = 32, 224


def check_size(size: int) -> None:
    """Refuse a size at which the objects could not be read."""
    if not SMALLEST <= size <= LARGEST:
        raise UserError(
            f"synthetic pictures are {SMALLEST} to {LARGEST} px wide, not {size}; choose such a size"
        )


def _stamp(scene: Scene, instance: Instance, size: int) -> tuple[Sprite, slice, slice]:
    """The object's sprite and the rows and columns it covers."""
    diameter = round(instance.diameter * size)
    top, left = round(instance.y * size - diameter / 2), round(instance.x * size - diameter / 2)
    # rounding may push an object at the rim one pixel out
    top, left = (min(max(edge, 0), size - diameter) for edge in (top, left))
    shape = sprite(scene.things[instance.thing].kind, diameter, OUTLINE[scene.time])
    return shape, slice(top, top + diameter), slice(left, left + diameter)


def draw(scene: Scene, size: int, seed: int) -> np.ndarray:
    """The picture, (size, size, 3) uint8: a function of its arguments alone."""
    check_size(size)
    variant, instances = place(scene, seed)
    picture = background(scene.time, scene.category, size, variant).copy()
    for instance in instances:
        shape, rows, columns = _stamp(scene, instance, size)
        under = picture[rows, columns]
        picture[rows, columns] = (
            under * shape.keep + shape.body * np.array(instance.rgb, np.float32) + (shape.fixed + 0.5)
        )
    return picture


def draw_labels(scene: Scene, size: int, seed: int) -> np.ndarray:
    """(size, size) int64: 0 for the background, else 1 + the object's place in `place(scene, seed)`."""
    check_size(size)
    labels = np.zeros((size, size), np.int64)
    for number, instance in enumerate(place(scene, seed)[1], start=1):
        shape, rows, columns = _stamp(scene, instance, size)
        labels[rows, columns][shape.covered] = number
    return labels
