"""Features of a whole split: every picture once, every caption once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from m1clip.data.augment import render
from m1clip.data.captions import CaptionTable
from m1clip.data.preprocess import Preprocess
from m1clip.data.store import Pictures
from m1clip.features.tables import FeatureCaptions, FeaturePictures
from m1clip.model.clip import Clip


@torch.inference_mode()
def encode_split(
    model: Clip, pictures: Pictures, captions: CaptionTable, preprocess: Preprocess, batch: int,
    autocast: Callable[[], AbstractContextManager[object]],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(image features, text features, owner) of a split, on the CPU."""
    training, device = model.training, model.logit_scale.device
    model.eval()
    image, text = [], []
    with autocast():
        for indices in _chunks(len(pictures), batch):
            seen = (
                pictures.features(indices)
                if isinstance(pictures, FeaturePictures)
                else pictures.read(indices)
            )
            pixels = torch.from_numpy(seen).to(device)
            image.append(model.encode_image(render(pixels, None, preprocess)).cpu())
        # Sorted by length, so that short captions are not padded to the longest of the set.
        order = np.argsort(captions.lengths, kind="stable")
        for indices in _chunks(len(order), 4 * batch):
            text.append(model.encode_text(torch.from_numpy(_told(captions, order[indices])).to(device)).cpu())
    model.train(training)
    sorted_text = torch.cat(text)
    features = torch.empty_like(sorted_text)
    features[torch.from_numpy(order)] = sorted_text
    return torch.cat(image), features, torch.from_numpy(captions.owner)


def _told(captions: CaptionTable, chosen: np.ndarray) -> np.ndarray:
    """Features of the captions where a tower has made them, else their tokens."""
    if isinstance(captions, FeatureCaptions):
        return captions.features(chosen)
    return captions.rows(chosen).astype(np.int64)


def _chunks(count: int, size: int) -> list[np.ndarray]:
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
