"""Squares of decoded images by matmuls: equal to those of Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image

from m1clip.data.images import to_square
from m1clip.data.resample import _to_bytes, _weights, squares

SIDE = 32
WIDE = ((50, 40), (67, 41), (50, 40), (32, 32), (60, 33), (31, 20), (500, 375))
# Not squashed, and of moderate height: else Pillow may make the vertical pass first.
HIGH = ((41, 67), (20, 31), (375, 500))


def noise(sizes: tuple[tuple[int, int], ...]) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, (height, width, 3), np.uint8) for width, height in sizes]


def planes(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1).contiguous()


@pytest.mark.parametrize(
    "resize",
    [
        "shortest",
        "shortest-floor",
        "squash",
        "shortest-bilinear",
        "shortest-floor-bilinear",
        "squash-bilinear",
    ],
)
def test_squares_equal_those_of_pillow(resize: str) -> None:
    """Of noise, the hardest case; sizes are mixed, and one is repeated."""
    images = noise(WIDE if resize.startswith("squash") else WIDE + HIGH)
    made = squares([planes(image) for image in images], SIDE, resize).numpy()
    for square, image in zip(made, images, strict=True):
        np.testing.assert_array_equal(square, to_square(Image.fromarray(image), SIDE, resize))


def test_float16_weights_of_cuda_differ_by_rounding_only() -> None:
    (image,) = noise(((500, 375),))
    exact = _weights(500, 298, 37, 224, False, torch.device("cpu"))
    lines = planes(image).reshape(-1, 500)[:, exact.first : exact.last].double()
    matrix = exact.matrix[: exact.last - exact.first]
    expected = _to_bytes(lines @ matrix).int()
    difference = (_to_bytes(lines.float() @ matrix.half().float()).int() - expected).abs()
    assert difference.max() <= 1
    assert 0 < (difference > 0).float().mean() < 0.04


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_squares_on_cuda_differ_by_rounding_only() -> None:
    images = noise(WIDE + HIGH)
    made = squares([planes(image).cuda() for image in images], SIDE, "shortest").cpu().numpy()
    for square, image in zip(made, images, strict=True):
        difference = np.abs(square.astype(int) - to_square(Image.fromarray(image), SIDE))
        assert difference.max() <= 2
        assert (difference > 0).mean() < 0.06
