"""CSV, TSV, JSON (also that of COCO and Karpathy), JSONL and Parquet: rows of named cells."""

import csv
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from m1clip.data.images import BadImage, ImageRef, file_stamp
from m1clip.data.sources import splits
from m1clip.data.sources.base import (
    DEFAULT_OPTIONS,
    DataFormat,
    DataPath,
    DataSource,
    Options,
    Row,
    parse_json,
    user_error,
)
from m1clip.data.sources.columns import (
    IMAGE_NAMES,
    Columns,
    Record,
    Records,
    choose_columns,
    column_key,
    rows_of,
)
from m1clip.data.sources.plain_text import check_is_text, csv_rows, text_lines
from m1clip.data.types import SPLITS
from m1clip.errors import UserError
from m1clip.extras import require
from m1clip.formatting import one_line
from m1clip.io import read_small, read_start

_EXAMPLE_ROW = '{"image": "a.jpg", "captions": ["a dog"]}'
NO_CAPTIONS_IN_JSON = (
    f"neither a list of objects such as {_EXAMPLE_ROW} nor captions of COCO or Karpathy"
)
JSON_HINT = f"; expected objects such as {_EXAMPLE_ROW}"
_ROWS_FOR_COLUMNS = 100  # JSON rows whose keys become the columns
MAX_JSON = 2**30  # ten times the captions of COCO; parsed, it takes about ten times as much memory

# In a folder, the first of these is the data.
TABLE_NAMES = (
    *(
        "captions.csv",
        "captions.jsonl",
        "captions.tsv",
        "captions.parquet",
        "captions.json",
        "captions.txt",
    ),
    *("metadata.csv", "metadata.jsonl", "metadata.tsv", "metadata.parquet"),
    *("dataset_flickr8k.json", "dataset_flickr30k.json", "dataset_coco.json"),
)
# Captions of COCO, in as many files as there are splits.
CAPTION_PARTS = ("annotations/captions_*.json", "captions_*.json")
_CAPTION_KEYS = {"images", "annotations", *IMAGE_NAMES}
_BYTES_FOR_KEYS = 2**16  # of a JSON file, among which are its first keys


def table_format(path: Path) -> str | None:
    """The format of a table by its suffix; None for other files.

    A .txt file is CSV if it names its columns.
    """
    if path.suffix.lower() == ".txt" and path.is_file() and has_columns(path):
        return "csv"
    return FORMAT_OF_SUFFIX.get(path.suffix.lower())


def find_tables(
    path: Path,
    options: Options = DEFAULT_OPTIONS,
    format_name: str | None = None,
    nested: bool = True,
) -> list[Path]:
    """The tables (in the wanted format) with the captions of a folder: a usual name, several parts,
    the only one, or one for each split.
    """
    if not path.is_dir():
        return [path] if path.is_file() and table_format(path) else []

    def usable(files: Iterable[Path]) -> list[Path]:
        return [
            file
            for file in files
            if (kind := table_format(file)) and format_name in (None, kind) and file.is_file()
        ]

    groups = [[path / name] for name in TABLE_NAMES]
    # Other files may have such names, such as captions_config.json.
    groups += [
        [part for part in files if has_caption_keys(part, options)]
        for files in _parts(path, CAPTION_PARTS)
    ]
    groups += _parts(path, ("*.parquet", "data/*.parquet"))
    for group in groups:
        if tables := usable(group):
            return tables
    alone = text_tables(path)
    # A single table of another name may be about something else, unless its columns fit.
    if len(alone) == 1 and (table_format(alone[0]) == "jsonl" or has_columns(alone[0], options)):
        return usable(alone)
    if tables := _tables_of_splits(alone, options):
        return usable(tables)
    below = (
        [folder for folder in sorted(path.iterdir()) if splits.from_folder(folder.name)]
        if nested
        else []
    )
    return [
        table
        for folder in below
        if folder.is_dir()
        for table in find_tables(folder, options, format_name, False)
    ]


