"""Decodes a scene from its pixels and label map, without knowing the scene or the seed."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from m1clip.data.synthetic.drawing import DIAMETER, SIZE_JITTER, VARIANTS, background, place, sprite, sprite_at
from m1clip.data.synthetic.scene import AXES, CATEGORIES, COLORS, KINDS, OUTLINE, VALUES, Rgb, Scene, Thing


def draw_labels(scene: Scene, size: int, seed: int) -> np.ndarray:
    """(size, size) int64: 0 for the background, else 1 + the index of the object in `place(scene, seed)`."""
    labels = np.zeros((size, size), np.int64)
    for number, instance in enumerate(place(scene, seed)[1], start=1):
        shape, rows, columns = sprite_at(instance, scene.time, size)
        labels[rows, columns][shape.covered] = number
    return labels


def trim(mask: np.ndarray, *others: np.ndarray) -> tuple[np.ndarray, ...]:
    """The arrays cut to the box around the mask."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return tuple(array[box] for array in (mask, *others))


def iou(a: np.ndarray, b: np.ndarray) -> float:
    """Overlap of two trimmed masks with their top left corners together."""
    shape = np.maximum(a.shape, b.shape)
    full = np.zeros((2, *shape), bool)
    full[0, : a.shape[0], : a.shape[1]] = a
    full[1, : b.shape[0], : b.shape[1]] = b
    return float((full[0] & full[1]).sum() / (full[0] | full[1]).sum())


@cache
def _templates(size: int, outline: Rgb) -> list[tuple[str, str, tuple[np.ndarray, ...]]]:
    """(kind, size word, trimmed covered/keep/body/fixed) at every diameter this image size can have."""
    found = []
    for word in VALUES["size"]:
        middle = DIAMETER[word] * size
        for diameter in range(round(middle * (1 - SIZE_JITTER)), round(middle * (1 + SIZE_JITTER)) + 1):
            for kind in KINDS:
                shape = sprite(kind, diameter, outline)
                found.append((kind, word, trim(shape.covered, shape.keep, shape.body, shape.fixed)))
    return found


def _empty_scene(image: np.ndarray, labels: np.ndarray) -> tuple[str, str, np.ndarray]:
    """Time, ground and pixels of the best matching background."""
    choices = [
        (time, category, background(time, category, len(image), variant).astype(np.float32))
        for time in VALUES["time"]
        for category in CATEGORIES
        for variant in range(VARIANTS)
    ]
    empty = labels == 0
    return min(choices, key=lambda choice: float(np.abs(choice[2] - image)[empty].mean()))


def _object(
    pixels: np.ndarray, behind: np.ndarray, mask: np.ndarray, own: np.ndarray, outline: Rgb, size: int
) -> tuple[str, str, str]:
    """Kind, color and size word of the best matching template."""
    best: tuple[float, str, str, np.ndarray] | None = None
    for kind, word, (covered, keep, body, fixed) in _templates(size, outline):
        if covered.shape != mask.shape or iou(covered, mask) < 0.5:
            continue
        rest = (pixels - behind * keep - fixed)[own]  # what the color must explain
        weight = body[own]
        color = (rest * weight).sum(0) / (weight**2).sum()
        error = float(((rest - weight * color) ** 2).mean())
        if best is None or error < best[0]:
            best = (error, kind, word, color)
    assert best is not None, "no template has this silhouette"
    _, kind, word, color = best
    name = min(COLORS, key=lambda each: float(((np.array(COLORS[each]) - color) ** 2).sum()))
    return kind, name, word


def decode(image: np.ndarray, labels: np.ndarray) -> tuple[Scene, str]:
    """The decoded scene, and the category of the ground."""
    size = len(image)
    time, ground, behind = _empty_scene(image, labels)
    seen: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for number in range(1, labels.max() + 1):
        mask = labels == number
        own = mask | (labels == 0)
        trimmed, pixels, below, near = trim(mask, image.astype(np.float32), behind, own)
        found = _object(pixels, below, trimmed, near, OUTLINE[time], size)
        seen.setdefault(found, []).append(np.argwhere(mask).mean(0) / size - 0.5)
    things = []
    for (kind, color, word), centers in seen.items():
        y, x = np.mean(centers, axis=0)
        place = ("left" if x < 0 else "right") if abs(x) > abs(y) else ("top" if y < 0 else "bottom")
        things.append(Thing(kind, color, len(centers), word, place))
    things.sort(key=lambda thing: VALUES["position"].index(thing.position))
    return Scene(tuple(things), time), ground


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Any scene, of any split or none."""

    def value(name: str) -> Any:
        return draw(st.sampled_from(VALUES[name]))

    def different(name: str) -> list[str]:
        return draw(st.lists(st.sampled_from(VALUES[name]), min_size=len(places), max_size=len(places), unique=True))

    places = draw(st.sampled_from(AXES)) if draw(st.booleans()) else (value("position"),)
    things = zip(different("kind"), different("color"), places, strict=True)
    return Scene(
        tuple(Thing(kind, color, value("count"), value("size"), at) for kind, color, at in things), value("time")
    )


def is_valid(scene: Scene) -> bool:
    """Whether all values exist, and two things face each other and differ in kind and color."""
    values = [*((n, getattr(t, n)) for t in scene.things for n in VALUES if n != "time"), ("time", scene.time)]
    if not all(value in VALUES[name] for name, value in values):
        return False
    if len(scene.things) == 1:
        return True
    a, b = scene.things
    return (a.position, b.position) in AXES and a.kind != b.kind and a.color != b.color
