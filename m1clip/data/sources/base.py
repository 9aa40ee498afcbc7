"""Shared by all formats: options, rows, and the conversion of rows to samples in splits."""

from __future__ import annotations

import importlib
import json
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1clip.data.images import SUFFIXES, FileImage, one_line
from m1clip.data.sources import splits
from m1clip.data.sources.splits import clean_text
from m1clip.data.types import ImageRef, Problem, Sample
from m1clip.errors import UserError

NO_CAPTION = "no caption"
_IMAGE_FOLDERS = (
    *("images", "Images", "image", "imgs", "img", "pictures", "photos", "data"),
    *("Flicker8k_Dataset", "Flickr8k_Dataset", "flickr8k-images", "flickr30k-images", "flickr30k_images"),
)
Place = tuple[str, int]  # file and row number; row 0 means the file itself


@dataclass(frozen=True, slots=True)
class Options:
    """Column names of a table; detected if not given."""

    image_column: str | None = None
    caption_columns: tuple[str, ...] = ()


DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class Row:
    """One unchecked row: with an `image`, or with a `path` to find in `folder`."""

    place: Place
    captions: Any  # text, a list of texts, or Karpathy's {"raw": text}
    split: str | None = None
    path: Any = None
    folder: ImageFolder | None = None
    image: ImageRef | None = None
    id: str | None = None

    def key(self) -> str:
        """The id of the sample that this row belongs to."""
        return self.id or posixpath.normpath(str(self.path).replace("\\", "/"))


def user_error(message: str) -> UserError:
    """An error on one printable line, regardless of the file names and library messages in it."""
    return UserError(one_line(message))


class DataSource:
    """All samples of a file or folder. `read` yields the rows of its format."""

    def __init__(
        self, path: Path, format_name: str, read: Callable[[DataSource], Iterator[Row]], options: Options = DEFAULT
    ) -> None:
        self.path, self.format, self.options = path, format_name, options
        self.name, self.class_captions = str(path), format_name == "classes"
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._places: dict[str, list[Place]] = {}
        self._by_split = self._gather(read(self))

    def splits(self) -> tuple[str, ...]:
        return splits.in_order(self._by_split)

    def samples(self, split: str) -> Sequence[Sample]:
        if split not in self._by_split:
            raise UserError(f"{self.path}: no split {split!r}; it has {', '.join(self.splits())}")
        return self._by_split[split]

    def origin(self, id_: str, caption: int = 0) -> str:
        places = self._places[id_]
        return _shown(places[min(caption, len(places) - 1)])

    def problem(self, place: Place, what: str, kind: str = "row") -> None:
        """Record what is skipped and why."""
        self.problems.append(Problem(_shown(place), one_line(what), kind))

    def note(self, text: str) -> None:
        """Record something the user should know."""
        self.notes.append(one_line(text))

    def _gather(self, rows: Iterator[Row]) -> dict[str, tuple[Sample, ...]]:
        images: dict[str, ImageRef] = {}
        captions: dict[str, list[str]] = {}
        given: dict[str, str | None] = {}
        for row in rows:
            texts, wrong = captions_of(row.captions)
            if wrong:
                self.problem(row.place, wrong, "empty-caption" if wrong == NO_CAPTION else "row")
            image = self._image(row)
            if image is None or not texts:
                continue
            id_ = row.key()
            if id_ not in images:
                images[id_], captions[id_], given[id_], self._places[id_] = image, [], row.split, []
            elif given[id_] is None:
                given[id_] = row.split
            elif row.split and row.split != given[id_]:
                # Captions of one image never end up in two splits: the first split wins.
                what = f"{id_} is in {given[id_]} and in {row.split}; it stays in {given[id_]}"
                self.problem(row.place, what, "split-conflict")
            captions[id_] += texts
            self._places[id_] += [row.place] * len(texts)
        if not images:
            why = "no images with captions"
            if self.problems:
                why = f"none of its {len(self.problems)} rows can be used; the first: {self.problems[0]}"
            raise user_error(f"{self.path}: read as {self.format}, {why}")
        split_of, notes = splits.assign(given)
        for note in notes:
            self.note(note)
        by_split: dict[str, list[Sample]] = {}
        for id_, image in images.items():
            by_split.setdefault(split_of[id_], []).append(Sample(image, tuple(captions[id_]), id_))
        return {name: tuple(samples) for name, samples in by_split.items()}

    def _image(self, row: Row) -> ImageRef | None:
        if row.image is not None:
            return row.image
        if wrong := _path_problem(row.path):
            self.problem(row.place, wrong, "no-image")
            return None
        return row.folder.find(row.path) if row.folder else FileImage(row.path)


def _shown(place: Place) -> str:
    name, row = place
    return one_line(f"{name} row {row}" if row else name)


def captions_of(value: Any, depth: int = 2) -> tuple[list[str], str | None]:
    """The captions in a value, and what is wrong with it, if anything. Empty items of a list are skipped."""
    if isinstance(value, str) and value.startswith('["'):
        value = _parse_list(value)
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
    return found, next((what for _, what in parts if what not in (None, NO_CAPTION)), None if found else NO_CAPTION)


def _parse_list(text: str) -> Any:
    """A list inside one cell, as in exports of Flickr30k; other text stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list) else text


def _path_problem(name: Any) -> str | None:
    """Why a value cannot be the path of an image, or None."""
    if name is None or (isinstance(name, str) and not name.strip()):
        return "no file name of an image"
    if not isinstance(name, str):
        return f"the image's file name is not text but {type(name).__name__}"
    if "\0" in name or len(name) > 4096:
        return "the image's file name contains a zero byte or is too long"
    if name.startswith(("http://", "https://", "s3://", "gs://")):
        return f"{name[:80]} is a URL, not a file: download the images first (img2dataset does)"
    if name != name.encode("utf-8", "replace").decode("utf-8"):
        return "the image's file name is not valid Unicode"
    return None


def require(module: str, purpose: str) -> Any:
    """Import an optional library; UserError with install instructions if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise UserError(f"{purpose} needs the library {name}: pip install 'm1clip[data]'") from error


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


class ImageFolder:
    """Finds the image files named in a table: next to the table, or in a subfolder such as images/."""

    def __init__(self, folder: Path, more: tuple[str, ...] = ()) -> None:
        bases = [os.fspath(folder / name) for name in ("", *more, *_IMAGE_FOLDERS)]
        self._bases = [base for base in bases if os.path.isdir(base)] or [os.fspath(folder)]
        self._found: dict[str, FileImage] = {}

    def find(self, name: str) -> FileImage:
        """The image; where there is no file, the path next to the table, for the error message."""
        if name not in self._found:
            self._found[name] = FileImage(self._path(name) or os.path.join(self._bases[0], name))
        return self._found[name]

    def _path(self, name: str) -> str | None:
        for spelling in dict.fromkeys((name, name.replace("\\", "/"))):
            for number, base in enumerate(self._bases):
                path = os.path.join(base, spelling)
                if os.path.isfile(path):
                    # The folder of the last image most likely has the next one.
                    self._bases.insert(0, self._bases.pop(number))
                    return path
        return None
