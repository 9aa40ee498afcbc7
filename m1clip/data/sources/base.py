"""What all sources share: rows are joined by picture, splits are assigned, problems are kept by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from m1clip.data.images import one_line
from m1clip.data.pair import ImageRef, Pair
from m1clip.data.sources import splits
from m1clip.errors import UserError


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that was skipped at reading: the file and row, what was wrong, and its kind."""

    where: str
    what: str
    kind: str = "row"

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may say about a set; each field left out is found by looking."""

    image_column: str | None = None
    caption_columns: tuple[str, ...] = ()
    split_column: str | None = None
    split_seed: int = 0
    split_fractions: tuple[float, float, float] = (0.9, 0.05, 0.05)
    templates: tuple[str, ...] = ("a photo of a {}.",)

    def __post_init__(self) -> None:
        if len(self.split_fractions) != 3 or not all(0 <= f <= 1 for f in self.split_fractions):
            raise UserError(
                f"split fractions {self.split_fractions}: give three numbers from 0 to 1 (train, val, test)"
            )
        if abs(sum(self.split_fractions) - 1) > 1e-6:
            raise UserError(f"split fractions {self.split_fractions}: they must sum to 1")
        if not self.templates or any("{}" not in template for template in self.templates):
            raise UserError(f"templates {self.templates}: each needs {{}} where the class name goes")


DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the data. `place` is (file, row number), row 0 meaning the file itself."""

    image: ImageRef
    captions: tuple[str, ...]
    id: str
    split: str | None
    place: tuple[str, int]


def place_text(place: tuple[str, int]) -> str:
    """A place in a person's words."""
    label, row = place
    return one_line(f"{label} row {row}" if row else label)


class BaseSource:
    """A source that knows all its pairs. A kind of data is a subclass with `looks_like` and `rows`."""

    kind: ClassVar[str]
    by_templates: ClassVar[bool] = False

    def __init__(self, path: Path, options: Options = DEFAULT) -> None:
        self.path = path
        self.options = options
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._places: dict[str, list[tuple[str, int]]] = {}
        self._by_split = self._gather()

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """Whether the file or folder is of this kind, by a cheap look."""
        raise NotImplementedError

    def rows(self) -> Iterator[Row]:
        """Every usable row in the order of the data; what is not usable goes to `self.problem`."""
        raise NotImplementedError

    def splits(self) -> tuple[str, ...]:
        """The names of the splits that hold at least one pair: train, val, test, then others."""
        first = [name for name in splits.ORDER if name in self._by_split]
        return (*first, *sorted(set(self._by_split) - set(first)))

    def pairs(self, split: str) -> Sequence[Pair]:
        """All pairs of a split, in the order of the data."""
        if split not in self._by_split:
            raise UserError(f"{self.path}: no split {split!r}; it has {', '.join(self.splits())}")
        return self._by_split[split]

    def origin(self, id_: str, caption: int = 0) -> str:
        """The file and row a caption of a pair came from."""
        places = self._places[id_]
        return place_text(places[min(caption, len(places) - 1)])

    def problem(self, place: tuple[str, int], what: str, kind: str = "row") -> None:
        """Keep what was skipped and why."""
        self.problems.append(Problem(place_text(place), one_line(what), kind))

    def _gather(self) -> dict[str, tuple[Pair, ...]]:
        images: dict[str, ImageRef] = {}
        captions: dict[str, list[str]] = {}
        given: dict[str, str | None] = {}
        for row in self.rows():
            if row.id not in images:
                images[row.id], captions[row.id], given[row.id] = row.image, [], row.split
                self._places[row.id] = []
            elif given[row.id] is None:
                given[row.id] = row.split
            elif row.split and row.split != given[row.id]:
                # Captions of one picture never cross: the first split named keeps it.
                what = f"{row.id} is in {given[row.id]} and in {row.split}; it stays in {given[row.id]}"
                self.problem(row.place, what, "split-conflict")
            captions[row.id].extend(row.captions)
            self._places[row.id].extend([row.place] * len(row.captions))
        if not images:
            raise UserError(self._nothing())
        split_of, notes = splits.assign(given, self.options.split_seed, self.options.split_fractions)
        self.notes.extend(one_line(note) for note in notes)
        by_split: dict[str, list[Pair]] = {}
        for id_, image in images.items():
            by_split.setdefault(split_of[id_], []).append(Pair(image, tuple(captions[id_]), id_))
        return {name: tuple(pairs) for name, pairs in by_split.items()}

    def _nothing(self) -> str:
        if not self.problems:
            return one_line(f"{self.path}: read as {self.kind}, it holds no pictures with captions")
        first = self.problems[0]
        return one_line(
            f"{self.path}: read as {self.kind}, none of its {len(self.problems)} rows can be used; "
            f"the first: {first}"
        )
