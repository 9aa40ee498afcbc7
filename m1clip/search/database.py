"""The database of an index: its tables, its errors, and what counts as a valid row."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from m1clip.data.duplicates import LOOK_BYTES, THUMB_BYTES
from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.search import vectors
from m1clip.search.location import DATABASE, check_index_folder

SEARCH_INDEX_FORMAT = 3
WRITE_SECONDS = 30.0  # to wait for another process that uses the database
READ_SECONDS = 5.0
ABOUT = "CREATE TABLE about (name TEXT PRIMARY KEY, value)"
INDEX_SCHEMA = f"""
{ABOUT};
CREATE TABLE models (id INTEGER PRIMARY KEY, hash TEXT UNIQUE, path TEXT, stamp TEXT, dim INTEGER, generation INTEGER,
  used REAL);
CREATE TABLE images (id INTEGER PRIMARY KEY, sha256 BLOB UNIQUE, width INTEGER, height INTEGER, taken TEXT,
  orientation INTEGER, perceptual_hash BLOB, thumb BLOB);
CREATE TABLE files (id INTEGER PRIMARY KEY, path BLOB UNIQUE, bytes INTEGER, mtime_ns INTEGER, image INTEGER,
  problem TEXT);
CREATE TABLE vectors (model INTEGER, image INTEGER, row INTEGER, PRIMARY KEY (model, image)) WITHOUT ROWID;
CREATE UNIQUE INDEX vector_rows ON vectors (model, row);
CREATE INDEX file_images ON files (image);
"""
# Conditions for the rows that m1clip writes. SQLite stores any type in any column, so that an index
# from a stranger may contain other rows, which do not count.
VALID_ROW = "typeof(row) = 'integer' AND row >= 0"
# The path of a file is relative to the folder of photos and stays in it.
VALID_PATH = (
    "typeof(path) = 'blob' AND substr(path, 1, 1) != x'2f' AND instr(path, x'00') = 0 AND"
    " (instr(path, x'2e2e') = 0 OR instr(CAST('/' || CAST(path AS TEXT) || '/' AS BLOB),"
    " CAST('/../' AS BLOB)) = 0)"
)
VALID_FILE = f"{VALID_PATH} AND typeof(bytes) = 'integer' AND typeof(mtime_ns) = 'integer'"
VALID_IMAGE = (
    "typeof(sha256) = 'blob' AND length(sha256) = 32 AND typeof(width) = 'integer' AND"
    " typeof(height) = 'integer' AND typeof(taken) IN ('text', 'null') AND typeof(perceptual_hash)"
    f" = 'blob' AND length(perceptual_hash) = {LOOK_BYTES} AND typeof(thumb) = 'blob' AND"
    f" length(thumb) = {THUMB_BYTES}"
)


class IndexBusy(UserError):
    """Another process has locked the database for too long."""


def connect(index_folder: Path, write: bool = False) -> sqlite3.Connection:
    """Open the database of an index; UserError if it is damaged or of another m1clip."""
    path = index_folder / DATABASE
    uri = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode={'rwc' if write else 'ro'}"
    seconds = WRITE_SECONDS if write else READ_SECONDS
    with database_errors(path):
        db = sqlite3.connect(uri, uri=True, timeout=seconds, check_same_thread=False)
        db.execute("PRAGMA trusted_schema = OFF")
        if write and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            db.executescript(f"BEGIN; {INDEX_SCHEMA} COMMIT;")
        try:
            stored = stored_statements(db)
        except sqlite3.OperationalError as error:
            if write or not needs_rollback(error):
                raise
            roll_back(index_folder, READ_SECONDS)
            stored = stored_statements(db)
        other = UserError(f"{path}: not a valid index (other tables than m1clip's); {hint(path)}")
        # Before it is read: a view of this name could be computed forever.
        if stored and ABOUT not in stored:
            raise other
        facts = dict(db.execute("SELECT name, value FROM about"))
        if facts.get("format", SEARCH_INDEX_FORMAT) != SEARCH_INDEX_FORMAT:
            version = one_line(str(facts.get("version")))
            raise UserError(
                f"{path}: written by another version of m1clip ({version}); {hint(path)}"
            )
        if stored != statements(INDEX_SCHEMA):
            raise other
    return db


def stored_statements(db: sqlite3.Connection) -> list[str]:
    """The statements of all tables, indexes, views and triggers of a database, sorted.

    Only the statistics of SQLite's ANALYZE are skipped, by type too: SQLite also runs a trigger
    whose name starts with "sqlite_".
    """
    query = (
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL "
        "AND NOT (type = 'table' AND name LIKE 'sqlite~_stat_' ESCAPE '~')"
    )
    return sorted(sql for (sql,) in db.execute(query))


def statements(schema: str) -> list[str]:
    """The statements of a schema, sorted, as SQLite stores them."""
    return sorted(statement.strip() for statement in schema.split(";") if statement.strip())


def hint(path: Path) -> str:
    """What to do about a database that cannot be used; taught words are in another file."""
    return f"delete {path} and run m1clip index again"


@contextlib.contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Raise errors of SQLite as UserError; not that of a full disk, which needs no new index."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if is_full(error):
            raise
        if is_busy(error):
            raise IndexBusy(f"{path}: another program has locked it; try again later") from None
        if path.name == DATABASE and "no such table: about" in str(error):
            raise UserError(
                f"{path}: the index is being created; wait, or run m1clip index again"
            ) from None
        raise UserError(
            f"{path}: not a valid index ({one_line(str(error))}); {hint(path)}"
        ) from None


def needs_rollback(error: sqlite3.Error) -> bool:
    """Whether a process was killed during a commit, which a read-only connection cannot undo."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF == sqlite3.SQLITE_READONLY


