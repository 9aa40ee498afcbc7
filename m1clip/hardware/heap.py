"""How the C library keeps freed memory: training frees and asks for the same sizes in every step."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_ALL = 2**31 - 1
_OLD_LIMIT = 32 * 2**20  # the most that glibc before 2.35 takes for the second


def keep_freed_memory() -> bool:
    """Ask glibc to use freed blocks again instead of giving them back: true if it agreed, false elsewhere.

    By default each block of some megabytes goes back to the system when it is freed, and its pages are cleared
    and mapped anew at the next use: 110,000 page faults in one step of the 76.7M model (docs/speed.md).
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False  # who has set MALLOC_... variables has chosen already
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _ALL) or mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _ALL))


def return_freed_memory() -> bool:
    """Give what is free now back to the system, once: between training and what comes after it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return bool(trim is not None and trim(0))
