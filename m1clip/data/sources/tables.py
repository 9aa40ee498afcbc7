"""CSV, TSV, JSON (also that of COCO and Karpathy), JSONL and Parquet: rows of named cells."""

import codecs
import csv
import io
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from m1clip.data.images import BadImage, FileImage, ImageRef, file_stamp
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
from m1clip.errors import UserError
from m1clip.extras import require
from m1clip.formatting import one_line, plural
from m1clip.io import open_regular, read_small, read_start

# In order of preference; compared in lower case.
IMAGE_NAMES = (
    *(
        "image",
        "image_path",
        "filepath",
        "file_path",
        "file_name",
        "filename",
        "image_name",
        "path",
        "img",
    ),
    *("img_path", "image_file", "file", "picture", "photo", "jpg", "png", "jpeg", "webp"),
)
CAPTION_NAMES = (
    *(
        "captions",
        "caption",
        "text",
        "texts",
        "title",
        "description",
        "sentences",
        "sentence",
        "comment",
    ),
    *("alt_text", "alt", "prompt", "txt", "raw"),
)
IMAGE_FOLDERS = (
    *("", "images", "Images", "image", "imgs", "img", "pictures", "photos", "data"),
    *(
        "Flicker8k_Dataset",
        "Flickr8k_Dataset",
        "flickr8k-images",
        "flickr30k-images",
        "flickr30k_images",
    ),
)
SOURCE_NAME = "source"  # column with who wrote a caption: a person, or model:NAME
GENERATED = "model:"  # how the source of a generated caption begins
SPLIT_NAMES = ("split", "partition", "subset", "set")
_ENDS_AS_IMAGE = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|hei[cf])$")
_NUMBERED = re.compile(r"(captions?|text|title|description|sentence)[_ ]?\d+$")
_EXAMPLE_ROW = '{"image": "a.jpg", "captions": ["a dog"]}'
NO_CAPTIONS_IN_JSON = (
    f"neither a list of objects such as {_EXAMPLE_ROW} nor captions of COCO or Karpathy"
)
_ROWS_FOR_COLUMNS = 100  # JSON rows whose keys become the columns
# Longer than any real row: a binary file read as text must not fill the memory.
MAX_LINE = 2**24
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
# Files that are no text: how they begin, what they are, and what to do.
_SAVE_AS_CSV = "open it in a spreadsheet program and save it as CSV (UTF-8), then use that file"
_UNPACK = "unpack it first"
_BINARY = (
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Excel workbook", _SAVE_AS_CSV),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"PAR1", "a Parquet file", "use parquet:{}"),
    (b"\x1f\x8b", "a gzip archive", _UNPACK),
    (b"BZh", "a bzip2 archive", _UNPACK),
    (b"\xfd7zXZ\0", "an xz archive", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"%PDF-", "a PDF document", "write its captions into a CSV file"),
    (b"SQLite format 3\0", "an SQLite database", "export its table as CSV"),
    (b"\x89HDF\r\n", "an HDF5 file", "export its table as CSV"),
    (b"\xff\xd8\xff", "a JPEG image", "use the folder of the images, or a table that lists them"),
    (b"\x89PNG\r\n", "a PNG image", "use the folder of the images, or a table that lists them"),
)
# Spreadsheets are zip archives; these are in the first bytes of one.
_SPREADSHEETS = (
    ((".xlsx", ".xlsm", ".xltx"), (b"xl/", b"[Content_Types].xml"), "an Excel workbook"),
    ((".ods", ".ots"), (b"opendocument.spreadsheet",), "an OpenDocument spreadsheet"),
    ((".numbers",), (b"Index/Document.iwa",), "a Numbers spreadsheet"),
)
SPREADSHEET_SUFFIXES = {
    ".xls",
    *(suffix for suffixes, _, _ in _SPREADSHEETS for suffix in suffixes),
}
_BYTES_FOR_KIND = 4096
_BYTES_FOR_KEYS = 2**16  # of a JSON file, among which are its first keys


