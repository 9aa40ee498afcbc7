"""Shared by all formats: options, rows, and the conversion of rows to samples in splits."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from m1clip.data.images import SUFFIXES, ImageRef, one_line
from m1clip.data.sources import splits
from m1clip.data.sources.splits import clean_text
from m1clip.data.types import Problem, Sample, Source
from m1clip.errors import UserError
from m1clip.formatting import plural

if TYPE_CHECKING:
    from m1clip.data.sources.stream import StreamedSource

NO_CAPTION = "no caption"
Place = tuple[str, int]  # file and row number; row 0 means the file itself
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Options:
    """Column names of a table, detected if not given; and how shards are read."""

    image_column: str | None = None
    caption_columns: tuple[str, ...] = ()
    stream: bool = False  # read shards during training, whatever their size
    cache_dir: str | None = None  # for what is kept about remote shards
    progress: Callable[[int, int], None] = lambda done, total: None  # of indexing shards


DEFAULT = Options()


class Row(NamedTuple):
    """One row of a source: an image and some of its captions, not yet checked. Rows with the same id are joined."""

    place: Place
    captions: Any  # text, a list of texts, or Karpathy's {"raw": text}
    split: str | None
    image: ImageRef
    id: str


class DataPath:
    """A path to data, as formats see it when they are asked whether it is theirs."""

    def __init__(
        self, path: Path, options: Options = DEFAULT, format_name: str | None = None
    ) -> None:
        self.path = path
        self.options = options
        self.format_name = format_name  # if the user named the format, as in csv:PATH
        self._answers: dict[Callable[..., Any], Any] = {}

    def ask(self, find: Callable[[Path, Options], Answer]) -> Answer:
        """Return find(path, options), computed once however many formats ask for it."""
        if find not in self._answers:
            self._answers[find] = find(self.path, self.options)
        answer: Answer = self._answers[find]
        return answer


def same_path(data: DataPath) -> Path:
    """Return the path unchanged: most formats read the path that the user gave."""
    return data.path


@dataclass(frozen=True, kw_only=True)
class DataFormat:
    """How data of one format is recognized and read: an entry of the table in formats.py.

    A new format is a module with such an entry, and its line in the table.
    """

    name: str  # the prefix in `name:PATH`
    help: str  # what it reads, for `m1clip data formats`
    read: Callable[[DataSource], Iterator[Row]]
    # Whether a path looks like this format; None: only by its name.
    matches: Callable[[DataPath], bool] | None = None
    priority: int = 100  # where several formats match, the lowest wins
    class_captions: bool = False  # whether captions are made from class names
    locate: Callable[[DataPath], Path] = (
        same_path  # what to read, such as the only table in a folder
    )
    # The data as a stream, if it is too large to load; None: it is always loaded.
    open_stream: Callable[[DataPath], StreamedSource | None] | None = None


def user_error(message: str) -> UserError:
    """An error on one printable line, regardless of the file names and library messages in it."""
    return UserError(one_line(message))


class DataSource(Source):
    """All samples of a file or folder."""

    def __init__(self, path: Path, data_format: DataFormat, options: Options = DEFAULT) -> None:
        super().__init__(str(path), [path])
        self.path = path
        self.format = data_format.name
        self.options = options
        self.class_captions = data_format.class_captions
        self._places: dict[str, list[Place]] = {}
        self._gather(data_format.read(self))

    def origin(self, id_: str, caption: int = 0) -> str:
        places = self._places[id_]
        return _shown(places[min(caption, len(places) - 1)])

    def problem(self, place: Place, what: str, kind: str = "row") -> None:
        self.problems.append(Problem(_shown(place), one_line(what), kind))

    def note(self, text: str) -> None:
        self.notes.append(one_line(text))

    def _gather(self, rows: Iterator[Row]) -> None:
        images: dict[str, ImageRef] = {}
        captions: dict[str, list[str]] = {}
        given: dict[str, str | None] = {}
        for place, value, split, image, id_ in rows:
            texts, wrong = captions_of(value)
            if wrong:
                self.problem(place, wrong, "empty-caption" if wrong == NO_CAPTION else "row")
            if not texts:
                continue
            if id_ not in images:
                images[id_], captions[id_], given[id_], self._places[id_] = image, [], split, []
            elif given[id_] is None:
                given[id_] = split
            elif split and split != given[id_]:
                # Captions of one image never end up in two splits: the first split wins.
                what = f"{id_} is in {given[id_]} and in {split}; it stays in {given[id_]}"
                self.problem(place, what, "split-conflict")
            captions[id_] += texts
            self._places[id_] += [place] * len(texts)
        if not images:
            why = "no images with captions"
            if self.problems and all(problem.kind == "empty-caption" for problem in self.problems):
                first = self.problems[0].where
                why = f"no caption in any of its {plural(len(self.problems), 'row')} (the first: {first}); write some"
            elif self.problems:
                why = f"none of its {plural(len(self.problems), 'row')} can be used; the first: {self.problems[0]}"
            raise user_error(f"{self.path}: read as {self.format}, {why}")
        class_of = {id_: captions[id_][0] for id_ in images} if self.class_captions else None
        split_of, notes = splits.assign(given, class_of)
        self.notes += map(one_line, notes)
        for id_, image in images.items():
            self.by_split.setdefault(split_of[id_], []).append(
                Sample(image, tuple(captions[id_]), id_)
            )


class MixedSource(Source):
    """Several sources, one after the other; ids start with the number of the source."""

    def __init__(self, parts: Sequence[DataSource]) -> None:
        if not parts:
            raise UserError("no data: give at least one source")
        super().__init__(
            ", ".join(source.name for source in parts), [source.path for source in parts]
        )
        self.parts = tuple(parts)
        self.class_captions = all(source.class_captions for source in parts)
        for number, source in enumerate(parts):
            self.problems += source.problems
            self.notes += source.notes
            for split in source.splits():
                self.by_split.setdefault(split, []).extend(
                    Sample(sample.image, sample.captions, f"{number}/{sample.id}")
                    for sample in source.samples(split)
                )

    def origin(self, id_: str, caption: int = 0) -> str:
        number, _, rest = id_.partition("/")
        return self.parts[int(number)].origin(rest, caption)


def _shown(place: Place) -> str:
    name, row = place
    return one_line(f"{name} row {row}" if row else name)


# Characters, as in a cell of a CSV file; a compressed table may contain far more.
MAX_CAPTION = 2**17


def captions_of(value: Any, depth: int = 2) -> tuple[list[str], str | None]:
    """The captions in a value, and what is wrong with it, if anything. Empty items of a list are skipped."""
    if isinstance(value, str) and len(value) > MAX_CAPTION:
        return [], f"the caption is too long ({len(value):,} characters; at most {MAX_CAPTION:,})"
    # A list inside one cell, as in exports of Flickr30k.
    if isinstance(value, str) and value.startswith('["'):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping) and isinstance(value.get("raw"), str):
        value = value["raw"]
    if isinstance(value, str):
        value = clean_text(value)
    if value is None or value == "":
        return [], NO_CAPTION
    if isinstance(value, str):
        return [value], None
    if not isinstance(value, list | tuple):
        return [], f"the caption is not text but {type(value).__name__}"
    if depth == 0:
        return [], "the lists of captions are nested too deeply"
    parts = [captions_of(item, depth - 1) for item in value]
    found = [text for texts, _ in parts for text in texts]
    return found, next(
        (what for _, what in parts if what not in (None, NO_CAPTION)), None if found else NO_CAPTION
    )


def walk_images(root: Path) -> Iterator[str]:
    """Images under a folder as sorted relative names with /; links to folders are not followed."""
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith(".") and name != "__MACOSX")
        inside = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if inside == "." else f"{inside}/"
        for name in sorted(files):
            # macOS leaves ._a.jpg next to a.jpg.
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith("."):
                yield prefix + name
