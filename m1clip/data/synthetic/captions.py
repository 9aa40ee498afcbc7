"""Captions that say everything a scene shows and nothing else, and wrong ones, which show what a
model confuses.

They use only a-z, space, comma and full stop. Those that fit a character tokenizer of 77 tokens
come first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from m1clip.data.synthetic.scene import (
    CAPTIONS,
    KINDS,
    NEGATIVES,
    SCENE_TABLES,
    VALUES,
    Scene,
    Thing,
    generator,
)

FITS = 75  # characters: 77 tokens without start and end
ATTRIBUTES = tuple(VALUES)
Value = TypeVar("Value")


def _phrase(thing: Thing, style: int) -> str:
    words = SCENE_TABLES["words"]
    noun = thing.kind if thing.count == 1 else KINDS[thing.kind].plural
    return (
        f"{words['counts'][thing.count - 1][style]} {words['sizes'][thing.size][style]}"
        f" {thing.color} {noun}"
    )


def paraphrases(scene: Scene) -> tuple[str, ...]:
    """All captions of a scene.

    Caption i has the same wording for every scene with as many things.
    """
    first, last, time = scene.things[0], scene.things[-1], scene.time
    (at, left), (bt, right) = (
        SCENE_TABLES["positions"][first.position],
        SCENE_TABLES["positions"][last.position],
    )
    a_time = f"an {time}" if time == "evening" else f"a {time}"
    words = {"at": at, "bt": bt, "left": left, "right": right, "time": time, "a_time": a_time}
    return tuple(
        template.format(
            a=_phrase(first, style),
            b=_phrase(last, style),
            when=SCENE_TABLES["times"][time]["when"],
            **words,
        )
        for style in (0, 1)
        for template in SCENE_TABLES["templates"]["one" if len(scene.things) == 1 else "two"]
    )


def captions(scene: Scene, count: int, seed: int) -> tuple[str, ...]:
    """`count` different captions, those of at most `FITS` characters first.

    Fewer if there are no more.
    """
    choices = paraphrases(scene)
    order = generator(CAPTIONS, seed).permutation(len(choices)).tolist()
    return tuple(sorted((choices[i] for i in order), key=lambda text: len(text) > FITS)[:count])


@dataclass(frozen=True, slots=True)
class Negative:
    """A wrong scene, its caption, the attribute that was changed, and the true caption in the same
    wording.
    """

    scene: Scene
    caption: str
    changed: str
    truth: str


def _other(rng: np.random.Generator, choices: Sequence[Value], current: Sequence[Value]) -> Value:
    free = [choice for choice in choices if choice not in current]
    return free[int(rng.integers(len(free)))]


def _change(scene: Scene, attribute: str, index: int, rng: np.random.Generator) -> Scene:
    """The scene with a wrong value of one attribute: of the thing at `index`, of the time, or of
    the positions.
    """
    if attribute == "time":
        return replace(scene, time=_other(rng, VALUES["time"], [scene.time]))
    things = list(scene.things)
    # They swap places, which a bag of words cannot see.
    if attribute == "position" and len(things) == 2:
        first, second = things
        return replace(
            scene,
            things=(
                replace(second, position=first.position),
                replace(first, position=second.position),
            ),
        )
    thing = things[index]
    choices: Sequence[str] = VALUES[attribute]
    if attribute == "kind":
        choices = [name for name in choices if KINDS[name].category == thing.category]
    # Two things of a scene always differ in kind and color.
    current = [
        getattr(t, attribute) for t in (things if attribute in ("color", "kind") else [thing])
    ]
    things[index] = replace(thing, **{attribute: _other(rng, choices, current)})
    return replace(scene, things=tuple(things))


def negatives(scene: Scene, seed: int) -> list[Negative]:
    """One negative per attribute, in the wording of one true caption, so that only that attribute
    differs.
    """
    rng = generator(NEGATIVES, seed)
    changed_scenes = [
        _change(scene, attribute, int(rng.integers(len(scene.things))), rng)
        for attribute in ATTRIBUTES
    ]
    wordings = list(
        zip(*(paraphrases(variant) for variant in (scene, *changed_scenes)), strict=True)
    )
    longest = [max(map(len, wording)) for wording in wordings]
    # A truncated caption might lose the word that was changed.
    limit = max(FITS, min(longest))
    fitting = [
        wording for wording, length in zip(wordings, longest, strict=True) if length <= limit
    ]
    truth, *texts = fitting[int(rng.integers(len(fitting)))]
    return [
        Negative(*texts_of_scene, truth)
        for texts_of_scene in zip(changed_scenes, texts, ATTRIBUTES, strict=True)
    ]