def _tables_of_splits(tables: Sequence[Path], options: Options) -> list[Path]:
    """The text tables of a folder, train first, if each of them is one split with captions."""
    split_of = {path: splits.from_folder(path.stem) for path in tables}
    if "train" not in split_of.values() or None in split_of.values():
        return []
    if not all(table_format(path) == "jsonl" or has_columns(path, options) for path in tables):
        return []
    return sorted(tables, key=lambda path: SPLITS.index(str(split_of[path])))


def _parts(folder: Path, patterns: Iterable[str]) -> list[list[Path]]:
    return [sorted(folder.glob(pattern)) for pattern in patterns]


def has_caption_keys(path: Path, options: Options = DEFAULT_OPTIONS) -> bool:
    """Whether a JSON file begins with keys of COCO, Karpathy or a list of images with captions.

    It looks at the first bytes alone, so the captions of COCO are not parsed twice.
    """
    if not path.is_file():
        return False
    head = read_start(path, _BYTES_FOR_KEYS).decode("utf-8-sig", "replace")
    keys = {column_key(key) for key in re.findall(r'"([^"\\]*)"\s*:', head)}
    caption_keys = _CAPTION_KEYS | {column_key(options.image_column or "")}
    return head.lstrip()[:1] in ("[", "{") and not keys.isdisjoint(caption_keys)


def without_captions(folder: Path) -> list[Path]:
    """Return the files in a folder with names of COCO's captions that contain none."""
    files = [path for part in _parts(folder, CAPTION_PARTS) for path in part]
    return [path for path in files if path.is_file() and not has_caption_keys(path)]


def text_tables(folder: Path) -> list[Path]:
    """The CSV, TSV and JSONL files in a folder."""
    suffixes = {".csv", ".tsv", ".jsonl"}
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in suffixes and path.is_file()
    ]


def explain_columns(path: Path, options: Options) -> None:
    """Raise UserError for a text table without an image or a caption column.

    It names the columns.
    """
    check_is_text(path)
    _, header, _ = read_header(path, options)
    choose_columns(header, options, str(path))


Opened = tuple[Sequence[str], Records]  # column names, rows


def table_rows(source: DataSource) -> Iterator[Row]:
    root = source.path
    for path in find_tables(root, source.options, source.format) if root.is_dir() else [root]:
        # A folder train/ with a table of its own is a split; so is train in the name of a file.
        split = splits.from_folder(path.parent.name) if path.parent.parent == root else None
        prefix = f"{path.parent.name}/" if split else ""
        if source.format in {"json", "parquet"}:
            split = split or splits.from_file_name(path.name)
        else:
            # Only the complete name: dev_photos.csv of a user need not be a split.
            split = split or splits.from_folder(path.stem)
        # COCO: train2017 of captions_train2017.
        part, up = (path.stem.removeprefix("captions_"), path.parent.parent)
        folders = [path.parent, path.parent / part]
        # Never in a dataset beside this one.
        if path.parent.name == "annotations" or root in path.parent.parents:
            folders += [up / part, up / "images" / part, up]
        if source.format != "parquet":
            check_is_text(path)
        header, records = READERS[source.format](path, source)
        more = JSON_HINT if source.format in {"json", "jsonl"} else ""
        columns = choose_columns(header, source.options, str(path), more)
        yield from rows_of(
            source, f"{prefix}{path.name}", columns, records(columns), folders, split, prefix
        )


def has_columns(path: Path, options: Options = DEFAULT_OPTIONS) -> bool:
    """Whether the first line of a text file names an image and a caption column."""
    return read_header(path, options)[2]


def read_header(path: Path, options: Options) -> tuple[str, list[str], bool]:
    """(delimiter, column names, whether they include an image and a caption)."""
    line = next(text_lines(path), "")
    headers: dict[str, list[str]] = {}
    for delimiter in "\t" if FORMAT_OF_SUFFIX.get(path.suffix.lower()) == "tsv" else ",\t;|":
        try:
            headers[delimiter] = [
                name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])
            ]
            choose_columns(headers[delimiter], options, "")
            return delimiter, headers[delimiter], True
        except (UserError, csv.Error):
            continue
    delimiter = max(headers, key=lambda candidate: len(headers[candidate]), default=",")
    return delimiter, headers.get(delimiter, []), False


