"""Sample and Source: what every source of data provides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from m1clip.data.images import ImageRef
from m1clip.errors import UserError

SPLITS = ("train", "val", "test")


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


class Source:
    """A dataset: samples in named splits, which subclasses put into `by_split`."""

    class_captions = False  # whether captions are made from class names

    def __init__(self, name: str, paths: Sequence[Path] = ()) -> None:
        self.name, self.paths = name, tuple(paths)  # for messages; of its files or folders
        self.notes: list[str] = []  # for the user, about how the data was read
        self.problems: list[Problem] = []  # what was skipped
        self.by_split: dict[str, list[Sample]] = {}

    def splits(self) -> tuple[str, ...]:
        """The splits that hold at least one sample: train, val, test, then others by name."""
        return tuple(
            sorted(self.by_split, key=lambda name: (SPLITS.index(name) if name in SPLITS else len(SPLITS), name))
        )

    def samples(self, split: str) -> Sequence[Sample]:
        """All samples of a split, in an order that depends only on the data."""
        if split not in self.by_split:
            raise UserError(f"{self.name}: no split {split!r}; it has {', '.join(self.splits())}")
        return self.by_split[split]

    def origin(self, id_: str, caption: int = 0) -> str:
        """The file and row of a caption."""
        return id_
