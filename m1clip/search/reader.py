"""An index opened read-only: one state of its database, and the vectors that belong to it."""

import os
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from m1clip.errors import UserError
from m1clip.formatting import ceil_div
from m1clip.model.named import model_name
from m1clip.search.database import (
    READ_SECONDS,
    VALID_FILE,
    VALID_IMAGE,
    VALID_ROW,
    IndexBusy,
    committed_rows,
    connect,
    database_errors,
    is_busy,
    needs_rollback,
    roll_back,
    vectors_of,
)
from m1clip.search.location import DATABASE, find_index
from m1clip.search.match import LibraryStats
from m1clip.search.nearest import SAMPLE
from m1clip.search.results import Photo
from m1clip.search.vectors import Vectors

RETRY_SECONDS = 0.01  # between two attempts to read a database that is locked
INDEXER_SECONDS = 60.0  # without news, after which an indexer was killed
SQL_VALUES = 500  # in one statement; SQLite allows a limited number
VALID = f"{VALID_FILE} AND {VALID_IMAGE}"
LIVE = (
    "FROM vectors JOIN files ON files.image = vectors.image JOIN images ON images.id ="
    f" vectors.image WHERE model = ? AND {VALID_ROW} AND {VALID}"
)
# Starting with the table that is asked for: given many values, SQLite would go through all vectors.
JOINED_FROM = {
    "files.id": "FROM files CROSS JOIN images CROSS JOIN vectors",
    "path": "FROM files CROSS JOIN images CROSS JOIN vectors",
    "sha256": "FROM images CROSS JOIN files CROSS JOIN vectors",
    "row": "FROM vectors CROSS JOIN images CROSS JOIN files",
}


@dataclass(frozen=True)
class IndexedModel:
    """The model that made a set of vectors, as the database names it."""

    set_id: int
    path: str
    sha256: str
    stamp: str


class LibrarySample(NamedTuple):
    """Every vector of a small library, some of a large one."""

    vectors: np.ndarray  # (n, dim) float32
    stats: LibraryStats


