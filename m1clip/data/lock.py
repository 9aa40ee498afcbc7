"""One process at a time: a lock that the system lets go when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_SECONDS = 0.2


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock of this file; `waiting` is called once if another has it. False: the disk has no locks.

    A lock of the system and not a file with a process number: those outlive a kill, and numbers come again.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    told = False
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                    yield False
                    return
            else:
                break
            if not told:
                waiting()
                told = True
            time.sleep(POLL_SECONDS)
        yield True
    finally:
        os.close(handle)
