"""malloc settings for training, which allocates the same sizes in every step; memory limits."""

import contextlib
import ctypes
import gc
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from m1clip.hardware.machine_info import local_ranks

# Options of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_WITHOUT_LIMIT = 2**31 - 1
_OLD_LIMIT = 32 * 2**20  # maximum of M_MMAP_THRESHOLD in glibc before 2.35
_LARGE_ALLOCATION = 512 * 2**10


def keep_freed_memory(limit: int = _WITHOUT_LIMIT) -> bool:
    """Tell glibc to reuse freed blocks instead of returning them to the system; True if supported.

    Blocks of more than `limit` bytes, and what is free beyond it, are still returned.

    By default each block of some megabytes is unmapped when freed, and its pages are cleared and
    mapped again at the next use: 110,000 page faults in one step of the 76.7M model
    (docs/speed.md).
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    return_freed_memory()
    is_set = mallopt(_M_MMAP_THRESHOLD, limit) or mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT)
    return bool(is_set and mallopt(_M_TRIM_THRESHOLD, limit))


def map_large_blocks() -> bool:
    """Tell glibc to map each large block separately, for the first step; True if supported.

    In that step oneDNN allocates its kernels, 258 kB each, permanently. In between tensors that are
    freed they would fragment the heap.
    """
    mallopt = _mallopt()
    return bool(mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGE_ALLOCATION))


def _mallopt() -> Any:
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return None  # the user has chosen with MALLOC_... variables
    return getattr(ctypes.CDLL(None), "mallopt", None)


def return_freed_memory() -> bool:
    """Return free memory to the system once."""
    gc.collect()  # a discarded model may be part of a reference cycle
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return bool(trim is not None and trim(0))


class MemoryPressure(Exception):
    """Memory in use came close to the limit, but no allocation has failed yet."""

    def __init__(self, reason: str, used: int) -> None:
        super().__init__(reason)
        self.used = used  # bytes


NEAR_LIMIT = 0.95  # fraction of the limit; the rest is for the backward pass and other programs
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_limit(files: tuple[str, ...] = CGROUPS) -> int:
    """Return the bytes that this process can use: all of the machine, or a container's limit."""
    limits = [int(psutil.virtual_memory().total)]
    for name in files:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(Path(name).read_text(encoding="ascii")))
    return min(limit for limit in limits if limit > 0) // local_ranks()


_process = cache(psutil.Process)  # by process id: called in each step


def own_bytes() -> int:
    """Private memory of this process, without mapped files such as cached images."""
    facts = _process(os.getpid()).memory_info()
    return int(facts.rss - getattr(facts, "shared", 0))  # only Linux reports shared memory


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@dataclass(frozen=True)
class MallocUse:
    """Bytes that malloc has taken from the system."""

    used: int
    free: int  # freed by the program, and cached for later allocations


def malloc_use() -> MallocUse | None:
    """Read malloc's own counts; None on macOS, with musl, and with glibc before 2.33."""
    if sys.platform != "linux":
        return None
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _MallocInfo
    info: Any = mallinfo()
    return MallocUse(used=int(info.uordblks + info.hblkhd), free=int(info.fordblks))


def resident_bytes() -> int:
    """Memory of this process, with mapped files."""
    return int(_process(os.getpid()).memory_info().rss)
