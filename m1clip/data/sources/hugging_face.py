"""A Hugging Face dataset: a folder written by `save_to_disk`, or `hf:owner/name` from the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from m1clip.data.images import BadImage, FileImage, decode, one_line
from m1clip.data.sources import splits
from m1clip.data.sources.base import need
from m1clip.data.sources.tables import Columns, TableSource
from m1clip.data.types import ImageRef
from m1clip.errors import UserError

HUB = "hf:"
_READ_ERRORS = (
    ArithmeticError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class HuggingFaceSource(TableSource):
    """Columns as in any table; images are bytes in Arrow files, which are memory-mapped."""

    kind = "hf"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A folder that `save_to_disk` wrote."""
        if (path / "dataset_dict.json").is_file():
            return True
        return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()

    def header(self) -> list[str]:
        """Columns of the first split."""
        return list(next(iter(self._tables().values())).column_names)

    def folder(self) -> Path:
        """The folder itself."""
        return self.path

    def records(self, columns: Columns) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
        """Rows counted from 1 in each split; images stay where they are."""
        for split, table in self._tables().items():
            inside = is_inside(table.features[columns.image])
            wanted = {*columns.captions, columns.split, columns.id, None if inside else columns.image}
            narrow = table.select_columns([name for name in table.column_names if name in wanted])
            for number, cells in enumerate(narrow, start=1):
                at = (self._name, split, number - 1, columns.image)
                yield (split, number), cells | ({columns.image: HubImage(*at)} if inside else {})

    def image(self, cells: Mapping[str, Any], columns: Columns, place: tuple[str, int]) -> tuple[ImageRef, str] | str:
        """An image in the dataset, or a path."""
        image = cells.get(columns.image)
        if not isinstance(image, HubImage):
            return super().image(cells, columns, place)
        name = cells.get(columns.id) if columns.id else None
        return image, str(name) if isinstance(name, (str, int)) else f"{place[0]}#{place[1]}"

    def default_split(self, place: tuple[str, int]) -> str | None:
        """The name of the split, unless the dataset is only one, which says nothing."""
        return splits.normalise(place[0]) if len(self._tables()) > 1 else None

    @property
    def _name(self) -> str:
        return self.path.as_posix()

    def _tables(self) -> dict[str, Any]:
        try:
            return open_tables(self._name)
        except _READ_ERRORS as error:
            raise UserError(one_line(f"{self.path}: not a dataset that can be read ({error})"[:500])) from error


def is_inside(feature: Any) -> bool:
    """Whether a column holds images themselves, and not the names of files."""
    return type(feature).__name__ == "Image" or getattr(feature, "dtype", "") in {"binary", "large_binary"}


@lru_cache(maxsize=4)
def open_tables(name: str) -> dict[str, Any]:
    """Split -> table, images not decoded. What is on the hub `datasets` downloads once, into its cache."""
    datasets = need("datasets", "A Hugging Face dataset")
    hub = name.removeprefix(HUB) if name.startswith(HUB) else None
    found = datasets.load_dataset(hub) if hub else datasets.load_from_disk(name)
    named = found if isinstance(found, Mapping) else {str(found.split or "train"): found}
    if not named:
        raise UserError(one_line(f"{name}: the dataset has no splits"))
    return {split: _undecoded(table, datasets.Image) for split, table in named.items()}


def _undecoded(table: Any, image_feature: Any) -> Any:
    images = [name for name, feature in table.features.items() if isinstance(feature, image_feature)]
    for name in images:
        table = table.cast_column(name, image_feature(decode=False))
    return table


@dataclass(frozen=True, slots=True)
class HubImage:
    """An image in a row of a Hugging Face dataset; a worker opens the dataset for itself."""

    name: str
    split: str
    row: int
    column: str

    def open(self, want: int | None = None) -> Image.Image:
        """Decode to RGB; BadImage when it cannot be."""
        return decode(self.read(), want, str(self))

    def read(self) -> bytes:
        """The bytes of the image, or of the file the row names."""
        try:
            value = open_tables(self.name)[self.split][self.row][self.column]
            path = value.get("path") if isinstance(value, dict) else None
            data = value.get("bytes") if isinstance(value, dict) else value
            if data is None and isinstance(path, str):
                return FileImage(path).read()
        except BadImage:
            raise
        except _READ_ERRORS as error:
            raise BadImage(str(self), f"cannot be read ({error})") from error
        if not isinstance(data, bytes):
            raise BadImage(str(self), "no image in this row")
        return data

    def stamp(self) -> str:
        """The fingerprint of the table, which `datasets` changes with its content, and the row."""
        return f"{self.name}|{open_tables(self.name)[self.split]._fingerprint}|{self.split}|{self.row}"

    def __str__(self) -> str:
        return one_line(f"{self.name} {self.split} row {self.row + 1}")
