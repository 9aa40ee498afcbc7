"""A table of images: which columns matter, and what a row of any table becomes."""

from __future__ import annotations

import csv
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from m1clip.data.images import BadImage, decode, file_stamp, one_line
from m1clip.data.sources import splits
from m1clip.data.sources.base import (
    DEFAULT,
    MAX_LINE,
    BaseSource,
    ImageFinder,
    Options,
    Row,
    bounded_lines,
    clean_text,
    find_encoding,
    need,
    open_text,
    read_json,
)
from m1clip.data.types import ImageRef
from m1clip.errors import UserError
from m1clip.io import open_regular

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
# Where an image lies inside the table, these name it, so that several rows of it are joined.
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
        return f"{where}: its first row is an image, not names of columns; add one such as image,caption"
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
    """Rows of named cells. A kind of table gives `header`, `records`, and `image` if that is not a path."""

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

    def image(self, cells: Mapping[str, Any], columns: Columns, place: tuple[str, int]) -> tuple[ImageRef, str] | str:
        """The image of a row and its id, or what is wrong."""
        name = cells.get(columns.image)
        wrong = wrong_path(name)
        if wrong or not isinstance(name, str):
            return wrong or "not a file name"
        return self._finder.find(name), posixpath.normpath(name.replace("\\", "/"))

    def rows(self) -> Iterator[Row]:
        """Rows with an image and at least one caption."""
        columns = choose_columns(self.header(), self.options, str(self.path))
        self._finder = ImageFinder(self.folder())
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
            answer = answer or self.image(cells, columns, place)
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
    """Why a cell cannot be the path of an image, or None."""
    if name is None or (isinstance(name, str) and not name.strip()):
        return "no file name of an image"
    if not isinstance(name, str):
        return f"the image's file name is not text but {type(name).__name__}"
    if "\0" in name or len(name) > 4096:
        return "the image's file name holds a zero byte or is too long"
    if name.startswith(("http://", "https://", "s3://", "gs://")):
        return f"{name[:80]} is an address, not a file: download the images first (img2dataset does)"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "the image's file name is not valid text"
    return None


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
        self.delimiter = "\t" if self.path.suffix.lower() in {".tsv", ".tab"} else _find_delimiter(line, self.options)
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
                what = f"{self.path} row {number + 1}: {error}; look for a quote that is opened and never closed"
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


_ROWS_LOOKED_AT = 100


class JsonlSource(TableSource):
    """One JSON object a line."""

    kind = "jsonl"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A file that ends in .jsonl or .ndjson."""
        return path.is_file() and path.suffix.lower() in {".jsonl", ".ndjson"}

    def header(self) -> list[str]:
        """Every key of the first rows."""
        rows = islice((row for _, row in self._objects() if isinstance(row, dict)), _ROWS_LOOKED_AT)
        names = list(dict.fromkeys(key for row in rows for key in row))
        if not names:
            raise UserError(one_line(f"{self.path}: no line of it is a JSON object such as {_EXAMPLE}"))
        return names

    def records(self, columns: Columns) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
        """Objects with their line number."""
        for number, row in self._objects():
            if isinstance(row, dict):
                yield (self.path.name, number), row
            else:
                self.problem((self.path.name, number), row if isinstance(row, str) else "not a JSON object")

    def _objects(self) -> Iterator[tuple[int, Any]]:
        """(line number, object), or (line number, what is wrong with the line)."""
        with open_regular(self.path) as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if len(line) >= MAX_LINE:
                    what = f"{self.path} line {number}: over {MAX_LINE >> 20} MiB; write one object a line"
                    raise UserError(one_line(what))
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not text.strip():
                    continue
                try:
                    row = json.loads(text.decode("utf-8"))
                    yield number, row if isinstance(row, dict) else None
                except (ValueError, RecursionError) as error:
                    yield number, f"not valid JSON ({error})"


class JsonSource(TableSource):
    """A JSON file that holds a list of objects."""

    kind = "json"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A .json file that is a list."""
        return path.is_file() and path.suffix.lower() == ".json" and isinstance(read_json(path), list)

    def header(self) -> list[str]:
        """Every key of the first rows."""
        rows = [row for row in self._document()[:_ROWS_LOOKED_AT] if isinstance(row, dict)]
        return list(dict.fromkeys(key for row in rows for key in row))

    def records(self, columns: Columns) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
        """Objects with their place in the list, counted from 1."""
        for number, row in enumerate(self._document(), start=1):
            if isinstance(row, dict):
                yield (self.path.name, number), row
            else:
                self.problem((self.path.name, number), "not a JSON object")

    def _document(self) -> list[Any]:
        document = read_json(self.path)
        if not isinstance(document, list):
            raise UserError(one_line(f"{self.path}: not a list of objects such as {_EXAMPLE}"))
        return document


