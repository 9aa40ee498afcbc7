"""From a picture to the square of pixels that the image tower was made for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from m1clip.errors import UserError

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Kept in the model folder, so that a picture is seen at use as it was in training."""

    image_size: int
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD
    resize: Literal["shortest", "squash"] = "shortest"  # shortest side then centre crop, or the whole picture

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocess:
        """The inverse of `to_dict`."""
        try:
            triples = {name: tuple(values[name]) for name in ("mean", "std")}
            return cls(**{**values, **triples})
        except (TypeError, KeyError) as error:
            raise UserError(f"preprocessing has a missing or unknown key: {error}") from None


def to_square(picture: Image.Image, size: int, resize: str = "shortest") -> np.ndarray:
    """(size, size, 3) uint8, as open_clip does it: bicubic, shortest side to `size`, centre crop."""
    picture = picture.convert("RGB")
    width, height = picture.size
    if resize == "squash":
        picture = picture.resize((size, size), Image.Resampling.BICUBIC)
    elif (width, height) != (size, size):
        scale = size / min(width, height)
        wide, high = (size, int(height * scale)) if width <= height else (int(width * scale), size)
        picture = picture.resize((max(wide, size), max(high, size)), Image.Resampling.BICUBIC)
        left, top = round((picture.width - size) / 2), round((picture.height - size) / 2)
        picture = picture.crop((left, top, left + size, top + size))
    return np.asarray(picture)