def roll_back(index_folder: Path, seconds: float) -> None:
    """Undo the transaction of a killed process."""
    check_index_folder(index_folder)
    path = index_folder / DATABASE
    uri = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode=rw"
    with database_errors(path), closing(sqlite3.connect(uri, uri=True, timeout=seconds)) as db:
        db.execute("SELECT 1 FROM sqlite_master").fetchone()


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another process has locked the database."""
    code = getattr(error, "sqlite_errorcode", None)  # of errors of Python's own, there is none
    return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_unwritable(error: sqlite3.Error) -> bool:
    """Whether a database is not damaged, but its file or folder cannot be opened or written to."""
    codes = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in codes


def is_full(error: Exception) -> bool:
    """Whether an error means that the disk is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    codes = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) in codes


def committed_rows(db: sqlite3.Connection, index_folder: Path, set_id: int) -> int:
    """The number of rows that a file of vectors has according to the database.

    UserError if rows are missing between them: one large number would need any amount of memory.
    """
    query = f"SELECT count(*), max(row) FROM vectors WHERE model = ? AND {VALID_ROW}"
    rows, last = db.execute(query, (set_id,)).fetchone()
    if rows and last != rows - 1:
        path = index_folder / DATABASE
        raise UserError(f"{path}: not a valid index (bad numbers of vectors); {hint(path)}")
    return int(rows)


def vectors_of(
    db: sqlite3.Connection, index_folder: Path, root: Path, set_id: int
) -> vectors.Vectors | None:
    """The file of a model's vectors, or None if it has none yet; UserError for invalid numbers."""
    generation, dim = db.execute(
        "SELECT generation, dim FROM models WHERE id = ?", (set_id,)
    ).fetchone()
    if generation is None:
        return None
    valid = (
        type(generation) is int
        and generation >= 0
        and type(dim) is int
        and 1 <= dim <= vectors.MAX_DIM
    )
    if not valid:
        path = index_folder / DATABASE
        raise UserError(f"{path}: not a valid index (bad numbers of a model); {hint(path)}")
    return vectors.Vectors(index_folder, root, set_id, generation, dim)
