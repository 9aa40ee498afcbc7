"""Negative captions of known difficulty, which show what a model confuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from m1clip.data.synthetic.captions import FITS, paraphrases
from m1clip.data.synthetic.scene import (
    AXES,
    COLOUR_NAMES,
    COUNTS,
    KIND_NAMES,
    KINDS,
    NEGATIVES,
    POSITIONS,
    SIZES,
    TIMES,
    Scene,
    Thing,
    generator,
)

ATTRIBUTES = ("colour", "count", "size", "position", "kind", "time")
DIFFICULTIES = ("easy", "medium", "hard")
_EACH = 3  # easy and medium ones; there is one hard negative per attribute

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Negative:
    """A wrong scene, its caption, what was changed, and the true caption in the same wording."""

    scene: Scene
    caption: str
    difficulty: str
    changed: tuple[str, ...]
    truth: str


def _other(rng: np.random.Generator, choices: Sequence[Value], taken: Sequence[Value]) -> Value:
    free = [choice for choice in choices if choice not in taken]
    return free[int(rng.integers(len(free)))]


def _moved(scene: Scene, rng: np.random.Generator) -> Scene:
    """Another position for a single thing; two things swap theirs, which a bag of words cannot see."""
    if len(scene.things) == 1:
        (thing,) = scene.things
        return replace(scene, things=(replace(thing, position=_other(rng, POSITIONS, [thing.position])),))
    first, second = scene.things
    swapped = replace(second, position=first.position), replace(first, position=second.position)
    return replace(scene, things=swapped)


def _change(scene: Scene, attribute: str, index: int, rng: np.random.Generator) -> Scene:
    """The scene with a wrong value of one attribute: of the thing at `index`, of the time, or of the positions."""
    if attribute == "time":
        return replace(scene, time=_other(rng, TIMES, [scene.time]))
    if attribute == "position":
        return _moved(scene, rng)
    things = list(scene.things)
    thing = things[index]
    near = [name for name in KIND_NAMES if KINDS[name].category == thing.category]
    choices: dict[str, Sequence[Any]] = {"colour": COLOUR_NAMES, "count": COUNTS, "size": SIZES, "kind": near}
    # Two things of a scene always differ in kind and colour.
    taken = [getattr(t, attribute) for t in (things if attribute in ("colour", "kind") else [thing])]
    things[index] = replace(thing, **{attribute: _other(rng, choices[attribute], taken)})
    return replace(scene, things=tuple(things))


def _all_changed(scene: Scene, rng: np.random.Generator) -> Scene:
    """Nothing in common: other categories, colours, counts, sizes, positions and time."""
    categories = {thing.category for thing in scene.things}
    far = [name for name in KIND_NAMES if KINDS[name].category not in categories]
    kinds, colours = [t.kind for t in scene.things], [t.colour for t in scene.things]
    if len(scene.things) == 1:
        places: tuple[str, ...] = (_other(rng, POSITIONS, [scene.things[0].position]),)
    else:
        places = _other(rng, AXES, [(scene.things[0].position, scene.things[1].position)])
    things: list[Thing] = []
    for thing, place in zip(scene.things, places, strict=True):
        kinds.append(_other(rng, far, kinds))
        colours.append(_other(rng, COLOUR_NAMES, colours))
        # Different from both things, so that no count is right by chance.
        count = _other(rng, COUNTS, [t.count for t in scene.things])
        things.append(Thing(kinds[-1], colours[-1], count, _other(rng, SIZES, [thing.size]), place))
    return Scene(tuple(things), _other(rng, TIMES, [scene.time]))


def _wrong_scenes(scene: Scene, rng: np.random.Generator) -> list[tuple[Scene, str, tuple[str, ...]]]:
    found: list[tuple[Scene, str, tuple[str, ...]]] = []
    for attribute in ATTRIBUTES:
        index = int(rng.integers(len(scene.things)))
        found.append((_change(scene, attribute, index, rng), "hard", (attribute,)))
    for _ in range(_EACH):
        picked = sorted(rng.permutation(len(ATTRIBUTES))[: rng.integers(2, 4)].tolist())
        names = tuple(ATTRIBUTES[i] for i in picked)
        wrong, index = scene, int(rng.integers(len(scene.things)))
        # Positions last: swapping them changes the order of the things.
        for attribute in sorted(names, key=lambda name: name == "position"):
            wrong = _change(wrong, attribute, index, rng)
        found.append((wrong, "medium", names))
    return found + [(_all_changed(scene, rng), "easy", ATTRIBUTES) for _ in range(_EACH)]


def negatives(scene: Scene, seed: int) -> list[Negative]:
    """One hard negative per attribute, three medium (two or three changed), three easy (all changed).

    All have the wording of one true caption, so that only the facts differ.
    """
    rng = generator(NEGATIVES, seed)
    wrong = _wrong_scenes(scene, rng)
    wordings = list(zip(*(paraphrases(each) for each in (scene, *(row[0] for row in wrong))), strict=True))
    longest = [max(map(len, wording)) for wording in wordings]
    # A truncated caption might lose the word that was changed.
    limit = max(FITS, min(longest))
    fitting = [wording for wording, length in zip(wordings, longest, strict=True) if length <= limit]
    truth, *texts = fitting[int(rng.integers(len(fitting)))]
    return [
        Negative(other, text, difficulty, changed, truth)
        for (other, difficulty, changed), text in zip(wrong, texts, strict=True)
    ]
