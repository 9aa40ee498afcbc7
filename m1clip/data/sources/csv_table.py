"""CSV and TSV: a row a caption or a row a picture, any common delimiter, any common encoding."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from m1clip.data.images import one_line
from m1clip.data.sources.base import DEFAULT, Options
from m1clip.data.sources.reading import bounded_lines, find_encoding, open_text
from m1clip.data.sources.table import Columns, TableSource, choose_columns
from m1clip.errors import UserError

DELIMITERS = (",", "\t", ";", "|")


class CsvSource(TableSource):
    """A file of separated values whose first row names the columns."""

    kind = "csv"

    def __init__(self, path: Path, options: Options = DEFAULT) -> None:
        self.encoding = find_encoding(path)
        self.delimiter = ","
        super().__init__(path, options)
        if self.encoding == "cp1252":
            note = "is not UTF-8: it was read as Windows-1252; save it as UTF-8 if letters look wrong"
            self.notes.append(one_line(f"{path.name} {note}"))

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A file with the ending of a table, or a .txt whose first line names an image and a caption."""
        if not path.is_file():
            return False
        if path.suffix.lower() in {".csv", ".tsv", ".tab"}:
            return True
        return path.suffix.lower() == ".txt" and names_columns(path)

    def header(self) -> list[str]:
        """The first row, cut by the delimiter that finds the columns."""
        line = first_line(self.path, self.encoding)
        self.delimiter = (
            "\t" if self.path.suffix.lower() in {".tsv", ".tab"} else _find_delimiter(line, self.options)
        )
        return _cut(line, self.delimiter)

    def records(self, columns: Columns) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
        """Rows numbered as a spreadsheet does: the names are row 1."""
        with open_text(self.path, self.encoding) as file:
            reader = csv.reader(bounded_lines(file, self.path), delimiter=self.delimiter)
            number = 0
            names: list[str] = []
            try:
                for number, cells in enumerate(reader, start=1):
                    if number == 1:
                        names = [name.strip() for name in cells]
                    elif len(cells) > len(names):
                        what = f"{len(cells)} cells under {len(names)} columns"
                        what += f": put quotes round captions with {self.delimiter!r}"
                        self.problem((self.path.name, number), what)
                    elif cells:
                        # strict: a short row has no cell under its last names, which reads as missing.
                        yield (self.path.name, number), dict(zip(names, cells, strict=False))
            except csv.Error as error:
                what = (
                    f"{self.path} row {number + 1}: {error}; look for a quote that is opened and never closed"
                )
                raise UserError(one_line(what)) from error


def first_line(path: Path, encoding: str) -> str:
    """The first line of a text file."""
    with open_text(path, encoding) as file:
        return next(bounded_lines(file, path), "")


def _cut(line: str, delimiter: str) -> list[str]:
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def _find_delimiter(line: str, options: Options) -> str:
    for delimiter in DELIMITERS:
        try:
            choose_columns(_cut(line, delimiter), options, "")
        except UserError:
            continue
        return delimiter
    return max(DELIMITERS, key=lambda delimiter: len(_cut(line, delimiter)))


def names_columns(path: Path, options: Options = DEFAULT) -> bool:
    """Whether the first line of a text file names an image and a caption column."""
    line = first_line(path, find_encoding(path))
    names = _cut(line, _find_delimiter(line, options))
    try:
        return bool(choose_columns(names, options, ""))
    except UserError:
        return False
