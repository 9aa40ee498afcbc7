"""Inputs of both sides: weights, images and sentences generated from their names. NumPy only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

TEXTS = [
    "a photo of a cat",
    "Two dogs -- running, on the BEACH at 7:30!",
    "naïve café & façade ☕",
    "x" * 400,
    "",
]
SIZES = [(224, 224), (300, 200), (199, 331), (97, 64), (640, 481), (225, 1000)]  # (width, height)
LOGIT_SCALE, LOGIT_BIAS = 3.25, -9.5


def uniform(key: str, count: int) -> np.ndarray:
    """(count,) float32 in [-1, 1): a hash of key and position, independent of library versions."""
    start = np.uint64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23)) - np.float32(1)


def tensor(name: str, shape: Sequence[int]) -> np.ndarray:
    """A weight; no bias is zero and no norm is one, so that swapped tensors are detected."""
    if list(shape) in ([], [1]):
        return np.full(shape, LOGIT_SCALE if "scale" in name else LOGIT_BIAS, np.float32)
    values = uniform(name, math.prod(shape)).reshape(tuple(shape))
    is_norm = len(shape) == 1 and name.endswith("weight")
    if len(shape) == 1:
        return 0.1 * values + np.float32(is_norm)
    embedding = "embedding" in name and "patch" not in name
    if name.endswith(("pos_embed", "latent", "probe")):
        return values * np.float32(0.5)
    scale = 0.05 if embedding else math.sqrt(3 / math.prod(shape[1:]))
    return values * np.float32(scale)


def images() -> list[Image.Image]:
    """Smooth images of odd sizes."""
    made = []
    for width, height in SIZES:
        coarse = (uniform(f"{width}x{height}", 9 * 7 * 3).reshape(9, 7, 3) * 127 + 128).astype(
            np.uint8
        )
        made.append(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return made
