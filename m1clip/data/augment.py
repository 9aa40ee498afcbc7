"""Crop, resize, flip and color jitter of a batch on the training device; a function of (seed, epoch, sample).

Cropping, resizing (antialiased) and flipping are linear in the pixels and separable, so one batch
is two small batched matrix products, with one matrix per sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1clip.data import randomness as rnd
from m1clip.data.images import Preprocess
from m1clip.losses.positives import partners

MAX_BOX_AREA = 0.5  # of a box of another image
MILD_CROP_MIN = 0.8  # minimum area fraction of a crop in the last steps


@dataclass(frozen=True)
class Augmentation:
    crop_min: float = 1.0  # minimum area fraction of a crop
    flip: float = 0.0  # probability
    color_jitter: float = 0.0  # brightness and contrast between 1 - this and 1 + this
    patch_dropout: float = 0.0  # fraction of patches dropped
    word_dropout: float = 0.0  # fraction of caption tokens dropped
    cutmix: float = 0.0  # probability that an image gets a box of its partner in the batch

    def milder(self) -> Augmentation:
        """The augmentation of the last steps: more like what the model will be used with."""
        crop_min = max(self.crop_min, MILD_CROP_MIN)
        return replace(self, crop_min=crop_min, word_dropout=0.0, cutmix=0.0)


def draw_views(
    augmentation: Augmentation, seed: int, epoch: int, samples: np.ndarray
) -> Tensor | None:
    """(n, 7) float32, the random view of each image: left, top, width, height, flipped, brightness, contrast.

    The box is in fractions of the side. A view is a function of (seed, epoch, sample); None if all
    are complete.
    """
    if augmentation.crop_min == 1 and augmentation.flip == augmentation.color_jitter == 0:
        return None

    def u(stream: int) -> np.ndarray:
        return rnd.uniform(seed, epoch, samples, stream)

    area = augmentation.crop_min + (1 - augmentation.crop_min) * u(rnd.CROP_AREA)
    stretch = (
        np.exp((2 * u(rnd.CROP_ASPECT) - 1) * np.log(4 / 3)) if augmentation.crop_min < 1 else 1.0
    )
    width = np.minimum(np.sqrt(area * stretch), 1.0)
    height = np.minimum(np.sqrt(area / stretch), 1.0)
    left, top = u(rnd.CROP_X) * (1 - width), u(rnd.CROP_Y) * (1 - height)
    brightness, contrast = (
        1 + augmentation.color_jitter * (2 * u(s) - 1) for s in (rnd.BRIGHTNESS, rnd.CONTRAST)
    )
    flips = u(rnd.FLIP) < augmentation.flip
    return torch.from_numpy(
        np.stack([left, top, width, height, flips, brightness, contrast], 1).astype(np.float32)
    )


def draw_patches(
    dropout: float, count: int, seed: int, epoch: int, samples: np.ndarray
) -> np.ndarray:
    """(n, kept) of `count` patches for each sample, sorted, as a function of (seed, epoch, sample)."""
    kept_count = max(1, round(count * (1 - dropout)))
    draws = rnd.bits(seed, epoch, samples[:, None] * count + np.arange(count), rnd.PATCH)
    return np.sort(np.argsort(draws, axis=1)[:, :kept_count], axis=1)


def draw_boxes(cutmix: float, seed: int, epoch: int, samples: np.ndarray) -> Tensor:
    """(n, 4) float32: left, top, right and bottom of a box in each image, in fractions of the side.

    Its area is uniform up to `MAX_BOX_AREA`, and what is outside of the image is cut off. The box of
    an image is a function of (seed, epoch, sample); empty without one.
    """

    def u(stream: int) -> np.ndarray:
        return rnd.uniform(seed, epoch, samples, stream)

    half_side = np.sqrt(MAX_BOX_AREA * u(rnd.MIX_AREA)) / 2 * (u(rnd.MIX) < cutmix)
    x, y = u(rnd.MIX_X), u(rnd.MIX_Y)
    edges = np.stack([x - half_side, y - half_side, x + half_side, y + half_side], 1)
    return torch.from_numpy(edges.clip(0, 1).astype(np.float32))


def box_areas(boxes: Tensor) -> Tensor:
    """(n,) the part of each image that its box covers."""
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def paste_boxes(images: Tensor, boxes: Tensor) -> Tensor:
    """(n, 3, size, size) images with boxes of their partners; the first row is an even one of its batch."""
    size = images.shape[2]
    centers = (torch.arange(size, device=images.device) + 0.5) / size
    left, top, right, bottom = boxes[:, :, None].unbind(1)  # (n, 1) each
    across = (centers >= left) & (centers < right)
    down = (centers >= top) & (centers < bottom)
    inside = down[:, None, :, None] & across[:, None, None, :]
    return torch.where(inside, images[partners(len(images), images.device)], images)


def render(pixels: Tensor, views: Tensor | None, preprocess: Preprocess) -> Tensor:
    """(n, side, side, 3) uint8 -> (n, 3, size, size) float32: cropped, resized, recolored and normalized.

    `views` are those of `draw_views`; None shows each image in full. Under autocast the two
    products run in its precision, whose rounding error is similar to that of 8-bit pixels.
    """
    constants = (lambda function, *of: function(*of)) if pixels.device.type == "cpu" else _sent
    if views is None and pixels.shape[1] == preprocess.image_size:
        # One pass over rows of pixels; the channels stay last in memory, as convolutions want them.
        scale, shift = constants(_scale_and_shift, preprocess, pixels.device)
        rows = torch.addcmul(shift, pixels.flatten(2).float(), scale)
        return rows.view(pixels.shape).permute(0, 3, 1, 2)
    x = pixels.permute(0, 3, 1, 2).contiguous()  # (n, 3, side, side), while they are bytes
    complete = torch.tensor([0.0, 0, 1, 1, 0]).repeat(len(x), 1)
    x = (
        _resample(
            x, (complete if views is None else views).to(x.device), preprocess.image_size
        ).float()
        / 255
    )
    if views is not None:
        brightness, contrast = views[:, 5:].to(x.device).view(-1, 2, 1, 1, 1).unbind(1)
        middle = x.mean(dim=(1, 2, 3), keepdim=True)
        # ((x * b) - (middle * b)) * c + middle * b, in one pass over the pixels
        x = x.mul_(brightness * contrast).add_(middle * brightness * (1 - contrast)).clamp_(0, 1)
    return x.sub_(constants(_channels, preprocess.mean, x.device)).div_(
        constants(_channels, preprocess.std, x.device)
    )


def _channels(values: tuple[float, float, float], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(1, 3, 1, 1)


def _scale_and_shift(preprocess: Preprocess, device: torch.device) -> tuple[Tensor, Tensor]:
    """(size * 3,) each: bytes of a row of pixels times the first plus the second are normalized."""
    both = torch.tensor([preprocess.mean, preprocess.std], device=device)
    mean, std = both.repeat(1, preprocess.image_size)
    return 1 / (255 * std), -mean / std


@functools.lru_cache(maxsize=8)
def _sent(function: Callable[..., Any], *of: Any) -> Any:
    """Constants that are copied to a device once: a copy synchronizes, and cannot be part of a CUDA graph."""
    return function(*of)


def _resample(x: Tensor, views: Tensor, size: int) -> Tensor:
    """(n, 3, side, side) uint8 -> (n, 3, size, size): crop, resize and flip as a product from each side."""
    n, _, side, _ = x.shape
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    left, top, width, height, flips = views[:, :5].unbind(1)
    across = _resampler(left, width, flips > 0, side, size).to(dtype)  # (n, size, side)
    down = _resampler(top, height, torch.zeros_like(flips, dtype=torch.bool), side, size).to(dtype)
    # One product for all three channels, without a copy of the matrix for each.
    wide = torch.bmm(x.to(dtype).view(n, 3 * side, side), across.transpose(1, 2)).view(
        n, 3, side, size
    )
    return torch.stack([torch.bmm(down, wide[:, channel]) for channel in range(3)], dim=1)


def _resampler(start: Tensor, extent: Tensor, flip: Tensor, side: int, size: int) -> Tensor:
    """(n, size, side) weights of a triangle filter as wide as one output pixel, at least one input pixel."""
    step = extent * side / size  # input pixels for one output pixel
    centers = (torch.arange(size, device=start.device) + 0.5) * step[:, None] + (start * side)[
        :, None
    ]
    centers = torch.where(flip[:, None], centers.flip(1), centers)
    inputs = torch.arange(side, device=start.device) + 0.5
    support = step.clamp(min=1.0)[:, None, None]
    weights = (1 - (centers[:, :, None] - inputs).abs() / support).clamp(min=0)
    return weights / weights.sum(dim=2, keepdim=True)
