"""Index a folder of photos: SQLite for files and facts, and for each model a memory-mapped file of float16 vectors.

Vectors belong to the content of a file (sha256), so a moved or renamed file keeps its vector. A vector is on disk
before the row that refers to it is committed: after a kill, the next call drops what is not committed and continues.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
from filelock import FileLock, Timeout
from PIL import Image

import m1clip
from m1clip.data.duplicates import appearance
from m1clip.data.images import READ_TIMEOUT, SUFFIXES, BadImage, FileImage, decode, map_with_timeout, one_line, opened
from m1clip.errors import UserError, hub_hint
from m1clip.hardware.facts import decode_threads
from m1clip.io import first_writable, open_for_write, read_small, require, write_bytes

FOLDER, DATABASE, LOCK, THUMBNAILS = ".m1clip-index", "index.sqlite", "lock", "thumbnails"
LAST = "last-folder"  # in the data folder of the user
FORMAT = 1
BATCH = 64  # images encoded together
SAVE_SECONDS = 2.0  # maximum work lost when a process is killed
WATCH_MILLISECONDS = 2000  # changes within this time are indexed together
MAX_UNUSED = 0.2  # fraction of vectors without a file, above which the vectors are rewritten
MODEL_FILES = ("config.json", "open_clip_config.json", "preprocess.json")  # one of these is in every model folder
TEMPORARY = ("missing", "no-decoder", "unreadable")  # problems that may be gone next time, though the file is the same
SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value);
CREATE TABLE models (id INTEGER PRIMARY KEY, hash TEXT UNIQUE, path TEXT, stamp TEXT, dim INTEGER, vectors TEXT,
  used REAL);
CREATE TABLE images (id INTEGER PRIMARY KEY, sha256 BLOB UNIQUE, width INTEGER, height INTEGER, taken TEXT,
  orientation INTEGER, look BLOB, thumb BLOB);
CREATE TABLE files (id INTEGER PRIMARY KEY, path BLOB UNIQUE, bytes INTEGER, mtime_ns INTEGER, image INTEGER,
  problem TEXT);
CREATE TABLE vectors (model INTEGER, image INTEGER, row INTEGER, PRIMARY KEY (model, image)) WITHOUT ROWID;
CREATE UNIQUE INDEX vector_rows ON vectors (model, row);
CREATE INDEX file_images ON files (image);
"""

Progress = Callable[[int, int], None]  # (done, total)


@dataclass
class Report:
    """What `update_index` did."""

    place: Path  # the folder of the index
    indexed: int = 0  # files with a vector now
    added: int = 0  # images encoded
    kept: int = 0  # moved, renamed or copied: their vectors were reused
    removed: int = 0  # files that are gone
    problems: list[tuple[str, str]] = field(default_factory=list)  # (path, why it cannot be used)
    hidden: int = 0
    links: int = 0
    other: int = 0  # files that are not images
    seconds: float = 0.0


def user_data() -> Path:
    asked = os.environ.get("XDG_DATA_HOME")
    if asked and os.path.isabs(asked):
        return Path(asked) / "m1clip"
    return Path.home() / ("Library/Application Support" if sys.platform == "darwin" else ".local/share") / "m1clip"


def find_index(folder: Path | None = None) -> Path:
    """The index of a folder or of one above it; by default of the current folder, or else of the one indexed last."""
    for start in [folder] if folder is not None else [Path(), *_last_folder()]:
        path = Path(os.path.abspath(start.expanduser()))
        for each in (path, *path.parents):
            for place in (each / FOLDER, _outside(each)):
                if (place / DATABASE).is_file():
                    return place
    raise UserError(f"{folder or 'this folder'}: not indexed yet; run: m1clip index {folder or 'FOLDER'}")


def _last_folder() -> list[Path]:
    try:
        return [Path(os.fsdecode(read_small(user_data() / LAST)))]
    except OSError:
        return []


