"""From a picture to the square of pixels that the image tower was made for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from m1clip.errors import UserError
from m1clip.plain import check_limits, checked

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
# Beyond this the ends are cut off before resizing: a line of 60,000 x 1 would become 13 million pixels wide.
MAX_ASPECT = 16


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Kept in the model folder, so that a picture is seen at use as it was in training."""

    image_size: int
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD
    # Shortest side then centre crop, or the whole picture. An odd margin is halved as torchvision and open_clip do, or
    # ("-floor") as transformers does: a picture then moves by one pixel.
    resize: Literal["shortest", "shortest-floor", "squash"] = "shortest"

    def __post_init__(self) -> None:
        check_limits(self, "preprocessing: ")
        if self.image_size < 1:
            raise UserError(f"preprocessing: image_size must be at least 1, not {self.image_size}")
        if min(self.std) <= 0:
            raise UserError(f"preprocessing: std must be above 0, not {self.std}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocess:
        """The inverse of `to_dict`; a key or a value that cannot be meant is an error, never a guess."""
        return cls(**checked(cls, values, "preprocessing"))


def to_square(picture: Image.Image, size: int, resize: str = "shortest") -> np.ndarray:
    """(size, size, 3) uint8, as open_clip does it: bicubic, shortest side to `size`, centre crop."""
    # Cut before anything else: each copy of a picture of 1 x 60,000,000 takes 700 MB.
    picture = (picture if resize == "squash" else _without_ends(picture)).convert("RGB")
    width, height = picture.size
    if resize == "squash":
        picture = picture.resize((size, size), Image.Resampling.BICUBIC)
    elif (width, height) != (size, size):
        # In this order, as torchvision does: a scale computed first is now and then one pixel short.
        wide, high = (
            (size, int(size * height / width)) if width <= height else (int(size * width / height), size)
        )
        picture = picture.resize((max(wide, size), max(high, size)), Image.Resampling.BICUBIC)
        left, top = ((whole - size) / 2 for whole in picture.size)
        left, top = (int(left), int(top)) if resize == "shortest-floor" else (round(left), round(top))
        picture = picture.crop((left, top, left + size, top + size))
    return np.asarray(picture)


def _without_ends(picture: Image.Image) -> Image.Image:
    """The middle of a very long picture; any other picture as it is."""
    width, height = picture.size
    limit = MAX_ASPECT * min(width, height)
    if max(width, height) <= limit:
        return picture
    # An even number of pixels goes, half from each end, so that the centre stays where it was.
    cut_x, cut_y = max(0, width - limit) // 2, max(0, height - limit) // 2
    return picture.crop((cut_x, cut_y, width - cut_x, height - cut_y))