def table_format(path: Path) -> str | None:
    """The format of a table by its suffix; None for other files.

    A .txt file is CSV if it names its columns.
    """
    if path.suffix.lower() == ".txt" and path.is_file() and has_columns(path):
        return "csv"
    return FORMAT_OF_SUFFIX.get(path.suffix.lower())


def binary_kind(path: Path) -> str | None:
    """What a file that is no text is, with what to do; None for text."""
    head = read_start(path, _BYTES_FOR_KIND)
    for start, kind, hint in _BINARY:
        if head.startswith(start):
            if start.startswith(b"PK"):
                for suffixes, names, spreadsheet in _SPREADSHEETS:
                    if path.suffix.lower() in suffixes or any(name in head for name in names):
                        return f"{spreadsheet}; {_SAVE_AS_CSV}"
            return f"{kind}; {hint.format(path)}"
    first_line = head.partition(b"\n")[0]  # in later ones, a zero byte is a problem of its row
    if b"\0" in first_line and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "a binary file, not a table; use a CSV, TSV, JSONL, JSON or Parquet file"
    return None


def check_is_text(path: Path) -> None:
    """Raise UserError for a file whose bytes would be read as column names, such as a spreadsheet."""
    if kind := binary_kind(path):
        raise user_error(f"{path}: is {kind}")