def _outside(root: Path) -> Path:
    """Where the index is if the photo folder is not writable."""
    return user_data() / "indexes" / hashlib.sha256(os.fsencode(root)).hexdigest()[:24]


def connect(place: Path, write: bool = False) -> sqlite3.Connection:
    """Open the database of an index; UserError if it is damaged or of a newer m1clip."""
    path = place / DATABASE
    uri = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode={'rwc' if write else 'ro'}"
    try:
        db = sqlite3.connect(uri, uri=True, timeout=30, check_same_thread=False)
        if write and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        try:
            facts = dict(db.execute("SELECT name, value FROM about"))
        except sqlite3.OperationalError as error:
            if write or "readonly" not in str(error):
                raise
            connect(place, write=True).close()  # undoes the transaction of a killed process
            facts = dict(db.execute("SELECT name, value FROM about"))
    except sqlite3.DatabaseError as error:
        if is_full(error):
            raise
        if not write and "no such table: about" in str(error):
            raise UserError(f"{path}: the index is being created; wait, or run m1clip index again") from None
        raise UserError(f"{path}: not a valid index ({error}); delete {place} and run m1clip index again") from None
    if facts.get("format", FORMAT) != FORMAT:
        raise UserError(f"{path}: written by another version of m1clip ({facts.get('version')}); upgrade, or delete it")
    return db


def is_full(error: Exception) -> bool:
    """Whether an error means that the disk is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    codes = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
    return isinstance(error, sqlite3.Error) and error.sqlite_errorcode in codes


def root_of(place: Path, db: sqlite3.Connection) -> Path:
    """The photo folder of an index."""
    (stored,) = db.execute("SELECT value FROM about WHERE name = 'root'").fetchone()
    return place.parent if stored is None else Path(os.fsdecode(stored))


def thumbnail(place: Path, sha256: bytes) -> Path:
    """Where `m1clip serve` keeps the thumbnail of an image."""
    return place / THUMBNAILS / sha256.hex()[:2] / f"{sha256.hex()}.jpg"


# Models


def model_stamp(path: str | Path) -> str:
    """Names, sizes and times of a model's files: unchanged files are not hashed again."""
    stats = [(name, os.stat(name)) for name in _model_files(path)]
    return ";".join(f"{os.path.basename(name)}|{stat.st_size}|{stat.st_mtime_ns}" for name, stat in stats)


