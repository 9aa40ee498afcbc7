"""Files: bounded reads, atomic writes, links that are not followed, run locks."""

import contextlib
import errno
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from m1clip.errors import UserError
from m1clip.system import NO_FOLLOW

PARTIAL = ".partial"  # suffix of what is still being written
OLD = f".old{PARTIAL}"  # suffix of a folder moved aside while another replaces it
SMALL = 2**22  # bytes: far more than any config, state or list of names needs


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new, never a part of it."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes, sync: bool = True) -> None:
    """Replace a file atomically; with `sync` it survives a power loss once this returns."""
    if not path.parent.name.endswith(PARTIAL):  # do not recreate a partial folder that was deleted
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a rename would destroy a device such as /dev/full
        raise OSError(errno.EINVAL, "exists and is not a regular file", str(path))
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
    try:
        # That of a killed process, or a link in the folder of a stranger, which leads anywhere.
        temporary.unlink(missing_ok=True)
        handle = open_for_write(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        # On a full disk, the partial file must not use up the remaining space.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # not the temporary name, or none for a full disk
        raise
    if sync:
        sync_folder(path.parent)


def open_for_write(path: Path, flags: int) -> int:
    """Open a file for writing; UserError for a symbolic link, which could point anywhere."""
    try:
        return os.open(path, flags | NO_FOLLOW, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise UserError(
                f"{path}: is a symbolic link, and m1clip does not write through links; delete it"
            ) from None
        raise


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into.

    It replaces `path` when the block ends without an error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers_of(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
    except OSError as error:
        error.filename = str(path)  # not the temporary name
        raise
    try:
        yield temporary
        for file in filter(Path.is_file, temporary.rglob("*")):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(temporary)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            named = str(error.filename or temporary)  # without a name if the disk is full
            error.filename = named.replace(str(temporary), str(path), 1)
        raise
    old = path.with_name(f"{path.name}{OLD}")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)  # if killed after this line, `restore_folders` undoes it
    temporary.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder; it is renamed first, so that its name never refers to a partial folder."""
    doomed = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


# Not every system can open a file relative to an open folder.
CAN_OPEN_BENEATH = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


def open_beneath(folder: str | Path, name: str, flags: int, make_folders: bool = False) -> int:
    """Open a file below a folder without following any link; OSError (EPERM) for one.

    Each part of the name is opened relative to the folder before it, so that no part can be
    replaced by a link between a check and its use. The folder itself may be reached through links.
    """
    parts = _safe_parts(name, folder)
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # opening a FIFO would otherwise wait for another process
    if not CAN_OPEN_BENEATH:
        return _open_and_compare(Path(folder), parts, flags, make_folders)
    with _open_parent(folder, parts, make_folders) as parent:
        try:
            return os.open(parts[-1], flags | os.O_NOFOLLOW, 0o644, dir_fd=parent)
        except OSError as error:
            raise _as_link_error(error, folder, name) from None


def write_beneath(folder: str | Path, name: str, data: bytes) -> None:
    """Replace a file below a folder atomically, without following any link.

    The folders in its name are created.
    """
    temporary = f"{name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    handle = open_beneath(folder, temporary, flags, make_folders=True)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if CAN_OPEN_BENEATH:
            parts = _safe_parts(name, folder)
            with _open_parent(folder, parts) as parent:
                source = os.path.basename(temporary)
                os.replace(source, parts[-1], src_dir_fd=parent, dst_dir_fd=parent)
        else:
            os.replace(os.path.join(folder, temporary), os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            unlink_beneath(folder, temporary)
        raise


def unlink_beneath(folder: str | Path, name: str) -> None:
    """Delete a file below a folder without following any link, if it exists."""
    parts = _safe_parts(name, folder)
    with contextlib.suppress(FileNotFoundError):
        if not CAN_OPEN_BENEATH:
            os.unlink(os.path.join(folder, name))
            return
        with _open_parent(folder, parts) as parent:
            os.unlink(parts[-1], dir_fd=parent)


def _safe_parts(name: str, folder: str | Path) -> list[str]:
    """The parts of a relative path; OSError for one that may lead out of its folder."""
    parts = name.split(os.sep)
    if any(part in ("", os.curdir, os.pardir) or "\0" in part for part in parts):
        raise OSError(errno.EPERM, f"not a path inside {folder}", name)
    return parts


@contextlib.contextmanager
def _open_parent(folder: str | Path, parts: list[str], make_folders: bool = False) -> Iterator[int]:
    """Yield a descriptor of the folder that contains the last part."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    parent = os.open(folder, flags)
    try:
        for part in parts[:-1]:
            if make_folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=parent)
            try:
                child = os.open(part, flags | os.O_NOFOLLOW, dir_fd=parent)
            except OSError as error:
                # Linux reports a link as ENOTDIR, as O_DIRECTORY is checked first.
                if error.errno == errno.ENOTDIR and _is_link(part, parent):
                    error.errno = errno.ELOOP
                raise _as_link_error(error, folder, os.sep.join(parts)) from None
            os.close(parent)
            parent = child
        yield parent
    finally:
        os.close(parent)


def _is_link(part: str, parent: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISLNK(os.stat(part, dir_fd=parent, follow_symlinks=False).st_mode)
    return False


def _as_link_error(error: OSError, folder: str | Path, name: str) -> OSError:
    """Describe what opening a link with O_NOFOLLOW raises; other errors get the complete path."""
    path = os.path.join(folder, name)
    if error.errno in (errno.ELOOP, errno.EMLINK):  # the second on FreeBSD
        return OSError(errno.EPERM, f"a link in {folder}", path)
    return OSError(error.errno, error.strerror, path)


def _open_and_compare(folder: Path, parts: list[str], flags: int, make_folders: bool) -> int:
    """Look for links before and after opening a file, where a system has no folder descriptors."""
    path = folder.joinpath(*parts)
    paths = [folder.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    error = OSError(errno.EPERM, f"a link in {folder}", str(path))
    if any(component.is_symlink() for component in paths):
        raise error
    if make_folders:
        path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, flags, 0o644)
    is_same = os.path.samestat(os.fstat(handle), os.lstat(path))
    if any(component.is_symlink() for component in paths) or not is_same:
        os.close(handle)
        raise error
    return handle


def open_regular(path: str | Path, inside: str | Path | None = None) -> BinaryIO:
    """Open a regular file for reading.

    OSError for a FIFO, device or folder, or a link out of the folder `inside`.
    """
    # Non-blocking: opening a FIFO would otherwise wait for a writer before its kind can be checked.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags) if inside is None else _open_inside(path, inside, flags)
    return _regular(handle, path)


def _regular(handle: int, path: str | Path) -> BinaryIO:
    """Return the file of a descriptor; OSError if it is not a regular file."""
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def _open_inside(path: str | Path, inside: str | Path, flags: int) -> int:
    """Open a file by its real path in a folder, without following links that appear meanwhile."""
    # realpath, as Path.resolve raises RuntimeError for a link to itself.
    folder = os.path.realpath(inside)
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(folder):
        raise OSError(errno.EPERM, f"a link out of {inside}", str(path))
    if real == Path(folder):
        return os.open(folder, flags)
    return open_beneath(folder, str(real.relative_to(folder)), flags)


def read_small(path: str | Path, limit: int = SMALL, inside: str | Path | None = None) -> bytes:
    """Read a regular file (see `open_regular`); OSError for more than `limit` bytes."""
    with open_regular(path, inside) as file:
        return _read_up_to(file, limit, path)


def parse_json(data: bytes | str) -> Any:
    """Parse JSON from a file that may be damaged; ValueError also for one that is nested deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_beneath(folder: str | Path, name: str, limit: int = SMALL) -> bytes:
    """Read a regular file below a folder without following any link (see `open_beneath`)."""
    path = os.path.join(folder, name)
    with _regular(open_beneath(folder, name, os.O_RDONLY), path) as file:
        return _read_up_to(file, limit, path)


def _read_up_to(file: BinaryIO, limit: int, path: str | Path) -> bytes:
    data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(path))
    return data


def read_start(path: str | Path, count: int) -> bytes:
    """The first bytes of a regular file (see `open_regular`)."""
    with open_regular(path) as file:
        return file.read(count)


def sync_folder(path: Path) -> None:
    """Make a rename in this folder survive a power loss."""
    if os.name == "nt":
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def restore_folders(folder: Path) -> list[str]:
    """Restore folders that `atomic_folder` had moved aside when it was killed.

    Returns their names.
    """
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
    """Restore what a killed process had moved aside and delete its partial files.

    Returns the deleted names.
    """
    restore_folders(folder)
    names = []
    for item in folder.glob(f"*{PARTIAL}") if folder.is_dir() else ():
        names.append(item.name)
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)
    return names


def remove_leftovers_of(path: Path) -> None:
    """Delete partial files and folders of a path that killed processes left beside it."""
    of_process = re.compile(rf"{re.escape(path.name)}\.(\d{{1,10}})(?:-\d+)?{re.escape(PARTIAL)}")
    try:
        names = os.listdir(path.parent)
    except OSError:
        return
    for name in names:
        match = of_process.fullmatch(name)
        if match is None or psutil.pid_exists(int(match[1])):
            continue
        item = path.with_name(name)
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                item.unlink()


RUN_LOCK = "run.lock"
SPLITS_FILE = "splits.json"  # of a run: the split of each of its images
# {(device, inode): process id} of the locks of runs that this process holds. The system releases
# such a lock when its file is closed once, even by code that has only read it.
_held_locks: dict[tuple[int, int], int] = {}


def holds_lock(run: Path) -> bool:
    """Whether this process holds the lock of a run."""
    try:
        lock = (run / RUN_LOCK).stat()
    except OSError:
        return False
    # A forked process inherits the table, but not the locks.
    return _held_locks.get((lock.st_dev, lock.st_ino)) == os.getpid()


def remember_lock(handle: int) -> None:
    """Keep others in this process from opening the lock file that is locked through a handle."""
    lock = os.fstat(handle)
    _held_locks[lock.st_dev, lock.st_ino] = os.getpid()


def forget_lock(handle: int) -> None:
    """Undo `remember_lock`, before the handle is closed."""
    lock = os.fstat(handle)
    _held_locks.pop((lock.st_dev, lock.st_ino), None)


@dataclass(frozen=True)
class Owner:
    """The process that wrote a run's lock."""

    pid: int
    host: str
    start_id: str  # see `process_start_id`

    @property
    def on_this_machine(self) -> bool:
        return self.host == platform.node()

    def process(self) -> psutil.Process | None:
        """The running process, unless its process id was reused by a later one."""
        try:
            process = psutil.Process(self.pid)
            same = self.on_this_machine and process_start_id(process) == self.start_id
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.Error, OverflowError, ValueError):  # the last two: not a valid process id
            return None


def lock_content(pid: int | None = None) -> str:
    """The three lines in the lock of a run that name its process, by default this one."""
    process = psutil.Process(pid)
    return f"{process.pid}\n{platform.node()}\n{process_start_id(process)}\n"


def process_start_id(process: psutil.Process) -> str:
    """Return when a process started.

    On Linux, these are the boot id and a clock tick, which setting the clock does not change.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {start_tick(process.pid)}"
    except (OSError, ValueError, IndexError):
        return f"{process.create_time():.2f}"


def start_tick(pid: int) -> int:
    """Return the clock tick since the boot at which a process started, on Linux."""
    # The program name is in parentheses and may contain anything: parse from its end.
    stat_line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat_line.rpartition(")")[2].split()[19])


def read_owner(run: Path) -> Owner | None:
    """The process that holds, or last held, a run; None where there is no valid lock."""
    if holds_lock(run):
        pid, host, start_id = lock_content().split("\n")[:3]
        return Owner(int(pid), host, start_id)
    try:
        pid, host, start_id = read_small(run / RUN_LOCK, 4096).decode("utf-8").split("\n")[:3]
        return Owner(int(pid), host, start_id)
    except (OSError, ValueError):
        return None


def first_writable(folders: Iterable[Path], purpose: str, hint: str) -> Path:
    """Return the first folder that can be created and written to."""
    reason = ""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
        except OSError as error:
            reason = f"{folder}: {error.strerror or error}"
    raise UserError(f"no folder for the {purpose} ({reason}); {hint}")


def user_cache() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME")
    if configured and os.path.isabs(configured):
        return Path(configured) / "m1clip"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "m1clip"
