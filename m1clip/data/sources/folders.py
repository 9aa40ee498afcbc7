"""A folder of class folders: captions are made from the names of the classes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from m1clip.data.images import FileImage, one_line
from m1clip.data.sources import splits
from m1clip.data.sources.base import DEFAULT, BaseSource, Options, Row, clean_text, walk_images
from m1clip.data.sources.tables import CsvSource, JsonlSource, JsonSource, ParquetSource, names_columns
from m1clip.io import read_small

# In a folder, the first of these is the data.
TABLE_NAMES = (
    *("captions.csv", "captions.jsonl", "captions.tsv", "captions.parquet", "captions.json", "captions.txt"),
    *("metadata.csv", "metadata.jsonl", "metadata.tsv", "metadata.parquet"),
)
_TABLES: tuple[type[BaseSource], ...] = (CsvSource, JsonlSource, ParquetSource, JsonSource)


def table_in(folder: Path, ending: str = "", options: Options = DEFAULT) -> Path | None:
    """The table that a folder is about: one of the known names, else the only one there."""
    if not folder.is_dir():
        return None
    for name in TABLE_NAMES:
        path = folder / name
        if name.endswith(ending) and path.is_file() and any(table.looks_like(path) for table in _TABLES):
            return path
    tables = tables_in(folder)
    if len(tables) != 1 or not tables[0].name.endswith(ending):
        return None
    # A lone table of another name may be about something else: its columns must say what it is.
    return tables[0] if tables[0].suffix.lower() == ".jsonl" or names_columns(tables[0], options) else None


def tables_in(folder: Path) -> list[Path]:
    """The tables of text that lie in a folder."""
    endings = {".csv", ".tsv", ".jsonl"}
    return [path for path in sorted(folder.iterdir()) if path.suffix.lower() in endings and path.is_file()]


class SplitFoldersSource(BaseSource):
    """train/metadata.jsonl, test/metadata.jsonl: the folder is the split."""

    kind = "imagefolder"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A folder named as a split holds a table."""
        return path.is_dir() and bool(_tables(path))

    def rows(self) -> Iterator[Row]:
        """Rows of each table, put into the split of its folder."""
        for split, file in _tables(self.path):
            kind = next(table for table in _TABLES if table.looks_like(file))
            part = kind(file, replace(self.options, split_fractions=(1.0, 0.0, 0.0)))
            self.problems += part.problems
            for name in part.splits():
                for sample in part.samples(name):
                    for number, caption in enumerate(sample.captions):
                        place = (f"{file.parent.name}/{part.origin(sample.id, number)}", 0)
                        yield Row(sample.image, (caption,), f"{file.parent.name}/{sample.id}", split, place)


def _tables(path: Path) -> list[tuple[str, Path]]:
    found = ((splits.known(sub.name), sub) for sub in sorted(path.iterdir()))
    return [(split, table) for split, sub in found if split and (table := table_in(sub))]


_IMAGES_LOOKED_AT = 100
MAX_TEXT_BYTES = 2**20


class TextBesideSource(BaseSource):
    """a.jpg and a.txt; folders train, val and test at the top are splits."""

    kind = "txt"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """One of the first images has its text."""
        if not path.is_dir():
            return False
        first = (name for name, _ in zip(walk_images(path), range(_IMAGES_LOOKED_AT), strict=False))
        return any(_text_of(path, name) for name in first)

    def rows(self) -> Iterator[Row]:
        """A row an image."""
        for name in walk_images(self.path):
            place = (name, 0)
            text = _text_of(self.path, name)
            if text is None:
                self.problem(place, "no .txt beside it", "empty-caption")
                continue
            data = _read_text(os.path.join(self.path, text))
            if data is None:
                self.problem(place, f"{text} cannot be read, or is not a caption", "row")
                continue
            captions = tuple(line for line in map(clean_text, data.splitlines()) if line)
            if captions:
                yield Row(FileImage(os.path.join(self.path, name)), captions, name, split_of(name), (text, 0))
            else:
                self.problem((text, 0), "no caption", "empty-caption")


def split_of(name: str) -> str | None:
    """The split a relative name lies in, if its first folder is one."""
    top, slash, _ = name.partition("/")
    return splits.known(top) if slash else None


def _text_of(root: Path, name: str) -> str | None:
    candidates = (os.path.splitext(name)[0] + ".txt", name + ".txt")
    return next((text for text in candidates if os.path.isfile(os.path.join(root, text))), None)


def _read_text(path: str) -> str | None:
    try:
        return read_small(Path(path), MAX_TEXT_BYTES).decode("utf-8-sig", "replace")
    except OSError:
        return None


CLASSES_SHOWN = 5


class ClassFolderSource(BaseSource):
    """cats/1.jpg, or train/cats/1.jpg; the folder an image lies in is its class."""

    kind = "classes"
    by_templates = True

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """Images lie in two folders or more that are not splits: one class alone tells nothing."""
        if not path.is_dir():
            return False
        first: str | None = None
        for name in walk_images(path):
            label = _class_of(name)
            if label and first and label != first:
                return True
            first = first or label
        return False

    def rows(self) -> Iterator[Row]:
        """A row an image, a caption a template."""
        classes: dict[str, None] = {}
        for name in walk_images(self.path):
            label = _class_of(name)
            if label is None:
                self.problem((name, 0), "lies in no class folder", "row")
                continue
            classes[label] = None
            captions = tuple(template.replace("{}", label) for template in self.options.templates)
            yield Row(FileImage(os.path.join(self.path, name)), captions, name, split_of(name), (name, 0))
        names = ", ".join(list(classes)[:CLASSES_SHOWN]) + (", ..." if len(classes) > CLASSES_SHOWN else "")
        self.notes.append(one_line(f"captions are made from the names of {len(classes):,} folders: {names}"))


def _class_of(name: str) -> str | None:
    """golden_retriever/1.jpg -> golden retriever."""
    folders = name.split("/")[:-1]
    if split_of(name):
        folders = folders[1:]
    return clean_text(folders[-1].replace("_", " ").replace("-", " ")) or None if folders else None
