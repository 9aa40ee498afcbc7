"""Features in the place of pixels and tokens: what the loader, the loop and the evaluators already know how to use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from m1clip.errors import UserError
from m1clip.io import locked, open_regular

NAME_BYTES = 16
DTYPE = np.dtype(np.float16)
ROWS, NAMES, LOCK = "rows.bin", "names.bin", "lock"
Computed = Generator[tuple[list[int], np.ndarray]]  # places in what was asked for, and their rows


def name_of(*words: str) -> bytes:
    """The hash under which a row is found."""
    digest = hashlib.sha256("\x1f".join(words).encode("utf-8", "surrogatepass"))
    return digest.digest()[:NAME_BYTES]


class FeatureStore:
    """The rows of one tower and preprocessing; `width` numbers a row."""

    def __init__(self, folder: Path, key: str, width: int) -> None:
        self.path, self.width = folder / f"features-{key}", width
        self.path.mkdir(parents=True, exist_ok=True)

    def missing(self, names: Sequence[bytes]) -> list[int]:
        """Places of the names that have no row yet, each name once."""
        known = self._index()
        first: dict[bytes, int] = {}
        for place, name in enumerate(names):
            if name not in known:
                first.setdefault(name, place)
        return sorted(first.values())

    def fill(
        self, names: Sequence[bytes], compute: Callable[[list[int]], Computed], waiting: Callable[[], None]
    ) -> None:
        """Have `compute` make what is missing and add it as it comes; of two processes one waits for the other."""
        if not self.missing(names):
            return
        with locked(self.path / LOCK, waiting) as alone:
            if not alone:  # two at once could give each other's names to their rows
                raise UserError(f"{self.path}: this disk has no file locks; name another with --data.cache-dir")
            wanted = self.missing(names)  # again: another process may have been at it
            self._cut_to_whole_rows()
            with (
                (self.path / ROWS).open("ab") as rows,
                (self.path / NAMES).open("ab") as keys,
                closing(compute(wanted)) as computed,  # ends its progress lines when a write fails
            ):
                for places, block in computed:
                    assert block.shape == (len(places), self.width)
                    rows.write(np.ascontiguousarray(block, DTYPE).tobytes())
                    _safe(rows.fileno(), rows.flush)
                    keys.write(b"".join(names[place] for place in places))
                    _safe(keys.fileno(), keys.flush)

    def rows(self, names: Iterable[bytes]) -> np.ndarray:
        """(n,) the row of each name; -1 where there is none."""
        known = self._index()
        return np.array([known.get(name, -1) for name in names], np.int64)

    def mapped(self) -> np.ndarray:
        """(rows, width) float16, mapped from the disk."""
        count = self._whole()
        if count == 0:
            return np.zeros((0, self.width), DTYPE)
        # A plain view: pieces taken from a np.memmap are memmaps again, which costs time.
        return np.asarray(np.memmap(self.path / ROWS, DTYPE, "r", shape=(count, self.width)))

    def _index(self) -> dict[bytes, int]:
        try:
            with open_regular(self.path / NAMES) as file:
                found = file.read()
        except FileNotFoundError:
            return {}
        ends = range(0, self._whole() * NAME_BYTES, NAME_BYTES)
        return {found[start : start + NAME_BYTES]: row for row, start in enumerate(ends)}

    def _whole(self) -> int:
        """Rows that are there with their name."""
        sizes = [_size(self.path / ROWS) // self._row_bytes, _size(self.path / NAMES) // NAME_BYTES]
        return min(sizes)

    def _cut_to_whole_rows(self) -> None:
        """Remove what a killed build left behind the last whole row, or the next one would be added askew."""
        count = self._whole()
        for name, size in ((ROWS, self._row_bytes), (NAMES, NAME_BYTES)):
            if (self.path / name).exists():
                os.truncate(self.path / name, count * size)

    @property
    def _row_bytes(self) -> int:
        return self.width * DTYPE.itemsize


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _safe(handle: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(handle)
