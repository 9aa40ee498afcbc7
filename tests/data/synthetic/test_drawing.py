"""Every attribute of a scene can be read back from the pixels."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_decoder import decode, draw_labels, iou, scenes, trim

from m1clip.data.synthetic.drawing import draw, sprite
from m1clip.data.synthetic.negatives import negatives
from m1clip.data.synthetic.scene import COLOURS, DARK_RGB, KIND_NAMES, Scene, Thing
from m1clip.data.synthetic.source import SyntheticImage, SyntheticSource, sample_scenes
from m1clip.errors import UserError


@pytest.mark.parametrize(("size", "split", "count"), [(32, "train", 60), (64, "val", 60), (112, "test", 20)])
def test_every_attribute_is_decoded_from_the_pixels(size: int, split: str, count: int) -> None:
    for number, scene in enumerate(sample_scenes(split, count, seed=7)):
        seen, ground = decode(draw(scene, size, number), draw_labels(scene, size, number))
        assert seen == scene
        assert ground == scene.category


@given(scene=scenes(), size=st.integers(32, 224), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_scene_at_any_size_and_seed_is_decoded(scene: Scene, size: int, seed: int) -> None:
    assert decode(draw(scene, size, seed), draw_labels(scene, size, seed)) == (scene, scene.category)


@given(scene=scenes(), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_object_hides_another(scene: Scene, seed: int) -> None:
    labels = draw_labels(scene, 112, seed)
    numbers, areas = np.unique(labels[labels > 0], return_counts=True)
    assert numbers.tolist() == list(range(1, sum(t.count for t in scene.things) + 1))
    # objects of one thing are the same sprite: a smaller area would be a covered one
    start = 0
    for thing in scene.things:
        assert len(set(areas[start : start + thing.count].tolist())) == 1
        start += thing.count


@given(scene=scenes(), seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_labels_mark_exactly_what_the_background_does_not_show(scene: Scene, seed: int) -> None:
    """Take the second thing away: only the pixels near its labels may change."""
    other = Scene((scene.things[0],), scene.time)
    same = (draw_labels(scene, 64, seed) == 0) & (draw_labels(other, 64, seed) == 0)
    # the rim of an object covers less than half of its outermost pixels
    for shift in (-1, 1):
        for axis in (0, 1):
            same &= np.roll(same, shift, axis)
    assert np.array_equal(draw(scene, 64, seed)[same], draw(other, 64, seed)[same])


def test_silhouettes_differ_at_twelve_pixels() -> None:
    masks = [trim(sprite(kind, 12, DARK_RGB).covered)[0] for kind in KIND_NAMES]
    closest = max(iou(a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert closest < 0.9


def test_every_kind_shows_its_colour() -> None:
    for kind in KIND_NAMES:
        shape = sprite(kind, 24, DARK_RGB)
        assert shape.body.sum() > 0.3 * shape.covered.sum(), kind
        blend = shape.keep + shape.body
        assert blend.max() <= 1 + 1e-5
        assert blend.min() >= -1e-5


def test_colours_are_far_apart() -> None:
    values = np.array(list(COLOURS.values()), float)
    distance = np.linalg.norm(values[:, None] - values[None], axis=2)
    assert distance[~np.eye(len(values), dtype=bool)].min() > 80


@pytest.mark.parametrize("size", [32, 33, 57, 96, 224])
def test_shape_and_type_of_an_image(size: int) -> None:
    (scene,) = sample_scenes("train", 1, seed=0)
    image = draw(scene, size, 0)
    assert image.shape == (size, size, 3)
    assert image.dtype == np.uint8


@pytest.mark.parametrize("size", [31, 225, 0, -1])
def test_other_sizes_are_refused(size: int) -> None:
    (scene,) = sample_scenes("train", 1, seed=0)
    with pytest.raises(UserError, match="32 to 224"):
        draw(scene, size, 0)


def test_the_seed_determines_the_image() -> None:
    scene = Scene((Thing("cat", "red", 2, "large", "left"),), "day")
    first = draw(scene, 64, 1)
    assert np.array_equal(first, draw(scene, 64, 1))
    assert not np.array_equal(first, draw(scene, 64, 2))


def test_changing_an_image_does_not_change_the_next() -> None:
    scene = Scene((Thing("cat", "red", 2, "large", "left"),), "day")
    clean = draw(scene, 64, 1).copy()
    draw(scene, 64, 1)[:] = 0
    assert np.array_equal(draw(scene, 64, 1), clean)


def test_pixels_captions_and_negatives_stay_the_same() -> None:
    """Other digests change every published figure: raise VERSION with them. Python hashes differ in each process."""
    pixels, texts = hashlib.sha256(), hashlib.sha256()
    source = SyntheticSource(64, train=60, val=20, test=20, seed=3)
    for split in source.splits():
        for sample in source.samples(split):
            image = sample.image
            assert isinstance(image, SyntheticImage)
            pixels.update(image.open().tobytes())
            wrong = [f"{n.caption}|{n.truth}|{n.difficulty}" for n in negatives(image.scene, image.seed)]
            texts.update("|".join((sample.id, image.stamp(), *sample.captions, *wrong)).encode())
    assert pixels.hexdigest()[:16] == "a5505315443fd0ef"
    assert texts.hexdigest()[:16] == "bc06686f06748fcc"
