"""Index a folder of photos: SQLite for files and facts, and a file of float16 vectors per model.

Vectors belong to the content of a file (sha256), so a moved or renamed file keeps its vector. A
vector is on disk before the row that refers to it is committed: after a kill, the next call
overwrites what is not committed.

An index may come from a stranger. It contains no path that m1clip writes to: the folder of photos
is the one that contains the index, files of vectors have numbers, thumbnails are named after
content, and links are rejected.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import sqlite3
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
from filelock import FileLock, Timeout
from PIL import Image

import m1clip
from m1clip import console
from m1clip.data.decode_pool import decode_in_order, decode_processes
from m1clip.data.decode_worker import Late
from m1clip.data.duplicates import LOOK_BYTES, THUMB_BYTES, appearance
from m1clip.data.images import (
    READ_TIMEOUT,
    SUFFIXES,
    BadImage,
    FileImage,
    Preprocess,
    decode,
    map_with_timeout,
    one_line,
    open_header,
)
from m1clip.errors import UserError
from m1clip.extras import require
from m1clip.hardware.machine_info import decode_threads, usable_cpus
from m1clip.inference.inputs import square
from m1clip.io import first_writable, open_regular, read_small, unlink_beneath, write_bytes
from m1clip.model.listing import MIN_INDEXED, keep_speed
from m1clip.model.named import BOXED, boxed_name, default_model, model_name, require_towers, resolve
from m1clip.search import vectors
from m1clip.system import is_owned_by_user

INDEX_FOLDER, DATABASE, LOCK, THUMBNAILS = ".m1clip-index", "index.sqlite", "lock", "thumbnails"
CONCEPTS = "concepts.sqlite"  # taught words: user data, which stays if the index is made again
LAST = "last-folder"  # in the data folder of the user
SEARCH_INDEX_FORMAT = 3
ENCODED_BATCH = 64  # images encoded together
SAVE_SECONDS = 2.0  # maximum work lost when a process is killed
WATCH_MILLISECONDS = 2000  # changes within this time are indexed together
MAX_UNUSED = 0.2  # fraction of vectors without a file, above which the vectors are rewritten
# One of these is in every model folder.
MODEL_FILES = ("config.json", "open_clip_config.json", "preprocess.json")
# Problems that may be gone next time, though the file is the same.
TEMPORARY = ("missing", "no-decoder", "unreadable")
WRITE_SECONDS = 30.0  # to wait for another process that uses the database
READ_SECONDS = 5.0
JOURNAL_ENDING = "-journal"  # of the file with which SQLite undoes a transaction
DATABASE_ENDINGS = ("", JOURNAL_ENDING, "-wal", "-shm")  # of the files that SQLite writes
# The end of a journal that names another file, which SQLite deletes.
SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
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


@dataclass
class Report:
    """What `update_index` did."""

    folder: Path  # of the index
    root: Path  # the folder of photos
    model: str = ""  # the name or path of the model that encodes them
    indexed: int = 0  # files with a vector now
    added: int = 0  # images encoded
    reused: int = 0  # moved, renamed or copied: their vectors were reused
    removed: int = 0  # files that are gone
    problems: list[tuple[str, str]] = field(default_factory=list)  # (path, why it cannot be used)
    hidden: int = 0
    links: int = 0
    other: int = 0  # files that are not images
    seconds: float = 0.0


def user_data() -> Path:
    configured = os.environ.get("XDG_DATA_HOME")
    if configured and os.path.isabs(configured):
        return Path(configured) / "m1clip"
    return (
        Path.home()
        / ("Library/Application Support" if sys.platform == "darwin" else ".local/share")
        / "m1clip"
    )


class IndexBusy(UserError):
    """Another process has locked the database for too long."""


class NotIndexedError(UserError):
    """A folder has no index that this user can use."""


def find_index(folder: Path | None = None) -> tuple[Path, Path]:
    """(folder of the index, folder of its photos) of a folder or of one above it.

    By default that of the current folder, or else of the one indexed last. An index of another user
    is opened only if its own folder is named: in a shared folder, anyone could put one above the
    photos of others.
    """
    foreign: list[Path] = []
    for start in [folder] if folder is not None else [Path(), *_last_folder()]:
        path = Path(os.path.abspath(start.expanduser()))
        # A mistyped folder has no index, although one above it may have.
        above = path.parents if os.path.lexists(path) else ()
        for root in (path, *above):
            folders = [
                candidate
                for candidate in (root / INDEX_FOLDER, _outside(root))
                if _has_database(candidate)
            ]
            index_folder = next((candidate for candidate in folders if is_own(candidate)), None)
            if index_folder is None and folders:
                if folder is None or root != path:
                    foreign.append(root)
                    break
                index_folder = folders[0]  # it was asked for
            if index_folder is not None:
                check_index_folder(index_folder)
                return index_folder, root
    if folder is not None and not folder.expanduser().exists():
        raise NotIndexedError(f"{folder}: no such folder")
    name = f"{folder or 'this folder'}"
    if foreign:
        raise NotIndexedError(
            f"{name}: not indexed yet (the index in {foreign[0]} belongs to another user; "
            f"name that folder to use it); run: m1clip index {folder or 'FOLDER'}"
        )
    raise NotIndexedError(f"{name}: not indexed yet; run: m1clip index {folder or 'FOLDER'}")


def _has_database(index_folder: Path) -> bool:
    return os.path.lexists(index_folder / DATABASE)


def is_own(index_folder: Path) -> bool:
    """Whether this user made an index folder: it, and the database in it."""
    paths = [path for path in (index_folder, index_folder / DATABASE) if os.path.lexists(path)]
    return all(is_owned_by_user(path) for path in paths)


def check_index_folder(index_folder: Path, write: bool = False) -> None:
    """Raise UserError if an index folder or something in it is a link: it could point anywhere.

    With `write` also if a file in it is a hard link: writing would change a file elsewhere.
    """
    problem = "m1clip does not read or write an index through links; delete it"
    if index_folder.is_symlink():
        raise UserError(f"{index_folder}: is a symbolic link, and {problem}")
    if not index_folder.is_dir():
        return
    with os.scandir(index_folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise UserError(f"{entry.path}: is a symbolic link, and {problem}")
            if not entry.is_file() and not entry.is_dir():
                raise UserError(f"{entry.path}: is a pipe or device; delete it")
            if write and entry.is_file():
                check_single_name(Path(entry.path))
            if entry.name.endswith(JOURNAL_ENDING):
                _check_journal(Path(entry.path))


def check_single_name(path: Path) -> None:
    """Raise UserError if a file has another name (a hard link), under which it would change too."""
    if os.lstat(path).st_nlink > 1:
        raise UserError(
            f"{path}: is a hard link, so that another file would change with it; replace it by a"
            " copy"
        )


def check_database(path: Path) -> None:
    """Raise UserError if SQLite could change a file elsewhere by writing to a database."""
    for ending in DATABASE_ENDINGS:
        file = path.with_name(f"{path.name}{ending}")
        if file.is_symlink():
            raise UserError(f"{file}: is a symbolic link; delete it")
        if file.exists():
            check_single_name(file)
    _check_journal(path.with_name(f"{path.name}{JOURNAL_ENDING}"))


def _check_journal(path: Path) -> None:
    """Raise UserError for a journal with the name of another file, which SQLite would delete."""
    with contextlib.suppress(FileNotFoundError), open_regular(path, inside=path.parent) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(SUPER_JOURNAL)))
        if file.read() == SUPER_JOURNAL:
            raise UserError(f"{path}: was not written by m1clip; delete it")


def _last_folder() -> list[Path]:
    try:
        return [Path(os.fsdecode(read_small(user_data() / LAST)))]
    except OSError:
        return []


def _outside(root: Path) -> Path:
    """Where the index is if the photo folder is not writable."""
    return user_data() / "indexes" / hashlib.sha256(os.fsencode(root)).hexdigest()[:24]


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


def thumbnail(sha256: bytes) -> str:
    """Where `m1clip serve` keeps the thumbnail of an image, below the folder of the index."""
    name = bytes(sha256).hex()
    return os.path.join(THUMBNAILS, name[:2], f"{name}.jpg")


# Models


def model_stamp(path: str | Path) -> str:
    """Names, sizes and times of a model's files: unchanged files are not hashed again."""
    stats = [(name, os.stat(name)) for name in _model_files(path)]
    return ";".join(
        f"{os.path.basename(name)}|{stat.st_size}|{stat.st_mtime_ns}" for name, stat in stats
    )


