"""Parquet: one file or a folder of them, pictures as paths or as bytes inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from m1clip.data.images import BadImage, decode, file_stamp, one_line
from m1clip.data.pair import ImageRef
from m1clip.data.sources import splits
from m1clip.data.sources.reading import need
from m1clip.data.sources.table import Columns, TableSource
from m1clip.errors import UserError


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
        """Rows counted from 1 in each file. Bytes of pictures are left where they are."""
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
                                ref = (
                                    {columns.image: ParquetImage(str(path), columns.image, *at)}
                                    if inside
                                    else {}
                                )
                                yield (name, number), cells | ref

    def picture(
        self, cells: Mapping[str, Any], columns: Columns, place: tuple[str, int]
    ) -> tuple[ImageRef, str] | str:
        """A path, or the bytes in the table; several rows are joined where an id column says so."""
        image = cells.get(columns.image)
        if not isinstance(image, ParquetImage):
            return super().picture(cells, columns, place)
        name = cells.get(columns.id) if columns.id else None
        return image, str(name) if isinstance(name, (str, int)) else f"{place[0]}#{place[1]}"

    def default_split(self, place: tuple[str, int]) -> str | None:
        """What the name of the file says."""
        return splits.from_file_name(place[0]) or splits.known(self._files[place[0]].parent.name)


@dataclass(frozen=True, slots=True)
class ParquetImage:
    """The bytes of a picture in a row of a Parquet file."""

    path: str
    column: str
    group: int
    row: int

    def open(self, want: int | None = None) -> Image.Image:
        """Decode to RGB; BadImage when it cannot be."""
        return decode(self.read(), want, str(self))

    def read(self) -> bytes:
        """The bytes; their group of rows stays in memory, since the next picture is most likely there."""
        try:
            value = _group(self.path, file_stamp(self.path), self.column, self.group)[self.row].as_py()
        except (ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError) as error:
            raise BadImage(str(self), f"cannot be read ({error})") from error
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise BadImage(str(self), "no picture in this row")
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
    """Whether a column holds pictures themselves: bytes, or the {bytes, path} of `datasets`."""
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
    except (
        ArithmeticError,
        LookupError,
        MemoryError,
        NotImplementedError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(
            one_line(f"{path}: not a Parquet file that can be read ({error}); write it again")
        ) from error
