"""Sample and Source: what every source of data provides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image


class ImageRef(Protocol):
    """An image not yet decoded. It must pickle, because worker processes receive it."""

    def open(self, want: int | None = None) -> Image.Image:
        """Decode to RGB; `want` is the short side wanted, so that JPEG may be decoded smaller."""

    def read(self) -> bytes:
        """The encoded bytes; BadImage if they cannot be read."""

    def stamp(self) -> str:
        """What identifies the content (name, size, time), for the key of a cache."""

    def __str__(self) -> str:
        """Where it is, for messages: the file, or the shard and member, or the row."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One image with every caption that describes it. `id` is unique within the source."""

    image: ImageRef
    captions: tuple[str, ...]
    id: str


def identities(samples: Sequence[Sample]) -> np.ndarray:
    """(n,) int64: the index of the first sample with the same image."""
    first: dict[ImageRef, int] = {}
    numbers = np.arange(len(samples))
    for place, sample in enumerate(samples):
        try:
            numbers[place] = first.setdefault(sample.image, place)
        except TypeError:  # not hashable: taken for an image of its own
            continue
    return numbers


class Source(Protocol):
    """A set of samples with named splits ("train", "val", "test")."""

    def splits(self) -> tuple[str, ...]:
        """The names of the splits that hold at least one sample."""

    def samples(self, split: str) -> Sequence[Sample]:
        """All samples of a split, in an order that depends on the data alone."""
