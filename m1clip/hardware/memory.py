"""How the C library keeps freed memory: training frees and asks for the same sizes in every step."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_ALL = 2**31 - 1
_OLD_LIMIT = 32 * 2**20  # the most that glibc before 2.35 takes for the second
_LARGE = 512 * 2**10


def keep_freed_memory() -> bool:
    """Ask glibc to use freed blocks again instead of giving them back: true if it agreed, false elsewhere.

    By default each block of some megabytes goes back to the system when it is freed, and its pages are cleared
    and mapped anew at the next use: 110,000 page faults in one step of the 76.7M model (docs/speed.md).
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    return_freed_memory()
    kept = mallopt(_M_MMAP_THRESHOLD, _ALL) or mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _ALL))


def map_large_blocks() -> bool:
    """Ask glibc to map each large block by itself, as in the first step: true if it agreed, false elsewhere.

    In that step oneDNN makes its kernels, 258 kB each, which stay. Between tensors that come and go they would lie
    scattered for good, and what is free around them would be too small for the tensors of the next step.
    """
    mallopt = _mallopt()
    return bool(mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGE))


def _mallopt() -> Any:
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return None  # who has set MALLOC_... variables has chosen already
    return getattr(ctypes.CDLL(None), "mallopt", None)


def return_freed_memory() -> bool:
    """Give what is free now back to the system, once: between training and what comes after it."""
    gc.collect()  # a model that was given up may hang in a circle with what used it
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return bool(trim is not None and trim(0))


NEAR = 0.95  # of the limit: what is missing is left for the backward pass and for others
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def smallest_limit(physical: int, told: list[str]) -> int:
    """The machine's memory, or less where a container's file says a number below it ("max" is none)."""
    numbers = [int(text) for text in (line.strip() for line in told) if text.isascii() and text.isdigit()]
    return min([physical, *(number for number in numbers if number > 0)])


def memory_limit(files: tuple[str, ...] = CGROUPS) -> int:
    """Bytes that the process can have at most before the system stops it, or swaps."""
    told = []
    for name in files:
        try:
            told.append(Path(name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return smallest_limit(int(psutil.virtual_memory().total), told)


_process = cache(psutil.Process)  # by number: asked in each step


def own_bytes() -> int:
    """Memory of this process that nobody else could use; files that are only mapped, such as images, do not count."""
    facts = _process(os.getpid()).memory_info()
    return int(facts.rss - getattr(facts, "shared", 0))  # only Linux tells of what is shared


def is_near(used: float, limit: float) -> bool:
    """Whether so much memory is too near to a limit to go on in the same way."""
    return used > NEAR * limit
