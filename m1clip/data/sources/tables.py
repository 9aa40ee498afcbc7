"""CSV, TSV, JSON, JSONL and Parquet: every table is read into rows of named cells, and the columns are detected."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

from m1clip.data.images import BadImage, decode, file_stamp, one_line
from m1clip.data.sources import splits
from m1clip.data.sources.base import DEFAULT, DataSource, ImageFolder, Options, Row, require, user_error
from m1clip.data.types import ImageRef
from m1clip.errors import UserError
from m1clip.io import open_regular, read_small

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
# Where the image is inside the table, one of these joins the rows of the same image.
ID_NAMES = ("image_id", "img_id", "imgid", "filename", "file_name", "image_name", "image_path")
_ENDS_AS_IMAGE = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|hei[cf])$")
_NUMBERED = re.compile(r"(captions?|text|title|description|sentence)[_ ]?\d+$")
_DELIMITERS = (",", "\t", ";", "|")
_EXAMPLE = '{"image": "a.jpg", "captions": ["a dog"]}'
_ROWS_FOR_COLUMNS = 100  # JSON rows whose keys become the columns
# Longer than any real row: a binary file read as text must not fill the memory.
MAX_LINE = 2**24
MAX_JSON = 2**30  # ten times the captions of COCO; parsed, it takes about ten times as much memory
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that are read."""

    image: str
    captions: tuple[str, ...]
    split: str | None
    id: str | None


Record = tuple[int, Mapping[str, Any] | str, ImageRef | None]  # row number, cells (or what is wrong), image in the row


@dataclass(frozen=True, slots=True)
class Table:
    """An open table of any format."""

    path: Path
    name: str  # in messages
    columns: Sequence[str]
    records: Callable[[Columns], Iterator[Record]]
    folder: Path  # image paths are relative to it
    split: str | None = None  # of rows that name none


def table_rows(table: Table, source: DataSource) -> Iterator[Row]:
    """The rows of a table, with the columns chosen by the options or by their names."""
    columns = choose_columns(table.columns, source.options, str(table.path))
    folder = ImageFolder(table.folder)
    for number, cells, image in table.records(columns):
        place = (table.name, number)
        if isinstance(cells, str):
            source.problem(place, cells)
            continue
        captions = [cells.get(name) for name in columns.captions]
        id_ = None
        if image is not None:
            value = cells.get(columns.id) if columns.id else None
            id_ = (str(value) if isinstance(value, str | int) else "") or f"{table.name}#{number}"
        yield Row(
            place,
            captions if len(captions) > 1 else captions[0],
            splits.from_value(cells.get(columns.split) if columns.split else None) or table.split,
            cells.get(columns.image),
            folder,
            image,
            id_,
        )


def choose_columns(header: Sequence[str], options: Options, where: str) -> Columns:
    """The columns named by the user, else those with common names; an error lists what is there."""
    by_key = {_key(name): name for name in reversed(header)}

    def find(names: Iterable[str]) -> list[str]:
        return [by_key[_key(name)] for name in names if _key(name) in by_key]

    asked = [name for name in (options.image_column, *options.caption_columns) if name is not None]
    for name in asked:
        if _key(name) not in by_key:
            raise user_error(f"{where}: no column {name!r}; it has {_listing(header)}")
    image = find([options.image_column] if options.image_column else IMAGE_NAMES)[:1]
    numbered = [name for name in header if _NUMBERED.fullmatch(_key(name))]
    captions = find(options.caption_columns) or numbered or find(CAPTION_NAMES)[:1]
    if not image or not captions:
        raise user_error(f"{where}: {_missing(not image, not captions, header)}")
    ids = [name for name in find(ID_NAMES) if name != image[0]]
    split = next(iter(find(SPLIT_NAMES)), None)
    return Columns(image[0], tuple(dict.fromkeys(captions)), split, next(iter(ids), None))


def _key(name: str) -> str:
    return name.strip().lower()


def _listing(header: Sequence[str]) -> str:
    names = ", ".join(name[:40] for name in header[:12])
    return (names or "no columns") + (", ..." if len(header) > 12 else "")


def _missing(image: bool, caption: bool, header: Sequence[str]) -> str:
    if image and any(_ENDS_AS_IMAGE.search(_key(name)) for name in header):
        return "the first row is an image, not column names; add a row such as image,caption"
    missing = [name for name, lacks in (("image", image), ("caption", caption)) if lacks]
    flags = " and ".join(f"--{name}-column" for name in missing)
    return f"no {' and no '.join(missing)} column among {_listing(header)}; specify it with {flags}"


def open_table(path: Path, source: DataSource) -> Table:
    """The table in a file, by its suffix."""
    if path.suffix.lower() in {".parquet", ".pq"}:
        return parquet_table(path, source)
    if path.suffix.lower() == ".json":
        return json_table(path, source)
    return jsonl_table(path, source) if is_jsonl(path) else csv_table(path, source)


