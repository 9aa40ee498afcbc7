"""A folder that is about one table, and folders train/, val/, test/ with a table each (imagefolder)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from m1clip.data.sources import splits
from m1clip.data.sources.base import DEFAULT, BaseSource, Options, Row
from m1clip.data.sources.csv_table import CsvSource, names_columns
from m1clip.data.sources.json_table import JsonlSource, JsonSource
from m1clip.data.sources.parquet_table import ParquetSource

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
                for pair in part.pairs(name):
                    for number, caption in enumerate(pair.captions):
                        place = (f"{file.parent.name}/{part.origin(pair.id, number)}", 0)
                        yield Row(pair.image, (caption,), f"{file.parent.name}/{pair.id}", split, place)


def _tables(path: Path) -> list[tuple[str, Path]]:
    found = ((splits.known(sub.name), sub) for sub in sorted(path.iterdir()))
    return [(split, table) for split, sub in found if split and (table := table_in(sub))]
