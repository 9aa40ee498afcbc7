"""Sources of samples. A new kind is one file and one line in `KINDS`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from m1clip.data.images import one_line
from m1clip.data.sources import splits
from m1clip.data.sources.base import DEFAULT, BaseSource, Options, Problem, read_json, walk_images
from m1clip.data.sources.coco import CocoSource
from m1clip.data.sources.flickr import KarpathySource, TokenSource
from m1clip.data.sources.folders import ClassFolderSource, SplitFoldersSource, TextBesideSource, table_in, tables_in
from m1clip.data.sources.hugging_face import HUB, HuggingFaceSource
from m1clip.data.sources.mixture import MixedSource, parse_weight
from m1clip.data.sources.shards import ShardSource
from m1clip.data.sources.tables import CsvSource, JsonlSource, JsonSource, ParquetSource
from m1clip.errors import UserError

__all__ = ["KINDS", "MixedSource", "Options", "Problem", "open_source", "open_sources", "parse_weight"]

FOLDERS_LOOKED_AT = 100  # of a parent of data sets there are few, of classes there may be thousands
# In the order they are tried on a path of unknown kind.
KINDS: dict[str, type[BaseSource]] = {
    "hf": HuggingFaceSource,
    "csv": CsvSource,
    "tsv": CsvSource,
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "webdataset": ShardSource,
    "coco": CocoSource,
    "karpathy": KarpathySource,
    "token": TokenSource,
    "json": JsonSource,
    "imagefolder": SplitFoldersSource,
    "txt": TextBesideSource,
    "classes": ClassFolderSource,
}


def open_source(spec: str, *, kind: str | None = None, options: Options = DEFAULT) -> BaseSource:
    """The data at a path, its kind found by looking, or named: `csv:PATH`, `hf:owner/name`."""
    if not spec:
        raise UserError("the path to the data is empty; '.' is the current folder")
    name, path = _named(spec, kind)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # A pipe or a device could be waited on, or read, for ever.
            raise UserError(one_line(f"{path}: neither a file nor a folder"))
        if name is not None:
            return KINDS[name](path, options)
        if not path.exists() and not ShardSource.looks_like(path):
            raise UserError(one_line(_not_there(spec)))
        path = table_in(path, "", options) or path
        tables = tables_in(path) if path.is_dir() else []
        for found in KINDS.values():
            if found is ClassFolderSource and (below := _sets_below(path, options)):
                raise UserError(one_line(_several_sets(path, below)))
            if found.looks_like(path):
                source = found(path, options)
                if source.by_templates:
                    source.notes += [f"{t} was not read; if it has the captions: --data {t}" for t in tables]
                return source
        if len(tables) == 1:
            return open_source(str(tables[0]), options=options)  # says which columns it lacks
    except (OSError, ValueError) as error:
        # ValueError: a path no system takes, such as one with a zero byte.
        reason = getattr(error, "strerror", None) or error
        raise UserError(one_line(f"{getattr(error, 'filename', None) or path}: cannot be read ({reason})")) from error
    finally:
        read_json.cache_clear()
    raise UserError(one_line(_unknown(path)))


def open_sources(specs: Sequence[str], *, options: Options = DEFAULT) -> BaseSource | MixedSource:
    """One source, or several with weights: `photos`, `shards:0.3`."""
    parsed = [parse_weight(spec, KINDS) for spec in specs]
    if len(parsed) == 1 and parsed[0][1] == 1.0:
        return open_source(parsed[0][0], options=options)
    parts = [(open_source(spec, options=options), weight) for spec, weight in parsed]
    return MixedSource(parts, seed=options.split_seed)


def _named(spec: str, kind: str | None) -> tuple[str | None, Path]:
    if kind is None:
        before, colon, rest = spec.partition(":")
        if colon and before in KINDS and rest:
            kind, spec = before, rest
    if kind is None:
        return None, Path(spec)
    if kind not in KINDS:
        raise UserError(one_line(f"kind {kind!r} is not known; the kinds are {', '.join(KINDS)}"))
    path = Path(spec)
    if kind == "hf" and not path.exists():
        return kind, Path(HUB + spec)
    if kind in {"csv", "tsv", "jsonl", "json"} and path.is_dir():
        path = table_in(path, f".{kind}") or path
    return kind, path


def _sets_below(path: Path, options: Options) -> list[Path]:
    """Folders in a folder that are sets by themselves: with captions, or with splits of their own."""
    if not path.is_dir():
        return []
    below = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and not folder.name.startswith(".")]
    with_captions = [kind for kind in KINDS.values() if kind is not ClassFolderSource]
    return [
        folder
        for folder in below[:FOLDERS_LOOKED_AT]
        if not splits.known(folder.name)
        and (
            table_in(folder, "", options)
            or any(kind.looks_like(folder) for kind in with_captions)
            or any(splits.known(part.name) and part.is_dir() for part in folder.iterdir())
        )
    ]


def _several_sets(path: Path, below: Sequence[Path]) -> str:
    names = ", ".join(folder.name for folder in below[:5]) + (", ..." if len(below) > 5 else "")
    how = " ".join(f"--data {folder}" for folder in below[:2])
    return (
        f"{path}: a folder of data sets ({names}); name those to train on, as in {how}, "
        f"or classes:{path} if its folders are classes"
    )


def _unknown(path: Path) -> str:
    tables = tables_in(path) if path.is_dir() else []
    if tables:
        names = ", ".join(table.name for table in tables[:5]) + (", ..." if len(tables) > 5 else "")
        return f"{path}: holds {len(tables)} tables ({names}); name the one with captions: --data {tables[0]}"
    if path.is_dir() and next(walk_images(path), None):
        return f"{path}: images but no captions; add captions.csv (image,caption), or a .txt beside each"
    return f"{path}: no known kind of data; name it, as in csv:PATH (kinds: {', '.join(KINDS)})"


def _not_there(spec: str) -> str:
    if spec.count("/") == 1 and not spec.startswith((".", "/")):
        return f"{spec}: no such file or folder; a dataset of the Hugging Face hub is named hf:{spec}"
    return f"{spec}: no such file or folder"
