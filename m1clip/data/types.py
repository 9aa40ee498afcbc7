"""Sample and Source: what every source of data provides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image


class ImageRef(Protocol):
    """An image that is not yet decoded. Must be hashable, and picklable for worker processes."""

    def open(self, want: int | None = None) -> Image.Image:
        """Decode to RGB; `want` is the short side wanted, so that JPEG may be decoded smaller."""

    def read(self) -> bytes:
        """The encoded bytes; BadImage if they cannot be read."""

    def stamp(self) -> str:
        """Identifies the content (name, size, time), for cache keys."""

    def __str__(self) -> str:
        """Where it is, for messages: the file, or the shard and member, or the row."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One image with every caption that describes it. `id` is unique within the source."""

    image: ImageRef
    captions: tuple[str, ...]
    id: str


def sample_ids_of(samples: Sequence[Sample]) -> np.ndarray:
    """(n,) int64: the index of the first sample with the same image."""
    first: dict[ImageRef, int] = {}
    return np.array([first.setdefault(sample.image, place) for place, sample in enumerate(samples)], np.int64)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that was skipped: the file and row, what is wrong, and the kind of problem."""

    where: str
    what: str
    kind: str = "row"

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Source(Protocol):
    """A dataset: samples in named splits ("train", "val", "test")."""

    @property
    def name(self) -> str:
        """For messages: the path."""

    @property
    def class_captions(self) -> bool:
        """Whether the captions are made from class names."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user about how the data was read."""

    @property
    def problems(self) -> Sequence[Problem]:
        """What was skipped."""

    def splits(self) -> tuple[str, ...]:
        """The names of the splits that hold at least one sample."""

    def samples(self, split: str) -> Sequence[Sample]:
        """All samples of a split, in an order that depends only on the data."""

    def origin(self, id_: str, caption: int = 0) -> str:
        """The file and row of a caption."""