def _read_csv(path: Path, source: DataSource) -> Opened:
    """The first row has the column names; delimiter and encoding are detected."""
    delimiter, header, _ = read_header(path, source.options)

    def records(columns: Columns) -> Iterator[Record]:
        number = 0
        try:
            # Rows are numbered as a spreadsheet does: the column names are row 1.
            lines = text_lines(path, source)
            for number, cells in enumerate(csv_rows(lines, delimiter), start=1):
                if len(cells) > len(header) and number > 1:
                    counts = f"{len(cells)} cells under {len(header)} columns"
                    yield number, f"{counts}: put quotes around captions with {delimiter!r}", None
                elif cells and number > 1:
                    # Not strict: cells missing at the end of a row read as None.
                    yield number, dict(zip(header, cells, strict=False)), None
        except csv.Error as error:
            raise user_error(
                f"{path} row {number + 1}: {error}; check for an unclosed quote"
            ) from error

    return header, records


def _read_jsonl(path: Path, source: DataSource) -> Opened:
    """One JSON object per line."""

    def values() -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(text_lines(path), start=1):
            if line.strip():
                try:
                    yield number, parse_json(line)
                except ValueError as error:
                    yield number, ValueError(f"not valid JSON ({error})")

    return _json_table(path, values)


def _read_json(path: Path, source: DataSource) -> Opened:
    """A list of JSON objects, COCO captions, or Karpathy's list of images with sentences."""
    try:
        if (size := path.stat().st_size) > MAX_JSON:
            raise user_error(
                f"{path}: {size >> 20} MiB of JSON in one document; write it as .jsonl, one row per"
                " line"
            )
        document = parse_json(read_small(path, MAX_JSON))
    except ValueError as error:
        raise user_error(
            f"{path}: not valid JSON ({error}); write it again or check its end"
        ) from error
    rows = document
    if isinstance(document, dict):
        rows, annotations = document.get("images"), document.get("annotations")
        if isinstance(rows, list) and isinstance(annotations, list):
            rows = _coco_rows(rows, annotations)
        elif isinstance(rows, list):
            rows = [_karpathy_row(row) if isinstance(row, dict) else row for row in rows]
    if not isinstance(rows, list):
        raise user_error(f"{path}: {NO_CAPTIONS_IN_JSON}")
    return _json_table(path, lambda: enumerate(rows, start=1))


def _coco_rows(images: list[Any], annotations: list[Any]) -> list[Any]:
    """One row per annotation; without an image where its image_id is not among the images."""

    def key(item: dict[str, Any], name: str) -> str | None:
        return str(item[name]) if isinstance(item.get(name), int | str) else None

    names = {
        key(image, "id"): image.get("file_name") for image in images if isinstance(image, dict)
    } | {None: None}
    dicts = (
        (annotation, annotation if isinstance(annotation, dict) else {})
        for annotation in annotations
    )
    return [
        {"image": names.get(key(d, "image_id")), "caption": d.get("caption")} if d else record
        for record, d in dicts
    ]


def _karpathy_row(image: dict[str, Any]) -> dict[str, Any]:
    name, below = image.get("filename"), image.get("filepath")
    if isinstance(name, str) and isinstance(below, str):
        name = posixpath.join(below, name)
    return {"image": name, "captions": image.get("sentences"), "split": image.get("split")}


def _json_table(path: Path, values: Callable[[], Iterable[tuple[int, Any]]]) -> Opened:
    rows = islice((row for _, row in values() if isinstance(row, dict)), _ROWS_FOR_COLUMNS)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        raise user_error(f"{path}: contains no JSON object such as {_EXAMPLE_ROW}")

    def records(_: Columns) -> Iterator[Record]:
        for number, row in values():
            fault = row.args[0] if isinstance(row, ValueError) else "not a JSON object"
            yield number, row if isinstance(row, dict) else fault, None

    return columns, records


