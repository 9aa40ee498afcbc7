"""Folders: a table for each split, a .txt next to each image, or class folders whose names become captions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from m1clip.data.images import FileImage
from m1clip.data.sources import splits
from m1clip.data.sources.base import DEFAULT, DataSource, Options, Row, walk_images
from m1clip.data.sources.splits import clean_text
from m1clip.data.sources.tables import has_columns, is_csv, is_json, is_jsonl, open_table, parquet_files, table_rows
from m1clip.io import read_small

# In a folder, the first of these is the data.
TABLE_NAMES = (
    *("captions.csv", "captions.jsonl", "captions.tsv", "captions.parquet", "captions.json", "captions.txt"),
    *("metadata.csv", "metadata.jsonl", "metadata.tsv", "metadata.parquet"),
)
TEMPLATE = "a photo of a {}."
MAX_TEXT_BYTES = 2**20
_IMAGES_CHECKED = 100
_CLASSES_SHOWN = 5


def find_table(folder: Path, suffix: str = "", options: Options = DEFAULT) -> Path | None:
    """The table that describes a folder: one of the known names, else the only one there."""
    if not folder.is_dir():
        return None
    for name in TABLE_NAMES:
        path = folder / name
        if name.endswith(suffix) and (is_csv(path) or is_jsonl(path) or is_json(path) or parquet_files(path)):
            return path
    tables = text_tables(folder)
    if len(tables) != 1 or not tables[0].name.endswith(suffix):
        return None
    # A single table of another name may be about something else, unless its columns fit.
    return tables[0] if is_jsonl(tables[0]) or has_columns(tables[0], options) else None


def text_tables(folder: Path) -> list[Path]:
    """The CSV, TSV and JSONL files in a folder."""
    suffixes = {".csv", ".tsv", ".jsonl"}
    return [path for path in sorted(folder.iterdir()) if path.suffix.lower() in suffixes and path.is_file()]


def is_imagefolder(path: Path) -> bool:
    """A folder named after a split has a table."""
    return path.is_dir() and bool(_split_tables(path))


def imagefolder_rows(source: DataSource) -> Iterator[Row]:
    """The rows of train/metadata.jsonl, test/metadata.jsonl: the folder is the split."""
    for split, path in _split_tables(source.path):
        folder = path.parent.name
        table = replace(open_table(path, source), name=f"{folder}/{path.name}", folder=path.parent)
        for row in table_rows(table, source):
            yield replace(row, split=split, id=f"{folder}/{row.key()}")


def _split_tables(path: Path) -> list[tuple[str, Path]]:
    found = ((splits.from_folder(folder.name), folder) for folder in sorted(path.iterdir()))
    return [(split, table) for split, folder in found if split and (table := find_table(folder))]


def has_text_files(path: Path) -> bool:
    """One of the first images has its text."""
    return path.is_dir() and any(_text_file(path, name) for name in islice(walk_images(path), _IMAGES_CHECKED))


def text_file_rows(source: DataSource) -> Iterator[Row]:
    """a.jpg and a.txt, one caption per line; folders train, val and test at the top are splits."""
    for name in walk_images(source.path):
        text = _text_file(source.path, name)
        if text is None:
            source.problem((name, 0), "no .txt file next to it", "empty-caption")
            continue
        try:
            lines = read_small(source.path / text, MAX_TEXT_BYTES).decode("utf-8-sig", "replace").splitlines()
        except OSError:
            source.problem((name, 0), f"{text} cannot be read as a caption")
            continue
        yield Row((text, 0), lines, _split_of(name), image=FileImage(os.path.join(source.path, name)), id=name)


def _text_file(root: Path, name: str) -> str | None:
    candidates = (os.path.splitext(name)[0] + ".txt", name + ".txt")
    return next((text for text in candidates if os.path.isfile(os.path.join(root, text))), None)


def _split_of(name: str) -> str | None:
    """The split of a relative name whose first folder is one."""
    top, slash, _ = name.partition("/")
    return splits.from_folder(top) if slash else None


def is_class_folders(path: Path) -> bool:
    """Images in at least two folders that are not splits; a single class has nothing to distinguish."""
    if not path.is_dir():
        return False
    first: str | None = None
    for name in walk_images(path):
        label = _class_of(name)
        if label and first and label != first:
            return True
        first = first or label
    return False


def class_folder_rows(source: DataSource) -> Iterator[Row]:
    """cats/1.jpg or train/cats/1.jpg: the folder of an image is its class."""
    classes: dict[str, None] = {}
    for name in walk_images(source.path):
        label = _class_of(name)
        if label is None:
            source.problem((name, 0), "not in a class folder")
            continue
        classes[label] = None
        image = FileImage(os.path.join(source.path, name))
        yield Row((name, 0), TEMPLATE.format(label), _split_of(name), image=image, id=name)
    names = ", ".join(list(classes)[:_CLASSES_SHOWN]) + (", ..." if len(classes) > _CLASSES_SHOWN else "")
    source.note(f"captions are generated from the names of {len(classes):,} folders: {names}")


def _class_of(name: str) -> str | None:
    """golden_retriever/1.jpg -> golden retriever."""
    folders = name.split("/")[:-1]
    if _split_of(name):
        folders = folders[1:]
    return clean_text(folders[-1].replace("_", " ").replace("-", " ")) or None if folders else None
