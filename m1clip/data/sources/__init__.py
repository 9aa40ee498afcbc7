"""Datasets of any format as samples. A new format is two functions and one line in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from m1clip.data.sources import coco, flickr, folders, shards, splits, tables
from m1clip.data.sources.base import DEFAULT, DataSource, Options, Row, user_error, walk_images
from m1clip.data.sources.folders import find_table, text_tables
from m1clip.data.sources.hugging_face import HUB, hugging_face_rows, is_saved_dataset
from m1clip.data.sources.mixture import MixedSource, parse_weight
from m1clip.errors import UserError

__all__ = ["FORMATS", "DataSource", "MixedSource", "Options", "open_source", "open_sources", "parse_weight"]

FOLDERS_CHECKED = 100  # a folder of datasets has few, one of classes may have thousands


@dataclass(frozen=True, slots=True)
class Format:
    """How a format is recognized at a path, and how its rows are read."""

    matches: Callable[[Path], bool]
    rows: Callable[[DataSource], Iterator[Row]]


def _table(open_table: Callable[[Path, DataSource], tables.Table]) -> Callable[[DataSource], Iterator[Row]]:
    return lambda source: tables.table_rows(open_table(source.path, source), source)


# In the order in which they are tried on a path.
FORMATS = {
    "hf": Format(is_saved_dataset, hugging_face_rows),
    "csv": Format(tables.is_csv, _table(tables.csv_table)),
    "tsv": Format(tables.is_csv, _table(tables.csv_table)),
    "jsonl": Format(tables.is_jsonl, _table(tables.jsonl_table)),
    "parquet": Format(lambda path: bool(tables.parquet_files(path)), tables.parquet_rows),
    "webdataset": Format(shards.is_shards, shards.shard_rows),
    "coco": Format(coco.is_coco, coco.coco_rows),
    "karpathy": Format(flickr.is_karpathy, flickr.karpathy_rows),
    "token": Format(flickr.is_token, flickr.token_rows),
    "json": Format(tables.is_json, _table(tables.json_table)),
    "imagefolder": Format(folders.is_imagefolder, folders.imagefolder_rows),
    "txt": Format(folders.has_text_files, folders.text_file_rows),
    "classes": Format(folders.is_class_folders, folders.class_folder_rows),
}


def open_sources(specs: Sequence[str], *, options: Options = DEFAULT) -> DataSource | MixedSource:
    """One dataset, or several with weights: `photos`, `shards:0.3`."""
    parsed = [parse_weight(spec, FORMATS) for spec in specs]
    if len(parsed) == 1 and parsed[0][1] == 1.0:
        return open_source(parsed[0][0], options=options)
    return MixedSource([(open_source(spec, options=options), weight) for spec, weight in parsed])


def open_source(spec: str, *, options: Options = DEFAULT) -> DataSource:
    """The dataset at a path. Its format is detected, or named: `csv:PATH`, `hf:owner/name`."""
    if not spec:
        raise UserError("the path to the data is empty; use '.' for the current folder")
    name, path = _parse(spec)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # Reading a pipe or a device might never finish.
            raise user_error(f"{path}: neither a file nor a folder")
        if name is None:
            name, path = _detect(spec, path, options)
        source = DataSource(path, name, FORMATS[name].rows, options)
    except (OSError, ValueError) as error:
        # ValueError: a path that no system accepts, such as one with a zero byte.
        reason = getattr(error, "strerror", None) or error
        raise user_error(f"{getattr(error, 'filename', None) or path}: cannot be read ({reason})") from error
    finally:
        tables.read_json.cache_clear()
    if source.class_captions:
        for table in text_tables(path):
            source.note(f"{table} was not read; if it contains the captions, use --data {table}")
    return source


def _parse(spec: str) -> tuple[str | None, Path]:
    """(format, path) of `format:path`, or (None, path)."""
    name, colon, rest = spec.partition(":")
    if not colon or name not in FORMATS or not rest:
        return None, Path(spec)
    path = Path(rest)
    if name == "hf" and not path.exists():
        return name, Path(HUB + rest)
    if name in {"csv", "tsv", "jsonl", "json"}:
        path = find_table(path, f".{name}") or path
    return name, path


def _detect(spec: str, path: Path, options: Options) -> tuple[str, Path]:
    if not path.exists() and not shards.is_shards(path):
        is_hub_name = spec.count("/") == 1 and not spec.startswith((".", "/"))
        hint = f"; for a dataset on the Hugging Face hub, use hf:{spec}" if is_hub_name else ""
        raise user_error(f"{spec}: no such file or folder{hint}")
    path = find_table(path, "", options) or path
    for name, found in FORMATS.items():
        if name == "classes" and (below := _datasets_below(path, options)):
            how = " ".join(f"--data {folder}" for folder in below[:2])
            raise user_error(
                f"{path}: a folder of datasets ({_listing(below)}); choose the ones to train on, as in {how}, "
                f"or classes:{path} if its folders are classes"
            )
        if found.matches(path):
            return name, path
    found_tables = text_tables(path) if path.is_dir() else []
    if len(found_tables) == 1:
        return _detect(str(found_tables[0]), found_tables[0], options)  # its error names the missing columns
    if found_tables:
        what = f"{len(found_tables)} tables ({_listing(found_tables)})"
        raise user_error(f"{path}: contains {what}; choose the one with captions: --data {found_tables[0]}")
    if path.is_dir() and next(walk_images(path), None):
        raise user_error(
            f"{path}: images but no captions; add captions.csv (image,caption), or a .txt file next to each image"
        )
    raise user_error(f"{path}: unknown format; specify it, as in csv:PATH (formats: {', '.join(FORMATS)})")


def _listing(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths[:5]) + (", ..." if len(paths) > 5 else "")


def _datasets_below(path: Path, options: Options) -> list[Path]:
    """Folders in a folder that are datasets themselves: with captions, or with splits of their own."""
    if not path.is_dir():
        return []
    below = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and not folder.name.startswith(".")]
    with_captions = [found for name, found in FORMATS.items() if name != "classes"]
    return [
        folder
        for folder in below[:FOLDERS_CHECKED]
        if not splits.from_folder(folder.name)
        and (
            find_table(folder, "", options)
            or any(found.matches(folder) for found in with_captions)
            or any(splits.from_folder(part.name) and part.is_dir() for part in folder.iterdir())
        )
    ]
