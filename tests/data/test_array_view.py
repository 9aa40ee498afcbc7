"""Decoded images on the device: content, and batches made from them."""

from dataclasses import replace

import numpy as np
import torch
from small_run import prepared, small_config

from m1clip.data import array_view, decoding
from m1clip.data.loader import batches

HOST = torch.device("cpu")


def test_images_go_to_the_device_if_they_leave_room() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 3), np.uint8)
    for rows in (None, np.array([5, 0, 3])):
        images, expected = (
            array_view.ArrayView(pixels, rows),
            pixels if rows is None else pixels[rows],
        )
        there = images.to_device(HOST, 4 * expected.nbytes)
        assert there is not None
        assert np.array_equal(there.numpy(), expected)
        assert images.to_device(HOST, 4 * expected.nbytes - 4) is None
    assert decoding.LazyImages([], 4).to_device(HOST, 10**9) is None


def test_batch_is_the_same_with_images_on_the_device() -> None:
    plain = prepared(small_config({"data.crop_min": 0.5})).training
    there = replace(plain, device_images=plain.images.to_device(HOST, 10**9))
    # Workers cannot see the device's memory, so none are started.
    pairs = zip(
        batches(plain, 0, 3, 0, "fork", False), batches(there, 0, 3, 2, "fork", False), strict=True
    )
    for one, other in pairs:
        assert other.images is None
        assert torch.equal(other.pixels(), one.images)
        assert torch.equal(other.pixels(slice(2, 5)), one.images[2:5])
        assert torch.equal(other.views, one.views)
