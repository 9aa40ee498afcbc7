"""Rows of decoded images or computed features on disk, computed once and shared by all runs.

`.m1clip-cache/KEY/rows.bin` holds rows of one shape and type, and `names.bin` the 16-byte key of
each row. KEY is a hash of what all rows depend on (image size; or tower weights and preprocessing),
a row key a hash of what one row depends on (path, size and time of the image file; or the caption).
A changed image gets a new row, so an old row is never stale. Rows are written in any order, also by
other processes. A key is written after its row is on disk: a row without a key (16 zero bytes) is
free, so a killed process leaves free rows, and the next one continues with them.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
from filelock import FileLock, Timeout

from m1clip import console
from m1clip.data.array_view import ArrayView
from m1clip.data.decode_worker import write_at
from m1clip.data.types import Sample, Source
from m1clip.errors import UserError
from m1clip.formatting import size
from m1clip.io import first_writable, open_for_write, open_regular, user_cache
from m1clip.system import wait_for_writers

CACHE_FOLDER = ".m1clip-cache"
ROWS_FILE, KEYS, LOCK = "rows.bin", "names.bin", "lock"
KEY_BYTES = 16
FREE = bytes(KEY_BYTES)  # the key of a row that has no content
# Between two syncs: work that is lost when a process is killed. Rows that wait for the last sync are
# waited for: with 2 s, filling a cache by nvJPEG took 1.3 times as long.
SYNC_SECONDS = 0.25
DISK_MARGIN = 1.05


class RowWriter:
    """The rows that are to be written: any number of processes may write, each to rows of
    its own.
    """

    def __init__(self, file: int, row_bytes: int, dtype: np.dtype, rows: Sequence[int]) -> None:
        """For a file descriptor; `rows` are the rows of the missing items, by index."""
        self.file = file
        self.row_bytes = row_bytes
        self.dtype = dtype
        self.rows = rows

    def write(self, indices: Sequence[int], block: np.ndarray) -> None:
        """Write the rows at some indices, neighbors at once."""
        values = np.ascontiguousarray(block, self.dtype)
        rows = np.array([self.rows[index] for index in indices], np.int64)
        if not len(rows):
            return
        ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        start = 0
        for end in ends:
            write_at(self.file, values[start:end].data, int(rows[start]) * self.row_bytes)
            start = end


class _KeySaver:
    """Syncs rows to disk, then writes their keys: in a thread, so that computing does not wait for
    the disk.
    """

    def __init__(self, writer: RowWriter, key_file: int, keys: Sequence[bytes]) -> None:
        self.writer = writer
        self.key_file = key_file
        self.keys = keys
        self._done: SimpleQueue[Sequence[int] | None] = SimpleQueue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="cache")
        self._thread.start()

    def add(self, indices: Sequence[int]) -> None:
        """Rows at these indices are written; OSError if earlier ones could not be synced."""
        if self._error is not None:
            raise self._error
        self._done.put(indices)

    def close(self) -> None:
        """Wait until all keys are on disk; OSError if that fails."""
        self._done.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            is_open = True
            while is_open:
                indices, is_open = self._collect()
                self._save(indices)
        except OSError as error:
            self._error = error

    def _collect(self) -> tuple[list[int], bool]:
        """The indices that come before the next sync, and whether there will be more."""
        collected = list[int]()
        indices = self._done.get()
        end = time.monotonic() + SYNC_SECONDS
        while indices is not None:
            collected.extend(indices)
            try:
                indices = self._done.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                return collected, True
        return collected, False

    def _save(self, indices: Sequence[int]) -> None:
        os.fsync(self.writer.file)  # before the keys: after a power loss each key has its row
        for index in indices:
            offset = self.writer.rows[index] * KEY_BYTES
            write_at(self.key_file, memoryview(self.keys[index]), offset)
        os.fsync(self.key_file)


# Yields indices in the list of missing items whose rows are written.
Computed = Generator[Sequence[int]]
# Adds the indices that failed to the dict.
Compute = Callable[[list[int], dict[int, str], RowWriter], Computed]


def row_key(*parts: str) -> bytes:
    """The key of a row in the cache."""
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).digest()[:KEY_BYTES]


def image_keys(samples: Sequence[Sample], folders: Sequence[str]) -> list[bytes]:
    """The row key of each image.

    Paths are relative to the data folders, so that the data may be moved.
    """
    working_folder, roots = (
        os.getcwd(),
        [os.path.join(os.path.abspath(folder), "") for folder in folders],
    )
    keys = []
    for sample in samples:
        stamp = sample.image.stamp()
        path = os.path.normpath(os.path.join(working_folder, stamp))
        inside = next((path[len(root) :] for root in roots if path.startswith(root)), stamp)
        keys.append(row_key(inside))
    return keys


class RowCache:
    """Rows of one shape and type on disk, looked up by key and shared by all runs."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        settings: str,
        shape: tuple[int, ...],
        dtype: type[np.generic],
    ) -> None:
        """`settings` is everything that all rows depend on."""
        self.path = folder / f"{kind}-{hashlib.sha256(settings.encode()).hexdigest()[:24]}"
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.row_bytes = math.prod(shape) * self.dtype.itemsize

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """The items whose row is missing, each key once."""
        stored = self._index()
        first = {key: item for item, key in reversed(list(enumerate(keys))) if key not in stored}
        return sorted(first.values())

    def fill(self, keys: Sequence[bytes], compute: Compute) -> tuple[np.ndarray, dict[int, str]]:
        """(n,) the row of each key, computing missing ones.

        And the items that failed, whose row is -1.
        """
        failed = self._add(keys, compute) if self.missing(keys) else {}
        stored = self._index()
        rows = np.array([stored.get(key, -1) for key in keys], np.int64)
        return rows, {item: failed[keys[item]] for item in np.flatnonzero(rows < 0).tolist()}

    def _add(self, keys: Sequence[bytes], compute: Compute) -> dict[bytes, str]:
        """Append rows as they are computed, and return the failures; a second process waits."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._locked():
            missing = self.missing(keys)
            if not missing:  # another process has added them
                return {}
            self._check_space(len(missing) * self.row_bytes)
            failed: dict[int, str] = {}
            try:
                with self._open(ROWS_FILE) as row_file, self._open(KEYS) as key_file:
                    # Held also by the processes that write rows, until the last of them has ended.
                    wait_for_writers(row_file)
                    rows = self._free_rows(key_file, len(missing))
                    writer = RowWriter(row_file, self.row_bytes, self.dtype, rows)
                    wanted_keys = [keys[item] for item in missing]
                    with (
                        closing(_KeySaver(writer, key_file, wanted_keys)) as saver,
                        closing(compute(missing, failed, writer)) as done,
                    ):
                        for indices in done:
                            saver.add(indices)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise UserError(
                    f"{self.path}: the disk is full; free some space and run again to continue"
                ) from None
        return {keys[missing[index]]: reason for index, reason in failed.items()}

    def _free_rows(self, key_file: int, count: int) -> list[int]:
        """The first rows without content."""
        stored = self._keys()
        os.ftruncate(key_file, len(stored) * KEY_BYTES)  # a killed process may have left a part
        free = (row for row, key in enumerate(stored) if key == FREE)
        return list(itertools.islice(itertools.chain(free, itertools.count(len(stored))), count))

    def _locked(self) -> AbstractContextManager[object]:
        # A soft lock would outlive a killed process.
        lock = FileLock(self.path / LOCK, fallback_to_soft=False)
        try:
            try:
                return lock.acquire(blocking=False)
            except Timeout:
                console.warn(f"{self.path}: another process is filling this cache; waiting")
                return lock.acquire(poll_interval=0.2)
        except OSError as error:
            if error.filename:  # the file cannot be opened
                raise
            # Without a lock, two processes could assign keys to each other's rows.
            raise UserError(
                f"{self.path}: this disk does not support file locks; choose another with"
                " --cache-dir"
            ) from None

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        # Non-blocking, so that a FIFO is an immediate error.
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
        file = open_for_write(self.path / name, flags)
        try:
            yield file
        finally:
            os.close(file)

    def view(self, rows: np.ndarray) -> ArrayView:
        """These rows, memory-mapped."""
        return ArrayView.mapped(
            self.path / ROWS_FILE, self.dtype, (self._complete(), *self.shape), rows
        )

    def _keys(self) -> list[bytes]:
        """The key of each row, FREE where it has no content."""
        try:
            with open_regular(self.path / KEYS) as file:
                data = file.read(self._complete() * KEY_BYTES)
        except FileNotFoundError:
            return []
        return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]

    def _index(self) -> dict[bytes, int]:
        """The row of each stored key."""
        return {key: row for row, key in enumerate(self._keys()) if key != FREE}

    def _complete(self) -> int:
        """Number of rows that have a key, which may be FREE."""
        try:
            sizes = [(self.path / name).stat().st_size for name in (ROWS_FILE, KEYS)]
        except FileNotFoundError:
            return 0
        return min(sizes[0] // self.row_bytes, sizes[1] // KEY_BYTES)

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if needed * DISK_MARGIN > free:
            raise UserError(
                f"the cache needs {size(needed * DISK_MARGIN)}, {self.path.parent} has"
                f" {size(free)} free: free some space, choose another disk with --cache-dir,"
                " or use --cache ram or off"
            )


def cache_folder(requested: str | None, data: Sequence[str]) -> Path:
    """The requested folder; else next to the data.

    Else, if that is not writable, the user's cache folder.
    """
    folders = (
        [Path(requested).expanduser()]
        if requested
        else [*(Path(folder) / CACHE_FOLDER for folder in data[:1]), user_cache()]
    )
    return first_writable(folders, "cache", "choose one with --cache-dir, or use --cache ram")


def data_folders(source: Source) -> tuple[str, ...]:
    """The folders that contain the data; a cache goes next to the first."""
    # A shard pattern is not a file, and a hub dataset (hf:owner/name) has no folder.
    folders = [
        path if path.is_dir() else path.parent
        for path in source.paths
        if not str(path).startswith("hf:")
    ]
    return tuple(str(folder) for folder in folders if folder.is_dir())