def model_hash(path: str | Path) -> str:
    digest = hashlib.sha256()
    for name in _model_files(path):
        with open(name, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _model_files(path: str | Path) -> list[str]:
    name = boxed_name(path)
    path = BOXED[name].folder if name is not None else resolve(path)
    if os.path.isfile(path):
        return [str(path)]
    # Of a model folder only: the index of a stranger may name any folder of the disk.
    if any((Path(path) / name).is_file() for name in MODEL_FILES):
        return sorted(str(file) for file in Path(path).rglob("[!.]*") if file.is_file())
    raise UserError(
        f"{path}: the model is no longer there; give another with --model, and index again"
    )


def _resolve(model: str | Path) -> str:
    """The name of a model, or the absolute path of a model folder or file: best/ or model/ of a
    run.
    """
    name = model_name(model)
    if name in BOXED:
        require_towers(name)
        return name
    if name is not None:
        resolve(name)
        return name  # not the folder of one version: a newer one may be downloaded
    for folder in (Path(model), Path(model) / "best", Path(model) / "model"):
        if folder.is_file() or any((folder / name).is_file() for name in MODEL_FILES):
            return os.path.abspath(folder)
    raise UserError(f"{model}: no model found; give a run or a model folder with --model")


def _choose_model(
    db: sqlite3.Connection, requested: str | None, when_done: bool = False
) -> tuple[int, str]:
    """(number of the set of vectors, path of the model), which is by default that of the last call.

    It is the one that is searched from now on, or with `when_done` from `_use_model` on.
    """
    last = db.execute("SELECT path FROM models ORDER BY used DESC").fetchone()
    path = requested or (str(last[0]) if last else _resolve(default_model()))
    stamp = model_stamp(path)
    row = db.execute("SELECT id FROM models WHERE path = ? AND stamp = ?", (path, stamp)).fetchone()
    if row is None:
        digest = model_hash(path)
        db.execute("INSERT OR IGNORE INTO models (hash) VALUES (?)", (digest,))
        row = db.execute("SELECT id FROM models WHERE hash = ?", (digest,)).fetchone()
        db.execute("UPDATE models SET path = ?, stamp = ? WHERE id = ?", (path, stamp, row[0]))
    if not when_done:
        _use_model(db, row[0])
    return row[0], path


def _use_model(db: sqlite3.Connection, set_id: int) -> None:
    """Search with this model by default, although the clock was set back meanwhile."""
    last = "SELECT max(used) FROM models WHERE typeof(used) = 'real' AND id != ?2"
    latest = f"max(?1, ifnull(({last}), 0) + 1)"
    db.execute(f"UPDATE models SET used = {latest} WHERE id = ?2", (time.time(), set_id))


# Files


def _scan(root: Path, report: Report) -> tuple[dict[bytes, tuple[int, int]], list[bytes]]:
    """({relative path: (bytes, mtime)} of the image files, folders that cannot be listed)."""
    files, closed, folders = dict[bytes, tuple[int, int]](), list[bytes](), [b""]
    while folders:
        prefix = folders.pop()
        try:
            with os.scandir(os.path.join(os.fsencode(root), prefix)) as listed:
                entries = list(listed)
        except OSError as error:
            if not prefix:
                raise UserError(f"{root}: {error.strerror}") from None
            closed.append(prefix)
            report.problems.append((os.fsdecode(prefix), error.strerror or str(error)))
            continue
        for entry in entries:
            if entry.name == INDEX_FOLDER.encode():
                continue
            if entry.name.startswith(b".") or entry.name == b"__MACOSX":
                report.hidden += 1
            elif entry.is_symlink():
                report.links += 1
            elif entry.is_dir(follow_symlinks=False):
                folders.append(prefix + entry.name + b"/")
            elif (
                not entry.is_file()
                or os.path.splitext(os.fsdecode(entry.name))[1].lower() not in SUFFIXES
            ):
                report.other += 1
            else:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    stat = entry.stat(follow_symlinks=False)
                    files[prefix + entry.name] = stat.st_size, stat.st_mtime_ns
    return files, closed


@dataclass(frozen=True, slots=True)
class _Read:
    """A file that was read: its image unless the content is known already, or why it cannot be
    used.
    """

    path: bytes
    sha256: bytes = b""
    pixels: np.ndarray | None = None  # (size, size, 3) uint8
    facts: tuple[Any, ...] = ()  # columns of the table images
    problem: str | None = None
    kind: str = ""


def _read(root: bytes, path: bytes, rows_of_known: dict[bytes, int], model: Any) -> _Read:
    """Read a file once: hash its bytes, then decode them, unless an image of this hash has a
    vector.
    """
    where = os.fsdecode(path)
    try:
        data = FileImage(os.fsdecode(os.path.join(root, path)), inside=os.fsdecode(root)).read()
        digest = hashlib.sha256(data).digest()
        if digest in rows_of_known:
            return _Read(path, digest)
        with open_header(data, where) as header:
            facts = _facts(header)
        image = decode(data, model.preprocess.image_size, where)
        return _Read(path, digest, model.square(image), (*facts, *appearance(image)))
    except BadImage as error:
        return _Read(path, problem=one_line(error.reason), kind=error.kind)
    # What decoders raise for an unreadable image; the last two for absurd sizes.
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        return _Read(path, problem=one_line(str(error) or type(error).__name__), kind="unreadable")


def _facts(header: Image.Image) -> tuple[int, int, str | None, int]:
    """(width, height, time taken, orientation): the size is that of the upright image."""
    taken, orientation = None, 1
    with contextlib.suppress(Exception):  # damaged EXIF data
        exif = header.getexif()
        orientation = exif.get(0x0112, 1)
        orientation = orientation if orientation in range(1, 9) else 1
        text = exif.get_ifd(0x8769).get(0x9003) or exif.get(0x0132) or ""
        taken = datetime.strptime(text.strip("\0 "), "%Y:%m:%d %H:%M:%S").isoformat()
    width, height = header.size if orientation < 5 else header.size[::-1]
    return width, height, taken, orientation


# The index


def update_index(
    folder: str | Path, model: str | Path | None = None, when_done: bool = False
) -> Report:
    """Index the images of a folder and its subfolders; unchanged files are not read again.

    With `when_done`, searches use the model only once all images have its vectors, and until then
    the one before.
    """
    began, root = time.monotonic(), Path(os.path.abspath(Path(folder).expanduser()))
    if not root.is_dir():
        raise UserError(f"{root}: no such folder")
    folders = [
        candidate for candidate in (root / INDEX_FOLDER, _outside(root)) if is_own(candidate)
    ]
    for index_folder in filter(os.path.lexists, folders):
        check_index_folder(index_folder, write=True)
    # Chosen before anything is created: a missing model leaves no empty index.
    path = None if model is None else _resolve(model)
    if path is None and not any(map(_has_database, folders)):
        path = _resolve(default_model())
    report = Report(first_writable(folders, "index", "make one of them writable"), root)
    # A soft lock would outlive a killed process.
    lock = FileLock(report.folder / LOCK, fallback_to_soft=False)
    try:
        with (
            lock.acquire(blocking=False),
            database_errors(report.folder / DATABASE),
            closing(connect(report.folder, write=True)) as db,
        ):
            _update(db, root, path, report, when_done)
    except Timeout:
        raise UserError(f"{root}: another process is indexing this folder now") from None
    except (OSError, sqlite3.Error) as error:
        if not is_full(error):
            raise
        raise UserError(
            f"{report.folder}: the disk is full; free some space and run again to continue"
        ) from None
    with contextlib.suppress(OSError):  # the home folder may be read-only
        write_bytes(user_data() / LAST, os.fsencode(root), sync=False)
    report.seconds = time.monotonic() - began
    return report


def _update(
    db: sqlite3.Connection, root: Path, requested: str | None, report: Report, when_done: bool
) -> None:
    db.executemany(
        "INSERT OR REPLACE INTO about VALUES (?, ?)",
        [("format", SEARCH_INDEX_FORMAT), ("version", m1clip.__version__)],
    )
    set_id, path = _choose_model(db, requested, when_done)
    report.model = path
    db.commit()
    _drop_lost_rows(db, report.folder, root, set_id)
    files, closed = _scan(root, report)
    db.execute(f"DELETE FROM files WHERE NOT ({VALID_FILE})")
    stored = {
        name: (size, mtime, done)
        for name, size, mtime, done in db.execute(
            "SELECT path, bytes, mtime_ns, problem IS NOT NULL OR row IS NOT NULL "
            "FROM files LEFT JOIN vectors ON vectors.image = files.image AND model = ?",
            (set_id,),
        )
    }
    gone = [
        name for name in stored if name not in files and not name.startswith(tuple(closed) or b"\0")
    ]
    db.executemany("DELETE FROM files WHERE path = ?", [(name,) for name in gone])
    report.removed = len(gone)
    db.commit()
    changed = sorted(name for name, stamp in files.items() if stored.get(name) != (*stamp, 1))

    refresh = console.current_progress()

    def record_progress(done: int, total: int) -> None:
        """Also for `m1clip serve`; committed with the images."""
        note = f"{done} {total} {time.time():.0f}"
        db.execute("INSERT OR REPLACE INTO about VALUES ('progress', ?)", (note,))
        refresh(done, total)

    if changed:
        model = m1clip.load(path)
        began = time.monotonic()
        with _Writer(db, report, set_id) as writer:
            for read in _pipeline(root, changed, writer, model, record_progress):
                writer.add(read, files, model)
        name = model_name(path)
        if name is not None and report.added >= MIN_INDEXED:
            device = str(getattr(model.encoder, "device", "cpu"))
            keep_speed(name, report.added, time.monotonic() - began, device, "index")
    if when_done:
        _use_model(db, set_id)
        db.commit()
    unused = (
        "SELECT sha256 FROM images WHERE id NOT IN (SELECT image FROM files WHERE image IS NOT"
        " NULL) AND typeof(sha256) = 'blob'"
    )
    for (sha256,) in db.execute(unused):
        with contextlib.suppress(OSError):  # a link in thumbnails, which is not followed
            unlink_beneath(report.folder, thumbnail(sha256))
    _remove_unused(db, report.folder, root, set_id)
    report.problems += [
        (os.fsdecode(name), problem)
        for name, problem in db.execute(
            "SELECT path, problem FROM files WHERE problem IS NOT NULL ORDER BY path"
        )
    ]
    (report.indexed,) = db.execute(
        "SELECT count(*) FROM files JOIN vectors ON vectors.image = files.image WHERE model = ?",
        (set_id,),
    ).fetchone()


def _pipeline(
    root: Path,
    names_to_read: Sequence[bytes],
    writer: _Writer,
    model: Any,
    refresh: console.Refresh,
) -> Iterator[list[_Read]]:
    """Read and decode on half of the cores while the caller encodes."""
    start, cpus = os.fsencode(root), max(1, usable_cpus() // 2)
    # Moved files have known images, whose bytes are only hashed: threads see what is known.
    moved = writer.report.removed > 0
    processes = 0 if moved else decode_processes(len(names_to_read), cpus)
    if processes:
        reads = _read_in_processes(start, names_to_read, model, processes)
    else:
        reads = map_with_timeout(
            names_to_read,
            lambda name: _read(start, name, writer.known, model),
            READ_TIMEOUT,
            max(2, min(decode_threads(), cpus)),
        )
    late = f"the read did not finish within {READ_TIMEOUT:g} s"
    done, names = 0, iter(names_to_read)
    refresh(0, len(names_to_read))
    with closing(reads):
        while chunk := list(itertools.islice(reads, ENCODED_BATCH)):
            both = zip(chunk, names, strict=False)
            yield [
                _Read(name, problem=late, kind="unreadable") if read is None else read
                for read, name in both
            ]
            done += len(chunk)
            refresh(done, len(names_to_read))


@dataclass(frozen=True)
class _ReadPhoto:
    """Work for `DecodePool`: the name of a file -> its pixels, and what else was read."""

    root: bytes
    model: _Squares

    def __call__(self, path: bytes) -> tuple[np.ndarray | None, _Read]:
        read = _read(self.root, path, {}, self.model)
        return read.pixels, replace(read, pixels=None)


@dataclass(frozen=True)
class _Squares:
    """The preprocessing of a model, without the model."""

    preprocess: Preprocess

    def square(self, image: Image.Image) -> np.ndarray:
        return square(image, self.preprocess)


def _read_in_processes(
    root: bytes, names: Sequence[bytes], model: Any, processes: int
) -> Generator[_Read | None]:
    """What was read from each file, in order; None for one that took too long."""
    side = model.preprocess.image_size
    work = _ReadPhoto(root, _Squares(model.preprocess))
    blocks = decode_in_order(work, names, processes, (side, side, 3), READ_TIMEOUT)
    with closing(blocks):
        for reports, pixels in blocks:
            for report, row in zip(reports, pixels, strict=True):
                if isinstance(report, Late):
                    yield None
                else:
                    yield report if report.problem else replace(report, pixels=row.copy())


class _Writer:
    """Appends vectors and commits the rows that refer to them."""

    def __init__(self, db: sqlite3.Connection, report: Report, set_id: int) -> None:
        self.db, self.report, self.set_id = db, report, set_id
        pairs = (
            "SELECT sha256, images.id FROM images JOIN vectors ON image = images.id "
            "WHERE model = ? AND typeof(sha256) = 'blob'"
        )
        self.known: dict[bytes, int] = dict(db.execute(pairs, (set_id,)))  # images with a vector
        self.rows = committed_rows(db, report.folder, set_id)
        self.file: BinaryIO | None = None  # opened with the first vector: its length is known then
        self._saved = time.monotonic()

    def __enter__(self) -> _Writer:
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

    def add(self, reads: Sequence[_Read], files: dict[bytes, tuple[int, int]], model: Any) -> None:
        """Encode the images of some files and add the files to the index."""
        new = {
            read.sha256: read
            for read in reads
            if read.pixels is not None and read.sha256 not in self.known
        }
        if new:
            pixels = np.stack([read.pixels for read in new.values() if read.pixels is not None])
            self._append(list(new.values()), np.asarray(model.encode_image(pixels), np.float16))
        self.report.reused += sum(not read.problem for read in reads) - len(new)
        for read in reads:
            size, mtime = files[read.path]
            mtime = -1 if read.kind in TEMPORARY else mtime
            self.db.execute(
                "INSERT INTO files (path, bytes, mtime_ns, image, problem) VALUES (?1, ?2, ?3, ?4,"
                " ?5) ON CONFLICT (path) DO UPDATE SET bytes = ?2, mtime_ns = ?3, image = ?4,"
                " problem = ?5",
                (read.path, size, mtime, self.known.get(read.sha256), read.problem),
            )
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def _append(self, reads: Sequence[_Read], encoded: np.ndarray) -> None:
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
            self.known[read.sha256] = image
            self.rows += 1
        self.report.added += len(reads)

    def _open_file(self, dim: int) -> BinaryIO:
        """Open the file of vectors after its committed rows, or a new one."""
        stored = vectors_of(self.db, self.report.folder, self.report.root, self.set_id)
        if stored is not None:
            if stored.dim != dim:
                path = self.report.folder / DATABASE
                raise UserError(
                    f"{path}: has vectors of {stored.dim} values, the model {dim}; {hint(path)}"
                )
            return vectors.open_end(self.report.folder, *stored.key, self.rows)
        generation, file = vectors.create(self.report.folder, self.set_id)
        self.db.execute(
            "UPDATE models SET dim = ?, generation = ? WHERE id = ?", (dim, generation, self.set_id)
        )
        return file


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


def _drop_lost_rows(db: sqlite3.Connection, index_folder: Path, root: Path, set_id: int) -> None:
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


def _remove_unused(db: sqlite3.Connection, index_folder: Path, root: Path, set_id: int) -> None:
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


def watch_folder(folder: Path) -> Iterator[object]:
    """Yield once the folder is watched, and then whenever its files have changed.

    The index itself does not count.
    """
    inside = os.sep + INDEX_FOLDER + os.sep
    steps = require("watchfiles", "--watch", "search").watch(
        folder,
        watch_filter=lambda _, path: inside not in path + os.sep,
        debounce=WATCH_MILLISECONDS,
        rust_timeout=WATCH_MILLISECONDS,
        yield_on_timeout=True,
    )
    return (changes for number, changes in enumerate(steps) if changes or number == 0)
