"""Shared by all formats: options, rows, and the conversion of rows to samples in splits."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from m1clip.data.images import SUFFIXES, FileImage, ImageRef
from m1clip.data.sources import splits
from m1clip.data.sources.splits import clean_text
from m1clip.data.types import Problem, ProblemKind, Sample, Source
from m1clip.errors import UserError
from m1clip.formatting import one_line, plural

if TYPE_CHECKING:
    from m1clip.data.sources.stream import StreamedSource

MAX_TEXT_BYTES = 2**20  # of a file or a member of a shard that has the captions of one image
IMAGES_CHECKED = 100  # images that a folder format looks at to recognize its data
Location = tuple[str, int]  # file, and number of the `DataFormat.item` in it; 0: the file itself
# Captions as a reader finds them: text, or None or "" where there is none; a list of these, also
# one in another list; or Karpathy's {"raw": text}. What else a file contains is reported as a
# problem.
Captions = str | Sequence[object] | Mapping[str, object] | None
Answer = TypeVar("Answer")
# Which captions of a table are used: `person` leaves out those that a model generated.
CaptionChoice = Literal["all", "person"]


@dataclass(frozen=True, slots=True)
class Options:
    """Column names of a table, detected if not given; and how shards are read."""

    image_column: str | None = None
    caption_columns: tuple[str, ...] = ()
    stream: bool = False  # read shards during training, whatever their size
    cache_dir: str | None = None  # for what is kept about remote shards
    captions: CaptionChoice = "all"


DEFAULT_OPTIONS = Options()


class Row(NamedTuple):
    """An image and some of its captions, as a reader yields them; rows with the same id are joined.

    The captions are cleaned and checked here, not by the reader. A reader reports what it skips
    with `DataSource.problem`, and yields no row for it.
    """

    location: Location
    captions: Captions
    split: str | None  # train, val, test or another name; None: not named by the data
    image: ImageRef
    id: str  # of the image within the source, the same on every machine, such as a relative path


class DataPath:
    """A path to data, as formats see it when they are asked whether it is theirs."""

    def __init__(
        self, path: Path, options: Options = DEFAULT_OPTIONS, format_name: str | None = None
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

    A new format is a module with such an entry, and its line in the table. Where several formats
    match, the first in the table wins.
    """

    name: str  # the prefix in `name:PATH`
    help: str  # what it reads, for `m1clip data formats`
    item: str  # what messages call that which has captions: row, image or sample
    read: Callable[[DataSource], Iterator[Row]]
    # Whether a path looks like this format, by its content where a name says little. None: the
    # format is used only if the user names it. A format that yields to another one for some paths
    # asks for the same, as in `data.path.is_file() or not data.ask(find_tables)`.
    matches: Callable[[DataPath], bool] | None = None
    # Whether captions are made from class names. Such a format is tried after all others, and only
    # on a path that is not a folder of datasets: almost every folder of images looks like classes.
    class_captions: bool = False
    # Whether the format is tried only if the path has no class folders either.
    after_classes: bool = False
    # Whether a new captions.csv beside its images would hide its captions, because tables are tried
    # first. False: they are made from names, or copied into the table (metadata).
    hidden_by_table: bool = True
    # The category of an image by its id, such as the folder of its class folder; None: there are
    # none.
    category_of: Callable[[str], str] | None = None
    # What to read, such as the only table in a folder.
    locate: Callable[[DataPath], Path] = same_path
    # The data as a stream, if it is too large to load; None: it is always loaded.
    open_stream: Callable[[DataPath], StreamedSource | None] | None = None


def user_error(message: str) -> UserError:
    """An error on one printable line, regardless of the file names and library messages in it."""
    return UserError(one_line(message))


