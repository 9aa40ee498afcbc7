"""A Hugging Face dataset: a folder written by `save_to_disk`, or `hf:owner/name` from the hub."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from m1clip.data.images import BadImage, FileImage, ImageRef
from m1clip.data.sources import splits
from m1clip.data.sources.base import DataFormat, DataPath, DataSource, Row, user_error
from m1clip.data.sources.columns import Columns, Record, choose_columns, rows_of
from m1clip.data.sources.tables import bytes_in
from m1clip.extras import require
from m1clip.formatting import one_line

HUB = "hf:"
# What `datasets` and pyarrow raise for a damaged dataset.
_READ_ERRORS = (
    *(ArithmeticError, LookupError, MemoryError, NotImplementedError),
    *(OSError, RuntimeError, TypeError, ValueError),
)


def is_saved_dataset(path: Path) -> bool:
    """A folder that `save_to_disk` wrote."""
    names = [
        name
        for name in ("dataset_dict.json", "state.json", "dataset_info.json")
        if (path / name).is_file()
    ]
    return "dataset_dict.json" in names or len(names) == 2


def _folder_or_hub_name(data: DataPath) -> Path:
    return data.path if data.path.exists() else Path(f"{HUB}{data.path}")


def hugging_face_rows(source: DataSource) -> Iterator[Row]:
    """Images stay in the Arrow files, which are memory-mapped."""
    name = source.path.as_posix()
    try:
        tables = open_dataset(name)
    except _READ_ERRORS as error:
        raise user_error(f"{source.path}: not a readable dataset ({error})"[:500]) from error
    for split, data in tables.items():
        # The name of a single split is not informative.
        split_name = splits.from_value(split) if len(tables) > 1 else None
        columns = choose_columns(data.column_names, source.options, str(source.path))
        yield from rows_of(
            source, split, columns, _records(name, split, data, columns), (source.path,), split_name
        )


def _records(name: str, split: str, data: Any, columns: Columns) -> Iterator[Record]:
    feature = data.features[columns.image]
    # The column has the images themselves, not file names.
    embedded = type(feature).__name__ == "Image" or getattr(feature, "dtype", "") in {
        "binary",
        "large_binary",
    }
    used_names = {*columns.captions, columns.split, None if embedded else columns.image}
    narrow = data.select_columns([column for column in data.column_names if column in used_names])
    for row, cells in enumerate(narrow):
        yield row + 1, cells, HubImage(name, split, row, columns.image) if embedded else None


@lru_cache(maxsize=4)
def open_dataset(name: str) -> dict[str, Any]:
    """Split -> table with undecoded images.

    `datasets` downloads what is on the hub once, into its cache.
    """
    datasets = require("datasets", "A Hugging Face dataset")
    loaded = (
        datasets.load_dataset(name.removeprefix(HUB))
        if name.startswith(HUB)
        else datasets.load_from_disk(name)
    )
    tables = dict(loaded) if isinstance(loaded, Mapping) else {str(loaded.split or "train"): loaded}
    if not tables:
        raise user_error(f"{name}: the dataset has no splits")
    for split, table in tables.items():
        for column, feature in table.features.items():
            if isinstance(feature, datasets.Image):
                tables[split] = tables[split].cast_column(column, datasets.Image(decode=False))
    return tables


@dataclass(frozen=True, slots=True)
class HubImage(ImageRef):
    """An image in a row of a Hugging Face dataset; a worker process opens the dataset itself."""

    name: str
    split: str
    row: int
    column: str

    def read(self) -> bytes:
        """The bytes of the image, or of the file that the row names."""
        try:
            value = open_dataset(self.name)[self.split][self.row][self.column]
        except _READ_ERRORS as error:
            raise BadImage(str(self), f"cannot be read ({error})") from error
        if (
            isinstance(value, dict)
            and value.get("bytes") is None
            and isinstance(value.get("path"), str)
        ):
            return FileImage(value["path"]).read()
        return bytes_in(value, str(self))

    def stamp(self) -> str:
        """The fingerprint of the table, which changes with its content, and the row."""
        return f"{self.name}|{open_dataset(self.name)[self.split]._fingerprint}|{self.split}|{self.row}"

    def __str__(self) -> str:
        return one_line(f"{self.name} {self.split} row {self.row + 1}")


HUGGING_FACE = DataFormat(
    name="hf",
    help="a folder written by save_to_disk, or owner/name on the Hugging Face hub",
    read=hugging_face_rows,
    item="row",
    matches=lambda data: is_saved_dataset(data.path),
    locate=_folder_or_hub_name,
)
