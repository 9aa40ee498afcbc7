"""Text of unknown encoding, and what files that are no text are."""

import codecs
import csv
import io
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from m1clip.data.sources.base import DataSource, user_error
from m1clip.io import open_regular, read_start

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
# Longer than any real row: a binary file read as text must not fill the memory.
MAX_LINE = 2**24
NOT_UTF8 = "cp1252"  # the encoding of text that is neither UTF-8 nor UTF-16
NOT_UTF8_NOTE = "not UTF-8: read as Windows-1252; save as UTF-8 if letters look wrong"
_CONTROL = set(map(chr, range(32))) - set("\t\n\r\f")


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
    """Raise UserError for a file whose bytes would be read as column names, such as a
    spreadsheet.
    """
    if kind := binary_kind(path):
        raise user_error(f"{path}: is {kind}")


def spreadsheets(folder: Path) -> list[Path]:
    """The files in a folder that only a spreadsheet program reads."""
    files = (
        path for path in sorted(folder.iterdir()) if path.suffix.lower() in SPREADSHEET_SUFFIXES
    )
    return [path for path in files if path.is_file() and binary_kind(path)]


def text_lines(path: Path, source: DataSource | None = None) -> Iterator[str]:
    """The lines of a text file with their ends, in its encoding.

    Bytes that do not fit are replaced.
    """
    with open_regular(path) as binary:
        encoding = _find_encoding(binary)
    if source and encoding == NOT_UTF8:
        source.note(f"{path.name} {NOT_UTF8_NOTE}")
    with io.TextIOWrapper(open_regular(path), encoding, errors="replace", newline="") as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) >= MAX_LINE:
                raise user_error(
                    f"{path} line {number}: longer than {MAX_LINE >> 20} MiB; is it a text file?"
                )
            yield line


def csv_rows(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """Yield the rows of a CSV file; csv.Error for one with a quote that is never closed.

    It would hide all rows below it, in one cell.
    """
    # A line behind the last one is a row of its own, unless a quote is open.
    end = ["end of the file"]
    row: list[str] | None = None
    for following in csv.reader(itertools.chain(lines, end), delimiter=delimiter):
        if row is not None:
            yield row
        row = following
    if row != end:
        raise csv.Error("a quote is not closed")


def decode_text(data: bytes) -> tuple[str, str]:
    """Return the text of a small file, and its encoding as `text_lines` finds it.

    ValueError for bytes that are no text in it.
    """
    encoding = _find_encoding(io.BytesIO(data))
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = "\0"
    # Nearly all bytes are letters of Windows-1252, but text has no control characters.
    rejected = _CONTROL if encoding == NOT_UTF8 else {"\0"}
    if not rejected.isdisjoint(text):
        raise ValueError("neither UTF-8, UTF-16 with its mark (BOM) nor Windows-1252")
    return text, encoding


def _find_encoding(file: BinaryIO) -> str:
    """UTF-8 (with or without BOM), UTF-16 by its BOM, else cp1252, which Excel writes on
    Windows.
    """
    if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    file.seek(0)
    try:
        text = io.TextIOWrapper(file, "utf-8-sig")
        while text.read(2**20):
            pass
    except UnicodeDecodeError:
        return NOT_UTF8
    return "utf-8-sig"