def model_hash(path: str | Path) -> str:
    digest = hashlib.sha256()
    for name in _model_files(path):
        with open(name, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _model_files(path: str | Path) -> list[str]:
    if os.path.isfile(path):
        return [str(path)]
    if found := sorted(str(file) for file in Path(path).rglob("[!.]*") if file.is_file()):
        return found
    raise UserError(f"{path}: the model is no longer there; give another with --model, and index again")


def _resolved(model: str | Path) -> str:
    """The absolute path of a model folder or file: best/ or model/ of a run."""
    for folder in (Path(model), Path(model) / "best", Path(model) / "model"):
        if folder.is_file() or any((folder / name).is_file() for name in MODEL_FILES):
            return os.path.abspath(folder)
    raise UserError(f"{model}: no model found; give a run or a model folder with --model{hub_hint(model)}")


def _choose_model(db: sqlite3.Connection, asked: str | Path | None) -> tuple[int, str]:
    """(number of the set of vectors, path of the model), which is by default that of the last call."""
    last = db.execute("SELECT path FROM models ORDER BY used DESC").fetchone()
    if asked is None and last is None:
        from m1clip.model.folder import newest_run

        asked = newest_run()
    path = last[0] if asked is None else _resolved(asked)
    stamp = model_stamp(path)
    found = db.execute("SELECT id FROM models WHERE path = ? AND stamp = ?", (path, stamp)).fetchone()
    if found is None:
        digest = model_hash(path)
        db.execute("INSERT OR IGNORE INTO models (hash) VALUES (?)", (digest,))
        found = db.execute("SELECT id FROM models WHERE hash = ?", (digest,)).fetchone()
        db.execute("UPDATE models SET path = ?, stamp = ? WHERE id = ?", (path, stamp, found[0]))
    db.execute("UPDATE models SET used = ? WHERE id = ?", (time.time(), found[0]))
    return found[0], path


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
            if entry.name == FOLDER.encode():
                continue
            if entry.name.startswith(b".") or entry.name == b"__MACOSX":
                report.hidden += 1
            elif entry.is_symlink():
                report.links += 1
            elif entry.is_dir(follow_symlinks=False):
                folders.append(prefix + entry.name + b"/")
            elif not entry.is_file() or os.path.splitext(os.fsdecode(entry.name))[1].lower() not in SUFFIXES:
                report.other += 1
            else:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    stat = entry.stat(follow_symlinks=False)
                    files[prefix + entry.name] = stat.st_size, stat.st_mtime_ns
    return files, closed


@dataclass(frozen=True, slots=True)
class _Read:
    """A file that was read: its image unless the content is known already, or why it cannot be used."""

    path: bytes
    sha256: bytes = b""
    pixels: np.ndarray | None = None  # (size, size, 3) uint8
    facts: tuple[Any, ...] = ()  # columns of the table images
    problem: str | None = None
    kind: str = ""


def _read(root: bytes, path: bytes, known: dict[bytes, int], model: Any) -> _Read:
    """Read a file once: hash its bytes, then decode them, unless an image of this hash has a vector."""
    where = os.fsdecode(path)
    try:
        data = FileImage(os.fsdecode(os.path.join(root, path))).read()
        digest = hashlib.sha256(data).digest()
        if digest in known:
            return _Read(path, digest)
        with opened(data, where) as header:
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
    folder: str | Path, model: str | Path | None = None, progress: Progress = lambda done, total: None
) -> Report:
    """Index the images of a folder and its subfolders; unchanged files are not read again."""
    began, root = time.monotonic(), Path(os.path.abspath(Path(folder).expanduser()))
    if not root.is_dir():
        raise UserError(f"{root}: no such folder")
    report = Report(first_writable((root / FOLDER, _outside(root)), "index", "make one of them writable"))
    lock = FileLock(report.place / LOCK, fallback_to_soft=False)  # a soft lock would outlive a killed process
    try:
        with lock.acquire(blocking=False), closing(connect(report.place, write=True)) as db:
            _update(db, root, model, report, progress)
    except Timeout:
        raise UserError(f"{root}: another process is indexing this folder now") from None
    except (OSError, sqlite3.Error) as error:
        if not is_full(error):
            raise
        raise UserError(f"{report.place}: the disk is full; free some space and run again to continue") from None
    with contextlib.suppress(OSError):  # the home folder may be read-only
        write_bytes(user_data() / LAST, os.fsencode(root), sync=False)
    report.seconds = time.monotonic() - began
    return report


