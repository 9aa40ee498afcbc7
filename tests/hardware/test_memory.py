"""Freed memory is reused with glibc, and the user's malloc settings are kept."""

import os
import subprocess
import sys

import pytest

from m1clip.hardware import memory

# Writes to a fresh block of 16 MB ten times, and counts the page faults of the last nine rounds.
FAULTS = """
import resource, sys
from m1clip.hardware.memory import keep_freed_memory, return_freed_memory
kept = keep_freed_memory()
def rounds(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(n):
        block = bytearray(b"x") * (16 << 20)
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
rounds(1)
again = rounds(9)
returned = return_freed_memory()
print(kept, again, returned, rounds(1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_is_reused_until_it_is_returned() -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    result = subprocess.run(
        [sys.executable, "-c", FAULTS], env=plain, capture_output=True, text=True, check=True
    )
    freed, again, returned, after = result.stdout.split()
    if freed == "False":
        pytest.skip("this C library has no mallopt")
    pages = (16 << 20) // os.sysconf("SC_PAGE_SIZE")
    # If memory were returned each time, it would be nine times the pages.
    assert int(again) < pages / 2
    assert returned == "True"
    assert int(after) > int(again)  # with huge pages few, but never none


def test_malloc_is_not_changed_on_other_systems_or_where_the_user_has_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert memory.keep_freed_memory() is False
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.keep_freed_memory() is False
    assert memory.return_freed_memory() is False
