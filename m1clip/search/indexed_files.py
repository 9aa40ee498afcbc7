"""Read from an index which files its rows belong to: results, duplicates, and a Parquet file."""

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.data.duplicates import near_duplicates
from m1clip.errors import UserError
from m1clip.extras import require
from m1clip.io import PARTIAL
from m1clip.search.reader import LIVE, VALID, IndexReader
from m1clip.search.results import TAKEN, Condition, Copy, Result


def filtered_rows(
    reader: IndexReader,
    db: sqlite3.Connection,
    filtered: Condition,
    end: str = "GROUP BY row",
    *values: Any,
) -> tuple[np.ndarray, int]:
    """((n,) the rows of the images that pass a filter, the number of their files)."""
    condition, filter_values = filtered
    query = f"SELECT row, count(*) {LIVE}{condition} {end}"
    counted = db.execute(query, (reader.model.set_id, *filter_values, *values)).fetchall()
    rows = [row for row, _ in counted if 0 <= row < len(reader.vectors)]
    return np.array(rows, np.int64), sum(files for _, files in counted)


def read_results(
    reader: IndexReader,
    db: sqlite3.Connection,
    rows: np.ndarray,
    scores: np.ndarray,
    chance: np.ndarray | None,
    filtered: Condition,
    collapse: bool,
) -> list[Result]:
    """The files of some rows, in the order of the rows; rows of deleted files have none."""
    condition, filter_values = filtered
    position = {row: number for number, row in enumerate(rows.tolist())}
    columns = f"row, files.id, path, width, height, {TAKEN}, bytes, perceptual_hash, thumb"
    query = f"SELECT {columns} {LIVE} AND row IN ({','.join(map(str, position))}){condition}"
    matches = db.execute(query, (reader.model.set_id, *filter_values))
    files = sorted(matches, key=lambda file: (position[file[0]], file[2]))
    groups = [[number] for number in range(len(files))]
    if collapse:
        groups = duplicate_groups([file[-2:] for file in files])
    results = []
    for group in groups:
        row, id_, path, width, height, taken, size, *_ = files[group[0]]
        number = position[row]
        name = os.fsdecode(path)
        results.append(
            Result(
                id=id_,
                path=name,
                file=str(reader.root / name),
                score=float(scores[number]),
                probability=None if chance is None else float(chance[number]),
                width=width,
                height=height,
                taken=taken,
                bytes=size,
                copies=tuple(os.fsdecode(files[copy][2]) for copy in group[1:]),
            )
        )
    return results


def read_duplicates(reader: IndexReader) -> list[list[Copy]]:
    """Groups of equal and near-equal images: the best of each first, the group with the most bytes
    to save first.

    The best has the most pixels, then the most bytes, then the shortest path.
    """
    columns = "files.id, path, width, height, bytes, sha256, perceptual_hash, thumb"
    query = f"SELECT {columns} FROM files JOIN images ON images.id = image WHERE {VALID}"
    with reader.reading() as db:
        files = db.execute(f"{query} ORDER BY path").fetchall()
    groups = []
    for members in duplicate_groups([file[-2:] for file in files]):
        if len(members) == 1:
            continue
        group = sorted(
            (files[member] for member in members),
            key=lambda file: (-file[2] * file[3], -file[4], len(file[1])),
        )
        best_digest = group[0][5]
        copies = []
        for id_, path, width, height, size, digest, *_ in group:
            name = os.fsdecode(path)
            file = str(reader.root / name)
            copies.append(Copy(id_, name, file, width, height, size, digest == best_digest))
        groups.append(copies)
    return sorted(groups, key=lambda group: -sum(copy.bytes for copy in group[1:]))


def export_parquet(reader: IndexReader, path: Path) -> int:
    """Write a Parquet file for a vector database (path, sha256, taken, width, height, vector).

    Returns its rows.
    """
    if not path.name or path.is_dir():
        raise UserError(f"{path}: is a folder; give the name of a file")
    pa = require("pyarrow", "--export")
    pq = require("pyarrow.parquet", "--export")
    with reader.reading() as db:
        columns = f"SELECT path, sha256, {TAKEN}, width, height, row {LIVE} ORDER BY path"
        records = db.execute(columns, (reader.model.set_id,)).fetchall()
        stored = reader.vectors  # a later state of the index may have other rows
    if not records:
        raise UserError(f"{reader.root}: no image is left in the indexed folder")
    paths, *facts, rows = zip(*records, strict=True)
    names = pa.array([os.fsdecode(name).encode("utf-8", "replace").decode() for name in paths])
    flat = pa.array(stored[list(rows)].astype(np.float32).ravel())
    vectors = pa.FixedSizeListArray.from_arrays(flat, reader.dim)
    arrays = [names, *(pa.array(column) for column in facts), vectors]
    titles = ["path", "sha256", "taken", "width", "height", "vector"]
    partial = path.with_name(path.name + PARTIAL)
    pq.write_table(pa.table(arrays, names=titles), partial)
    partial.replace(path)
    return len(rows)


def duplicate_groups(appearances: Sequence[tuple[bytes, bytes]]) -> list[list[int]]:
    """Groups of images that look alike, from their (hash, thumbnail).

    Each image is in one group, in order.
    """
    numbers_of: dict[tuple[bytes, bytes], list[int]] = {}
    for number, appearance in enumerate(appearances):
        numbers_of.setdefault(appearance, []).append(number)
    groups = {
        number: [number] for number in range(len(numbers_of))
    }  # members of a group share a list
    for i, j in near_duplicates(list(numbers_of)):
        small, large = sorted((groups[i], groups[j]), key=len)
        if small is not large:
            large += small
            groups |= dict.fromkeys(small, large)
    equal = list(numbers_of.values())
    joined = {
        id(group): sorted(member for number in group for member in equal[number])
        for group in groups.values()
    }
    return sorted(joined.values())
