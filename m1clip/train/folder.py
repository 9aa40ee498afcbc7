"""The folder of a run: claimed by one process alone, and given back if the run never began."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from m1clip.errors import UserError
from m1clip.files import open_plain
from m1clip.owner import LOCK, own_mark
from m1clip.runlog import PREPARING, PREPARING_PARTIAL

OUTPUT = "train.log"  # what a run in the background says


def claim_folder(asked: Path | None, name: str) -> Path:
    """Make a folder that holds no run yet: the one asked for, or runs/NAME, runs/NAME-2, ..."""
    if asked is not None:
        check_free(asked)
        asked.mkdir(parents=True, exist_ok=True)
        return asked
    number = 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)  # fails if another process was quicker
        except FileExistsError:
            number += 1
        else:
            return folder


def check_free(asked: Path) -> None:
    """Refuse a folder that holds a run, or anything else."""
    if (asked / "config.toml").exists():
        raise UserError(
            f"{asked}: holds a run already; continue it with --resume {asked}, or choose another --run"
        )
    if asked.exists() and (not asked.is_dir() or _contents(asked)):
        raise UserError(f"{asked}: exists and is not a run; choose another --run")


def give_back(folder: Path) -> None:
    """Remove a claimed folder in which nothing was written, so that the same command works again."""
    if not _contents(folder):
        for name in (LOCK, PREPARING, PREPARING_PARTIAL):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
            if folder.parent == Path("runs"):
                folder.parent.rmdir()  # fails, and stays, when it holds other runs


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Be the only writer of a run; the system lets go of it when this process ends, however it ends."""
    handle = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        try:
            # Not flock: forked data workers would share it, and outlive a killed parent by some seconds.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(handle, 64).decode("utf-8", "replace").partition("\n")[0].strip() or "unknown"
            raise UserError(
                f"{folder}: process {holder} is training there; wait for it, or stop it first"
            ) from None
        except OSError:
            pass  # a disk without locks (some network mounts): then no one can be kept out
        os.truncate(handle, 0)
        os.write(handle, own_mark().encode())
        (folder / PREPARING).unlink(missing_ok=True)  # of a killed process
        yield
    finally:
        os.close(handle)


def _contents(folder: Path) -> list[str]:
    return [
        item.name
        for item in folder.iterdir()
        if item.name not in (LOCK, OUTPUT, PREPARING, PREPARING_PARTIAL)
    ]
