"""Vectors of every image and caption of a split."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from m1clip.data.prepare import Split
from m1clip.inference.model import Array, Model


class SplitFeatures(NamedTuple):
    """Unit vectors of a split, with what belongs together."""

    image: np.ndarray  # (images, d) float32
    text: np.ndarray  # (captions, d) float32
    image_index: np.ndarray  # (captions,) the image that each caption describes
    caption_ids: np.ndarray  # (captions,) equal captions have equal ids
    labels: np.ndarray | None  # (images,) the class, for class folders


def encode_split(
    model: Model,
    split: Split,
    image_rows: int | None = None,
    part: tuple[int, int] = (0, 1),
    gather: Callable[[Array], Array] = lambda rows: rows,
) -> SplitFeatures:
    """Encode every image and every caption of a split, or of its first `image_rows`.

    With part (r, n), encodes the r-th of n parts; `gather` then concatenates those of all.
    """
    captions = split.captions
    image_rows = len(split.images) if image_rows is None else image_rows
    rank, size = part
    image_part, text_part = (
        range(total * rank // size, total * (rank + 1) // size)
        for total in (image_rows, int(captions.first[image_rows]))
    )
    image = np.asarray(gather(model.encoder.split_images(split, image_part)))
    text = np.asarray(gather(model.encoder.captions(captions, text_part)))
    return SplitFeatures(
        image,
        text,
        captions.image_index[: len(text)],
        captions.caption_ids[: len(text)],
        None if captions.labels is None else captions.labels[: len(image)],
    )
