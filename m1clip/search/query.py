"""Search an index: `Index` finds the images nearest to texts and images, exactly."""

import hashlib
import os
import re
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np

import m1clip
from m1clip.data.duplicates import near_duplicates
from m1clip.data.images import BadImage, FileImage
from m1clip.errors import UserError
from m1clip.extras import require
from m1clip.formatting import ceil_div, one_line
from m1clip.io import PARTIAL
from m1clip.model.named import model_name
from m1clip.search.concepts import TEXT_ONLY, Concepts, Examples, fit_concept, split_text
from m1clip.search.index import (
    DATABASE,
    READ_SECONDS,
    VALID_FILE,
    VALID_IMAGE,
    VALID_ROW,
    IndexBusy,
    Report,
    committed_rows,
    connect,
    database_errors,
    find_index,
    hint,
    is_busy,
    model_hash,
    model_stamp,
    needs_rollback,
    roll_back,
    update_index,
    vectors_of,
)
from m1clip.search.nearest import SAMPLE, nearest
from m1clip.search.short_queries import everyday_vectors, is_short, reference_vectors, short_vectors
from m1clip.search.vectors import Vectors

# The probability of a match: a logistic function of its z-score (constant, slope). Fitted with the
# model general on the validation splits of Flickr8k and COCO by benchmarks/search_cutoff.py.
MATCH_WEIGHTS = (-4.5, 0.89)
CUTOFF = 0.5  # results below it do not count as matches
# Results above it are listed if there is no match: on validation, half of the top ones are correct.
UNSURE = 0.2
NOT_WEIGHT = -0.5
RETRY_SECONDS = 0.01  # between two attempts to read a database that is locked
INDEXER_SECONDS = 60.0  # without news, after which an indexer was killed
WEIGHTED = re.compile(r"([0-9]+(?:\.[0-9]+)?)\*(.+)", re.DOTALL)
MAX_WEIGHT = 1000.0  # of a part of a query
SQL_VALUES = 500  # in one statement; SQLite allows a limited number
DATE = re.compile(r"[0-9]{4}(-[0-9]{2}(-[0-9]{2})?)?")
TAKEN = (
    "coalesce(taken, strftime('%Y-%m-%dT%H:%M:%S', mtime_ns / 1000000000, 'unixepoch',"
    " 'localtime'))"
)
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
NO_ROWS = np.zeros(0, np.int64)

Condition = tuple[str, list[Any]]  # SQL and its values
# (dim,) mean and (dim, dim) covariance of the library's vectors.
LibraryStats = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Filter:
    """Which images to search.

    Dates are YYYY, YYYY-MM or YYYY-MM-DD, and refer to EXIF or else to the file's time.
    """

    since: str | None = None
    until: str | None = None  # included
    subfolder: str | None = None  # a folder, relative to the folder of photos
    orientation: Literal["landscape", "portrait"] | None = None
    min_side: int | None = None  # pixels of the shorter side

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            if (text := getattr(self, name)) is not None and not is_date(text):
                raise UserError(f"--{name} {text}: give a date as 2024, 2024-05 or 2024-05-31")

    def sql(self) -> Condition:
        """A condition and its values; "" for no filter."""
        parts: list[tuple[str, list[Any]]] = []
        if self.since:
            parts.append((f"{TAKEN} >= ?", [self.since]))
        if self.until:
            parts.append((f"{TAKEN} < ?", [self.until + "~"]))  # ~ is after any digit, - and T
        if self.subfolder:
            prefix = os.fsencode(os.path.normpath(self.subfolder)) + b"/"
            parts.append(("path >= ? AND path < ?", [prefix, prefix[:-1] + b"0"]))  # 0 follows /
        if self.orientation:
            parts.append((f"width {'>' if self.orientation == 'landscape' else '<'} height", []))
        if self.min_side:
            parts.append(("min(width, height) >= ?", [self.min_side]))
        return "".join(f" AND {text}" for text, _ in parts), [
            value for _, values in parts for value in values
        ]


