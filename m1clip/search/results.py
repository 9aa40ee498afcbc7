"""What a search is limited to, and what it finds: `Filter`, `Result`, `Copy` and `Photo`."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal, NamedTuple

from m1clip.errors import UserError
from m1clip.search.match import CUTOFF, UNSURE

DATE = re.compile(r"[0-9]{4}(-[0-9]{2}(-[0-9]{2})?)?")
TAKEN = (
    "coalesce(taken, strftime('%Y-%m-%dT%H:%M:%S', mtime_ns / 1000000000, 'unixepoch',"
    " 'localtime'))"
)

Condition = tuple[str, list[Any]]  # SQL and its values


@dataclass(frozen=True)
class Filter:
    """Which images to search.

    Dates are YYYY, YYYY-MM or YYYY-MM-DD, and refer to EXIF or else to the file's time.
    """

    since: str | None = None
    until: str | None = None  # included
    subfolder: str | None = None  # a folder, relative to the folder of photos
    orientation: Literal["landscape", "portrait"] | None = None
    min_side: int | None = None  # pixels of the shorter side

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            if (text := getattr(self, name)) is not None and not is_date(text):
                raise UserError(f"--{name} {text}: give a date as 2024, 2024-05 or 2024-05-31")

    def sql(self) -> Condition:
        """A condition and its values; "" for no filter."""
        parts: list[tuple[str, list[Any]]] = []
        if self.since:
            parts.append((f"{TAKEN} >= ?", [self.since]))
        if self.until:
            parts.append((f"{TAKEN} < ?", [self.until + "~"]))  # ~ is after any digit, - and T
        if self.subfolder:
            prefix = os.fsencode(os.path.normpath(self.subfolder)) + b"/"
            parts.append(("path >= ? AND path < ?", [prefix, prefix[:-1] + b"0"]))  # 0 follows /
        if self.orientation:
            parts.append((f"width {'>' if self.orientation == 'landscape' else '<'} height", []))
        if self.min_side:
            parts.append(("min(width, height) >= ?", [self.min_side]))
        return "".join(f" AND {text}" for text, _ in parts), [
            value for _, values in parts for value in values
        ]


def is_date(text: str) -> bool:
    """Whether a text is a year, a month or a day of the calendar, in ISO format."""
    if not DATE.fullmatch(text):
        return False
    try:
        date.fromisoformat(text + "-01-01"[len(text) - 4 :])
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Result:
    """An image that was found."""

    id: int  # of the file, until it is deleted or renamed
    path: str  # relative to the folder of photos
    file: str  # absolute path
    score: float  # cosine similarity; for sums of queries, that with the combined vector
    # That it matches; None unless the query is a single text, and for some models.
    probability: float | None
    width: int
    height: int
    taken: str  # ISO time of EXIF, or else of the file
    bytes: int
    copies: tuple[str, ...] = ()  # duplicates and near-duplicates that are not listed


@dataclass(frozen=True)
class Results:
    """The nearest images, the nearest first: a sequence of them, with `matches` and `possible`
    ones.

    Where no probability is known, all count as both.
    """

    nearest: list[Result]
    searched: int  # images

    def __len__(self) -> int:
        return len(self.nearest)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.nearest)

    def __getitem__(self, position: int) -> Result:
        return self.nearest[position]

    @property
    def has_probabilities(self) -> bool:
        """Whether it is known how likely the images are to match."""
        return all(result.probability is not None for result in self.nearest)

    @property
    def matches(self) -> list[Result]:
        """Those above the cutoff; none: nothing here matches."""
        return self._above(CUTOFF)

    @property
    def possible(self) -> list[Result]:
        """The matches, and results that are less likely but possible."""
        return self._above(UNSURE)

    def _above(self, cut: float) -> list[Result]:
        return [
            result
            for result in self.nearest
            if result.probability is None or result.probability >= cut
        ]


class Photo(NamedTuple):
    """An indexed file: its number, path in the folder of photos, content, and the row of its
    vector.
    """

    id: int
    path: str
    sha256: bytes
    row: int


@dataclass(frozen=True)
class Copy:
    """One image of a group of duplicates."""

    id: int  # of the file
    path: str  # relative to the folder of photos
    file: str  # absolute path
    width: int
    height: int
    bytes: int
    equal: bool  # the same content as the best, byte for byte
