"""Every attribute of a scene can be read back from the pixels."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_decoder import decode, draw_labels, iou, scenes, trim

from m1clip.data.synthetic.drawing import draw, sprite
from m1clip.data.synthetic.negatives import negatives
from m1clip.data.synthetic.scene import COLORS, KINDS, OUTLINE, Scene, Thing
from m1clip.data.synthetic.source import SyntheticImage, SyntheticSource

RED_CATS = Scene((Thing("cat", "red", 2, "large", "left"),), "day")


@given(scene=scenes(), size=st.sampled_from((32, 33, 64, 112, 223)), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_scene_can_be_decoded_from_pixels(scene: Scene, size: int, seed: int) -> None:
    image = draw(scene, size, seed)
    assert (image.shape, image.dtype) == ((size, size, 3), np.uint8)
    assert decode(image, draw_labels(scene, size, seed)) == (scene, scene.category)


@given(scene=scenes(), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_object_hides_another(scene: Scene, seed: int) -> None:
    labels = draw_labels(scene, 112, seed)
    numbers, areas = np.unique(labels[labels > 0], return_counts=True)
    assert numbers.tolist() == list(range(1, sum(t.count for t in scene.things) + 1))
    # Objects of one thing are the same sprite: a smaller area would be a covered one.
    start = 0
    for thing in scene.things:
        assert len(set(areas[start : start + thing.count].tolist())) == 1
        start += thing.count


def test_kinds_differ_in_silhouette_and_show_their_color() -> None:
    sprites = [sprite(kind, 12, OUTLINE["day"]) for kind in KINDS]
    masks = [trim(each.covered)[0] for each in sprites]
    assert max(iou(a, b) for i, a in enumerate(masks) for b in masks[:i]) < 0.9
    for shape in sprites:
        assert shape.body.sum() > 0.3 * shape.covered.sum()
        assert -1e-5 <= (shape.keep + shape.body).min() <= (shape.keep + shape.body).max() <= 1 + 1e-5
    colors = np.array(list(COLORS.values()), float)
    distance = np.linalg.norm(colors[:, None] - colors[None], axis=2)
    assert distance[~np.eye(len(colors), dtype=bool)].min() > 80


def test_image_depends_only_on_scene_and_seed() -> None:
    first = draw(RED_CATS, 64, 1).copy()
    draw(RED_CATS, 64, 1)[:] = 0
    assert np.array_equal(first, draw(RED_CATS, 64, 1))
    assert not np.array_equal(first, draw(RED_CATS, 64, 2))


def test_pixels_captions_and_negatives_stay_the_same() -> None:
    """If a digest changes, so do all published figures: raise VERSION."""
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