def is_date(text: str) -> bool:
    """Whether a text is a year, a month or a day of the calendar, in ISO format."""
    if not DATE.fullmatch(text):
        return False
    try:
        date.fromisoformat(text + "-01-01"[len(text) - 4 :])
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Result:
    """An image that was found."""

    id: int  # of the file, until it is deleted or renamed
    path: str  # relative to the folder of photos
    file: str  # absolute path
    score: float  # cosine similarity; for sums of queries, that with the combined vector
    probability: float | None  # that it matches; None unless the query is a single text
    width: int
    height: int
    taken: str  # ISO time of EXIF, or else of the file
    bytes: int
    copies: tuple[str, ...] = ()  # duplicates and near-duplicates that are not listed


@dataclass(frozen=True)
class Results:
    """The nearest images, the nearest first: a sequence of them, with `matches` and `possible`
    ones.
    """

    nearest: list[Result]
    searched: int  # images

    def __len__(self) -> int:
        return len(self.nearest)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.nearest)

    def __getitem__(self, position: int) -> Result:
        return self.nearest[position]

    @property
    def matches(self) -> list[Result]:
        """Those above the cutoff; none: nothing here matches."""
        return self._above(CUTOFF)

    @property
    def possible(self) -> list[Result]:
        """The matches, and results that are less likely but possible."""
        return self._above(UNSURE)

    def _above(self, cut: float) -> list[Result]:
        return [
            result
            for result in self.nearest
            if result.probability is None or result.probability >= cut
        ]


class Photo(NamedTuple):
    """An indexed file: its number, path in the folder of photos, content, and the row of its
    vector.
    """

    id: int
    path: str
    sha256: bytes
    row: int


@dataclass(frozen=True)
class Copy:
    """One image of a group of duplicates."""

    id: int  # of the file
    path: str  # relative to the folder of photos
    file: str  # absolute path
    width: int
    height: int
    bytes: int
    equal: bool  # the same content as the best, byte for byte


