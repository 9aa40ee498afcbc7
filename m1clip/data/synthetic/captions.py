"""Captions that say everything a scene shows and nothing else, and wrong ones, which show what a model confuses.

They use only a-z, space, comma and full stop. Those that fit a character tokenizer of 77 tokens come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from m1clip.data.synthetic.scene import AXES, CAPTIONS, KINDS, NEGATIVES, TABLES, VALUES, Scene, Thing, generator

FITS = 75  # characters: 77 tokens without start and end
ATTRIBUTES = tuple(VALUES)
_EACH = 3  # easy and medium ones; there is one hard negative per attribute
Value = TypeVar("Value")


def _phrase(thing: Thing, style: int) -> str:
    words = TABLES["words"]
    noun = thing.kind if thing.count == 1 else KINDS[thing.kind].plural
    return f"{words['counts'][thing.count - 1][style]} {words['sizes'][thing.size][style]} {thing.color} {noun}"


def paraphrases(scene: Scene) -> tuple[str, ...]:
    """All captions of a scene. Caption i has the same wording for every scene with as many things."""
    first, last, time = scene.things[0], scene.things[-1], scene.time
    (at, left), (bt, right) = TABLES["positions"][first.position], TABLES["positions"][last.position]
    a_time = f"an {time}" if time == "evening" else f"a {time}"
    words = {"at": at, "bt": bt, "left": left, "right": right, "time": time, "a_time": a_time}
    return tuple(
        template.format(a=_phrase(first, style), b=_phrase(last, style), when=TABLES["times"][time]["when"], **words)
        for style in (0, 1)
        for template in TABLES["templates"]["one" if len(scene.things) == 1 else "two"]
    )


def captions(scene: Scene, count: int, seed: int) -> tuple[str, ...]:
    """`count` different captions, those of at most `FITS` characters first; fewer if there are no more."""
    choices = paraphrases(scene)
    order = generator(CAPTIONS, seed).permutation(len(choices)).tolist()
    return tuple(sorted((choices[i] for i in order), key=lambda text: len(text) > FITS)[:count])


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


def _change(scene: Scene, attribute: str, index: int, rng: np.random.Generator) -> Scene:
    """The scene with a wrong value of one attribute: of the thing at `index`, of the time, or of the positions."""
    if attribute == "time":
        return replace(scene, time=_other(rng, VALUES["time"], [scene.time]))
    things = list(scene.things)
    if attribute == "position" and len(things) == 2:  # they swap places, which a bag of words cannot see
        first, second = things
        return replace(
            scene, things=(replace(second, position=first.position), replace(first, position=second.position))
        )
    thing = things[index]
    choices: Sequence[str] = VALUES[attribute]
    if attribute == "kind":
        choices = [name for name in choices if KINDS[name].category == thing.category]
    # Two things of a scene always differ in kind and color.
    taken = [getattr(t, attribute) for t in (things if attribute in ("color", "kind") else [thing])]
    things[index] = replace(thing, **{attribute: _other(rng, choices, taken)})
    return replace(scene, things=tuple(things))


def _all_changed(scene: Scene, rng: np.random.Generator) -> Scene:
    """Nothing in common: other categories, colors, counts, sizes, positions and time."""
    far = [name for name in KINDS if all(KINDS[name].category != thing.category for thing in scene.things)]
    kinds, colors = [t.kind for t in scene.things], [t.color for t in scene.things]
    positions = tuple(t.position for t in scene.things)
    choices = [(name,) for name in VALUES["position"]] if len(positions) == 1 else AXES
    things: list[Thing] = []
    for thing, position in zip(scene.things, _other(rng, choices, [positions]), strict=True):
        kinds.append(_other(rng, far, kinds))
        colors.append(_other(rng, VALUES["color"], colors))
        # Different from both things, so that no count is right by chance.
        count = _other(rng, VALUES["count"], [t.count for t in scene.things])
        things.append(Thing(kinds[-1], colors[-1], count, _other(rng, VALUES["size"], [thing.size]), position))
    return Scene(tuple(things), _other(rng, VALUES["time"], [scene.time]))


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
