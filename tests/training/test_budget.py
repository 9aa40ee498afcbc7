"""The rules of docs/recipe.md for long runs: epochs and augmentation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1clip.config import RECIPES, DataConfig, read_recipe
from m1clip.data.prepare import choose_augmentation
from m1clip.training.budget import (
    ENOUGH_STEPS,
    MAX_EPOCHS,
    MAX_MEMBERS,
    MEMBER_EPOCHS,
    MILD,
    STRENGTHS,
    Strength,
    augmentation_strength,
    best_members,
    max_epochs,
    steps_of_epochs,
)

EPOCHS = st.floats(0.001, 1e6)


@given(EPOCHS, EPOCHS)
def test_more_epochs_never_weaken_the_augmentation(first: float, second: float) -> None:
    fewer, more = (augmentation_strength(epochs) for epochs in sorted((first, second)))
    assert more.crop_min <= fewer.crop_min
    assert more.word_dropout >= fewer.word_dropout
    assert more.cutmix >= fewer.cutmix


def test_augmentation_is_the_measured_one_at_measured_epochs() -> None:
    for epochs, strength in STRENGTHS.items():
        assert augmentation_strength(epochs) == strength
    assert augmentation_strength(0.1) == MILD
    assert augmentation_strength(1e9) == STRENGTHS[max(STRENGTHS)]


def test_short_runs_have_the_default_augmentation() -> None:
    usual = choose_augmentation(DataConfig(source=("photos",)))
    assert Strength(usual.crop_min, usual.word_dropout, usual.cutmix) == MILD
    default_epochs = read_recipe("scratch").settings["train"]["epochs"]
    assert augmentation_strength(default_epochs) == MILD


@pytest.mark.parametrize("recipe", RECIPES)
def test_time_allows_at_least_the_default_epochs_of_a_recipe(recipe: str) -> None:
    for steps_per_epoch in (1, 93, 10_000):
        default = read_recipe(recipe).settings["train"]["epochs"]
        assert max_epochs(recipe, steps_per_epoch) >= default


def test_few_images_are_seen_more_often_from_random_weights() -> None:
    epochs = [max_epochs("scratch", steps, can_mix=False) for steps in (5, 15, 93, 5_000)]
    assert epochs == [100, 33.3, 18, 18]
    with_cutmix = [max_epochs("scratch", steps) for steps in (5, 15, 93, 5_000)]
    assert with_cutmix == [100, *[MAX_EPOCHS["scratch"]] * 3]
    assert max_epochs("frozen", 5) == max_epochs("frozen", 93)


def test_steps_of_epochs_is_at_least_one() -> None:
    assert steps_of_epochs(0.001, 10) == 1
    assert steps_of_epochs(2.5, 10) == 25


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 10**5))
def test_more_time_never_means_fewer_members_nor_too_few_steps(
    steps: int, more: int, steps_per_epoch: int
) -> None:
    count = best_members(steps, steps_per_epoch)
    assert 1 <= count <= best_members(steps + more, steps_per_epoch) <= MAX_MEMBERS
    if count > 1:
        assert steps / count >= max(ENOUGH_STEPS, MEMBER_EPOCHS * steps_per_epoch)
