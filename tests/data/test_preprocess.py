"""From a picture to a square, against PIL done by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from m1clip.data.preprocess import Preprocess, to_square
from m1clip.errors import UserError


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def reference(image: Image.Image, size: int) -> np.ndarray:
    """torchvision's Resize(size, bicubic) and CenterCrop(size), as open_clip uses them."""
    width, height = image.size
    short, long = min(width, height), max(width, height)
    new_long = int(size * long / short)
    new = (size, new_long) if width <= height else (new_long, size)
    image = image.resize(new, Image.Resampling.BICUBIC)
    left, top = round((new[0] - size) / 2), round((new[1] - size) / 2)
    return np.asarray(image.crop((left, top, left + size, top + size)))


@pytest.mark.parametrize(
    "size", [(33, 33), (64, 64), (65, 64), (101, 57), (57, 101), (20, 31), (32, 33), (33, 32), (500, 40)]
)
def test_shortest_side_then_centre(size: tuple[int, int]) -> None:
    square = to_square(picture(*size), 32)
    assert square.shape == (32, 32, 3)
    assert square.dtype == np.uint8
    assert np.array_equal(square, reference(picture(*size), 32))


def test_a_picture_of_the_right_size_is_left_alone() -> None:
    assert np.array_equal(to_square(picture(32, 32), 32), np.asarray(picture(32, 32)))


def test_squash_keeps_the_edges() -> None:
    whole = np.zeros((40, 80, 3), np.uint8)
    whole[:, :20] = 255  # cut off by a centre crop
    assert to_square(Image.fromarray(whole), 32, "squash")[:, 0].min() == 255
    assert to_square(Image.fromarray(whole), 32, "shortest")[:, 2:].max() < 60


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_any_mode_becomes_rgb(mode: str) -> None:
    assert to_square(picture(40, 50).convert(mode), 32).shape == (32, 32, 3)


def test_preprocessing_goes_through_json() -> None:
    preprocess = Preprocess(image_size=96, mean=(0.1, 0.2, 0.3), resize="squash")
    assert Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict()))) == preprocess
    with pytest.raises(UserError, match="zoom"):
        Preprocess.from_dict({**preprocess.to_dict(), "zoom": 2})
    with pytest.raises(UserError, match="mean"):
        Preprocess.from_dict({"image_size": 32})
