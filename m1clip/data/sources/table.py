"""A table of pictures: which columns matter, and what a row of any table becomes."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1clip.data.images import one_line
from m1clip.data.pair import ImageRef
from m1clip.data.sources import splits
from m1clip.data.sources.base import BaseSource, Options, Row
from m1clip.data.sources.reading import PictureFinder, clean_text
from m1clip.errors import UserError

# In order of preference; compared in lower case.
IMAGE_NAMES = (
    *("image", "image_path", "filepath", "file_path", "file_name", "filename", "image_name", "path", "img"),
    *("img_path", "image_file", "file", "picture", "photo", "jpg", "png", "jpeg", "webp"),
)
CAPTION_NAMES = (
    *("captions", "caption", "text", "texts", "title", "description", "sentences", "sentence", "comment"),
    *("alt_text", "alt", "prompt", "txt", "raw"),
)
SPLIT_NAMES = ("split", "partition", "subset", "set")
# Where a picture lies inside the table, these name it, so that several rows of it are joined.
ID_NAMES = ("image_id", "img_id", "imgid", "filename", "file_name", "image_name", "image_path")
_ENDS_AS_IMAGE = r"\.(jpe?g|png|webp|gif|bmp|tiff?|hei[cf])$"
_NUMBERED = re.compile(r"(captions?|text|title|description|sentence)[_ ]?\d+$")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table that are read."""

    image: str
    captions: tuple[str, ...]
    split: str | None = None
    id: str | None = None


def choose_columns(header: Sequence[str], options: Options, where: str) -> Columns:
    """The columns named by the person, else found by common names; a UserError says what is there."""
    by_key = {name.strip().lower(): name for name in reversed(header)}
    for asked in (options.image_column, *options.caption_columns, options.split_column):
        if asked is not None and asked.strip().lower() not in by_key:
            raise UserError(one_line(f"{where}: no column {asked!r}; it has {_listing(header)}"))
    image = options.image_column or _first(IMAGE_NAMES, by_key)
    captions: Iterable[str] = options.caption_columns
    if not captions:
        numbered = [key for key in (name.strip().lower() for name in header) if _NUMBERED.fullmatch(key)]
        single = _first(CAPTION_NAMES, by_key)
        captions = numbered or ([single] if single else [])
    if image is None or not captions:
        raise UserError(one_line(_missing(image is None, not captions, header, where)))
    split = options.split_column or _first(SPLIT_NAMES, by_key)
    chosen = [by_key[name.strip().lower()] for name in (image, *captions)]
    name_of_split = by_key[split.strip().lower()] if split else None
    name_of_id = _first([name for name in ID_NAMES if name != chosen[0].strip().lower()], by_key)
    return Columns(
        chosen[0], tuple(dict.fromkeys(chosen[1:])), name_of_split, by_key[name_of_id] if name_of_id else None
    )


def _first(names: Iterable[str], by_key: Mapping[str, str]) -> str | None:
    return next((name for name in names if name in by_key), None)


def _listing(header: Sequence[str]) -> str:
    names = ", ".join(name[:40] for name in header[:12])
    return (names or "no columns") + (", ..." if len(header) > 12 else "")


def _missing(image: bool, caption: bool, header: Sequence[str], where: str) -> str:
    if image and any(re.search(_ENDS_AS_IMAGE, name.strip().lower()) for name in header):
        return f"{where}: its first row is a picture, not names of columns; add one such as image,caption"
    missing = [name for name, lacks in (("image", image), ("caption", caption)) if lacks]
    flags = [" ".join(f"{prefix}{name}-column" for name in missing) for prefix in ("--data.", "--")]
    return (
        f"{where}: no {' and no '.join(missing)} column among {_listing(header)}; "
        f"name it (train: {flags[0]}, data lint and pack: {flags[1]})"
    )


