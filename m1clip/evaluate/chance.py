"""What a model that knows nothing would score, so that a number can be read against it."""

from __future__ import annotations

import torch
from torch import Tensor


def text_to_image_chance(k: int, n_images: int) -> float:
    """Probability that a random order of the pictures holds the one right picture in its first k."""
    return min(k, n_images) / n_images


def image_to_text_chance(k: int, captions: Tensor) -> float:
    """Probability that a random order of all captions holds one of the picture's own in its first k.

    captions: (n_images,) how many each picture has; averaged over the pictures that have any.
    """
    n_texts = int(captions.sum())
    counts, weight = _caption_counts(captions)
    drawn = torch.arange(min(k, n_texts), dtype=torch.float64)
    # Hypergeometric: draw k captions without putting back and miss every own one, draw by draw.
    miss = ((n_texts - counts[:, None] - drawn) / (n_texts - drawn)).clamp(min=0).prod(dim=1)
    return float(((1 - miss) * weight).sum())


def text_to_image_median_chance(n_images: int) -> float:
    """Median rank of the right picture in a random order."""
    return (n_images + 1) / 2


def image_to_text_median_chance(captions: Tensor) -> float:
    """Median best rank of a picture's own captions in a random order: the first k with chance >= 1/2."""
    low, high = 1, int(captions.sum())
    while low < high:
        middle = (low + high) // 2
        if image_to_text_chance(middle, captions) >= 0.5:
            high = middle
        else:
            low = middle + 1
    return float(low)


def _caption_counts(captions: Tensor) -> tuple[Tensor, Tensor]:
    """The different numbers of captions and the share of pictures that have each."""
    counts, pictures = captions[captions > 0].cpu().unique(return_counts=True)
    return counts.double(), pictures.double() / pictures.sum()
