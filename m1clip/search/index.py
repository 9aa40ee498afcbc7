"""Index a folder of photos: SQLite for files and facts, and a file of float16 vectors per model.

Vectors belong to the content of a file (sha256), so a moved or renamed file keeps its vector.
`location` says where an index is, `database` what is in it, `read_photos` reads the files, and
`writer` stores their vectors.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

import m1clip
from m1clip import console
from m1clip.errors import UserError
from m1clip.extras import require
from m1clip.io import first_writable, unlink_beneath
from m1clip.model.listing import MIN_INDEXED, keep_speed
from m1clip.model.named import default_model, model_name
from m1clip.search.database import (
    SEARCH_INDEX_FORMAT,
    VALID_FILE,
    connect,
    database_errors,
    is_full,
)
from m1clip.search.indexed_model import choose_model, resolve_model, use_model
from m1clip.search.location import (
    DATABASE,
    INDEX_FOLDER,
    INDEX_LOCK,
    check_index_folder,
    has_database,
    index_folders,
    is_own,
    remember_folder,
    thumbnail,
)
from m1clip.search.read_photos import Scan, read_all, scan
from m1clip.search.writer import Writer, drop_lost_rows, remove_unused

WATCH_MILLISECONDS = 2000  # changes within this time are indexed together


@dataclass
class Report:
    """What `update_index` did."""

    folder: Path  # of the index
    root: Path  # the folder of photos
    model: str = ""  # the name or path of the model that encodes them
    indexed: int = 0  # files with a vector now
    added: int = 0  # images encoded
    reused: int = 0  # moved, renamed or copied: their vectors were reused
    removed: int = 0  # files that are gone and were not moved
    problems: list[tuple[str, str]] = field(default_factory=list)  # (path, why it cannot be used)
    hidden: int = 0
    links: int = 0
    other: int = 0  # files that are not images
    seconds: float = 0.0
    chose_model: bool = False  # for a new index without --model


def update_index(
    folder: str | Path, model: str | Path | None = None, when_done: bool = False
) -> Report:
    """Index the images of a folder and its subfolders; unchanged files are not read again.

    With `when_done`, searches use the model only once all images have its vectors, and until then
    the one before.
    """
    began = time.monotonic()
    root = Path(os.path.abspath(Path(folder).expanduser()))
    if not root.is_dir():
        raise UserError(f"{root}: no such folder")
    folders = [candidate for candidate in index_folders(root) if is_own(candidate)]
    for index_folder in filter(os.path.lexists, folders):
        check_index_folder(index_folder, write=True)
    # Chosen before anything is created: a missing photo or model leaves no empty index.
    is_new = not any(map(has_database, folders))
    if is_new:
        _require_images(root)
    requested = None if model is None else resolve_model(model)
    if requested is None and is_new:
        requested = resolve_model(default_model())
    report = Report(first_writable(folders, "index", "make one of them writable"), root)
    report.chose_model = is_new and model is None
    # A soft lock would outlive a killed process.
    lock = FileLock(report.folder / INDEX_LOCK, fallback_to_soft=False)
    try:
        with (
            lock.acquire(blocking=False),
            database_errors(report.folder / DATABASE),
            closing(connect(report.folder, write=True)) as db,
        ):
            _update(db, requested, report, when_done)
    except Timeout:
        raise UserError(f"{root}: another process is indexing this folder now") from None
    except (OSError, sqlite3.Error) as error:
        if not is_full(error):
            raise
        raise UserError(
            f"{report.folder}: the disk is full; free some space and run again to continue"
        ) from None
    remember_folder(root)
    report.seconds = time.monotonic() - began
    return report


def _require_images(root: Path) -> None:
    """Raise UserError if a folder has no file that may be an image."""
    files = scan(root)
    if files.images or files.unreadable:
        return
    there = [
        f"{number:,} {kind}"
        for number, kind in (
            (files.other, "other files"),
            (files.links, "links, which are not followed"),
            (files.hidden, "hidden ones"),
        )
        if number
    ]
    only = f" (there are {', '.join(there)})" if there else ""
    raise UserError(
        f"{root}: contains no photos{only}; give the folder that contains them, such as ~/Pictures"
    )


def _update(db: sqlite3.Connection, requested: str | None, report: Report, when_done: bool) -> None:
    """Bring a database up to date with its folder, and note in the report what was done."""
    db.executemany(
        "INSERT OR REPLACE INTO about VALUES (?, ?)",
        [("format", SEARCH_INDEX_FORMAT), ("version", m1clip.__version__)],
    )
    set_id, report.model = choose_model(db, requested, when_done)
    db.commit()
    drop_lost_rows(db, report.folder, report.root, set_id)
    files = scan(report.root)
    report.hidden, report.links, report.other = files.hidden, files.links, files.other
    changed, gone = _remove_gone(db, files, set_id)
    if changed:
        _encode_changed(db, changed, files, set_id, report, moved=len(gone) > 0)
    report.removed = len(gone) - _count_moved(db, changed, gone)
    if when_done:
        use_model(db, set_id)
        db.commit()
    _remove_thumbnails(db, report.folder)
    remove_unused(db, report.folder, report.root, set_id)
    _count(db, files, set_id, report)


def _remove_gone(
    db: sqlite3.Connection, files: Scan, set_id: int
) -> tuple[list[bytes], list[int | None]]:
    """Forget the files that are gone.

    Returns the files that are new or have changed, sorted, and the images of those that are gone.
    """
    db.execute(f"DELETE FROM files WHERE NOT ({VALID_FILE})")
    columns = "path, bytes, mtime_ns, problem IS NOT NULL OR row IS NOT NULL, files.image"
    rows = db.execute(
        f"SELECT {columns} FROM files LEFT JOIN vectors ON vectors.image = files.image"
        " AND model = ?",
        (set_id,),
    )
    stored = {}
    image_of = {}
    for path, size, mtime, done, image in rows:
        stored[path] = (size, mtime, done)
        image_of[path] = image
    gone = [path for path in stored if path not in files.images and not files.is_unreadable(path)]
    db.executemany("DELETE FROM files WHERE path = ?", [(path,) for path in gone])
    db.commit()
    changed = [path for path, stamp in files.images.items() if stored.get(path) != (*stamp, 1)]
    return sorted(changed), [image_of[path] for path in gone]


def _encode_changed(
    db: sqlite3.Connection,
    changed: Sequence[bytes],
    files: Scan,
    set_id: int,
    report: Report,
    moved: bool,
) -> None:
    """Encode the images of new and changed files, some of which may have been `moved`."""
    refresh = console.current_progress()

    def record_progress(done: int, total: int) -> None:
        """Also for `m1clip serve`; committed with the images."""
        note = f"{done} {total} {time.time():.0f}"
        db.execute("INSERT OR REPLACE INTO about VALUES ('progress', ?)", (note,))
        refresh(done, total)

    model = m1clip.load(report.model)
    began = time.monotonic()
    preprocess = model.preprocess
    with Writer(db, report.folder, report.root, set_id) as writer:
        for reads in read_all(
            report.root, changed, writer.image_ids, preprocess, moved, record_progress
        ):
            writer.add(reads, files.images, model)
    report.added = writer.added
    report.reused = writer.reused
    name = model_name(report.model)
    if name is not None and writer.added >= MIN_INDEXED:
        device = str(getattr(model.encoder, "device", "cpu"))
        keep_speed(name, writer.added, time.monotonic() - began, device, "index")


def _count_moved(
    db: sqlite3.Connection, changed: Sequence[bytes], gone: Sequence[int | None]
) -> int:
    """How many of the files that are gone have a new path: one file for each new one."""
    images = Counter(image for image in gone if image is not None)
    if not images:
        return 0
    query = "SELECT image FROM files WHERE path = ?"
    now = Counter(image for path in changed for (image,) in db.execute(query, (path,)))
    return (images & now).total()


def _remove_thumbnails(db: sqlite3.Connection, index_folder: Path) -> None:
    """Delete the thumbnails of images that no file has any longer."""
    unused = (
        "SELECT sha256 FROM images WHERE id NOT IN (SELECT image FROM files WHERE image IS NOT"
        " NULL) AND typeof(sha256) = 'blob'"
    )
    for (sha256,) in db.execute(unused):
        with contextlib.suppress(OSError):  # a link in thumbnails, which is not followed
            unlink_beneath(index_folder, thumbnail(sha256))


def _count(db: sqlite3.Connection, files: Scan, set_id: int, report: Report) -> None:
    """Add the files with a vector, and those with a problem, to the report."""
    query = "SELECT path, problem FROM files WHERE problem IS NOT NULL ORDER BY path"
    report.problems = [
        (os.fsdecode(path), problem) for path, problem in [*files.unreadable, *db.execute(query)]
    ]
    (report.indexed,) = db.execute(
        "SELECT count(*) FROM files JOIN vectors ON vectors.image = files.image WHERE model = ?",
        (set_id,),
    ).fetchone()


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
