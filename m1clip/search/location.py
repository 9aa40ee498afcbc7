"""Where the index of a folder of photos is, and whether it is safe to open.

An index may come from a stranger. It contains no path that m1clip writes to: the folder of photos
is the one that contains the index, files of vectors have numbers, thumbnails are named after
content, and links are rejected.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path

from m1clip.errors import UserError
from m1clip.io import open_regular, read_small, write_bytes
from m1clip.system import is_owned_by_user

INDEX_FOLDER = ".m1clip-index"
DATABASE = "index.sqlite"
INDEX_LOCK = "lock"
THUMBNAILS = "thumbnails"
CONCEPTS = "concepts.sqlite"  # taught words: user data, which stays if the index is made again
LAST = "last-folder"  # in the data folder of the user
JOURNAL_ENDING = "-journal"  # of the file with which SQLite undoes a transaction
DATABASE_ENDINGS = ("", JOURNAL_ENDING, "-wal", "-shm")  # of the files that SQLite writes
# The end of a journal that names another file, which SQLite deletes.
SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")


class NotIndexedError(UserError):
    """A folder has no index that this user can use."""


def user_data() -> Path:
    """The folder for the data of m1clip that belong to no folder of photos."""
    configured = os.environ.get("XDG_DATA_HOME")
    if configured and os.path.isabs(configured):
        return Path(configured) / "m1clip"
    system = "Library/Application Support" if sys.platform == "darwin" else ".local/share"
    return Path.home() / system / "m1clip"


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
            existing = [candidate for candidate in index_folders(root) if has_database(candidate)]
            index_folder = next((candidate for candidate in existing if is_own(candidate)), None)
            if index_folder is None and existing:
                if folder is None or root != path:
                    foreign.append(root)
                    break
                index_folder = existing[0]  # it was asked for
            if index_folder is not None:
                check_index_folder(index_folder)
                return index_folder, root
    raise _not_indexed(folder, foreign)


def _not_indexed(folder: Path | None, foreign: list[Path]) -> NotIndexedError:
    """The error for a folder without an index, or with indexes of other users only."""
    if folder is not None and not folder.expanduser().exists():
        return NotIndexedError(f"{folder}: no such folder")
    name = f"{folder or 'this folder'}"
    command = f"m1clip index {folder or 'FOLDER'}"
    if foreign:
        return NotIndexedError(
            f"{name}: not indexed yet (the index in {foreign[0]} belongs to another user; "
            f"name that folder to use it); run: {command}"
        )
    return NotIndexedError(f"{name}: not indexed yet; run: {command}")


def index_folders(root: Path) -> tuple[Path, Path]:
    """Where the index of a folder of photos may be: in it, or if it is not writable, outside."""
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:24]
    return root / INDEX_FOLDER, user_data() / "indexes" / name


def has_database(index_folder: Path) -> bool:
    """Whether an index was created in this folder."""
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


def remember_folder(root: Path) -> None:
    """Open the index of this folder from now on where none is named."""
    with contextlib.suppress(OSError):  # the home folder may be read-only
        write_bytes(user_data() / LAST, os.fsencode(root), sync=False)


def _last_folder() -> list[Path]:
    try:
        return [Path(os.fsdecode(read_small(user_data() / LAST)))]
    except OSError:
        return []


def thumbnail(sha256: bytes) -> str:
    """Where `m1clip serve` keeps the thumbnail of an image, below the folder of the index."""
    name = bytes(sha256).hex()
    return os.path.join(THUMBNAILS, name[:2], f"{name}.jpg")
