"""Pillow's resampling as matmuls: a GPU makes the same squares of decoded images as `to_square`.

A pass of Pillow's resampling is a weighted sum along one axis, rounded to 8 bits: the product of
the pixels with a matrix of weights. Tensor cores compute both passes in a fraction of the time of
torch's own `interpolate`, which rounds only at the end. Some high images differ, for which Pillow
makes the vertical pass first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from m1clip.data.images import BILINEAR, square_geometry
from m1clip.formatting import ceil_div

WEIGHT_UNITS = 2.0**22  # Pillow's weights are multiples of its inverse
CUBIC_SLOPE = -0.5  # Pillow's parameter of bicubic interpolation
# Matrices of weights on the device, each up to 1 MB for a photo of 1,000 pixels: photos of one
# source have a few sizes.
KEPT_WEIGHTS = 256
ALIGNMENT = 8  # of the numbers in a line, without which a matmul takes five times as long


class Weights(NamedTuple):
    """What a pass along one axis multiplies pixels `first` to `last` with."""

    first: int
    last: int
    matrix: Tensor  # (pixels, outputs), with rows of zeros at the end


def squares(images: Sequence[Tensor], side: int, resize: str) -> Tensor:
    """(n, side, side, 3) uint8 of decoded images (3, height, width), as `to_square` makes them.

    Images of one size are resized together.
    """
    by_size: dict[torch.Size, list[int]] = {}
    for index, image in enumerate(images):
        by_size.setdefault(image.shape, []).append(index)
    groups = [
        _resized_together([images[index] for index in indices], side, resize)
        for indices in by_size.values()
    ]
    if len(groups) == 1:
        return groups[0]
    order = np.argsort([index for indices in by_size.values() for index in indices])
    return torch.cat(groups)[torch.from_numpy(order).to(images[0].device)]


def _resized_together(images: list[Tensor], side: int, resize: str) -> Tensor:
    """(n, side, side, 3) uint8 of images of one size."""
    count, (height, width), device = len(images), images[0].shape[1:], images[0].device
    wide, high, left, top = square_geometry(width, height, side, resize)
    bilinear = resize.endswith(BILINEAR)
    horizontal = _weights(width, wide, left, side, bilinear, device)
    vertical = _weights(height, high, top, side, bilinear, device)
    if device.type == "cuda":  # each thread has a stream, and another one may evict the weights
        stream = torch.cuda.current_stream(device)
        horizontal.matrix.record_stream(stream)
        vertical.matrix.record_stream(stream)
    used = torch.stack(images)[
        :, :, vertical.first : vertical.last, horizontal.first : horizontal.last
    ]
    rows, columns = used.shape[2:]
    # (rows, n, 3, columns): each pass is one matmul, the second one from the left
    shape = (len(vertical.matrix), count, 3, len(horizontal.matrix))
    pixels = torch.zeros(shape, dtype=horizontal.matrix.dtype, device=device)
    pixels[:rows, ..., :columns] = used.permute(2, 0, 1, 3)
    shrunk = _to_bytes(_product(pixels.flatten(end_dim=2), horizontal.matrix))
    by_row = shrunk.to(pixels.dtype).reshape(len(vertical.matrix), count * 3 * side)
    resized = _to_bytes(_product(vertical.matrix.T, by_row))
    # (side, n, 3, side) -> (n, side, side, 3)
    return resized.reshape(side, count, 3, side).permute(1, 0, 3, 2).contiguous()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A matmul; of float16 in float32."""
    if left.dtype == torch.float16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def _to_bytes(values: Tensor) -> Tensor:
    """Bytes of new values. Halves are rounded up, as by Pillow."""
    return values.add_(0.5).clamp_(0, 255).to(torch.uint8)


@lru_cache(KEPT_WEIGHTS)
def _weights(
    length: int, resized: int, start: int, count: int, bilinear: bool, device: torch.device
) -> Weights:
    """The weights of the pixels `start` to `start + count` of a line of `length` that is resized.

    In float16 on CUDA, where the sums are computed in float32; exact elsewhere.
    """
    weights = _pillow_weights(length, resized, bilinear)[:, start : start + count]
    used = np.flatnonzero(weights.any(axis=1))
    first, last = int(used[0]), int(used[-1]) + 1
    dtype = torch.float16 if device.type == "cuda" else torch.float64
    padded = torch.zeros(ALIGNMENT * ceil_div(last - first, ALIGNMENT), count, dtype=torch.float64)
    padded[: last - first] = torch.from_numpy(weights[first:last])
    return Weights(first, last, padded.to(device, dtype))


def _pillow_weights(length: int, resized: int, bilinear: bool) -> np.ndarray:
    """(length, resized) what each pixel of a line contributes to each one of the resized line."""
    scale = length / resized
    filter_scale = max(scale, 1.0)
    support = (1.0 if bilinear else 2.0) * filter_scale
    centers = (np.arange(resized) + 0.5) * scale
    first = np.maximum(0, (centers - support + 0.5).astype(np.int64))
    last = np.minimum(length, (centers + support + 0.5).astype(np.int64))
    pixels = np.arange(length)[:, None]
    distance = np.abs((pixels - centers + 0.5) * (1.0 / filter_scale))
    weights = _linear(distance) if bilinear else _cubic(distance)
    weights[(pixels < first) | (pixels >= last)] = 0
    weights /= weights.sum(axis=0)
    return np.floor(weights * WEIGHT_UNITS + 0.5) / WEIGHT_UNITS


def _linear(distance: np.ndarray) -> np.ndarray:
    return np.maximum(1 - distance, 0.0)


def _cubic(distance: np.ndarray) -> np.ndarray:
    x, a = distance, CUBIC_SLOPE
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
