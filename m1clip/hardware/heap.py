"""How the C library keeps freed memory: training frees and asks for the same sizes in every step."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import Any

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
