"""From an image to a square, against PIL done by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from m1clip.data.images import Preprocess, to_square
from m1clip.errors import UserError


def image(width: int, height: int) -> Image.Image:
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
    square = to_square(image(*size), 32)
    assert square.shape == (32, 32, 3)
    assert square.dtype == np.uint8
    assert np.array_equal(square, reference(image(*size), 32))


def test_a_image_of_the_right_size_is_left_alone() -> None:
    assert np.array_equal(to_square(image(32, 32), 32), np.asarray(image(32, 32)))


def test_squash_keeps_the_edges() -> None:
    whole = np.zeros((40, 80, 3), np.uint8)
    whole[:, :20] = 255  # cut off by a centre crop
    assert to_square(Image.fromarray(whole), 32, "squash")[:, 0].min() == 255
    assert to_square(Image.fromarray(whole), 32, "shortest")[:, 2:].max() < 60


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_any_mode_becomes_rgb(mode: str) -> None:
    assert to_square(image(40, 50).convert(mode), 32).shape == (32, 32, 3)


def test_preprocessing_goes_through_json() -> None:
    preprocess = Preprocess(image_size=96, mean=(0.1, 0.2, 0.3), resize="squash")
    assert Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict()))) == preprocess
    with pytest.raises(UserError, match="zoom"):
        Preprocess.from_dict({**preprocess.to_dict(), "zoom": 2})
    with pytest.raises(UserError, match="mean"):
        Preprocess.from_dict({"image_size": 32})


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_001), (2_000_000, 1), (3, 50_000)])
def test_a_line_needs_no_more_memory_than_a_image(size: tuple[int, int]) -> None:
    square = to_square(Image.new("RGB", size, (10, 200, 30)), 64)
    assert square.shape == (64, 64, 3)
    assert np.abs(square.astype(int) - (10, 200, 30)).max() <= 1


@pytest.mark.parametrize("size", [(17, 1000), (1000, 17), (1001, 20), (40, 641)])
def test_the_middle_of_a_very_long_image_is_that_of_the_whole(size: tuple[int, int]) -> None:
    slope = np.indices(size[::-1]).sum(axis=0) * 255 / sum(size)
    long = Image.fromarray(slope.astype(np.uint8)).convert("RGB")
    assert np.abs(to_square(long, 32).astype(int) - reference(long, 32)).max() <= 2


@pytest.mark.parametrize(
    "change",
    [
        {"image_size": "96"}, {"image_size": 96.0}, {"image_size": True}, {"image_size": 0}, {"image_size": None},
        {"mean": [0.5]}, {"mean": 0.5}, {"mean": ["a", "b", "c"]}, {"std": [1, 1, 0]}, {"std": [1, 1, float("nan")]},
        {"std": [1, 1, 10**400]}, {"resize": "zoom"}, {"resize": ["shortest"]}, {"resize": None},
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_meant_is_one_line(change: dict[str, object]) -> None:
    values = {**Preprocess(image_size=96).to_dict(), **change}
    with pytest.raises(UserError, match=next(iter(change))) as caught:
        Preprocess.from_dict(values)
    assert "\n" not in str(caught.value)
