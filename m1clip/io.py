"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args, get_origin, get_type_hints

import psutil

from m1clip.errors import UserError

PARTIAL = ".partial"  # ends the name of what is still being written
OLD = f".old{PARTIAL}"  # ends the name of a folder moved aside while another takes its place
SMALL = 2**22  # bytes: far more than any config, state or list of names needs


def write_text(path: Path, text: str) -> None:
    """Replace a file in one move: a reader sees the old text or the new, never half of it."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes, sync: bool = True) -> None:
    """The same for bytes; with `sync` they are on the disk when this returns, whatever happens to the power."""
    if not path.parent.name.endswith(PARTIAL):  # a folder being filled that is gone was removed: do not recreate it
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


def open_for_write(path: Path, flags: int) -> int:
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
def atomic_folder(path: Path) -> Iterator[Path]:
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
        path.rename(old)  # a kill after this line: `restore_folders` brings it back
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


def restore_folders(folder: Path) -> list[str]:
    """Where a kill fell between the two moves of `atomic_folder`, put the old folder back; gives its name."""
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
    restore_folders(folder)
    names = []
    for item in folder.glob(f"*{PARTIAL}") if folder.is_dir() else ():
        names.append(item.name)
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)
    return names


# Larger than any published model: what lies beyond is a mistake, or a file made to fill the memory.
LIMITS: dict[str, float] = {
    "image_size": 4096, "patch_size": 1024, "width": 2**14, "layers": 256, "heads": 1024, "vision_width": 2**14,
    "vision_layers": 256, "vision_heads": 1024,
    "text_width": 2**14, "text_layers": 256, "text_heads": 1024, "context_length": 4096, "vocab_size": 2**21,
    "embed_dim": 2**14, "hidden": 2**14, "mlp_ratio": 64, "lora_rank": 2**12,
}  # fmt: skip


def check_limits(values: object, prefix: str) -> None:
    """Refuse a size above LIMITS, before anything is built from it."""
    for name, most in LIMITS.items():
        value = getattr(values, name, None)
        if value is not None and value > most:
            raise UserError(f"{prefix}{name} must be at most {most:,}, not {value:,}")


def validated(cls: type, values: dict[str, Any], what: str) -> dict[str, Any]:
    """The arguments of a dataclass; a missing or unknown key or a wrong type is a UserError that names it."""
    hints = get_type_hints(cls)
    odd = sorted(set(values) ^ set(hints))
    if odd:
        raise UserError(f"{what} has missing or unknown keys: {', '.join(map(ascii, odd))}")
    return {name: _value(hint, values[name], f"{what}: {name}") for name, hint in hints.items()}


def _value(hint: Any, value: Any, where: str) -> Any:
    if get_origin(hint) is Literal:
        # By type too: True == 1, and a list cannot be looked up among strings by hash.
        if any(type(value) is type(choice) and value == choice for choice in get_args(hint)):
            return value
        raise UserError(f"{where} must be one of {', '.join(get_args(hint))}, not {_shown(value)}")
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            raise UserError(f"{where} must be {len(parts)} numbers, not {_shown(value)}")
        return tuple(_value(part, item, where) for part, item in zip(parts, value, strict=True))
    if hint is str and not isinstance(value, str):
        raise UserError(f"{where} must be text, not {_shown(value)}")
    if hint is bool and not isinstance(value, bool):
        raise UserError(f"{where} must be true or false, not {_shown(value)}")
    if hint is int and (not isinstance(value, int) or isinstance(value, bool)):
        raise UserError(f"{where} must be a whole number, not {_shown(value)}")
    if hint is float and not _is_number(value):
        raise UserError(f"{where} must be a number, not {_shown(value)}")
    return value


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of a float
        return False


def _shown(value: Any) -> str:
    """On one line and short, whatever the file holds."""
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


LARGEST, SMALLEST, DEEPEST = 1e100, 1e-100, 16


def is_well_formed(value: Any, depth: int = DEEPEST) -> bool:
    """Whether arithmetic and UTF-8 can take every part: no number beyond 1e100, lone surrogate or deep nesting."""
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int | float):  # False for NaN, too
        return value == 0 or SMALLEST <= abs(value) <= LARGEST
    if isinstance(value, str):
        return value.isascii() or value == value.encode("utf-8", "replace").decode("utf-8")
    if depth == 0 or not isinstance(value, dict | list):
        return False
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return all(is_well_formed(part, depth - 1) for part in parts)


def matches_schema(value: Any, shape: Any) -> bool:
    """Whether a JSON value has a shape: a type, a predicate, [shape of each item], (shape, shape), or {key: shape}.

    float takes any number, int a whole one from 0 on. {str: shape} takes any keys, other dicts more than the shape has.
    """
    if isinstance(shape, list):
        return isinstance(value, list) and all(matches_schema(item, shape[0]) for item in value)
    if isinstance(shape, tuple):
        return (
            isinstance(value, list)
            and len(value) == len(shape)
            and all(matches_schema(item, part) for item, part in zip(value, shape, strict=True))
        )
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if str in shape:
            return all(matches_schema(item, shape[str]) for item in value.values())
        return all(key in value and matches_schema(value[key], part) for key, part in shape.items())
    if not isinstance(shape, type):
        return bool(shape(value))
    if isinstance(value, bool):
        return shape is bool
    if shape is int:
        return isinstance(value, int) and 0 <= value < 2**53
    return isinstance(value, int | float) if shape is float else isinstance(value, shape)


LOCK = "run.lock"
SAME_START = 2.0  # seconds: a process's start is known to the clock tick, the boot time to about a second


@dataclass(frozen=True)
class Owner:
    """The process that wrote a run's lock."""

    pid: int
    started: float  # seconds since 1970, as the system says
    host: str
    birth: str = ""  # the same start told by the kernel alone, which no change of the clock moves; "" where unknown

    @property
    def here(self) -> bool:
        """On this machine, so that it can be looked up."""
        return self.host == platform.node()

    def process(self) -> psutil.Process | None:
        """The living process, if it is this very one and not a later one with the same number."""
        if not self.here:
            return None
        try:
            process = psutil.Process(self.pid)
            birth = process_start_id(self.pid) if self.birth else ""
            # Seconds since 1970 move when the clock is set, and with them the start that the system tells.
            same = birth == self.birth if birth else abs(process.create_time() - self.started) < SAME_START
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.Error, OverflowError, ValueError):  # the last two: a number that no process can have
            return None


def lock_content() -> str:
    """What this process writes into the lock of its run: four lines."""
    started, birth = psutil.Process().create_time(), process_start_id(os.getpid())
    return f"{os.getpid()}\n{started:.3f}\n{platform.node()}\n{birth}\n"


def process_start_id(pid: int) -> str:
    """Which boot of the machine, and how many ticks after it the process began; "" where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # The name of the program stands in brackets and may hold anything: count from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return f"{boot} {int(fields[19])}"
    except (OSError, ValueError, IndexError):
        return ""


def read_owner(run: Path) -> Owner | None:
    """Who holds, or last held, a run; None where nothing says it."""
    try:
        pid, started, host, *birth = read_small(run / LOCK, 4096).decode("utf-8").split("\n")[:4]
        return Owner(int(pid), float(started), host, birth[0] if birth else "")
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock of this file; `waiting` is called once if another process has it. False: the disk has no locks."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, fallback_to_soft=False)  # a soft lock would outlive a killed process
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            waiting()
            lock.acquire(poll_interval=0.2)
    except OSError as error:
        if error.filename:  # the file cannot be opened
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
