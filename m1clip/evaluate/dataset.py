"""Features of a whole split: every picture once, every caption once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from m1clip.data.augment import render
from m1clip.data.captions import CaptionTable
from m1clip.data.preprocess import Preprocess
from m1clip.data.store import Pictures
from m1clip.features.tables import FeatureCaptions, FeaturePictures
from m1clip.model.clip import Clip


class Features(NamedTuple):
    """Features of a split on the CPU, in the order in which `held_out` takes them."""

    image: Tensor  # (images, d)
    text: Tensor  # (captions, d)
    owner: Tensor  # (captions,) the image that each caption describes
    keys: Tensor  # (captions,) equal captions have equal keys
    labels: Tensor | None  # (images,) the class, for class folders


@torch.inference_mode()
def encode_split(
    model: Clip, pictures: Pictures, captions: CaptionTable, preprocess: Preprocess, batch: int,
    autocast: Callable[[], AbstractContextManager[object]], images: int | None = None,
) -> Features:  # fmt: skip
    """Every image and every caption of a split, or of its first `images`."""
    images = len(pictures) if images is None else images
    texts = int(captions.first[images])
    training, device = model.training, model.logit_scale.device
    model.eval()
    image, text = [], []
    with autocast():
        for indices in _chunks(images, batch):
            seen = (
                pictures.features(indices)
                if isinstance(pictures, FeaturePictures)
                else pictures.read(indices)
            )
            pixels = torch.from_numpy(seen).to(device)
            image.append(model.encode_image(render(pixels, None, preprocess)).cpu())
        # Sorted by length, so that short captions are not padded to the longest of the set.
        order = np.argsort(captions.lengths[:texts], kind="stable")
        for indices in _chunks(len(order), 4 * batch):
            text.append(model.encode_text(torch.from_numpy(_told(captions, order[indices])).to(device)).cpu())
    model.train(training)
    sorted_text = torch.cat(text)
    features = torch.empty_like(sorted_text)
    features[torch.from_numpy(order)] = sorted_text
    owner, keys = (torch.from_numpy(each[:texts]) for each in (captions.owner, captions.keys))
    labels = None if captions.labels is None else torch.from_numpy(captions.labels[:images])
    return Features(torch.cat(image), features, owner, keys, labels)


def _told(captions: CaptionTable, chosen: np.ndarray) -> np.ndarray:
    """Features of the captions where a tower has made them, else their tokens."""
    if isinstance(captions, FeatureCaptions):
        return captions.features(chosen)
    return captions.rows(chosen).astype(np.int64)


def _chunks(count: int, size: int) -> list[np.ndarray]:
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
