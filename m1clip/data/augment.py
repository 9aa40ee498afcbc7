"""Crop, resize, flip, colour: for a whole batch at once, on the training device, the same for a sample each time.

Cropping, resizing (antialiased) and flipping are linear in the pixels and separable, so one batch is two small
batched matrix products, with a matrix for each sample that holds its own box.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m1clip.data import randomness as rnd
from m1clip.data.preprocess import Preprocess


@dataclass(frozen=True)
class Augmentation:
    """What is varied, and by how much."""

    crop_min: float = 1.0  # smallest share of the area that a crop keeps
    flip: float = 0.0  # probability
    colour: float = 0.0  # brightness and contrast between 1 - colour and 1 + colour


@dataclass(frozen=True)
class Views:
    """The random choices for one batch, one number a sample: small, and made by the loader."""

    boxes: np.ndarray  # (n, 4) float32: left, top, width, height as shares of the side
    flips: np.ndarray  # (n,) bool
    gains: np.ndarray  # (n, 2) float32: brightness, contrast


def draw_views(augmentation: Augmentation, seed: int, epoch: int, samples: np.ndarray) -> Views:
    """Choices for each sample, from (seed, epoch, sample) alone."""

    def u(stream: int) -> np.ndarray:
        return rnd.uniform(seed, epoch, samples, stream)

    area = augmentation.crop_min + (1 - augmentation.crop_min) * u(rnd.CROP_AREA)
    stretch = np.exp((2 * u(rnd.CROP_ASPECT) - 1) * np.log(4 / 3)) if augmentation.crop_min < 1 else 1.0
    width = np.minimum(np.sqrt(area * stretch), 1.0)
    height = np.minimum(np.sqrt(area / stretch), 1.0)
    left, top = u(rnd.CROP_X) * (1 - width), u(rnd.CROP_Y) * (1 - height)
    gains = 1 + augmentation.colour * (2 * np.stack([u(rnd.BRIGHTNESS), u(rnd.CONTRAST)], axis=1) - 1)
    boxes = np.stack([left, top, width, height], axis=1)
    return Views(boxes.astype(np.float32), u(rnd.FLIP) < augmentation.flip, gains.astype(np.float32))


def render(pixels: Tensor, views: Views | None, preprocess: Preprocess) -> Tensor:
    """(n, side, side, 3) uint8 -> (n, 3, size, size) float32, cropped, resized, coloured and normalised."""
    size, device = preprocess.image_size, pixels.device
    x = pixels.permute(0, 3, 1, 2).float()  # (n, 3, side, side)
    if views is None and x.shape[-1] != size:  # decoded with a margin for crops: show the whole picture
        views = _whole(len(x))
    if views is not None:
        boxes = torch.from_numpy(views.boxes).to(device)
        flips = torch.from_numpy(views.flips).to(device)
        moved = x.shape[-1] != size or bool((views.boxes[:, 2:] != 1).any()) or bool(views.flips.any())
        if moved:
            across = _resampler(boxes[:, 0], boxes[:, 2], flips, x.shape[3], size)  # (n, size, side)
            down = _resampler(boxes[:, 1], boxes[:, 3], torch.zeros_like(flips), x.shape[2], size)
            x = down[:, None] @ (x @ across.transpose(1, 2)[:, None])
    mean = torch.tensor(preprocess.mean, device=device).view(1, 3, 1, 1)
    std = torch.tensor(preprocess.std, device=device).view(1, 3, 1, 1)
    x = x / 255
    if views is not None and bool((views.gains != 1).any()):
        gains = torch.from_numpy(views.gains).to(device).view(-1, 2, 1, 1, 1)
        x = x * gains[:, 0]
        middle = x.mean(dim=(1, 2, 3), keepdim=True)
        x = ((x - middle) * gains[:, 1] + middle).clamp(0, 1)
    return (x - mean) / std


def _whole(count: int) -> Views:
    """The view of each picture that changes nothing but its size."""
    boxes = np.tile(np.array([0, 0, 1, 1], np.float32), (count, 1))
    return Views(boxes, np.zeros(count, bool), np.ones((count, 2), np.float32))


def _resampler(start: Tensor, extent: Tensor, flip: Tensor, side: int, size: int) -> Tensor:
    """(n, size, side) rows of weights: a triangle filter as wide as one output pixel, at least one input pixel."""
    step = extent * side / size  # input pixels for one output pixel
    centres = (torch.arange(size, device=start.device) + 0.5) * step[:, None] + (start * side)[:, None]
    centres = torch.where(flip[:, None], centres.flip(1), centres)
    inputs = torch.arange(side, device=start.device) + 0.5
    support = step.clamp(min=1.0)[:, None, None]
    weights = (1 - (centres[:, :, None] - inputs).abs() / support).clamp(min=0)
    return weights / weights.sum(dim=2, keepdim=True)