def _read_parquet(path: Path, source: DataSource) -> Opened:
    """Images are paths, or bytes that stay in the file until they are opened."""
    parquet = require("pyarrow.parquet", "Parquet")
    with _readable(path):
        schema = parquet.read_schema(path)

    def records(columns: Columns) -> Iterator[Record]:
        type_ = str(schema.field(columns.image).type)  # bytes, or the {bytes, path} of `datasets`
        embedded = (
            type_.startswith(("binary", "large_binary", "fixed_size_binary"))
            or "bytes: binary" in type_
        )
        names = [*columns.captions, columns.split, None if embedded else columns.image]
        with _readable(path), parquet.ParquetFile(path) as file:
            number = 0
            for group in range(file.num_row_groups):
                start = number
                present = [name for name in names if name]
                for batch in file.iter_batches(
                    batch_size=1024, row_groups=[group], columns=present
                ):
                    for cells in batch.to_pylist():
                        image = (
                            ParquetImage(str(path), columns.image, group, number - start)
                            if embedded
                            else None
                        )
                        number += 1
                        yield number, cells, image

    return schema.names, records


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """pyarrow's errors for a broken file, as one line."""
    try:
        yield
    # pyarrow's own errors derive from these; its decoders raise them for any bytes.
    except (
        ArithmeticError,
        LookupError,
        MemoryError,
        NotImplementedError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        raise user_error(
            f"{path}: not a readable Parquet file ({error}); write it again"
        ) from error


@dataclass(frozen=True, slots=True)
class ParquetImage(ImageRef):
    path: str
    column: str
    group: int
    row: int

    def read(self) -> bytes:
        """The bytes.

        Their row group stays in memory, because the next image is most likely in it.
        """
        try:
            value = _row_group(self.path, file_stamp(self.path), self.column, self.group)[
                self.row
            ].as_py()
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


def _is_table_of(name: str, data: DataPath) -> bool:
    tables = data.ask(find_tables)
    return bool(tables) and table_format(tables[0]) == name


def _locate_table(name: str, data: DataPath) -> Path:
    """Return the only table with captions, or the folder of several; they must have one format."""
    if data.format_name:
        tables = find_tables(data.path, data.options, name)
    else:
        tables = data.ask(find_tables)
        formats = {table_format(table) for table in tables}
        if len(formats) > 1:
            formats_found = (
                f"tables in {len(formats)} formats; choose one, as in {name}:{data.path}"
            )
            raise user_error(f"{data.path}: {formats_found}")
    return tables[0] if len(tables) == 1 else data.path


class TableFormat(NamedTuple):
    """A format of tables, and the file names that it reads."""

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[Path, DataSource], Opened]
    help: str


TABLES = (
    TableFormat(
        "csv", (".csv",), _read_csv, "a table with column names; the delimiter is detected"
    ),
    TableFormat("tsv", (".tsv", ".tab"), _read_csv, "a table with column names, separated by tabs"),
    TableFormat("jsonl", (".jsonl", ".ndjson"), _read_jsonl, "one JSON object per line"),
    TableFormat(
        "json", (".json",), _read_json, "a list of objects, or captions of COCO or Karpathy"
    ),
    TableFormat(
        "parquet", (".parquet", ".pq"), _read_parquet, "image paths, or the images themselves"
    ),
)
READERS = {table.name: table.read for table in TABLES}
FORMAT_OF_SUFFIX = {suffix: table.name for table in TABLES for suffix in table.suffixes}
TABLE_FORMATS = tuple(
    DataFormat(
        name=table.name,
        help=table.help,
        read=table_rows,
        item="row",
        matches=partial(_is_table_of, table.name),
        locate=partial(_locate_table, table.name),
    )
    for table in TABLES
)
