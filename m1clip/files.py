"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from m1clip.errors import UserError

PARTIAL = ".partial"  # ends the name of what is still being written
OLD = f".old{PARTIAL}"  # ends the name of a folder moved aside while another takes its place
SMALL = 2**22  # bytes: far more than any config, state or list of names needs


def write_text(path: Path, text: str) -> None:
    """Replace a file in one move: a reader sees the old text or the new, never half of it."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes, sync: bool = True) -> None:
    """The same for bytes; with `sync` they are on the disk when this returns, whatever happens to the power."""
    if not path.parent.name.endswith(
        PARTIAL
    ):  # a folder being filled that is gone was removed: do not recreate it
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:  # a full disk: the half must not take the room that is left
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename:
            error.filename = str(path)  # the name that the user knows
        raise
    if sync:
        sync_folder(path.parent)


def open_plain(path: Path, flags: int) -> int:
    """A handle of a file that we write; a link in its place, which could lead anywhere, is refused."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise UserError(f"{path}: is a link, and nothing is written through one; delete it") from None
        raise


def write_json(path: Path, value: Any) -> None:
    """The same for a JSON value."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Fill the folder given; when the block ends well it takes the place of `path` in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    old = path.with_name(f"{path.name}{OLD}")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)  # a kill after this line: `restore` brings it back
    temporary.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder so that its name never stands for a part of it: first renamed, then emptied."""
    doomed = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def open_regular(path: str | Path, inside: Path | None = None) -> BinaryIO:
    """Open a regular file to read; a FIFO, device or folder, or a link out of the folder `inside`, is an OSError."""
    if inside is not None and not Path(path).resolve().is_relative_to(inside.resolve()):
        raise OSError(errno.EPERM, f"a link out of {inside}", str(path))
    # Non-blocking: opening a FIFO would otherwise wait for a writer before its kind can be checked.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_small(path: str | Path, limit: int = SMALL, inside: Path | None = None) -> bytes:
    """All bytes of a regular file (see `open_regular`); more than `limit` bytes is an OSError, and never read."""
    with open_regular(path, inside) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        size = f"{limit >> 20} MiB" if limit >= 2**20 else f"{limit:,} bytes"
        raise OSError(errno.EFBIG, f"larger than {size}", str(path))
    return data


def format_version(record: Any) -> int:
    """The "format" of a file that m1clip wrote; KeyError, TypeError or ValueError where it has none."""
    version = record["format"]
    if type(version) is not int or version < 1:
        raise ValueError(f"format must be a whole number from 1 on, not {str(version)[:40]}")
    return version


def sync_folder(path: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def restore(folder: Path) -> list[str]:
    """Where a kill fell between the two moves of `whole_folder`, put the old folder back; gives its name."""
    names = []
    for old in sorted(folder.glob(f"*{OLD}")) if folder.is_dir() else ():
        target = old.with_name(old.name.removesuffix(OLD))
        if not target.exists():
            old.rename(target)
            names.append(target.name)
    if names:
        sync_folder(folder)
    return names


def remove_leftovers(folder: Path) -> list[str]:
    """Bring back what a killed process had moved aside, delete what it was writing; names what is deleted."""
    restore(folder)
    names = []
    for item in folder.glob(f"*{PARTIAL}") if folder.is_dir() else ():
        names.append(item.name)
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)
    return names