class DataSource(Source):
    """All samples of a file or folder."""

    def __init__(
        self, path: Path, data_format: DataFormat, options: Options = DEFAULT_OPTIONS
    ) -> None:
        super().__init__(str(path), [path])
        self.path = path
        self.format = data_format.name
        self.item = data_format.item
        self.options = options
        self.class_captions = data_format.class_captions
        self._category_of = data_format.category_of
        self._places: dict[str, list[Location]] = {}
        self.names_val = False  # whether the data names a val split
        self._held_out_note: str | None = None  # if its val was held out from the train it names
        self._gather(data_format.read(self))

    def origin(self, id_: str, caption: int = 0) -> str:
        locations = self._places[id_]
        return self._format_location(locations[min(caption, len(locations) - 1)])

    def category(self, id_: str) -> str:
        """The category of an image by its id; "" for a format without categories."""
        return "" if self._category_of is None else self._category_of(id_)

    def image_file(self, name: str) -> FileImage:
        """Return the image file of a name relative to the path of the source, which is a folder.

        A table names images relative to several folders: see `columns.image_finder`.
        """
        return FileImage(os.path.join(self.path, name))

    def problem(self, location: Location, message: str, kind: ProblemKind = "unreadable") -> None:
        """Report what is skipped.

        `m1clip data lint` counts it by kind, with the hint of its kind.
        """
        self.problems.append(Problem(self._format_location(location), one_line(message), kind))

    def _format_location(self, location: Location) -> str:
        name, number = location
        return one_line(f"{name} {self.item} {number}" if number else name)

    def note(self, text: str) -> None:
        """Tell the user something about how the data was read."""
        self.notes.append(one_line(text))

    def _gather(self, rows: Iterator[Row]) -> None:
        images: dict[str, ImageRef] = {}
        captions: dict[str, list[str]] = {}
        split_names: dict[str, str | None] = {}
        for location, value, split, image, id_ in rows:
            texts, fault = captions_of(value)
            if fault:
                self.problem(location, fault.message, fault.kind)
            if not texts:
                continue
            if id_ not in images:
                images[id_], captions[id_], split_names[id_], self._places[id_] = (
                    image,
                    [],
                    split,
                    [],
                )
            elif split_names[id_] is None:
                split_names[id_] = split
            elif split and split != split_names[id_]:
                # Captions of one image never end up in two splits: the first split wins.
                message = (
                    f"{id_} is in {split_names[id_]} and in {split}; it stays in {split_names[id_]}"
                )
                self.problem(location, message, "split-conflict")
            captions[id_] += texts
            self._places[id_] += [location] * len(texts)
        if not images:
            why = "no images with captions"
            if self.problems and all(problem.kind == "empty-caption" for problem in self.problems):
                items = plural(len(self.problems), self.item)
                first = self.problems[0].where
                why = f"no caption in any of its {items} (the first: {first}); write some"
            elif self.problems:
                items = plural(len(self.problems), self.item)
                why = f"none of its {items} can be used; the first: {self.problems[0]}"
            raise user_error(f"{self.path}: read as {self.format}, {why}")
        class_of = {id_: captions[id_][0] for id_ in images} if self.class_captions else None
        split_of, notes = splits.assign(split_names, class_of)
        self.notes += map(one_line, notes)
        named = set(split_names.values()) - {None}
        self.names_val = "val" in named
        if named and not self.names_val and "val" in split_of.values():
            self._held_out_note = one_line(notes[-1])
        for id_, image in images.items():
            self.by_split.setdefault(split_of[id_], []).append(
                Sample(image, tuple(captions[id_]), id_)
            )

    def return_held_out(self) -> None:
        """Put the val images that were held out from train back there.

        Only where the data names its train images: without any name, val is split off as usual.
        """
        if self._held_out_note is None:
            return
        self.notes.remove(self._held_out_note)
        self._held_out_note = None
        order = {id_: number for number, id_ in enumerate(self._places)}
        samples = self.by_split.pop("train", []) + self.by_split.pop("val")
        self.by_split["train"] = sorted(samples, key=lambda sample: order[sample.id])


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
        if len({source.item for source in parts}) == 1:
            self.item = parts[0].item
        if any(source.names_val for source in parts):
            # Such as train.csv next to val.csv: nothing more is held out.
            for source in parts:
                source.return_held_out()
        for number, source in enumerate(parts):
            self.problems += source.problems
            self.notes += source.notes
            for kind, count in source.caption_kinds.items():
                self.caption_kinds[kind] = self.caption_kinds.get(kind, 0) + count
            for split in source.splits():
                self.by_split.setdefault(split, []).extend(
                    Sample(sample.image, sample.captions, f"{number}/{sample.id}")
                    for sample in source.samples(split)
                )

    def origin(self, id_: str, caption: int = 0) -> str:
        number, _, rest = id_.partition("/")
        return self.parts[int(number)].origin(rest, caption)

    def category(self, id_: str) -> str:
        """The category that the source of the image gives it."""
        number, _, rest = id_.partition("/")
        return self.parts[int(number)].category(rest)


# Characters, as in a cell of a CSV file; a compressed table may contain far more.
MAX_CAPTION = 2**17


class CaptionFault(NamedTuple):
    """What is wrong with the captions of a row."""

    kind: ProblemKind
    message: str


NO_CAPTION = CaptionFault("empty-caption", "no caption")


def captions_of(value: Any, depth: int = 2) -> tuple[list[str], CaptionFault | None]:
    """Return the texts in `Captions`, and what is wrong with it, if anything.

    Empty items of a list are skipped.
    """
    if isinstance(value, str) and len(value) > MAX_CAPTION:
        length = f"{len(value):,} characters; at most {MAX_CAPTION:,}"
        return [], CaptionFault("unreadable", f"the caption is too long ({length})")
    # A list inside one cell, as in exports of Flickr30k.
    if isinstance(value, str) and value.startswith('["'):
        with contextlib.suppress(ValueError):
            value = parse_json(value)
    if isinstance(value, Mapping) and isinstance(value.get("raw"), str):
        value = value["raw"]
    if isinstance(value, str):
        value = clean_text(value)
    if value is None or value == "":
        return [], NO_CAPTION
    if isinstance(value, str):
        return [value], None
    if not isinstance(value, list | tuple):
        message = f"the caption is not text but {type(value).__name__}"
        return [], CaptionFault("unreadable", message)
    if depth == 0:
        return [], CaptionFault("unreadable", "the lists of captions are nested too deeply")
    parts = [captions_of(item, depth - 1) for item in value]
    texts_of_all = [text for texts, _ in parts for text in texts]
    faults = [fault for _, fault in parts if fault and fault.kind != "empty-caption"]
    if faults:
        return texts_of_all, faults[0]
    return texts_of_all, None if texts_of_all else NO_CAPTION


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document; ValueError for one that is not valid, or nested too deeply."""
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def first_images(root: Path) -> list[str]:
    """Return the first images under a folder, enough to recognize a format by them."""
    return list(islice(walk_images(root), IMAGES_CHECKED))


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