def find_tables(
    path: Path, options: Options = DEFAULT_OPTIONS, wanted: str | None = None, nested: bool = True
) -> list[Path]:
    """The tables (in the wanted format) with the captions of a folder: a usual name, several parts, or the only one."""
    if not path.is_dir():
        return [path] if path.is_file() and table_format(path) else []

    def usable(files: Iterable[Path]) -> list[Path]:
        return [
            file
            for file in files
            if (kind := table_format(file)) and wanted in (None, kind) and file.is_file()
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
    below = (
        [folder for folder in sorted(path.iterdir()) if splits.from_folder(folder.name)]
        if nested
        else []
    )
    return [
        table
        for folder in below
        if folder.is_dir()
        for table in find_tables(folder, options, wanted, False)
    ]


def _parts(folder: Path, patterns: Iterable[str]) -> list[list[Path]]:
    return [sorted(folder.glob(pattern)) for pattern in patterns]


def has_caption_keys(path: Path, options: Options = DEFAULT_OPTIONS) -> bool:
    """Whether a JSON file begins with keys of COCO, Karpathy or a list of images with captions.

    It looks at the first bytes alone, so the captions of COCO are not parsed twice.
    """
    if not path.is_file():
        return False
    head = read_start(path, _BYTES_FOR_KEYS).decode("utf-8-sig", "replace")
    keys = {_key(key) for key in re.findall(r'"([^"\\]*)"\s*:', head)}
    known = _CAPTION_KEYS | {_key(options.image_column or "")}
    return head.lstrip()[:1] in ("[", "{") and not keys.isdisjoint(known)


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


def spreadsheets(folder: Path) -> list[Path]:
    """The files in a folder that only a spreadsheet program reads."""
    files = (
        path for path in sorted(folder.iterdir()) if path.suffix.lower() in SPREADSHEET_SUFFIXES
    )
    return [path for path in files if path.is_file() and binary_kind(path)]


class Columns(NamedTuple):
    image: str
    captions: tuple[str, ...]
    split: str | None
    source: str | None = None


# Row number, cells (or what is wrong), image in the row.
Record = tuple[int, Mapping[str, Any] | str, ImageRef | None]
Records = Callable[[Columns], Iterator[Record]]
Opened = tuple[Sequence[str], Records]  # column names, rows


def table_rows(source: DataSource) -> Iterator[Row]:
    root = source.path
    for path in find_tables(root, source.options, source.format) if root.is_dir() else [root]:
        # A folder train/ with a table of its own is a split; so is train in the name of a part.
        split = splits.from_folder(path.parent.name) if path.parent.parent == root else None
        prefix = f"{path.parent.name}/" if split else ""
        if source.format in {"json", "parquet"}:
            split = split or splits.from_file_name(path.name)
        # COCO: train2017 of captions_train2017.
        part, up = (path.stem.removeprefix("captions_"), path.parent.parent)
        folders = [path.parent, path.parent / part]
        # Never in a dataset beside this one.
        if path.parent.name == "annotations" or root in path.parent.parents:
            folders += [up / part, up / "images" / part, up]
        if source.format != "parquet":
            check_is_text(path)
        header, records = READERS[source.format](path, source)
        columns = choose_columns(header, source.options, str(path))
        yield from rows_of(
            source, f"{prefix}{path.name}", columns, records(columns), folders, split, prefix
        )


def rows_of(
    source: DataSource,
    table_name: str,
    columns: Columns,
    records: Iterator[Record],
    folders: Sequence[Path],
    table_split: str | None,
    id_prefix: str = "",
) -> Iterator[Row]:
    """The rows of a table, whose images are in the table or in one of the folders."""
    find_image = _image_finder(folders)
    generated = 0
    for number, cells, stored in records:
        place = table_name, number
        if isinstance(cells, str):
            source.problem(place, cells)
            continue
        name: Any = cells.get(columns.image)
        wrong = _path_problem(name) if stored is None else None
        if wrong:
            source.problem(place, wrong, "no-image")
            continue
        if is_generated(cells.get(columns.source) if columns.source else None):
            generated += 1
            if source.options.captions == "person":
                continue
        id_ = (
            id_prefix + posixpath.normpath(name.replace("\\", "/"))
            if stored is None
            else f"{table_name}#{number}"
        )
        captions = [cells.get(column) for column in columns.captions]
        split = (
            splits.from_value(cells.get(columns.split) if columns.split else None) or table_split
        )
        yield Row(
            place,
            captions if len(captions) > 1 else captions[0],
            split,
            stored or find_image(name),
            id_,
        )
    if generated:
        left_out = (
            "left out"
            if source.options.captions == "person"
            else "--captions person leaves them out"
        )
        source.note(
            f"{table_name}: {plural(generated, 'row')} with a caption of a model; {left_out}"
        )


def is_generated(written_by: object) -> bool:
    """Whether the source of a caption says that a model wrote it."""
    return isinstance(written_by, str) and written_by.strip().startswith(GENERATED)


def _path_problem(name: Any) -> str | None:
    """Why a value cannot be the path of an image, or None."""
    if name is None or (isinstance(name, str) and not name.strip()):
        return "no file name of an image"
    if not isinstance(name, str):
        return f"the image's file name is not text but {type(name).__name__}"
    if "\0" in name or len(name) > 4096 or name != name.encode("utf-8", "replace").decode("utf-8"):
        return "the image's file name is not valid Unicode, contains a zero byte or is too long"
    if name.startswith(("http://", "https://", "s3://", "gs://")):
        return f"{name[:80]} is a URL, not a file: download the images first (img2dataset does)"
    return None


def _image_finder(folders: Sequence[Path]) -> Callable[[str], FileImage]:
    """Finds an image named in a table in these folders or in their images/.

    Else its path in the first, for errors.
    """
    near = dict.fromkeys(os.fspath(folder / name) for folder in folders for name in IMAGE_FOLDERS)
    bases = list(filter(os.path.isdir, near)) or [os.fspath(folders[0])]
    next_to_table = bases[0]

    @cache  # one object per image, however many captions it has
    def find(name: str) -> FileImage:
        for spelling in dict.fromkeys((name, name.replace("\\", "/"))):
            for number, base in enumerate(bases):
                path = os.path.join(base, spelling)
                if os.path.isfile(path):
                    bases.insert(0, bases.pop(number))  # it most likely has the next image, too
                    return FileImage(path)
        return FileImage(os.path.join(next_to_table, name))

    return find


def choose_columns(header: Sequence[str], options: Options, where: str) -> Columns:
    """The columns named by the user, else those with common names; an error lists what is there."""
    by_key = {_key(name): name for name in reversed(header)}

    def find(names: Iterable[str]) -> list[str]:
        return [by_key[_key(name)] for name in names if _key(name) in by_key]

    for name in (options.image_column, *options.caption_columns):
        if name is not None and _key(name) not in by_key:
            raise user_error(f"{where}: no column {name!r}; it has {_listing(header)}")
    image = find([options.image_column] if options.image_column else IMAGE_NAMES)[:1]
    numbered = [name for name in header if _NUMBERED.fullmatch(_key(name))]
    captions = find(options.caption_columns) or numbered or find(CAPTION_NAMES)[:1]
    if not image and any(_ENDS_AS_IMAGE.search(_key(name)) for name in header):
        raise user_error(
            f"{where}: the first row is an image, not column names; add a row such as image,caption"
        )
    if missing := [name for name, found in (("image", image), ("caption", captions)) if not found]:
        flags = " and ".join(f"--{name}-column" for name in missing)
        what = f"no {' and no '.join(missing)} column among {_listing(header)}"
        raise user_error(f"{where}: {what}; specify it with {flags}")
    split = next(iter(find(SPLIT_NAMES)), None)
    written_by = next(iter(find([SOURCE_NAME])), None)
    return Columns(image[0], tuple(dict.fromkeys(captions)), split, written_by)


def _key(name: str) -> str:
    return name.strip().lower()


def _listing(header: Sequence[str]) -> str:
    names = ", ".join(name[:40] for name in header[:12])
    return (names or "no columns") + (", ..." if len(header) > 12 else "")


def text_lines(path: Path, source: DataSource | None = None) -> Iterator[str]:
    """The lines of a text file with their ends, in its encoding.

    Bytes that do not fit are replaced.
    """
    encoding = _find_encoding(path)
    if source and encoding == "cp1252":
        source.note(
            f"{path.name} is not UTF-8: read as Windows-1252; save it as UTF-8 if letters look"
            " wrong"
        )
    with io.TextIOWrapper(open_regular(path), encoding, errors="replace", newline="") as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) >= MAX_LINE:
                raise user_error(
                    f"{path} line {number}: longer than {MAX_LINE >> 20} MiB; is it a text file?"
                )
            yield line