def _update(db: sqlite3.Connection, root: Path, asked: str | Path | None, report: Report, progress: Progress) -> None:
    stored_root = None if report.place.parent == root else os.fsencode(root)
    db.executemany(
        "INSERT OR REPLACE INTO about VALUES (?, ?)",
        [("format", FORMAT), ("version", m1clip.__version__), ("root", stored_root)],
    )
    set_id, path = _choose_model(db, asked)
    files, closed = _scan(root, report)
    stored = {
        name: (size, mtime, done)
        for name, size, mtime, done in db.execute(
            "SELECT path, bytes, mtime_ns, problem IS NOT NULL OR row IS NOT NULL "
            "FROM files LEFT JOIN vectors ON vectors.image = files.image AND model = ?",
            (set_id,),
        )
    }
    gone = [name for name in stored if name not in files and not name.startswith(tuple(closed) or b"\0")]
    db.executemany("DELETE FROM files WHERE path = ?", [(name,) for name in gone])
    report.removed = len(gone)
    db.commit()
    wanted = sorted(name for name, stamp in files.items() if stored.get(name) != (*stamp, 1))

    def noted(done: int, total: int) -> None:
        """Also for `m1clip serve`; committed with the images."""
        note = f"{done} {total} {time.time():.0f}"
        db.execute("INSERT OR REPLACE INTO about VALUES ('progress', ?)", (note,))
        progress(done, total)

    if wanted:
        model = m1clip.load(path)
        with _Writer(db, report, set_id) as writer:
            for found in _pipeline(root, wanted, writer, model, noted):
                writer.add(found, files, model)
    unused = "SELECT sha256 FROM images WHERE id NOT IN (SELECT image FROM files WHERE image IS NOT NULL)"
    for (sha256,) in db.execute(unused):
        thumbnail(report.place, sha256).unlink(missing_ok=True)
    _remove_unused(db, report.place, set_id)
    report.problems += [
        (os.fsdecode(name), problem)
        for name, problem in db.execute("SELECT path, problem FROM files WHERE problem IS NOT NULL ORDER BY path")
    ]
    (report.indexed,) = db.execute(
        "SELECT count(*) FROM files JOIN vectors ON vectors.image = files.image WHERE model = ?", (set_id,)
    ).fetchone()


