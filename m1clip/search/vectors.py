"""Files of float16 vectors, one per model and generation; their names are made from numbers.

A file only grows: rows that are committed to the database are never written again, and nothing is
truncated. Rows after them, which a killed process left, are overwritten by the next one. To drop
rows, a new generation is written. Readers copy the committed rows into memory: a mapped file would
end the process (SIGBUS) if it got shorter.
"""

from __future__ import annotations

import os
import re
import stat
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from m1clip.errors import UserError
from m1clip.io import open_beneath, sync_folder, unlink_beneath

BYTES = 2  # of a float16
EXPONENT = np.uint16(0x7C00)  # of a float16: all its bits are set in infinities and NaN
CHECKED_ROWS = 4096  # looked at together, so that it takes little memory
MAX_DIM = 2**14  # values of one vector; more than any model has
FILE = re.compile(r"vectors-([0-9]{1,18})-([0-9]{1,18})\.f16")


def file_name(model_id: int, generation: int) -> str:
    """The name of a file of vectors in the index folder."""
    return f"vectors-{int(model_id)}-{int(generation)}.f16"


def generations(index_folder: Path, model_id: int) -> list[int]:
    """The generations of a model's vectors that are on disk, also those of killed processes."""
    names = [FILE.fullmatch(name) for name in os.listdir(index_folder)]
    return sorted(int(name[2]) for name in names if name and int(name[1]) == model_id)


def create(index_folder: Path, model_id: int) -> tuple[int, BinaryIO]:
    """Create the file of the next generation; returns the generation and the file."""
    generation = max(generations(index_folder, model_id), default=-1) + 1
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    file = os.fdopen(open_beneath(index_folder, file_name(model_id, generation), flags), "wb")
    try:
        sync_folder(index_folder)
    except OSError:
        file.close()
        raise
    return generation, file


def open_end(index_folder: Path, model_id: int, generation: int, dim: int, rows: int) -> BinaryIO:
    """Open a file to write the vectors after its committed rows."""
    handle = open_beneath(index_folder, file_name(model_id, generation), os.O_WRONLY)
    file = os.fdopen(handle, "wb")  # of a descriptor, this does not truncate
    file.seek(rows * dim * BYTES)
    return file


def remove_others(index_folder: Path, model_id: int, generation: int | None) -> None:
    """Delete the files of all generations but one; a search that is reading another keeps it."""
    for other in generations(index_folder, model_id):
        if other != generation:
            unlink_beneath(index_folder, file_name(model_id, other))


class Vectors:
    """The committed vectors of one file, in memory; a later `read` adds the new ones."""

    def __init__(
        self, index_folder: Path, root: Path, model_id: int, generation: int, dim: int
    ) -> None:
        self.path = index_folder / file_name(model_id, generation)
        self.key = (model_id, generation, dim)
        self.dim = dim
        self._hint = f"run m1clip index {root} to restore it"
        self._buffer = np.empty((0, dim), np.float16)
        self._rows = 0  # rows of the buffer that are read

    def open(self) -> FileIO:
        """Open the file; UserError if there is none."""
        try:
            return FileIO(open_beneath(self.path.parent, self.path.name, os.O_RDONLY))
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}; {self._hint}") from None

    def rows_on_disk(self, file: FileIO) -> int:
        """The number of complete vectors in the open file, committed or not."""
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{self.path}: not a regular file; delete it and {self._hint}")
        return status.st_size // (self.dim * BYTES)

    def read(self, file: FileIO, rows: int) -> np.ndarray:
        """(rows, dim) the first rows of the open file; UserError if it is truncated or damaged.

        Earlier results stay valid.
        """
        on_disk = self.rows_on_disk(file)
        if on_disk < rows:
            missing = f"{on_disk:,} of {rows:,} vectors are left"
            raise UserError(f"{self.path}: truncated ({missing}); {self._hint}")
        if rows > len(self._buffer):
            # Half as many again: an indexer adds rows every few seconds.
            capacity = max(rows, len(self._buffer) * 3 // 2)
            try:
                buffer = np.empty((capacity, self.dim), np.float16)
            except MemoryError:
                raise UserError(f"{self.path}: {rows:,} vectors do not fit into memory") from None
            buffer[: self._rows] = self._buffer[: self._rows]
            self._buffer = buffer
        if rows > self._rows:
            self._fill(file, rows)
        return self._buffer[:rows]

    def _fill(self, file: FileIO, rows: int) -> None:
        """Read the rows that are not in memory yet."""
        unread = self._buffer[self._rows : rows].view(np.uint8).reshape(-1).data
        file.seek(self._rows * self.dim * BYTES)
        while unread:
            count = file.readinto(unread)
            if not count:
                raise UserError(f"{self.path}: truncated while it was read; {self._hint}")
            unread = unread[count:]
        for start in range(self._rows, rows, CHECKED_ROWS):
            bits = self._buffer[start : min(start + CHECKED_ROWS, rows)].view(np.uint16)
            if ((bits & EXPONENT) == EXPONENT).any():
                raise UserError(f"{self.path}: damaged (not finite); delete it and {self._hint}")
        self._rows = rows
