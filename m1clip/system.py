"""Signals, file locks and flags of `open`, which Windows lacks in part.

Python raises ImportError or AttributeError for them there, so modules take them from here.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Iterator

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # do not open symbolic links
# What ends a command: Ctrl-C, a request of the system, and a closed terminal.
STOP_SIGNALS = tuple(
    number
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if (number := getattr(signal, name, None)) is not None
)
HANGUP = getattr(signal, "SIGHUP", None)


def lock_file(handle: int) -> None:
    """Lock an open file until it is closed or this process ends.

    Raises BlockingIOError or PermissionError if another process has the lock, and OSError on a file
    system without locks. The lock is not inherited by forked processes, as one of flock would be.
    """
    if fcntl is not None:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    # One byte far behind the content, because a locked byte cannot be read by others.
    position = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, 2**30, os.SEEK_SET)
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    finally:
        os.lseek(handle, position, os.SEEK_SET)


def wait_for_writers(handle: int) -> None:
    """Wait for the exclusive lock of a file that other processes may have opened.

    Unlike that of `lock_file`, the lock is inherited by processes that get the handle: it ends with
    the last of them.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX)


def lock_with_children(handle: int) -> None:
    """Lock an open file until all processes that inherit the handle have ended or closed it.

    Raises BlockingIOError if another process has the lock, and OSError on a file system without
    locks. Does nothing on Windows.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def peak_resident_bytes() -> int | None:
    """The peak memory of this process so far; None where the system does not report it."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Bytes on macOS, kilobytes elsewhere.
    return peak if os.uname().sysname == "Darwin" else peak * 1024


def is_owned_by_user(path: str | os.PathLike[str]) -> bool:
    """Whether this user owns a file or link; True on Windows, which has no user ids."""
    if not hasattr(os, "geteuid"):
        return True
    return os.lstat(path).st_uid == os.geteuid()


@contextlib.contextmanager
def block_signals(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Block signals for processes started in this block, before they could ignore them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
