"""A negative differs from its scene in exactly the attributes it names."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_decoder import is_valid, scenes

from m1clip.data.synthetic.captions import FITS, paraphrases
from m1clip.data.synthetic.negatives import ATTRIBUTES, negatives
from m1clip.data.synthetic.scene import Scene
from m1clip.data.synthetic.source import sample_scenes

OF_THINGS = [name for name in ATTRIBUTES if name != "time"]


def _differences(one: Scene, other: Scene) -> list[set[str]]:
    """Names of the attributes that differ, for each way to match the things of both scenes."""
    time = {"time"} if one.time != other.time else set()
    return [
        time | {n for a, b in zip(one.things, order, strict=True) for n in OF_THINGS if getattr(a, n) != getattr(b, n)}
        for order in permutations(other.things)
    ]


@given(scene=scenes(), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_negatives_change_exactly_the_named_attributes(scene: Scene, seed: int) -> None:
    found = negatives(scene, seed)
    for negative in found:
        assert is_valid(negative.scene)
        assert set(negative.changed) in _differences(scene, negative.scene)
        assert negative.caption not in paraphrases(scene)
        assert negative.caption in paraphrases(negative.scene)
        assert negative.truth in paraphrases(scene)
    assert [negative.changed for negative in found if negative.difficulty == "hard"] == [(n,) for n in ATTRIBUTES]
    assert {len(negative.changed) for negative in found if negative.difficulty == "medium"} <= {2, 3}
    categories = {thing.category for thing in scene.things}
    for negative in found:
        if negative.difficulty == "easy":
            assert negative.changed == ATTRIBUTES
            assert not categories & {thing.category for thing in negative.scene.things}
            for before, after in zip(scene.things, negative.scene.things, strict=True):
                assert all(getattr(before, name) != getattr(after, name) for name in OF_THINGS)
        if negative.changed == ("kind",):  # a hard change of kind stays in the category
            assert sorted(t.category for t in negative.scene.things) == sorted(t.category for t in scene.things)


def test_negatives_change_either_thing_of_a_scene() -> None:
    scene = next(scene for scene in sample_scenes("val", 20, seed=0) if len(scene.things) == 2)
    changed = [n.scene for seed in range(40) for n in negatives(scene, seed) if n.changed == ("color",)]
    assert {scene.things.index(t) for each in changed for t in each.things if t in scene.things} == {0, 1}


def test_negative_captions_fit_and_depend_on_seed() -> None:
    sampled = sample_scenes("val", 200, seed=0)
    every = [n for seed, scene in enumerate(sampled) for n in negatives(scene, seed)]
    assert sum(len(n.caption) <= FITS for n in every) > 0.97 * len(every)
    assert negatives(sampled[0], 5) == negatives(sampled[0], 5)
    assert negatives(sampled[0], 5) != negatives(sampled[0], 6)