class Index:
    """The index of a folder of photos, opened read-only.

    `Index("~/Pictures").search("two dogs on a beach")`; `m1clip.Index()` opens that of the current
    folder, or else the newest; `Index.build` creates or updates one. Safe to use from threads; a
    search sees what another process has indexed meanwhile with the same model.
    """

    def __init__(self, folder: str | Path | None = None, model: str | Path | None = None) -> None:
        self.folder, self.root = find_index(None if folder is None else Path(folder))
        self._asked = None if model is None else model_name(model) or os.path.abspath(model)
        self._lock = threading.Lock()  # not held while waiting for another process
        self._encoder = threading.RLock()  # two encoders at once would only slow each other
        self.set_id = 0  # of the model's vectors, once it is chosen
        self._everyday_of: tuple[int, np.ndarray] | None = None  # `everyday_vectors` of that model
        self._file: Vectors | None = None
        self._known_statistics: tuple[int, tuple[np.ndarray, LibraryStats]] | None = (
            None  # with their version
        )
        self._counted = (-1, 0)  # (version, files)
        self.outdated = False  # another model was indexed since; a new `Index` has its vectors
        self._db = connect(self.folder)
        self._db.isolation_level = None
        self._db.execute("PRAGMA busy_timeout = 0")  # `_reading` waits instead
        self.version = -1  # changes with the index
        self.refresh()

    @classmethod
    def build(cls, folder: str | Path, model: str | Path | None = None) -> "Index":
        """Index a folder of photos, like the command `m1clip index`, and open the index.

        Only new and changed files are read. `model` is by default the one used last, the newest run
        in runs/, or general. `console.on_progress` calls a function with the number of files done
        and their total.
        """
        update_index(folder, model)
        return cls(folder, model)

    def update(self) -> Report:
        """Bring the index up to date with its folder, for the model of this index.

        Returns what was done.
        """
        report = update_index(self.root, self.model_path)
        self.refresh()
        return report

    def refresh(self) -> None:
        """Reload the index if it has changed; every search does this."""
        with self._reading():
            pass

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
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
        columns = "SELECT id, path, hash, stamp FROM models WHERE generation IS NOT NULL"
        only = (
            (None,)
            if self._asked is None
            else tuple(self._asked + end for end in ("", "/best", "/model"))
        )
        sets = db.execute(f"{columns} ORDER BY used DESC").fetchall()
        stored = next((row for row in sets if only == (None,) or row[1] in only), None)
        set_id = self.set_id or (stored[0] if stored else 0)
        rows = committed_rows(db, self.folder, set_id)
        if stored is None or rows == 0:
            problem = f"has no vectors of {self._asked}" if self._asked else "is empty"
            raise UserError(f"{self.root}: the index {problem}; run m1clip index {self.root}")
        if self._file is None:
            self.set_id = set_id
            self.model_path, self.model_sha256, self._stamp = map(str, stored[1:])
        self.outdated = stored[0] != set_id
        file = vectors_of(db, self.folder, self.root, set_id)
        if file is None or (self._file is not None and self._file.dim != file.dim):
            path = self.folder / DATABASE
            raise UserError(f"{path}: was replaced while it was open; open it again")
        if self._file is not None and self._file.key == file.key:
            file = self._file  # only its new rows are read
        with file.open() as opened:
            self.vectors = file.read(opened, rows)  # (rows, dim) float16
        self._file = file
        self.dim = file.dim
        self.version = version

    def progress(self) -> tuple[int, int] | None:
        """(done, total) images of an indexer that is running now."""
        with self._reading() as db:
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
        with self._reading() as db:
            paths = db.execute(f"SELECT path {LIVE}", (self.set_id,))
            with_files = {os.fsdecode(os.path.dirname(path)) for (path,) in paths}
        above = {str(parent) for folder in with_files for parent in PurePosixPath(folder).parents}
        return sorted((with_files | above) - {"", "."})

    def __len__(self) -> int:
        with self._reading() as db:
            return self._files(db)

    def _files(self, db: sqlite3.Connection) -> int:
        """Files with a vector, of which some may have the same content."""
        if self._counted[0] != self.version:
            (count,) = db.execute(f"SELECT count(*) {LIVE}", (self.set_id,)).fetchone()
            self._counted = self.version, int(count)
        return self._counted[1]

    @cached_property
    def model(self) -> Any:
        """The model of the vectors; UserError if it has changed since."""
        if (
            model_stamp(self.model_path) != self._stamp
            and model_hash(self.model_path) != self.model_sha256
        ):
            raise UserError(
                f"{self.model_path}: the model has changed since; run m1clip index {self.root}"
            )
        return m1clip.load(self.model_path)

    @property
    def library_stats(self) -> LibraryStats:
        """((dim,) mean, (dim, dim) covariance) of the vectors, from a sample."""
        return self._statistics()[1]

    @property
    def sample(self) -> np.ndarray:
        """(n, dim) float32: every vector of a small library, some of a large one."""
        return self._statistics()[0]

    def _statistics(self) -> tuple[np.ndarray, LibraryStats]:
        version, cached = self.version, self._known_statistics
        if cached is not None and cached[0] == version:
            return cached[1]
        sample = self.vectors[:: ceil_div(len(self.vectors), SAMPLE)].astype(np.float32)
        if not np.isfinite(sample).all():
            raise self._damaged()
        mean = sample.mean(axis=0)
        statistics = sample, (mean, (sample - mean).T @ (sample - mean) / len(sample))
        self._known_statistics = version, statistics
        return statistics

    def search(
        self,
        text: str | Sequence[str] | Mapping[str, float] = (),
        k: int = 20,
        *,
        like: Iterable[Any] = (),
        exclude: Sequence[str] = (),
        where: Filter | None = None,
        collapse: bool = True,
    ) -> Results:
        """The k images nearest to a text, to several with weights, to images (`like`), and far from
        `exclude`.

        An image is a path, a PIL image, its vector, or the id of a result. Near-duplicates of a
        result are listed with it, unless `collapse` is False.
        """
        self.refresh()
        like = list(like)
        texts = [text] if isinstance(text, str) else list(text)
        single = texts[0] if len(texts) == 1 and not like and not exclude else None
        parts, taught = self._parts(text, like, exclude)
        query = self._combine(parts)
        # Probabilities are only fitted for single texts.
        reference = None
        if single is not None and not taught:
            reference = reference_vectors(self._everyday(), is_short(single))
        filtered = (where or Filter()).sql()
        marks = self.concepts.marks(_parse_weight(single)[0]) if single is not None else {}
        with self._reading() as db:
            positive, negative = self._marked_rows(db, marks, filtered)
            rows, searched = self._rows(filtered) if filtered[0] else (None, self._files(db))
            total = len(self.vectors) if rows is None else len(rows)
            # Some are near-duplicates, or of files that are gone.
            count = min(total, k + k // 4 + 8 + len(negative))
            while True:
                chosen, scores = self._nearest(query, count, rows)
                chance = None
                if reference is not None:
                    chance = probabilities(zscore(scores, reference, self.library_stats))
                if len(positive) or len(negative):
                    ranked = self._with_marks(query, chosen, scores, chance, positive, negative)
                    results = self._results(*ranked, filtered, collapse)[:k]
                else:
                    results = self._results(chosen, scores, chance, filtered, collapse)[:k]
                if len(results) == k or count == total:
                    return Results(results, searched)
                count = min(total, 4 * count)

    def _marked_rows(
        self, db: sqlite3.Connection, marks: Mapping[bytes, bool], filtered: Condition
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the images that are marked as positive, and as negative."""
        if not marks:
            return NO_ROWS, NO_ROWS
        digests = ",".join(f"x'{digest.hex()}'" for digest in marks)
        query = (
            f"SELECT DISTINCT row, sha256 {LIVE} AND sha256 IN ({digests}){filtered[0]} ORDER"
            " BY row"
        )
        rows_found = db.execute(query, (self.set_id, *filtered[1])).fetchall()
        marked = [
            (row, marks[bytes(digest)])
            for row, digest in rows_found
            if 0 <= row < len(self.vectors)
        ]
        positive = np.array([row for row, is_positive in marked if is_positive], np.int64)
        negative = np.array([row for row, is_positive in marked if not is_positive], np.int64)
        return positive, negative

    def _with_marks(
        self,
        query: np.ndarray,
        chosen: np.ndarray,
        scores: np.ndarray,
        chance: np.ndarray | None,
        positive: np.ndarray,
        negative: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Rows, scores and probabilities, with the rows marked as positive first, and those marked
        as negative last.

        What the user has marked needs no estimate; the other images keep the order of their scores.
        """
        missing = np.setdiff1d(positive, chosen)
        chosen = np.concatenate([chosen, missing])
        scores = np.concatenate(
            [scores, self.vectors[missing].astype(np.float64) @ query.astype(np.float64)]
        )
        mark = np.isin(chosen, positive).astype(int) - np.isin(chosen, negative).astype(int)
        order = np.lexsort((chosen, -scores, -mark))
        if chance is not None:
            estimated = np.concatenate([chance, np.ones(len(missing))])
            chance = np.where(mark == 0, estimated, mark > 0)[order]
        return chosen[order], scores[order], chance

    def negatives(self, text: str, where: Filter | None = None) -> list[Result]:
        """The images that are marked as wrong for a text, however far down a search would list
        them.
        """
        filtered = (where or Filter()).sql()
        marks = self.concepts.marks(_parse_weight(text)[0])
        with self._reading() as db:
            _, rows = self._marked_rows(db, marks, filtered)
            return self._results(rows, np.zeros(len(rows)), None, filtered, False)

    def _nearest(
        self, query: np.ndarray, count: int, rows: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """`nearest` of the vectors; UserError if the file has been damaged."""
        try:
            return nearest(self.vectors, query, count, rows)
        except FloatingPointError:
            raise self._damaged() from None

    def _damaged(self) -> UserError:
        """The error for vectors that are not finite."""
        path = self._file.path if self._file else self.folder
        return UserError(
            f"{path}: damaged (not finite); delete it and run m1clip index {self.root}"
        )

    def newest(self, k: int = 20, where: Filter | None = None) -> Results:
        """The k images taken last."""
        filtered = (where or Filter()).sql()
        with self._reading():
            rows, files = self._rows(
                filtered, f"GROUP BY row ORDER BY max({TAKEN}) DESC, row LIMIT ?", k
            )
            return Results(self._results(rows, np.zeros(len(rows)), None, filtered, True), files)

    def _rows(
        self, filtered: Condition, end: str = "GROUP BY row", *values: Any
    ) -> tuple[np.ndarray, int]:
        """((n,) the rows of the images that pass a filter, the number of their files)."""
        query = f"SELECT row, count(*) {LIVE}{filtered[0]} {end}"
        rows_found = self._db.execute(query, (self.set_id, *filtered[1], *values)).fetchall()
        rows = [row for row, _ in rows_found if 0 <= row < len(self.vectors)]
        return np.array(rows, np.int64), sum(files for _, files in rows_found)

    def _results(
        self,
        rows: np.ndarray,
        scores: np.ndarray,
        chance: np.ndarray | None,
        filtered: Condition,
        collapse: bool,
    ) -> list[Result]:
        """The files of some rows, in the order of the rows; rows of deleted files have none."""
        position = {row: number for number, row in enumerate(rows.tolist())}
        columns = f"row, files.id, path, width, height, {TAKEN}, bytes, perceptual_hash, thumb"
        query = f"SELECT {columns} {LIVE} AND row IN ({','.join(map(str, position))}){filtered[0]}"
        matches = self._db.execute(query, (self.set_id, *filtered[1]))
        files = sorted(matches, key=lambda file: (position[file[0]], file[2]))
        groups = [[number] for number in range(len(files))]
        if collapse:
            groups = duplicate_groups([file[-2:] for file in files])
        results = []
        for group in groups:
            row, id_, path, width, height, taken, size, *_ = files[group[0]]
            copies = tuple(os.fsdecode(files[number][2]) for number in group[1:])
            score, likely = (
                float(scores[position[row]]),
                None if chance is None else float(chance[position[row]]),
            )
            name = os.fsdecode(path)
            file = str(self.root / name)
            results.append(
                Result(id_, name, file, score, likely, width, height, taken, size, copies)
            )
        return results

    def export(self, path: Path) -> int:
        """Write a Parquet file for a vector database (path, sha256, taken, width, height, vector).

        Returns its rows.
        """
        if not path.name or path.is_dir():
            raise UserError(f"{path}: is a folder; give the name of a file")
        pa, pq = require("pyarrow", "--export"), require("pyarrow.parquet", "--export")
        with self._reading() as db:
            columns = f"SELECT path, sha256, {TAKEN}, width, height, row {LIVE} ORDER BY path"
            records = db.execute(columns, (self.set_id,)).fetchall()
            stored = self.vectors  # a later state of the index may have other rows
        if not records:
            raise UserError(f"{self.root}: no image is left in the indexed folder")
        *facts, rows = zip(*records, strict=True)
        names = pa.array(
            [os.fsdecode(name).encode("utf-8", "replace").decode() for name in facts[0]]
        )
        flat = pa.array(stored[list(rows)].astype(np.float32).ravel())
        vectors = pa.FixedSizeListArray.from_arrays(flat, self.dim)
        arrays = [names, *(pa.array(column) for column in facts[1:]), vectors]
        partial = path.with_name(path.name + PARTIAL)
        pq.write_table(
            pa.table(arrays, names=["path", "sha256", "taken", "width", "height", "vector"]),
            partial,
        )
        partial.replace(path)
        return len(rows)

    def duplicates(self) -> list[list[Copy]]:
        """Groups of equal and near-equal images: the best of each first, the group with the most
        bytes to save first.

        The best has the most pixels, then the most bytes, then the shortest path.
        """
        query = (
            "SELECT files.id, path, width, height, bytes, sha256, perceptual_hash, thumb FROM files"
        )
        with self._reading() as db:
            files = db.execute(
                f"{query} JOIN images ON images.id = image WHERE {VALID} ORDER BY path"
            ).fetchall()
        groups = []
        for members in duplicate_groups([file[-2:] for file in files]):
            group = sorted(
                (files[at] for at in members),
                key=lambda file: (-file[2] * file[3], -file[4], len(file[1])),
            )
            copies = []
            for id_, path, width, height, size, digest, *_ in group:
                name = os.fsdecode(path)
                equal = digest == group[0][5]
                copies.append(Copy(id_, name, str(self.root / name), width, height, size, equal))
            groups.append(copies)
        return sorted(
            (g for g in groups if len(g) > 1), key=lambda g: -sum(copy.bytes for copy in g[1:])
        )

    def photos_at(self, rows: Iterable[int]) -> list[Photo]:
        """One file of each of some rows of vectors, the one with the first path.

        Rows of deleted files have none.
        """
        requested_rows = [int(row) for row in rows]
        photo_of = {photo.row: photo for photo in self._photos("row", requested_rows, "DESC")}
        return [photo_of[row] for row in requested_rows if row in photo_of]

    def photos_named(self, paths: Iterable[str]) -> dict[str, Photo]:
        """The files of some paths, relative to the folder of photos.

        Those that are not indexed are missing.
        """
        names = [os.fsencode(path) for path in paths]
        return {photo.path: photo for photo in self._photos("path", names)}

    def photos_with(self, digests: Iterable[bytes]) -> dict[bytes, Photo]:
        """One file with each of some contents (sha256), the one with the first path."""
        return {photo.sha256: photo for photo in self._photos("sha256", list(digests), "DESC")}

    def photo(self, id_: int) -> Photo:
        """An indexed file by its number.

        UserError if it is not in the index, or has no vector yet.
        """
        for photo in self._photos("files.id", [id_]):
            return photo
        raise UserError(f"image {id_}: no longer in the index")

    def _photos(self, column: str, values: Sequence[Any], order: str = "ASC") -> list[Photo]:
        """The files whose column has one of these values, sorted by path."""
        files: list[Photo] = []
        with self._reading() as db:
            for start in range(0, len(values), SQL_VALUES):
                part = values[start : start + SQL_VALUES]
                query = (
                    f"SELECT files.id, path, sha256, row {JOINED_FROM[column]} "
                    "WHERE files.image = images.id AND vectors.image = images.id AND model = ? "
                    f"AND {VALID_ROW} AND {VALID} AND {column} IN ({','.join('?' * len(part))})"
                )
                for id_, path, digest, row in db.execute(query, (self.set_id, *part)):
                    if row < len(self.vectors):
                        files.append(Photo(id_, os.fsdecode(path), bytes(digest), row))
        return sorted(files, key=lambda photo: photo.path, reverse=order == "DESC")

    def file(self, id_: int) -> Path:
        """The path of a result; UserError if it is not in the index."""
        return self.root / self._entry(id_)[0]

    def _entry(self, id_: int) -> tuple[str, bytes, np.ndarray | None]:
        """(path in the folder, sha256, vector) of a result; UserError if it is not in the index."""
        query = (
            "SELECT path, sha256, row FROM files JOIN images ON images.id = files.image "
            f"LEFT JOIN vectors ON vectors.image = files.image AND model = ? AND {VALID_ROW} "
            f"WHERE files.id = ? AND {VALID}"
        )
        with self._reading() as db:
            entry = db.execute(query, (self.set_id, id_)).fetchone()
            if entry is None:
                raise UserError(f"image {id_}: no longer in the index")
            name, digest, row = entry
            vector = None if row is None else self.vectors[row].astype(np.float32)
        return os.fsdecode(name), digest, vector

    def _parts(
        self, text: Any, like: Iterable[Any], exclude: Sequence[str]
    ) -> tuple[list[tuple[float, np.ndarray]], bool]:
        """(weight, unit vector) of each part of a query, and whether examples of taught words are
        among them.
        """
        examples = self.concepts.examples()
        parts = [(1.0, self.image_vector(image)) for image in like]
        taught = False
        for phrase, weight in {**_weights(text), **dict.fromkeys(exclude, NOT_WEIGHT)}.items():
            vectors, rest = self._taught(phrase, examples)
            taught = taught or bool(vectors)
            if rest or not vectors:
                vectors = [*vectors, *self._query_vectors([rest])]
            parts += [(weight, vector) for vector in vectors]
        if not parts:
            raise UserError("an empty query: give a text, or an image with --like")
        return parts, taught

    def _taught(
        self, phrase: str, examples: Mapping[str, Examples]
    ) -> tuple[list[np.ndarray], str]:
        """(the vectors of taught words in a text, the rest of it).

        Words that the text finds as well are no such.
        """
        names, _ = split_text(phrase, list(examples))
        if not names:
            return [], phrase
        vectors = {}
        for name, vector in zip(names, self._query_vectors(names), strict=True):
            fitted, choice = fit_concept(*examples[name], self.library_stats, vector, self.sample)
            if choice is not TEXT_ONLY:
                vectors[name] = fitted
        if not vectors:
            return [], phrase
        names, rest = split_text(phrase, list(vectors))
        return [vectors[name] for name in names], rest

    def encode_texts(self, texts: list[str]) -> np.ndarray:
        """(n, dim) unit vectors of texts, by the model of the index."""
        with self._encoder:
            return self._of_index(self.model.encode_text(texts))

    def _query_vectors(self, texts: list[str]) -> np.ndarray:
        """(n, dim) unit vectors to search with.

        See `short_queries` for those of one or two words.
        """
        vectors = self.encode_texts(texts).copy()
        short = [index for index, text in enumerate(texts) if is_short(text)]
        if short:
            chosen = [texts[index] for index in short]
            vectors[short] = short_vectors(self.encode_texts, chosen, self._everyday())
        return vectors

    def _everyday(self) -> np.ndarray:
        """(words, dim) unit vectors of everyday words, by the model of the index."""
        if self._everyday_of is None or self._everyday_of[0] != self.set_id:
            self._everyday_of = (self.set_id, everyday_vectors(self.encode_texts))
        return self._everyday_of[1]

    def _of_index(self, encoded: Any) -> np.ndarray:
        """(n, dim) float32 vectors of the model.

        UserError if those of the index have another length.
        """
        vectors = np.asarray(encoded, np.float32)
        if vectors.shape[1] != self.dim:
            path = self.folder / DATABASE
            raise UserError(
                f"{path}: has vectors of {self.dim} values, the model {vectors.shape[1]};"
                f" {hint(path)}"
            )
        return vectors

    @property
    def concepts(self) -> Concepts:
        return Concepts(self.folder, self.model_sha256, self.dim, self._vectors_of)

    def _vectors_of(self, digests: Collection[bytes]) -> dict[bytes, np.ndarray]:
        """The vectors of images by their content (sha256); only of those that are indexed."""
        query = (
            "SELECT row FROM vectors JOIN images ON images.id = vectors.image"
            f" WHERE vectors.model = ? AND sha256 = ? AND {VALID_ROW}"
        )
        by_digest = {}
        with self._reading() as db:
            for digest in digests:
                row = db.execute(query, (self.set_id, digest)).fetchone()
                if row is not None and row[0] < len(self.vectors):
                    by_digest[digest] = np.array(self.vectors[row[0]])
        return by_digest

    @property
    def model_before(self) -> str | None:
        """The model that was searched before this one, whose vectors are kept; None: there is none."""
        with self._reading() as db:
            row = db.execute(
                "SELECT path FROM models WHERE generation IS NOT NULL AND id != ? AND used IS NOT"
                " NULL ORDER BY used DESC",
                (self.set_id,),
            ).fetchone()
        return None if row is None else str(row[0])

    def teach(self, name: str, images: Sequence[str | Path | int], positive: bool = True) -> None:
        """Add images (paths or ids) as examples of a word, or as negative ones.

        A search finds the word by them.
        """
        examples = []
        for image in images:
            if isinstance(image, int):
                digest = self.sha256(image)
            else:
                try:
                    digest = hashlib.sha256(FileImage(str(image)).read()).digest()
                except BadImage as error:
                    raise UserError(str(error)) from None
            examples.append((digest, self.image_vector(image)))
        self.concepts.add(name, examples, positive)

    def uses_examples(self, name: str) -> bool:
        """Whether a search for a taught word ranks by its examples.

        If they rank held-out ones no better than the text does, the text stays the query.
        """
        vectors, _ = self._taught(" ".join(name.split()), self.concepts.examples())
        return bool(vectors)

    def mark(self, text: str, id_: int, positive: bool | None) -> None:
        """Mark an image as right or wrong for a text: an example as in `teach`.

        None removes the mark.
        """
        name, _ = _parse_weight(text)
        if positive is None:
            self.concepts.remove(name, self.sha256(id_))
        else:
            self.teach(name, [id_], positive)

    def marks(self, text: str, ids: Sequence[int]) -> dict[int, bool]:
        """Which of some images are marked as right or wrong for a text."""
        marked = self.concepts.marks(_parse_weight(text)[0])
        return (
            {id_: marked[digest] for id_ in ids if (digest := self.sha256(id_)) in marked}
            if marked
            else {}
        )

    def captions(self) -> list[tuple[str, str]]:
        """(path, word) of the right examples and marks of all words, for `m1clip train`.

        Of indexed images only.
        """
        with self._reading() as db:
            columns = "SELECT sha256, min(path) FROM files JOIN images ON images.id = image"
            paths = dict(db.execute(f"{columns} WHERE {VALID} GROUP BY 1"))
        rows = (
            (paths.get(mark.sha256), mark.name) for mark in self.concepts.rows() if mark.positive
        )
        return [
            (str(self.root / os.fsdecode(path)), name) for path, name in rows if path is not None
        ]

    def sha256(self, id_: int) -> bytes:
        """The hash of a result's content; UserError if it is not in the index."""
        return self._entry(id_)[1]

    def image_vector(self, image: Any) -> np.ndarray:
        """(dim,) unit vector of an image: a path, a PIL image, its vector, or the id of a
        result.
        """
        if isinstance(image, np.ndarray) and image.ndim == 1:
            if len(image) != self.dim:
                raise UserError(
                    f"a vector of {len(image)} values; those of the index have {self.dim}"
                )
            return image
        try:
            if isinstance(image, int):
                path, _, vector = self._entry(image)
                if vector is not None:
                    return vector
                image = FileImage(str(self.root / path), inside=str(self.root)).open()
            with self._encoder:
                return self._of_index(self.model.encode_image(image))[0]
        except BadImage as error:
            raise UserError(str(error)) from None

    def _combine(self, parts: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
        """(dim,) unit vector. In a sum, each part is divided by the spread of its scores over the
        library.

        Otherwise an image would outweigh a text: cosines between images vary more than those with
        texts.
        """
        vectors = np.stack([vector for _, vector in parts])
        weights = np.array([weight for weight, _ in parts], np.float32)
        if len(parts) > 1:
            spread = np.sqrt(np.einsum("pd,de,pe->p", vectors, self.library_stats[1], vectors))
            weights /= np.maximum(spread, 1e-6)
        query = weights @ vectors
        return query / max(float(np.linalg.norm(query)), 1e-12)


def _weights(text: str | Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    """Texts with their weights; UserError for a weight that has no meaning."""
    if isinstance(text, str):
        return {text: 1.0}
    weights = dict(text if isinstance(text, Mapping) else map(_parse_weight, text))
    for phrase, weight in weights.items():
        if not 0 < abs(weight) <= MAX_WEIGHT:
            name = one_line(phrase[:40])
            raise UserError(
                f"{name}: its weight must be above 0 and at most {MAX_WEIGHT:,.0f}, not {weight:g}"
            )
    return weights


def _parse_weight(text: str) -> tuple[str, float]:
    """A text with its weight: 2*dog counts twice as much as beach."""
    match = WEIGHTED.fullmatch(text)
    return (match[2], float(match[1])) if match else (text, 1.0)


def zscore(scores: np.ndarray, reference: np.ndarray, library_stats: LibraryStats) -> np.ndarray:
    """(n,) how far scores are above those of everyday words, in standard deviations of these.

    `reference` has the vectors of the words. A mean and spread of the query's own scores would hide
    matching images: both are larger if the library has many. The spread is that over the images;
    where they are too few or too similar to show it, that over the words.
    """
    mean, covariance = library_stats
    of_words = reference @ mean
    over_images = (reference @ covariance * reference).sum(axis=1).mean()
    spread = float(np.sqrt(max(over_images, of_words.var())))
    return np.asarray((scores - of_words.mean()) / max(spread, 1e-6))


def probabilities(zscores: np.ndarray, weights: tuple[float, ...] = MATCH_WEIGHTS) -> np.ndarray:
    """(n,) probability that each image matches."""
    return np.asarray(1 / (1 + np.exp(-weights[0] - weights[1] * zscores)))


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