class IndexReader:
    """The database and the vectors of an index, for the model that it uses.

    A `reading` sees one state of both. Safe to use from threads.
    """

    def __init__(self, folder: Path | None, model: str | Path | None) -> None:
        self.folder, self.root = find_index(folder)
        self._requested = None if model is None else model_name(model) or os.path.abspath(model)
        self._lock = threading.Lock()  # not held while waiting for another process
        self._model: IndexedModel | None = None  # chosen by the first reading
        self._file: Vectors | None = None
        self._statistics: tuple[int, LibrarySample] | None = None  # with their version
        self._file_count = (-1, 0)  # (version, files)
        self.outdated = False  # another model was indexed since; a new reader has its vectors
        self._db = connect(self.folder)
        self._db.isolation_level = None
        self._db.execute("PRAGMA busy_timeout = 0")  # `reading` waits instead
        self.version = -1  # changes with the index
        self.refresh()

    @property
    def model(self) -> IndexedModel:
        """The model of the vectors; it stays the same."""
        assert self._model is not None
        return self._model

    @property
    def dim(self) -> int:
        assert self._file is not None
        return self._file.dim

    def refresh(self) -> None:
        """Reload the index if it has changed."""
        with self.reading():
            pass

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield one state of the database: `vectors` belong to it, and an indexer cannot change it.

        While another process has locked the database, other threads are not blocked. Raises
        IndexBusy after READ_SECONDS.
        """
        deadline = time.monotonic() + READ_SECONDS
        while True:
            with self._lock, database_errors(self.folder / DATABASE):
                if self._begin(last=time.monotonic() >= deadline):
                    try:
                        self._load(self._db)
                        yield self._db
                    finally:
                        self._db.execute("ROLLBACK")
                    return
            time.sleep(RETRY_SECONDS)

    def _begin(self, last: bool) -> bool:
        """Begin to read; False if the database is locked, which is an error the last time."""
        self._db.execute("BEGIN")
        try:
            self._db.execute("SELECT 1 FROM about").fetchone()  # takes the lock
        except sqlite3.Error as error:
            self._db.execute("ROLLBACK")
            if last or not (is_busy(error) or needs_rollback(error)):
                raise
            if needs_rollback(error):
                with suppress(IndexBusy):
                    roll_back(self.folder, seconds=0.0)
            return False
        return True

    def _load(self, db: sqlite3.Connection) -> None:
        """Read the committed vectors if the database has changed; at first, choose the model."""
        (version,) = db.execute("PRAGMA data_version").fetchone()
        if version == self.version:
            return
        newest = self._newest_model(db)
        model = self._model or newest
        rows = 0 if model is None else committed_rows(db, self.folder, model.set_id)
        if model is None or newest is None or rows == 0:
            problem = f"has no vectors of {self._requested}" if self._requested else "is empty"
            raise UserError(f"{self.root}: the index {problem}; run m1clip index {self.root}")
        self.outdated = newest.set_id != model.set_id
        file = vectors_of(db, self.folder, self.root, model.set_id)
        if file is None or (self._file is not None and self._file.dim != file.dim):
            path = self.folder / DATABASE
            raise UserError(f"{path}: was replaced while it was open; open it again")
        if self._file is not None and self._file.key == file.key:
            file = self._file  # only its new rows are read
        with file.open() as opened:
            self.vectors = file.read(opened, rows)  # (rows, dim) float16
        self._model = model
        self._file = file
        self.version = version

    def _newest_model(self, db: sqlite3.Connection) -> IndexedModel | None:
        """The model that was used last, of those that were asked for."""
        columns = "SELECT id, path, hash, stamp FROM models WHERE generation IS NOT NULL"
        for set_id, path, sha256, stamp in db.execute(f"{columns} ORDER BY used DESC"):
            if self._requested is None or path in self._requested_paths():
                return IndexedModel(set_id, str(path), str(sha256), str(stamp))
        return None

    def _requested_paths(self) -> tuple[str, ...]:
        """A model, or those of a run."""
        return tuple(f"{self._requested}{end}" for end in ("", "/best", "/model"))

    def previous_model(self) -> str | None:
        """The model that was searched before this one, whose vectors are kept."""
        with self.reading() as db:
            row = db.execute(
                "SELECT path FROM models WHERE generation IS NOT NULL AND id != ? AND used IS NOT"
                " NULL ORDER BY used DESC",
                (self.model.set_id,),
            ).fetchone()
        return None if row is None else str(row[0])

    def progress(self) -> tuple[int, int] | None:
        """(done, total) images of an indexer that is running now."""
        with self.reading() as db:
            row = db.execute("SELECT value FROM about WHERE name = 'progress'").fetchone()
        try:
            done, total, at = str(row[0]).split() if row else ("0", "0", "0")
            # The clock may have been set back since: news of the future are old ones.
            running = done != total and abs(time.time() - float(at)) < INDEXER_SECONDS
            return (int(done), int(total)) if running else None
        except ValueError:  # not written by m1clip
            return None

    def folders(self) -> list[str]:
        """Folders that contain indexed images, relative to the folder of photos."""
        with self.reading() as db:
            paths = db.execute(f"SELECT path {LIVE}", (self.model.set_id,))
            with_files = {os.fsdecode(os.path.dirname(path)) for (path,) in paths}
        above = {str(parent) for folder in with_files for parent in PurePosixPath(folder).parents}
        return sorted((with_files | above) - {"", "."})

    def file_count(self, db: sqlite3.Connection) -> int:
        """Files with a vector, of which some may have the same content."""
        if self._file_count[0] != self.version:
            (count,) = db.execute(f"SELECT count(*) {LIVE}", (self.model.set_id,)).fetchone()
            self._file_count = self.version, int(count)
        return self._file_count[1]

    def sample(self) -> LibrarySample:
        """Some vectors and their mean and covariance, for the present state of the index."""
        version, cached = self.version, self._statistics
        if cached is not None and cached[0] == version:
            return cached[1]
        vectors = self.vectors[:: ceil_div(len(self.vectors), SAMPLE)].astype(np.float32)
        if not np.isfinite(vectors).all():
            raise self.damaged()
        mean = vectors.mean(axis=0)
        centered = vectors - mean
        sample = LibrarySample(vectors, (mean, centered.T @ centered / len(vectors)))
        self._statistics = version, sample
        return sample

    def damaged(self) -> UserError:
        """The error for vectors that are not finite."""
        path = self._file.path if self._file else self.folder
        return UserError(
            f"{path}: damaged (not finite); delete it and run m1clip index {self.root}"
        )

    def photos(self, column: str, values: Sequence[Any], order: str = "ASC") -> list[Photo]:
        """The files whose column has one of these values, sorted by path."""
        files: list[Photo] = []
        with self.reading() as db:
            for start in range(0, len(values), SQL_VALUES):
                part = values[start : start + SQL_VALUES]
                query = (
                    f"SELECT files.id, path, sha256, row {JOINED_FROM[column]} "
                    "WHERE files.image = images.id AND vectors.image = images.id AND model = ? "
                    f"AND {VALID_ROW} AND {VALID} AND {column} IN ({','.join('?' * len(part))})"
                )
                for id_, path, digest, row in db.execute(query, (self.model.set_id, *part)):
                    if row < len(self.vectors):
                        files.append(Photo(id_, os.fsdecode(path), bytes(digest), row))
        return sorted(files, key=lambda photo: photo.path, reverse=order == "DESC")

    def entry(self, id_: int) -> tuple[str, bytes, np.ndarray | None]:
        """(path in the folder, sha256, vector) of a result; UserError if it is not in the index."""
        query = (
            "SELECT path, sha256, row FROM files JOIN images ON images.id = files.image "
            f"LEFT JOIN vectors ON vectors.image = files.image AND model = ? AND {VALID_ROW} "
            f"WHERE files.id = ? AND {VALID}"
        )
        with self.reading() as db:
            entry = db.execute(query, (self.model.set_id, id_)).fetchone()
            if entry is None:
                raise UserError(f"image {id_}: no longer in the index")
            name, digest, row = entry
            vector = None if row is None else self.vectors[row].astype(np.float32)
        return os.fsdecode(name), digest, vector

    def vectors_with(self, digests: Collection[bytes]) -> dict[bytes, np.ndarray]:
        """The vectors of images by their content (sha256); only of those that are indexed."""
        query = (
            "SELECT row FROM vectors JOIN images ON images.id = vectors.image"
            f" WHERE vectors.model = ? AND sha256 = ? AND {VALID_ROW}"
        )
        by_digest = {}
        with self.reading() as db:
            for digest in digests:
                row = db.execute(query, (self.model.set_id, digest)).fetchone()
                if row is not None and row[0] < len(self.vectors):
                    by_digest[digest] = np.array(self.vectors[row[0]])
        return by_digest
