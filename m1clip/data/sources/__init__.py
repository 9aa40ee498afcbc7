"""Datasets of any format as samples.

A new format is a module with its entry, and a line in formats.py.
"""

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from m1clip.data.sources import shards
from m1clip.data.sources.base import (
    DEFAULT_OPTIONS,
    DataFormat,
    DataPath,
    DataSource,
    MixedSource,
    Options,
    user_error,
)
from m1clip.data.sources.formats import FORMATS, detect_format
from m1clip.data.sources.remote import is_remote
from m1clip.data.sources.stream import WEBDATASET, StreamedSource
from m1clip.data.types import Source
from m1clip.errors import UserError

__all__ = [
    "FORMATS",
    "DataFormat",
    "DataPath",
    "DataSource",
    "MixedSource",
    "Options",
    "open_source",
    "open_sources",
]

_FORMAT_NAME = re.compile(r"[a-z][a-z0-9_-]+")


def open_sources(specs: Sequence[str], *, options: Options = DEFAULT_OPTIONS) -> Source:
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
            f"{other}: cannot be mixed with streamed shards; convert it (m1clip data pack) and use"
            " --cache stream"
        )
    paths = [shard.path for source in streamed for shard in source.shards]
    return StreamedSource(", ".join(source.name for source in streamed), paths, options)


def open_source(spec: str, *, options: Options = DEFAULT_OPTIONS) -> DataSource | StreamedSource:
    """The dataset at a path. Its format is detected, or named: `csv:PATH`, `hf:owner/name`."""
    if not spec:
        raise UserError("the path to the data is empty; use '.' for the current folder")
    prefix, _, rest = spec.partition(":")
    if is_remote(spec):
        url = rest if prefix == WEBDATASET.name else spec
        return StreamedSource(url, shards.remote_paths(url), options)
    format_name = prefix if rest and prefix in FORMATS else None
    if rest and not format_name:
        _check_prefix(spec, prefix)
    data = DataPath(Path(rest if format_name else spec), options, format_name)
    try:
        return _open(data)
    except (OSError, ValueError) as error:
        # ValueError: a path that no system accepts, such as one with a zero byte.
        reason = getattr(error, "strerror", None) or error
        where = getattr(error, "filename", None) or data.path
        raise user_error(f"{where}: cannot be read ({reason})") from error


def _check_prefix(spec: str, prefix: str) -> None:
    """Raise UserError for a path that begins with the name of no format, as in cvs:PATH."""
    # One letter is a drive of Windows, and the name of a file may contain a colon.
    if not _FORMAT_NAME.fullmatch(prefix) or os.path.lexists(spec):
        return
    similar = difflib.get_close_matches(prefix, FORMATS, 1)
    hint = f"; did you mean {similar[0]}:?" if similar else ""
    names = ", ".join(FORMATS)
    raise user_error(f"{spec}: {prefix!r} is not a format{hint} (formats: {names})")


def _open(data: DataPath) -> DataSource | StreamedSource:
    if data.path.exists() and not (data.path.is_file() or data.path.is_dir()):
        # Reading a pipe or a device might never finish.
        raise user_error(f"{data.path}: neither a file nor a folder")
    data_format = FORMATS[data.format_name] if data.format_name else detect_format(data)
    path = data_format.locate(data)
    stream = data_format.open_stream(data) if data_format.open_stream else None
    if stream is not None:
        return stream
    if data.options.stream:
        raise user_error(
            f"{path}: --cache stream is for webdataset shards; m1clip data pack {path} SHARDS"
            " writes them"
        )
    return DataSource(path, data_format, data.options)
