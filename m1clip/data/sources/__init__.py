"""Datasets of any format as samples. A new format is a function from a source to its rows, and a line in `FORMATS`."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from m1clip.data.sources import folders, shards, splits, tables
from m1clip.data.sources.base import DEFAULT, DataSource, MixedSource, Options, Row, user_error, walk_images
from m1clip.data.sources.hugging_face import HUB, hugging_face_rows, is_saved_dataset
from m1clip.data.sources.remote import is_remote
from m1clip.data.sources.stream import STREAM_BYTES, StreamedSource
from m1clip.data.sources.tables import find_tables, table_format, text_tables
from m1clip.data.types import Source
from m1clip.errors import UserError

__all__ = ["FORMATS", "DataSource", "MixedSource", "Options", "open_source", "open_sources"]

FOLDERS_CHECKED = 100  # a folder of datasets has few, one of classes may have thousands
FORMATS: dict[str, Callable[[DataSource], Iterator[Row]]] = {
    **dict.fromkeys(tables.READERS, tables.table_rows),
    "hf": hugging_face_rows,
    "webdataset": shards.shard_rows,
    "txt": folders.text_file_rows,
    "classes": folders.class_folder_rows,
    "filenames": folders.file_name_rows,
}


def open_sources(specs: Sequence[str], *, options: Options = DEFAULT) -> Source:
    """One dataset, or several together."""
    sources = [open_source(spec, options=options) for spec in specs]
    if len(sources) == 1:
        return sources[0]
    streamed = [source for source in sources if isinstance(source, StreamedSource)]
    loaded = [source for source in sources if isinstance(source, DataSource)]
    if not streamed:
        return MixedSource(loaded)
    if loaded:
        other = loaded[0].name
        raise UserError(
            f"{other}: cannot be mixed with streamed shards; convert it (m1clip data pack) and use --cache stream"
        )
    paths = [shard.path for source in streamed for shard in source.shards]
    return StreamedSource(", ".join(source.name for source in streamed), paths, options)


def open_source(spec: str, *, options: Options = DEFAULT) -> DataSource | StreamedSource:
    """The dataset at a path. Its format is detected, or named: `csv:PATH`, `hf:owner/name`."""
    if not spec:
        raise UserError("the path to the data is empty; use '.' for the current folder")
    prefix, _, rest = spec.partition(":")
    if is_remote(spec):
        url = rest if prefix == "webdataset" else spec
        return StreamedSource(url, shards.remote_paths(url), options)
    name, path = (prefix, Path(rest)) if rest and prefix in FORMATS else (None, Path(spec))
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # Reading a pipe or a device might never finish.
            raise user_error(f"{path}: neither a file nor a folder")
        if name == "hf" and not path.exists():
            path = Path(HUB + rest)
        found = find_tables(path, options, name) if name in (None, *tables.READERS) else []
        name = name or _detect(path, found, options)
        if name in tables.READERS and len(formats := {table_format(table) for table in found}) > 1:
            raise user_error(f"{path}: tables in {len(formats)} formats; choose one, as in {name}:{path}")
        if name in tables.READERS and len(found) == 1:
            path = found[0]
        if name == "webdataset" and (stream := _streamed(path, options)) is not None:
            return stream
        if options.stream:
            raise user_error(
                f"{path}: --cache stream is for webdataset shards; m1clip data pack {path} SHARDS writes them"
            )
        source = DataSource(path, name, FORMATS[name], options)
    except (OSError, ValueError) as error:
        # ValueError: a path that no system accepts, such as one with a zero byte.
        reason = getattr(error, "strerror", None) or error
        raise user_error(f"{getattr(error, 'filename', None) or path}: cannot be read ({reason})") from error
    for table in text_tables(path) if source.class_captions else ():
        source.note(f"{table} was not read; if it contains the captions, use --data {table}")
    return source


def _streamed(path: Path, options: Options) -> StreamedSource | None:
    """The shards at a path, if they are asked to be streamed or too large to load."""
    paths = shards.shard_paths(path)
    large = sum(os.path.getsize(name) for name in paths) > STREAM_BYTES
    return StreamedSource(str(path), paths, options) if large or options.stream else None


def _detect(path: Path, found: list[Path], options: Options) -> str:
    """The format of the data at a path where these tables were found; UserError if there is none."""
    is_shards = shards.is_shards(path)
    if not path.exists() and not is_shards:
        is_hub_name = str(path).count("/") == 1 and not str(path).startswith((".", "/"))
        hint = f"; for a dataset on the Hugging Face hub, use hf:{path}" if is_hub_name else ""
        raise user_error(f"{path}: no such file or folder{hint}")
    if is_saved_dataset(path):
        return "hf"
    # img2dataset writes a table next to each shard.
    if is_shards and not any(table.name in tables.TABLE_NAMES for table in found):
        return "webdataset"
    if found:
        return table_format(found[0]) or "csv"
    if path.is_dir() and folders.has_text_files(path):
        return "txt"
    if below := _datasets_below(path, options):
        how = " ".join(f"--data {folder}" for folder in below[:2])
        raise user_error(
            f"{path}: a folder of datasets ({_listing(below)}); choose the ones to train on, as in {how}, "
            f"or classes:{path} if its folders are classes"
        )
    if folders.is_class_folders(path):
        return "classes"
    unclear = text_tables(path) if path.is_dir() else []
    if len(unclear) == 1:
        found += unclear  # reading it gives an error that names the missing columns
        return table_format(unclear[0]) or "csv"
    if unclear:
        what = f"{len(unclear)} tables ({_listing(unclear)})"
        raise user_error(f"{path}: contains {what}; choose the one with captions: --data {unclear[0]}")
    if path.is_dir() and next(walk_images(path), None):
        names = f", or use the file names: --data filenames:{path}" if folders.has_words_as_names(path) else ""
        if spreadsheets := tables.spreadsheets(path):
            what = f"images, but no table of captions that m1clip reads; {spreadsheets[0].name} is "
            raise user_error(f"{path}: {what}{tables.binary_kind(spreadsheets[0])}")
        raise user_error(
            f"{path}: images but no captions; write them into the table that m1clip data template {path} makes, "
            f"or sort the images into one folder per class{names}"
        )
    if path.is_file():
        tables.check_is_text(path)
    raise user_error(f"{path}: unknown format; specify it, as in csv:PATH (formats: {', '.join(FORMATS)})")


def _listing(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths[:5]) + (", ..." if len(paths) > 5 else "")


def _datasets_below(path: Path, options: Options) -> list[Path]:
    """Folders in a folder that are datasets themselves: with captions, or with splits of their own."""
    below = [folder for folder in sorted(path.glob("*")) if folder.is_dir() and not folder.name.startswith(".")]
    return [
        folder
        for folder in below[:FOLDERS_CHECKED]
        if not splits.from_folder(folder.name)
        and (
            find_tables(folder, options)
            or any(matches(folder) for matches in (is_saved_dataset, shards.is_shards, folders.has_text_files))
            or any(splits.from_folder(part.name) and part.is_dir() for part in folder.iterdir())
        )
    ]