def _find_encoding(path: Path) -> str:
    """UTF-8 (with or without BOM), UTF-16 by its BOM, else cp1252, which Excel writes on Windows."""
    with open_regular(path) as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16"
        file.seek(0)
        try:
            text = io.TextIOWrapper(file, "utf-8-sig")
            while text.read(2**20):
                pass
        except UnicodeDecodeError:
            return "cp1252"
    return "utf-8-sig"


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
    delimiter = max(headers, key=lambda each: len(headers[each]), default=",")
    return delimiter, headers.get(delimiter, []), False


def _read_csv(path: Path, source: DataSource) -> Opened:
    """The first row has the column names; delimiter and encoding are detected."""
    delimiter, header, _ = read_header(path, source.options)

    def records(columns: Columns) -> Iterator[Record]:
        number = 0
        try:
            # Rows are numbered as a spreadsheet does: the column names are row 1.
            for number, cells in enumerate(
                csv.reader(text_lines(path, source), delimiter=delimiter), start=1
            ):
                if len(cells) > len(header) and number > 1:
                    what = f"{len(cells)} cells under {len(header)} columns"
                    yield number, f"{what}: put quotes around captions with {delimiter!r}", None
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
    dicts = ((each, each if isinstance(each, dict) else {}) for each in annotations)
    return [
        {"image": names.get(key(d, "image_id")), "caption": d.get("caption")} if d else each
        for each, d in dicts
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
            wrong = row.args[0] if isinstance(row, ValueError) else "not a JSON object"
            yield number, row if isinstance(row, dict) else wrong, None

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
                wanted = [name for name in names if name]
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=wanted):
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
            what = f"tables in {len(formats)} formats; choose one, as in {name}:{data.path}"
            raise user_error(f"{data.path}: {what}")
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
