"""Choosing scenes: every scene has a number, a split is a set of numbers drawn without replacement."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np

from m1clip.data.synthetic.kinds import KIND_NAMES
from m1clip.data.synthetic.randomness import SCENES, generator
from m1clip.data.synthetic.scene import AXES, COLOUR_NAMES, COUNTS, POSITIONS, SIZES, TIMES, Scene, Thing
from m1clip.errors import UserError

SPLITS = ("train", "val", "test")
Look = tuple[str, str]  # kind and colour


def split_of(kind: str, colour: str) -> str:
    """The split that a (kind, colour) pair belongs to; val and test pairs are never seen in train.

    Every second kind gives two colours to val, the others two to test, and each colour gives three kinds to
    both: two, because with one the kind alone would give the colour away. No seed enters, so that sets made
    with two seeds cannot leak into each other.
    """
    place, test = divmod(KIND_NAMES.index(kind), 2)
    if (place - COLOUR_NAMES.index(colour)) % 4:
        return "train"
    return "test" if test else "val"


@cache
def looks(split: str) -> tuple[Look, ...]:
    """The (kind, colour) pairs of a split."""
    if split not in SPLITS:
        raise UserError(f"the synthetic set has no split {split!r}; it has {', '.join(SPLITS)}")
    return tuple(look for look in product(KIND_NAMES, COLOUR_NAMES) if split_of(*look) == split)


@cache
def _couples(split: str) -> tuple[tuple[Look, Look], ...]:
    """Ordered pairs of looks that may share a picture: one of the split, the other of train."""
    own, train = looks(split), looks("train")
    ordered = list(product(own, train))
    if split != "train":
        ordered += [(right, left) for left, right in ordered]
    return tuple((a, b) for a, b in ordered if a[0] != b[0] and a[1] != b[1])


@cache
def _thing(look: Look, count: int, size: str, position: str) -> Thing:
    return Thing(*look, count, size, position)


def _radices(split: str, things: int) -> tuple[int, ...]:
    amount = (len(COUNTS), len(SIZES))
    if things == 1:
        return (len(looks(split)), *amount, len(POSITIONS), len(TIMES))
    return (len(_couples(split)), *amount, *amount, len(AXES), len(TIMES))


def scenes_available(split: str, things: int) -> int:
    """How many distinct scenes with one (or two) things a split can have."""
    return int(np.prod(_radices(split, things)))


def _single(split: str, digits: list[int]) -> Scene:
    look, count, size, position, time = digits
    return Scene((_thing(looks(split)[look], COUNTS[count], SIZES[size], POSITIONS[position]),), TIMES[time])


def _double(split: str, digits: list[int]) -> Scene:
    couple, count1, size1, count2, size2, axis, time = digits
    (look1, look2), (position1, position2) = _couples(split)[couple], AXES[axis]
    first = _thing(look1, COUNTS[count1], SIZES[size1], position1)
    return Scene((first, _thing(look2, COUNTS[count2], SIZES[size2], position2)), TIMES[time])


def sample_scenes(split: str, count: int, seed: int, two_share: float = 0.5) -> list[Scene]:
    """`count` different scenes of a split, about `two_share` of them with two things."""
    singles, doubles = scenes_available(split, 1), scenes_available(split, 2)
    if not 0 <= count <= singles + doubles:
        raise UserError(f"{count} {split} scenes asked for; there are {singles + doubles:,} different ones")
    if not 0 <= two_share <= 1:
        raise UserError(f"two_share is a share between 0 and 1, not {two_share}")
    if (two_share == 0 and count > singles) or (two_share == 1 and count > doubles):
        raise UserError(
            f"{count} {split} scenes asked for with two_share {two_share}: choose a share between"
        )
    wanted = min(round(count * (1 - two_share)), singles)
    wanted = max(wanted, count - doubles)
    rng = generator(SCENES, SPLITS.index(split), seed)
    scenes: list[Scene] = []
    for things, number, make in ((1, wanted, _single), (2, count - wanted, _double)):
        chosen = rng.choice(scenes_available(split, things), size=number, replace=False)
        digits = np.stack(np.unravel_index(chosen, _radices(split, things)), axis=1).tolist()
        scenes += [make(split, row) for row in digits]
    return [scenes[i] for i in rng.permutation(count)]
