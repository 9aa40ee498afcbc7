"""Splits hold out combinations, and equal integers give equal scenes."""

from __future__ import annotations

from collections import Counter

import pytest

from m1clip.data.synthetic.scene import CATEGORIES, COLOUR_NAMES, KIND_NAMES, KINDS, Scene, Thing
from m1clip.data.synthetic.source import SPLITS, looks, sample_scenes, scenes_available, split_of
from m1clip.errors import UserError


def _looks_in(scene: Scene) -> list[str]:
    return [split_of(thing.kind, thing.colour) for thing in scene.things]


def test_pairs_of_kind_and_colour_are_shared_out_evenly() -> None:
    assert {split: len(looks(split)) for split in SPLITS} == {"train": 144, "val": 24, "test": 24}
    assert set(Counter(kind for kind, _ in looks("train")).values()) == {6}
    assert set(Counter(colour for _, colour in looks("train")).values()) == {18}
    for split in ("val", "test"):
        assert set(Counter(colour for _, colour in looks(split)).values()) == {3}
        # two colours a kind: with one, the kind alone would give the colour away
        assert set(Counter(kind for kind, _ in looks(split)).values()) == {2}
        assert len({kind for kind, _ in looks(split)}) == 12


def test_six_kinds_in_each_of_four_categories() -> None:
    assert Counter(kind.category for kind in KINDS.values()) == dict.fromkeys(CATEGORIES, 6)


def test_train_never_shows_a_pair_held_out_and_val_always_does() -> None:
    for scene in sample_scenes("train", 3000, seed=1):
        assert set(_looks_in(scene)) == {"train"}
    for split in ("val", "test"):
        for scene in sample_scenes(split, 1500, seed=1):
            assert _looks_in(scene).count(split) == 1
            assert set(_looks_in(scene)) <= {split, "train"}


def test_no_scene_is_in_two_splits_or_twice_in_one() -> None:
    drawn = [scene for split in SPLITS for scene in sample_scenes(split, 2500, seed=5)]
    assert len(set(drawn)) == len(drawn)


def test_every_word_of_every_attribute_is_used() -> None:
    scenes = sample_scenes("train", 3000, seed=0)
    things = [thing for scene in scenes for thing in scene.things]
    assert {thing.kind for thing in things} == set(KIND_NAMES)
    assert {thing.colour for thing in things} == set(COLOUR_NAMES)
    assert {scene.category for scene in scenes} == set(CATEGORIES)
    assert 0.45 < sum(len(scene.things) == 2 for scene in scenes) / len(scenes) < 0.55


def test_the_seed_decides() -> None:
    assert sample_scenes("train", 300, seed=4) == sample_scenes("train", 300, seed=4)
    assert sample_scenes("train", 300, seed=4) != sample_scenes("train", 300, seed=5)


@pytest.mark.parametrize(("share", "sizes"), [(0.0, {1}), (1.0, {2})])
def test_the_share_of_two_things_can_be_chosen(share: float, sizes: set[int]) -> None:
    assert {len(s.things) for s in sample_scenes("val", 200, seed=0, two_share=share)} == sizes


def test_all_single_scenes_can_be_had_and_not_one_more() -> None:
    available = scenes_available("val", 1)
    everything = sample_scenes("val", available, seed=0, two_share=0.0)
    assert len(set(everything)) == available == 24 * 4 * 2 * 4 * 4
    with pytest.raises(UserError, match="two_share"):
        sample_scenes("val", available + 1, seed=0, two_share=0.0)


def test_more_than_exist_is_refused_with_the_number_that_exists() -> None:
    total = scenes_available("test", 1) + scenes_available("test", 2)
    with pytest.raises(UserError, match=f"{total:,}"):
        sample_scenes("test", total + 1, seed=0)


def test_an_unknown_split_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'dev'"):
        sample_scenes("dev", 1, seed=0)


def test_impossible_scenes_cannot_be_made() -> None:
    cat, car = Thing("cat", "red", 1, "small", "left"), Thing("car", "blue", 1, "small", "right")
    with pytest.raises(ValueError, match="order"):
        Scene((car, cat), "day")
    with pytest.raises(ValueError, match="differ"):
        Scene((cat, Thing("car", "red", 1, "small", "right")), "day")
    with pytest.raises(ValueError, match="one or two"):
        Scene((), "day")
    with pytest.raises(ValueError, match="'noon'"):
        Scene((cat,), "noon")
    with pytest.raises(ValueError, match="'dog'"):
        Thing("dog", "red", 1, "small", "left")
