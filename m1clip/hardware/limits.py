"""How much memory this process may take: the machine's, a container's, or what the person said."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import psutil

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
    """Memory of this process that nobody else could use; files that are only mapped, such as pictures, do not count."""
    facts = _process(os.getpid()).memory_info()
    return int(facts.rss - getattr(facts, "shared", 0))  # only Linux tells of what is shared


def is_near(used: float, limit: float) -> bool:
    """Whether so much memory is too near to a limit to go on in the same way."""
    return used > NEAR * limit