def captions_of(value: Any) -> tuple[list[str], str | None]:
    """The captions a cell holds, and what is wrong with it, if something is."""
    if isinstance(value, str) and value.startswith(("['", '["')):
        value = _written_list(value)
    if value is None or value == "":
        return [], "no caption"
    if isinstance(value, str):
        text = clean_text(value)
        return ([text], None) if text else ([], "no caption")
    if isinstance(value, (list, tuple)):
        parts = [captions_of(part) for part in value if not isinstance(part, (list, tuple))]
        found = [text for texts, _ in parts for text in texts]
        wrong = next((what for _, what in parts if what), None if found else "no caption")
        return found, wrong if len(parts) == len(value) else "a list inside the list of captions"
    if isinstance(value, Mapping) and isinstance(value.get("raw"), str):
        return captions_of(value["raw"])
    return [], f"the caption is not text but {type(value).__name__}"


def _written_list(text: str) -> Any:
    """A list that was written into one cell, as exports of Flickr30k do."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list) else text


class TableSource(BaseSource):
    """Rows of named cells. A kind of table gives `header`, `records`, and `picture` if that is not a path."""

    def header(self) -> list[str]:
        """Names of the columns."""
        raise NotImplementedError

    def records(self, columns: Columns) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
        """(place, cells by column name) of each row."""
        raise NotImplementedError

    def folder(self) -> Path:
        """The folder that image paths are relative to."""
        return self.path.parent

    def default_split(self, place: tuple[str, int]) -> str | None:
        """The split of a row that names none."""
        return None

    def picture(
        self, cells: Mapping[str, Any], columns: Columns, place: tuple[str, int]
    ) -> tuple[ImageRef, str] | str:
        """The picture of a row and its id, or what is wrong."""
        name = cells.get(columns.image)
        wrong = wrong_path(name)
        if wrong or not isinstance(name, str):
            return wrong or "not a file name"
        return self._finder.find(name), posixpath.normpath(name.replace("\\", "/"))

    def rows(self) -> Iterator[Row]:
        """Rows with a picture and at least one caption."""
        columns = choose_columns(self.header(), self.options, str(self.path))
        self._finder = PictureFinder(self.folder())
        found: dict[str, tuple[ImageRef, str]] = {}
        for place, cells in self.records(columns):
            texts: list[str] = []
            for column in columns.captions:
                more, wrong = captions_of(cells.get(column))
                texts += more
                # One of several caption columns may be empty: that is how tables say "fewer captions".
                if wrong and (wrong != "no caption" or len(columns.captions) == 1):
                    self.problem(place, wrong, "empty-caption" if wrong == "no caption" else "row")
            name = cells.get(columns.image)
            answer: tuple[ImageRef, str] | str | None = found.get(name) if isinstance(name, str) else None
            answer = answer or self.picture(cells, columns, place)
            if isinstance(answer, str):
                self.problem(place, answer, "no-image")
                continue
            image, id_ = answer
            if isinstance(name, str):
                found[name] = answer
            if texts:
                yield Row(image, tuple(texts), id_, self._split(cells, columns, place), place)
            elif len(columns.captions) > 1:
                self.problem(place, "no caption", "empty-caption")

    def _split(self, cells: Mapping[str, Any], columns: Columns, place: tuple[str, int]) -> str | None:
        value = cells.get(columns.split) if columns.split else None
        if isinstance(value, str) and value.strip():
            return splits.normalise(clean_text(value))
        return self.default_split(place)


def wrong_path(name: Any) -> str | None:
    """Why a cell cannot be the path of a picture, or None."""
    if name is None or (isinstance(name, str) and not name.strip()):
        return "no file name of a picture"
    if not isinstance(name, str):
        return f"the picture's file name is not text but {type(name).__name__}"
    if "\0" in name or len(name) > 4096:
        return "the picture's file name holds a zero byte or is too long"
    if name.startswith(("http://", "https://", "s3://", "gs://")):
        return f"{name[:80]} is an address, not a file: download the pictures first (img2dataset does)"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "the picture's file name is not valid text"
    return None