_EXAMPLE = '{"image": "a.jpg", "captions": ["a dog"]}'


class ParquetSource(TableSource):
    """Files of one schema; their names may tell the split, as on the hub (train-00000-of-00002)."""

    kind = "parquet"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A .parquet file, or a folder that holds some (also in data/)."""
        return bool(parquet_files(path))

    def header(self) -> list[str]:
        """Names of the columns of the first file."""
        self._files = {path.name: path for path in parquet_files(self.path)}
        if not self._files:
            raise UserError(one_line(f"{self.path}: no .parquet file there"))
        first = next(iter(self._files.values()))
        with reported(first):
            return list(_schema(first).names)

    def folder(self) -> Path:
        """Beside the files."""
        return self.path if self.path.is_dir() else self.path.parent

    def records(self, columns: Columns) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
        """Rows counted from 1 in each file. Bytes of images are left where they are."""
        parquet = need("pyarrow.parquet", "Parquet")
        for name, path in self._files.items():
            with reported(path):
                inside = is_inside(_schema(path), columns.image)
                asked = [*columns.captions, columns.split, None if inside else columns.image]
                wanted = [column for column in asked if column]
                if inside and columns.id:
                    wanted.append(columns.id)
                number = 0
                with parquet.ParquetFile(path) as file:
                    for group in range(file.num_row_groups):
                        start = number
                        for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=wanted):
                            for cells in batch.to_pylist():
                                number += 1
                                at = (group, number - 1 - start)
                                ref = {columns.image: ParquetImage(str(path), columns.image, *at)} if inside else {}
                                yield (name, number), cells | ref

    def image(self, cells: Mapping[str, Any], columns: Columns, place: tuple[str, int]) -> tuple[ImageRef, str] | str:
        """A path, or the bytes in the table; several rows are joined where an id column says so."""
        image = cells.get(columns.image)
        if not isinstance(image, ParquetImage):
            return super().image(cells, columns, place)
        name = cells.get(columns.id) if columns.id else None
        return image, str(name) if isinstance(name, (str, int)) else f"{place[0]}#{place[1]}"

    def default_split(self, place: tuple[str, int]) -> str | None:
        """What the name of the file says."""
        return splits.from_file_name(place[0]) or splits.known(self._files[place[0]].parent.name)


@dataclass(frozen=True, slots=True)
class ParquetImage:
    """The bytes of an image in a row of a Parquet file."""

    path: str
    column: str
    group: int
    row: int

    def open(self, want: int | None = None) -> Image.Image:
        """Decode to RGB; BadImage when it cannot be."""
        return decode(self.read(), want, str(self))

    def read(self) -> bytes:
        """The bytes; their group of rows stays in memory, since the next image is most likely there."""
        try:
            value = _group(self.path, file_stamp(self.path), self.column, self.group)[self.row].as_py()
        except (ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError) as error:
            raise BadImage(str(self), f"cannot be read ({error})") from error
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise BadImage(str(self), "no image in this row")
        return data

    def stamp(self) -> str:
        """Name, size and time of the file, and the row."""
        return f"{self.path}|{file_stamp(self.path)}|{self.column}|{self.group}|{self.row}"

    def __str__(self) -> str:
        return one_line(f"{self.path} row group {self.group} row {self.row + 1}")


@lru_cache(maxsize=2)
def _group(path: str, stamp: str, column: str, group: int) -> Any:
    with need("pyarrow.parquet", "Parquet").ParquetFile(path) as file:
        return file.read_row_group(group, columns=[column]).column(0)


def _schema(path: Path) -> Any:
    return need("pyarrow.parquet", "Parquet").read_schema(path)


def is_inside(schema: Any, column: str) -> bool:
    """Whether a column holds images themselves: bytes, or the {bytes, path} of `datasets`."""
    kind = str(schema.field(column).type)
    return kind.startswith(("binary", "large_binary", "fixed_size_binary")) or "bytes: binary" in kind


def parquet_files(path: Path) -> list[Path]:
    """The Parquet files a path means, sorted."""
    if path.is_file():
        return [path] if path.suffix.lower() in {".parquet", ".pq"} else []
    for folder in (path, path / "data"):
        if found := sorted(folder.glob("*.parquet")):
            return found
    return []


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """What pyarrow says of a broken file, as one line."""
    try:
        yield
    except UserError:
        raise
    # pyarrow's own errors derive from these; its decoders raise them for any bytes.
    except (ArithmeticError, LookupError, MemoryError, NotImplementedError, OSError, TypeError, ValueError) as error:
        raise UserError(one_line(f"{path}: not a Parquet file that can be read ({error}); write it again")) from error