# CSV and TSV


def is_csv(path: Path) -> bool:
    """A file with the suffix of a table, or a .txt whose first line names an image and a caption column."""
    suffix = path.suffix.lower()
    return path.is_file() and (suffix in {".csv", ".tsv", ".tab"} or (suffix == ".txt" and has_columns(path)))


def has_columns(path: Path, options: Options = DEFAULT) -> bool:
    """Whether the first line of a text file names an image and a caption column."""
    return _csv_dialect(path, find_encoding(path), options)[2]


def csv_table(path: Path, source: DataSource) -> Table:
    """The first row has the column names; delimiter and encoding are detected."""
    encoding = _encoding(path, source)
    delimiter, header, _ = _csv_dialect(path, encoding, source.options)

    def records(columns: Columns) -> Iterator[Record]:
        number = 0
        with open_text(path, encoding) as file:
            try:
                # Rows are numbered as a spreadsheet does: the column names are row 1.
                for number, cells in enumerate(csv.reader(bounded_lines(file, path), delimiter=delimiter), start=1):
                    if len(cells) > len(header) and number > 1:
                        what = f"{len(cells)} cells under {len(header)} columns"
                        yield number, f"{what}: put quotes around captions with {delimiter!r}", None
                    elif cells and number > 1:
                        # Not strict: cells missing at the end of a row read as None.
                        yield number, dict(zip(header, cells, strict=False)), None
            except csv.Error as error:
                what = f"{error}; check for an unclosed quote"
                raise user_error(f"{path} row {number + 1}: {what}") from error

    return Table(path, path.name, header, records, path.parent)


def _csv_dialect(path: Path, encoding: str, options: Options) -> tuple[str, list[str], bool]:
    """(delimiter, column names, whether they include an image and a caption)."""
    with open_text(path, encoding) as file:
        line = next(bounded_lines(file, path), "")
    headers = {delimiter: _cells(line, delimiter) for delimiter in _DELIMITERS}
    if path.suffix.lower() in {".tsv", ".tab"}:
        headers = {"\t": headers["\t"]}
    for delimiter, header in headers.items():
        try:
            choose_columns(header, options, "")
        except UserError:
            continue
        return delimiter, header, True
    delimiter = max(headers, key=lambda delimiter: len(headers[delimiter]))
    return delimiter, headers[delimiter], False


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def find_encoding(path: Path) -> str:
    """UTF-8 (with or without BOM), UTF-16 by its BOM, else cp1252, which Excel writes on Windows."""
    with open_regular(path) as file:
        start = file.read(4)
        for bom, name in _BOMS:
            if start.startswith(bom):
                return name
        file.seek(0)
        try:
            text = io.TextIOWrapper(file, "utf-8")
            while text.read(2**20):
                pass
        except UnicodeDecodeError:
            return "cp1252"
    return "utf-8"


def _encoding(path: Path, source: DataSource) -> str:
    encoding = find_encoding(path)
    if encoding == "cp1252":
        source.note(f"{path.name} is not UTF-8: read as Windows-1252; save it as UTF-8 if letters look wrong")
    return encoding


def open_text(path: Path, encoding: str) -> TextIO:
    """A regular file as text; bytes that do not fit the encoding are replaced."""
    return io.TextIOWrapper(open_regular(path), encoding, errors="replace", newline="")


