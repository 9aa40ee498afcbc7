"""Sample and Source: what every source of data provides."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from m1clip.data.images import ImageRef
from m1clip.errors import UserError

SPLITS = ("train", "val", "test")
# Why something of a source was skipped. `data/lint.py` has the severity, message and hint of each.
ProblemKind = Literal[
    "unreadable",  # the default: a row, file or sample that is not as its format says
    "empty-caption",
    "no-image",
    "split-conflict",  # an image in a second split
    "unsafe-member",  # a file in a shard that a path outside of it names
    "shard",  # damaged from here on
]
PROBLEM_KINDS: tuple[ProblemKind, ...] = get_args(ProblemKind)


@dataclass(frozen=True, slots=True)
class Sample:
    """One image with every caption that describes it. `id` is unique within the source."""

    image: ImageRef
    captions: tuple[str, ...]
    id: str


def sample_ids_of(samples: Sequence[Sample]) -> np.ndarray:
    """(n,) int64: the index of the first sample with the same image."""
    first: dict[ImageRef, int] = {}
    return np.array(
        [first.setdefault(sample.image, index) for index, sample in enumerate(samples)], np.int64
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that was skipped: the file and row, what is wrong, and the kind of problem."""

    where: str
    message: str
    kind: ProblemKind = "unreadable"

    def __post_init__(self) -> None:
        # A kind without an entry in the table of lint would not be reported.
        if self.kind not in PROBLEM_KINDS:
            raise ValueError(f"{self.kind!r} is not one of {', '.join(PROBLEM_KINDS)}")

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class Source:
    """A dataset: samples in named splits, which subclasses put into `by_split`."""

    class_captions = False  # whether captions are made from class names
    item = "sample"  # what messages about problems call one entry, such as row
    streamed = False  # whether samples are read from shards when they are needed, never all at once
    threads = 0  # that read at a time; 0: as many as decode

    def __init__(self, name: str, paths: Sequence[Path] = ()) -> None:
        self.name, self.paths = name, tuple(paths)  # for messages; of its files or folders
        self.notes: list[str] = []  # for the user, about how the data was read
        self.problems: list[Problem] = []  # what was skipped
        self.caption_kinds: dict[str, int] = {}  # photos by where their captions are, if known
        self.by_split: dict[str, Any] = {}  # sequences of samples

    def splits(self) -> tuple[str, ...]:
        """The splits that hold at least one sample: train, val, test, then others by name."""
        return tuple(
            sorted(
                self.by_split,
                key=lambda name: (SPLITS.index(name) if name in SPLITS else len(SPLITS), name),
            )
        )

    def samples(self, split: str) -> Sequence[Sample]:
        """All samples of a split, in an order that depends only on the data."""
        if split not in self.by_split:
            others = ", ".join(self.splits())
            raise UserError(
                f"{self.name}: no split {split!r}; it has {others} (from a column split, or from"
                " the names of its files or folders)"
            )
        return self.by_split[split]

    def origin(self, id_: str, caption: int = 0) -> str:
        """The file and row of a caption."""
        return id_

    def category(self, id_: str) -> str:
        """The category of an image, which groups scores in an analysis; "" if the data has none."""
        return ""

    def pick(self, split: str, indices: Sequence[int]) -> list[Sample]:
        samples = self.samples(split)
        return [samples[index] for index in indices]

    def sampled(self, split: str) -> Sequence[Sample]:
        """Samples that stand for a split: all of them, or some of a streamed one."""
        return self.samples(split)

    def cached(self, split: str) -> list[Sample]:
        """The samples of a split that are to be cached: all of them, or an evaluation's share of a
        streamed one.
        """
        return list(self.samples(split))

    def caption_count(self) -> int:
        return sum(
            len(sample.captions) for split in self.splits() for sample in self.samples(split)
        )

    def fewest_captions(self, split: str) -> int:
        """The least number of captions that an image of a split has."""
        return min(len(sample.captions) for sample in self.samples(split))

    def fingerprint(self, samples: Sequence[Sample]) -> str:
        """Hash of the names and captions of some of its samples, in order."""
        digest = hashlib.sha256()
        for sample in samples:
            digest.update(
                "\x1f".join((sample.id, *sample.captions, "\x1e")).encode("utf-8", "surrogatepass")
            )
        return digest.hexdigest()
