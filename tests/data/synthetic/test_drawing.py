"""Drawing: no object hides another, and pixels and texts never change."""

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_scenes import scenes

from m1clip.data.synthetic.drawing import place_instances, sprite_at
from m1clip.data.synthetic.scene import Scene, Thing
from m1clip.data.synthetic.source import SyntheticImage, SyntheticSource

RED_CATS = Scene((Thing("cat", "red", 2, "large", "left"),), "day")


@given(scene=scenes(), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_no_object_hides_another(scene: Scene, seed: int) -> None:
    # 0 for the background, else 1 + the index of the object.
    labels = np.zeros((112, 112), np.int64)
    for number, instance in enumerate(place_instances(scene, seed)[1], start=1):
        shape, rows, columns = sprite_at(instance, scene.time, 112)
        labels[rows, columns][shape.keep[:, :, 0] < 0.5] = number
    numbers, areas = np.unique(labels[labels > 0], return_counts=True)
    assert numbers.tolist() == list(range(1, sum(t.count for t in scene.things) + 1))
    # Objects of one thing are the same sprite: a smaller area would be a covered one.
    start = 0
    for thing in scene.things:
        assert len(set(areas[start : start + thing.count].tolist())) == 1
        start += thing.count


def test_pixels_and_captions_stay_the_same() -> None:
    """If a digest changes, so do all published figures: raise VERSION."""
    pixels, texts = hashlib.sha256(), hashlib.sha256()
    source = SyntheticSource(64, train=60, val=20, test=20, seed=3)
    for split in source.splits():
        for sample in source.samples(split):
            image = sample.image
            assert isinstance(image, SyntheticImage)
            pixels.update(image.open().tobytes())
            texts.update("|".join((sample.id, image.stamp(), *sample.captions)).encode())
    assert pixels.hexdigest()[:16] == "a5505315443fd0ef"
    assert texts.hexdigest()[:16] == "8175f554bb7b89d2"