def bounded_lines(file: TextIO, path: Path) -> Iterator[str]:
    """Lines with their line ends; an extremely long one is an error, to bound memory."""
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if len(line) >= MAX_LINE:
            raise user_error(f"{path} line {number}: longer than {MAX_LINE >> 20} MiB; is it a text file?")
        yield line


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text file in its detected encoding."""
    with open_text(path, find_encoding(path)) as file:
        yield from bounded_lines(file, path)


# JSON and JSONL


def is_jsonl(path: Path) -> bool:
    """A file with the suffix .jsonl or .ndjson."""
    return path.is_file() and path.suffix.lower() in {".jsonl", ".ndjson"}


def is_json(path: Path) -> bool:
    """A .json file with a list."""
    return path.is_file() and path.suffix.lower() == ".json" and isinstance(read_json(path), list)


def jsonl_table(path: Path, source: DataSource) -> Table:
    """One JSON object per line."""
    encoding = _encoding(path, source)
    return _json_table(path, lambda: _json_lines(path, encoding))


def json_table(path: Path, source: DataSource) -> Table:
    """A file with a list of JSON objects."""
    document = read_json(path)
    if not isinstance(document, list):
        raise user_error(f"{path}: not a list of objects such as {_EXAMPLE}")
    return _json_table(path, lambda: enumerate(document, start=1))


def _json_table(path: Path, values: Callable[[], Iterable[tuple[int, Any]]]) -> Table:
    rows = islice((row for _, row in values() if isinstance(row, dict)), _ROWS_FOR_COLUMNS)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        raise user_error(f"{path}: contains no JSON object such as {_EXAMPLE}")

    def records(_: Columns) -> Iterator[Record]:
        for number, row in values():
            wrong = row.args[0] if isinstance(row, ValueError) else "not a JSON object"
            yield number, row if isinstance(row, dict) else wrong, None

    return Table(path, path.name, columns, records, path.parent)


def _json_lines(path: Path, encoding: str) -> Iterator[tuple[int, Any]]:
    """(line number, value); a line that is not JSON gives a ValueError."""
    with open_text(path, encoding) as file:
        for number, line in enumerate(bounded_lines(file, path), start=1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield number, ValueError(f"not valid JSON ({error})")


@lru_cache(maxsize=1)
def read_json(path: Path) -> Any:
    """The document in a JSON file; cached because detecting the format and reading it both need it."""
    try:
        if (size := path.stat().st_size) > MAX_JSON:
            raise user_error(f"{path}: {size >> 20} MiB of JSON in one document; write it as .jsonl, one row per line")
        return json.loads(read_small(path, MAX_JSON).decode("utf-8-sig"))
    except RecursionError as error:
        raise user_error(f"{path}: nested too deeply for a list of captions") from error
    except ValueError as error:
        raise user_error(f"{path}: not valid JSON ({error}); write it again or check its end") from error


# Parquet


def parquet_files(path: Path) -> list[Path]:
    """The Parquet files at a path, sorted: the file itself, or those of a folder or of its data/."""
    if path.is_file():
        return [path] if path.suffix.lower() in {".parquet", ".pq"} else []
    return sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))


def parquet_rows(source: DataSource) -> Iterator[Row]:
    """All files of a folder; their names may contain the split, as on the hub (train-00000-of-00002)."""
    files = parquet_files(source.path)
    if not files:
        raise user_error(f"{source.path}: no .parquet file there")
    for path in files:
        yield from table_rows(parquet_table(path, source), source)


def parquet_table(path: Path, source: DataSource) -> Table:
    """Images are paths, or bytes that stay in the file until they are opened."""
    parquet = require("pyarrow.parquet", "Parquet")
    with _readable(path):
        schema = parquet.read_schema(path)

    def records(columns: Columns) -> Iterator[Record]:
        embedded = _has_bytes(str(schema.field(columns.image).type))
        names = [*columns.captions, columns.split, columns.id if embedded else columns.image]
        with _readable(path), parquet.ParquetFile(path) as file:
            number = 0
            for group in range(file.num_row_groups):
                start = number
                wanted = [name for name in names if name]
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=wanted):
                    for cells in batch.to_pylist():
                        image = ParquetImage(str(path), columns.image, group, number - start) if embedded else None
                        number += 1
                        yield number, cells, image

    folder = source.path if source.path.is_dir() else path.parent
    split = splits.from_file_name(path.name) or splits.from_folder(path.parent.name)
    return Table(path, path.name, schema.names, records, folder, split)


def _has_bytes(column_type: str) -> bool:
    """Whether a column has the images themselves: bytes, or the {bytes, path} of `datasets`."""
    return column_type.startswith(("binary", "large_binary", "fixed_size_binary")) or "bytes: binary" in column_type


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """pyarrow's errors for a broken file, as one line."""
    try:
        yield
    # pyarrow's own errors derive from these; its decoders raise them for any bytes.
    except (ArithmeticError, LookupError, MemoryError, NotImplementedError, OSError, TypeError, ValueError) as error:
        raise user_error(f"{path}: not a readable Parquet file ({error}); write it again") from error


@dataclass(frozen=True, slots=True)
class ParquetImage:
    """An image in a row of a Parquet file."""

    path: str
    column: str
    group: int
    row: int

    def open(self, want: int | None = None) -> Image.Image:
        return decode(self.read(), want, str(self))

    def read(self) -> bytes:
        """The bytes; their row group stays in memory, because the next image is most likely in it."""
        try:
            value = _row_group(self.path, file_stamp(self.path), self.column, self.group)[self.row].as_py()
        except (ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError) as error:
            raise BadImage(str(self), f"cannot be read ({error})") from error
        return bytes_in(value, str(self))

    def stamp(self) -> str:
        return f"{self.path}|{file_stamp(self.path)}|{self.column}|{self.group}|{self.row}"

    def __str__(self) -> str:
        return one_line(f"{self.path} row group {self.group} row {self.row + 1}")


def bytes_in(value: Any, where: str) -> bytes:
    """The bytes of an image in a cell: themselves, or in the {bytes, path} of `datasets`."""
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes):
        raise BadImage(where, "no image in this row")
    return data


@lru_cache(maxsize=2)
def _row_group(path: str, stamp: str, column: str, group: int) -> Any:
    with require("pyarrow.parquet", "Parquet").ParquetFile(path) as file:
        return file.read_row_group(group, columns=[column]).column(0)
