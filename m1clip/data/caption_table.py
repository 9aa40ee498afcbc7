"""Read and change captions.csv: what is not changed stays, and two programs cannot lose each
other's captions.

A row has the name of an image and a caption. `source` says who wrote it: `person` (or nothing), or
`model:NAME`.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import posixpath
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from m1clip.data.sources import tables
from m1clip.data.sources.base import DEFAULT_OPTIONS, user_error
from m1clip.data.sources.columns import IMAGE_FOLDERS, choose_columns
from m1clip.data.sources.plain_text import check_is_text, csv_rows, text_lines
from m1clip.errors import UserError
from m1clip.io import write_bytes

CAPTIONS_FILE = "captions.csv"
PERSON = "person"  # the source of captions that a user wrote
COLUMNS = ("image", "caption", "source", "split")
MAX_CAPTION_CHARACTERS = 1000  # characters
# Embeddings and overrides, which would show a caption in another order than it is stored.
DIRECTION_MARKS = dict.fromkeys(map(ord, "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"))
MAX_TABLE = 2**28  # bytes
LOCK_SECONDS = 30.0  # to wait for another program that writes the table
BYTE_ORDER_MARK = "\ufeff"  # tells spreadsheet programs that a file is UTF-8


@dataclass(frozen=True, slots=True)
class Caption:
    """One caption of an image, with who wrote it and the split of its image ("" for none)."""

    text: str
    source: str = PERSON
    split: str = ""


def clean_caption(text: str) -> str:
    """A caption in one line; UserError if it is too long or no valid text."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UserError(
            "the caption contains half of a character (a lone surrogate); type it again"
        )
    # A replacement character stands for lost text; `read_captions` rejects a table with one.
    spaced = "".join(
        " " if unicodedata.category(char) == "Cc" or char == "\ufffd" else char for char in text
    )
    caption = " ".join(spaced.translate(DIRECTION_MARKS).split())
    if len(caption) > MAX_CAPTION_CHARACTERS:
        raise UserError(
            f"a caption has at most {MAX_CAPTION_CHARACTERS:,} characters, this one"
            f" {len(caption):,}; shorten it"
        )
    return caption


