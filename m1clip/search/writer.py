"""Write vectors and the rows that refer to them, and drop those that no file needs.

A vector is on disk before the row that refers to it is committed: after a kill, the next call
overwrites what is not committed.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from m1clip.errors import UserError
from m1clip.search import vectors
from m1clip.search.database import VALID_ROW, committed_rows, hint, vectors_of
from m1clip.search.location import DATABASE
from m1clip.search.read_photos import ReadFile

SAVE_SECONDS = 2.0  # maximum work lost when a process is killed
MAX_UNUSED = 0.2  # fraction of vectors without a file, above which the vectors are rewritten
# Problems that may be gone next time, though the file is the same.
TEMPORARY = ("missing", "no-decoder", "unreadable")


class Writer:
    """Appends vectors and commits the rows that refer to them."""

    def __init__(self, db: sqlite3.Connection, index_folder: Path, root: Path, set_id: int) -> None:
        self.db = db
        self.index_folder = index_folder
        self.root = root
        self.set_id = set_id
        self.added = 0  # images encoded
        self.reused = 0  # files whose image had a vector
        pairs = (
            "SELECT sha256, images.id FROM images JOIN vectors ON image = images.id "
            "WHERE model = ? AND typeof(sha256) = 'blob'"
        )
        # Images with a vector.
        self.image_ids: dict[bytes, int] = dict(db.execute(pairs, (set_id,)))
        self.rows = committed_rows(db, index_folder, set_id)
        self.file: BinaryIO | None = None  # opened with the first vector: its length is known then
        self._saved = time.monotonic()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.save()
        except (OSError, sqlite3.Error):
            self.db.rollback()
            raise
        finally:
            if self.file is not None:
                with contextlib.suppress(OSError):  # the buffer of a full disk
                    self.file.close()

    def save(self) -> None:
        if self.file is not None:
            self.file.flush()
            # Before the rows: after a power loss each row has its vector.
            os.fsync(self.file.fileno())
        self.db.commit()
        self._saved = time.monotonic()

    def add(
        self, reads: Sequence[ReadFile], files: dict[bytes, tuple[int, int]], model: Any
    ) -> None:
        """Encode the images of some files and add the files to the index."""
        new = {
            read.sha256: read
            for read in reads
            if read.pixels is not None and read.sha256 not in self.image_ids
        }
        if new:
            pixels = np.stack([read.pixels for read in new.values() if read.pixels is not None])
            self._append(list(new.values()), np.asarray(model.encode_image(pixels), np.float16))
        self.reused += sum(not read.problem for read in reads) - len(new)
        for read in reads:
            size, mtime = files[read.path]
            mtime = -1 if read.kind in TEMPORARY else mtime
            self.db.execute(
                "INSERT INTO files (path, bytes, mtime_ns, image, problem) VALUES (?1, ?2, ?3, ?4,"
                " ?5) ON CONFLICT (path) DO UPDATE SET bytes = ?2, mtime_ns = ?3, image = ?4,"
                " problem = ?5",
                (read.path, size, mtime, self.image_ids.get(read.sha256), read.problem),
            )
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def _append(self, reads: Sequence[ReadFile], encoded: np.ndarray) -> None:
        if self.file is None:
            self.file = self._open_file(encoded.shape[1])
        self.file.write(encoded.data)
        self.db.executemany(
            "INSERT OR IGNORE INTO images (sha256, width, height, taken, orientation,"
            " perceptual_hash, thumb) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(read.sha256, *read.facts) for read in reads],
        )
        for read in reads:
            (image,) = self.db.execute(
                "SELECT id FROM images WHERE sha256 = ?", (read.sha256,)
            ).fetchone()
            self.db.execute("INSERT INTO vectors VALUES (?, ?, ?)", (self.set_id, image, self.rows))
            self.image_ids[read.sha256] = image
            self.rows += 1
        self.added += len(reads)

    def _open_file(self, dim: int) -> BinaryIO:
        """Open the file of vectors after its committed rows, or a new one."""
        stored = vectors_of(self.db, self.index_folder, self.root, self.set_id)
        if stored is not None:
            if stored.dim != dim:
                path = self.index_folder / DATABASE
                raise UserError(
                    f"{path}: has vectors of {stored.dim} values, the model {dim}; {hint(path)}"
                )
            return vectors.open_end(self.index_folder, *stored.key, self.rows)
        generation, file = vectors.create(self.index_folder, self.set_id)
        self.db.execute(
            "UPDATE models SET dim = ?, generation = ? WHERE id = ?", (dim, generation, self.set_id)
        )
        return file


def drop_lost_rows(db: sqlite3.Connection, index_folder: Path, root: Path, set_id: int) -> None:
    """Forget the vectors that a truncated or missing file no longer has.

    Their images are encoded again. Also delete the files that killed processes left.
    """
    stored = vectors_of(db, index_folder, root, set_id)
    vectors.remove_others(index_folder, set_id, None if stored is None else stored.key[1])
    if stored is None:
        return
    rows = committed_rows(db, index_folder, set_id)
    try:
        with stored.open() as file:
            on_disk = stored.rows_on_disk(file)
    except UserError:  # missing, or no file
        on_disk = 0
    if on_disk < rows:
        pairs = (
            f"SELECT image, row FROM vectors WHERE model = ? AND row < ? AND {VALID_ROW} ORDER"
            " BY row"
        )
        _rewrite(db, index_folder, stored, db.execute(pairs, (set_id, on_disk)).fetchall())


def remove_unused(db: sqlite3.Connection, index_folder: Path, root: Path, set_id: int) -> None:
    """Rewrite the vectors if many no longer belong to a file.

    A search that is open keeps the old file.
    """
    stored = vectors_of(db, index_folder, root, set_id)
    if stored is None:
        return
    (total,) = db.execute("SELECT count(*) FROM vectors WHERE model = ?", (set_id,)).fetchone()
    pairs = db.execute(
        f"SELECT image, row FROM vectors WHERE model = ? AND {VALID_ROW} "
        "AND image IN (SELECT image FROM files) ORDER BY row",
        (set_id,),
    ).fetchall()
    # Nothing left more likely means a disk that is not connected.
    if pairs and total - len(pairs) > MAX_UNUSED * total:
        _rewrite(db, index_folder, stored, pairs)


def _rewrite(
    db: sqlite3.Connection, index_folder: Path, old: vectors.Vectors, pairs: list[tuple[int, int]]
) -> None:
    """Write the vectors of some (image, row) to a new generation, and delete the old file."""
    set_id = old.key[0]
    generation, new = vectors.create(index_folder, set_id)
    with new:
        if pairs:
            with old.open() as file:
                old_rows = old.read(file, pairs[-1][1] + 1)
            new.write(old_rows[[row for _, row in pairs]].data)
        new.flush()
        os.fsync(new.fileno())
    db.execute("DELETE FROM vectors WHERE model = ?", (set_id,))
    db.executemany(
        "INSERT INTO vectors VALUES (?, ?, ?)",
        [(set_id, image, row) for row, (image, _) in enumerate(pairs)],
    )
    db.execute(
        "DELETE FROM images WHERE id NOT IN (SELECT image FROM files WHERE image IS NOT NULL) "
        "AND id NOT IN (SELECT image FROM vectors)"
    )
    db.execute("UPDATE models SET generation = ? WHERE id = ?", (generation, set_id))
    db.commit()
    vectors.remove_others(index_folder, set_id, generation)
