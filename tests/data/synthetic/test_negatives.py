"""A negative differs from its scene in exactly the attributes it names."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_decoder import scenes

from m1clip.data.synthetic.captions import FITS, paraphrases
from m1clip.data.synthetic.negatives import ATTRIBUTES, Negative, negatives
from m1clip.data.synthetic.scene import KINDS, Scene
from m1clip.data.synthetic.source import sample_scenes


def _differences(one: Scene, other: Scene) -> list[set[str]]:
    """Names of what differs, for each way to say which thing became which."""
    time = {"time"} if one.time != other.time else set()
    names = [name for name in ATTRIBUTES if name != "time"]
    return [
        time | {n for a, b in zip(one.things, order, strict=True) for n in names if getattr(a, n) != getattr(b, n)}
        for order in permutations(other.things)
    ]


def _of(scene: Scene, seed: int, difficulty: str) -> list[Negative]:
    return [negative for negative in negatives(scene, seed) if negative.difficulty == difficulty]


@given(scene=scenes(), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_exactly_the_named_attributes_differ(scene: Scene, seed: int) -> None:
    for negative in negatives(scene, seed):
        assert set(negative.changed) in _differences(scene, negative.scene)
        assert negative.caption not in paraphrases(scene)
        assert negative.caption in paraphrases(negative.scene)
        assert negative.truth in paraphrases(scene)


@given(scene=scenes(), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_difficulty_is_the_number_of_changes(scene: Scene, seed: int) -> None:
    assert [negative.changed for negative in _of(scene, seed, "hard")] == [(name,) for name in ATTRIBUTES]
    assert {len(negative.changed) for negative in _of(scene, seed, "medium")} <= {2, 3}
    categories = {thing.category for thing in scene.things}
    for negative in _of(scene, seed, "easy"):
        assert negative.changed == ATTRIBUTES
        assert not categories & {thing.category for thing in negative.scene.things}
        for before, after in zip(scene.things, negative.scene.things, strict=True):
            assert all(getattr(before, n) != getattr(after, n) for n in ATTRIBUTES if n != "time")


def test_a_hard_change_of_kind_stays_in_the_category() -> None:
    for seed, scene in enumerate(sample_scenes("val", 100, seed=0)):
        (other,) = [n.scene for n in _of(scene, seed, "hard") if n.changed == ("kind",)]
        before = sorted(KINDS[thing.kind].category for thing in scene.things)
        assert sorted(KINDS[thing.kind].category for thing in other.things) == before


def test_either_of_two_things_may_be_changed() -> None:
    scene = next(scene for scene in sample_scenes("val", 20, seed=0) if len(scene.things) == 2)
    hit = Counter(
        index
        for seed in range(40)
        for negative in _of(scene, seed, "hard")
        if negative.changed == ("colour",)
        for index in (0, 1)
        if scene.things[index] != negative.scene.things[index]
    )
    assert set(hit) == {0, 1}


def test_wordings_fit_and_the_seed_decides() -> None:
    sampled = sample_scenes("val", 200, seed=0)
    every = [n for seed, scene in enumerate(sampled) for n in negatives(scene, seed)]
    assert sum(len(n.caption) <= FITS for n in every) > 0.97 * len(every)
    assert negatives(sampled[0], 5) == negatives(sampled[0], 5)
    assert negatives(sampled[0], 5) != negatives(sampled[0], 6)