@contextlib.contextmanager
def lock_captions(path: Path) -> Iterator[None]:
    """Hold the lock of a table while it is read, changed and written."""
    lock = FileLock(path.with_name(f".{path.name}.lock"), fallback_to_soft=False)
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise UserError(f"{path}: another program is writing it; try again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be locked ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()


def read_captions(path: Path) -> CaptionFile:
    """The table at a path; a new one if there is none.

    UserError for a file that is not such a table.
    """
    if path.is_symlink():
        raise user_error(
            f"{path}: is a symbolic link, and m1clip does not write through links; replace it by a"
            " copy"
        )
    if not path.exists():
        return CaptionFile(path, list(COLUMNS), [], ",")
    if not path.is_file():
        raise user_error(f"{path}: is not a regular file; rename it to start a table")
    if path.stat().st_size > MAX_TABLE:
        raise user_error(f"{path}: larger than {MAX_TABLE >> 20} MiB; rename it to start another")
    check_is_text(path)
    delimiter, _, is_caption_table = tables.read_header(path, DEFAULT_OPTIONS)
    if not is_caption_table:
        tables.explain_columns(path, DEFAULT_OPTIONS)
    try:
        header, *rows = csv_rows(text_lines(path), delimiter)
    except csv.Error as error:
        raise user_error(f"{path}: {error}; check for an unclosed quote") from None
    # A byte that is no text would be lost when the table is written.
    if any("\ufffd" in cell for row in rows for cell in row):
        raise user_error(f"{path}: contains bytes that are not text; save it as CSV (UTF-8)")
    return CaptionFile(path, header, rows, delimiter)


class CaptionFile:
    """A table of captions in memory. Rows, columns and the order that are not changed stay."""

    def __init__(
        self, path: Path, header: list[str], rows: list[list[str]], delimiter: str
    ) -> None:
        self.path = path
        self.header = header
        self.rows = rows
        self.delimiter = delimiter
        columns = choose_columns([name.strip() for name in header], DEFAULT_OPTIONS, str(path))
        names = [name.strip() for name in header]
        self._image = names.index(columns.image)
        self._captions = [names.index(name) for name in columns.captions]
        self._split = None if columns.split is None else names.index(columns.split)
        self._source = names.index("source") if "source" in names else None
        self._places: dict[str, list[int]] = {}  # name of an image -> its rows
        self._index()

    def images(self) -> list[str]:
        """The names of all images, also of those with an empty caption, in the order of
        the table.
        """
        return list(self._places)

    def of(self, name: str) -> list[Caption]:
        """The captions of an image."""
        return [
            Caption(text, self._cell(row, self._source) or PERSON, self._cell(row, self._split))
            for row in map(self.rows.__getitem__, self._rows_of(name))
            for column in self._captions
            if (text := " ".join(self._cell(row, column).split()))
        ]

    def replace(
        self, name: str, captions: Sequence[str], source: str = PERSON, split: str | None = None
    ) -> None:
        """Give an image these captions of one source; those of other sources stay.

        A split is only set where the image has none. An empty row of `m1clip data template` is
        filled.
        """
        new_captions = list(dict.fromkeys(captions))
        row_indices = self._rows_of(name)
        missing = [text for text in new_captions if text not in self._texts(row_indices, source)]
        self._remove(row_indices, source, new_captions)
        if missing and self._source is None and source != PERSON:
            self._source = self._add_column("source")
        if split and self._split is None:
            self._split = self._add_column("split")
        for row in map(self.rows.__getitem__, row_indices):
            if missing and not any(self._cell(row, column).strip() for column in self._captions):
                self._set(row, self._captions[0], missing.pop(0))
                self._set(row, self._source, source)
        first = end = row_indices[-1] + 1 if row_indices else len(self.rows)
        spelling = self._cell(self.rows[row_indices[0]], self._image) if row_indices else name
        for text in missing:
            row = [""] * len(self.header)
            self._set(row, self._image, spelling)
            self._set(row, self._captions[0], text)
            self._set(row, self._source, source)
            self.rows.insert(end, row)
            end += 1
        if row_indices:
            # A table of `m1clip data template` keeps a row for each image.
            self._drop_empty(
                row_indices if new_captions or self._source is not None else row_indices[1:]
            )
            self._index()
        elif end > first:  # no other row has moved, so that many images are added quickly
            self._places[normalize_name(name)] = list(range(first, end))
        self._set_split(name, split)

    def rename(self, old: str, new: str) -> None:
        """Give the rows of an image its new name."""
        for row_index in self._rows_of(old):
            self._set(self.rows[row_index], self._image, new)
        self._index()

    def write(self) -> None:
        """Replace the file atomically.

        OSError for a full disk, after which the old file is still there.
        """
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=self.delimiter).writerows([self.header, *self.rows])
        try:
            write_bytes(self.path, (BYTE_ORDER_MARK + text.getvalue()).encode("utf-8"))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full; free some space" if full else f"{error.strerror}"
            raise UserError(f"{self.path}: not saved: {reason}; then try again") from None

    def _index(self) -> None:
        self._places = {}
        for row_index, row in enumerate(self.rows):
            name = self._cell(row, self._image)
            if name.strip():
                self._places.setdefault(normalize_name(name), []).append(row_index)

    def _rows_of(self, name: str) -> list[int]:
        """The rows of an image; a table may name it relative to images/ beside it."""
        key = normalize_name(name)
        folder, slash, rest = key.partition("/")
        elsewhere = key not in self._places and slash and folder in IMAGE_FOLDERS
        if elsewhere and rest in self._places and not (self.path.parent / rest).exists():
            key = rest
        return list(self._places.get(key, ()))

    def _texts(self, row_indices: Sequence[int], source: str) -> set[str]:
        return {
            " ".join(self._cell(self.rows[row_index], column).split())
            for row_index in row_indices
            if (self._cell(self.rows[row_index], self._source) or PERSON) == source
            for column in self._captions
        }

    def _remove(self, row_indices: Sequence[int], source: str, captions: Sequence[str]) -> None:
        """Empty the cells with captions of a source that are no longer wanted."""
        for row in map(self.rows.__getitem__, row_indices):
            if (self._cell(row, self._source) or PERSON) != source:
                continue
            for column in self._captions:
                if " ".join(self._cell(row, column).split()) not in captions:
                    self._set(row, column, "")

    def _drop_empty(self, row_indices: Sequence[int]) -> None:
        """Delete those of some rows that have no caption."""
        for row_index in sorted(row_indices, reverse=True):
            row = self.rows[row_index]
            if not any(self._cell(row, column).strip() for column in self._captions):
                del self.rows[row_index]

    def _set_split(self, name: str, split: str | None) -> None:
        rows = [self.rows[row_index] for row_index in self._rows_of(name)]
        current = next(filter(None, (self._cell(row, self._split) for row in rows)), split)
        if current:
            for row in rows:
                self._set(row, self._split, current)

    def _add_column(self, name: str) -> int:
        self.header.append(name)
        return len(self.header) - 1

    def _cell(self, row: list[str], column: int | None) -> str:
        return "" if column is None or column >= len(row) else row[column]

    def _set(self, row: list[str], column: int | None, value: str) -> None:
        if column is None:
            return
        row += [""] * (column + 1 - len(row))
        row[column] = value


def normalize_name(name: str) -> str:
    """The name by which `m1clip train` knows an image of a table."""
    return posixpath.normpath(name.replace("\\", "/"))