def _pipeline(
    root: Path, wanted: Sequence[bytes], writer: _Writer, model: Any, progress: Progress
) -> Iterator[list[_Read]]:
    """Read and decode in threads while the caller encodes."""
    threads, start = max(2, min(decode_threads(), (os.cpu_count() or 2) // 2)), os.fsencode(root)
    reads = map_with_timeout(wanted, lambda name: _read(start, name, writer.known, model), READ_TIMEOUT, threads)
    late = f"the read did not finish within {READ_TIMEOUT:g} s"
    done, names = 0, iter(wanted)
    progress(0, len(wanted))
    while chunk := list(itertools.islice(reads, BATCH)):
        both = zip(chunk, names, strict=False)
        yield [_Read(name, problem=late, kind="unreadable") if read is None else read for read, name in both]
        done += len(chunk)
        progress(done, len(wanted))


class _Writer:
    """Appends vectors and commits the rows that refer to them."""

    def __init__(self, db: sqlite3.Connection, report: Report, set_id: int) -> None:
        self.db, self.report, self.set_id = db, report, set_id
        pairs = "SELECT sha256, images.id FROM images JOIN vectors ON image = images.id WHERE model = ?"
        self.known: dict[bytes, int] = dict(db.execute(pairs, (set_id,)))  # images with a vector
        (self.rows,) = db.execute("SELECT coalesce(max(row) + 1, 0) FROM vectors WHERE model = ?", (set_id,)).fetchone()
        name, self.dim = db.execute("SELECT vectors, dim FROM models WHERE id = ?", (set_id,)).fetchone()
        self.name = name or f"vectors-{set_id}-0.f16"
        self._saved = time.monotonic()

    def __enter__(self) -> _Writer:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK  # a FIFO is an immediate error
        self.file: BinaryIO = os.fdopen(open_for_write(self.report.place / self.name, flags), "wb")
        length = self.rows * (self.dim or 0) * 2
        if os.fstat(self.file.fileno()).st_size < length:
            raise UserError(
                f"{self.report.place / self.name}: truncated; delete {self.report.place} and run m1clip index again"
            )
        self.file.truncate(length)  # a killed process may have left more
        self.file.seek(length)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.save()
        except (OSError, sqlite3.Error):
            self.db.rollback()
            raise
        finally:
            with contextlib.suppress(OSError):  # the buffer of a full disk
                self.file.close()

    def save(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())  # before the rows: after a power loss each row has its vector
        self.db.commit()
        self._saved = time.monotonic()

    def add(self, reads: Sequence[_Read], files: dict[bytes, tuple[int, int]], model: Any) -> None:
        """Encode the images of some files and add the files to the index."""
        new = {read.sha256: read for read in reads if read.pixels is not None and read.sha256 not in self.known}
        if new:
            pixels = np.stack([read.pixels for read in new.values() if read.pixels is not None])
            self._append(list(new.values()), np.asarray(model.encode_image(pixels), np.float16))
        self.report.kept += sum(not read.problem for read in reads) - len(new)
        for read in reads:
            size, mtime = files[read.path]
            mtime = -1 if read.kind in TEMPORARY else mtime
            self.db.execute(
                "INSERT INTO files (path, bytes, mtime_ns, image, problem) VALUES (?1, ?2, ?3, ?4, ?5) "
                "ON CONFLICT (path) DO UPDATE SET bytes = ?2, mtime_ns = ?3, image = ?4, problem = ?5",
                (read.path, size, mtime, self.known.get(read.sha256), read.problem),
            )
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def _append(self, reads: Sequence[_Read], vectors: np.ndarray) -> None:
        if self.dim is None:
            self.dim = vectors.shape[1]
            values = (self.dim, self.name, self.set_id)
            self.db.execute("UPDATE models SET dim = ?, vectors = ? WHERE id = ?", values)
        self.file.write(vectors.data)
        self.db.executemany(
            "INSERT OR IGNORE INTO images (sha256, width, height, taken, orientation, look, thumb) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(read.sha256, *read.facts) for read in reads],
        )
        for read in reads:
            (image,) = self.db.execute("SELECT id FROM images WHERE sha256 = ?", (read.sha256,)).fetchone()
            self.db.execute("INSERT INTO vectors VALUES (?, ?, ?)", (self.set_id, image, self.rows))
            self.known[read.sha256] = image
            self.rows += 1
        self.report.added += len(reads)


def _remove_unused(db: sqlite3.Connection, place: Path, set_id: int) -> None:
    """Rewrite the vectors if many no longer belong to a file; a search that is open keeps the old file."""
    (total,) = db.execute("SELECT count(*) FROM vectors WHERE model = ?", (set_id,)).fetchone()
    pairs = db.execute(
        "SELECT image, row FROM vectors WHERE model = ? AND image IN (SELECT image FROM files) ORDER BY row", (set_id,)
    ).fetchall()
    name, dim = db.execute("SELECT vectors, dim FROM models WHERE id = ?", (set_id,)).fetchone()
    for file in place.glob(f"vectors-{set_id}-*"):  # a process was killed before it deleted the old file
        if name and file.name != name:
            file.unlink()
    # Nothing left more likely means a disk that is not connected.
    if not pairs or total - len(pairs) <= MAX_UNUSED * total:
        return
    old = np.memmap(place / name, np.float16, "r").reshape(-1, dim)
    new = f"vectors-{set_id}-{int(name.rpartition('-')[2].partition('.')[0]) + 1}.f16"
    write_bytes(place / new, old[[row for _, row in pairs]].tobytes())
    db.execute("DELETE FROM vectors WHERE model = ?", (set_id,))
    db.executemany(
        "INSERT INTO vectors VALUES (?, ?, ?)", [(set_id, image, row) for row, (image, _) in enumerate(pairs)]
    )
    db.execute(
        "DELETE FROM images WHERE id NOT IN (SELECT image FROM files WHERE image IS NOT NULL) "
        "AND id NOT IN (SELECT image FROM vectors)"
    )
    db.execute("UPDATE models SET vectors = ? WHERE id = ?", (new, set_id))
    db.commit()
    (place / name).unlink()


def watch_folder(folder: Path) -> Iterator[object]:
    """Yield once the folder is watched, and then whenever its files have changed; the index itself does not count."""
    inside = os.sep + FOLDER + os.sep
    steps = require("watchfiles", "--watch", "search").watch(
        folder,
        watch_filter=lambda _, path: inside not in path + os.sep,
        debounce=WATCH_MILLISECONDS,
        rust_timeout=WATCH_MILLISECONDS,
        yield_on_timeout=True,
    )
    return (changes for number, changes in enumerate(steps) if changes or number == 0)
