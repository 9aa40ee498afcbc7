"""Pictures by index, as whole batches of uint8: held in memory, or decoded each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Protocol

import numpy as np

from m1clip.data.pair import ImageRef
from m1clip.data.preprocess import to_square

Progress = Callable[[int, int], None]  # (done, total)
CHUNK = 64


class Pictures(Protocol):
    """A row of square pictures, all of one size."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8."""


@dataclass(frozen=True)
class ArrayPictures:
    """Pictures decoded once: an array in memory, or one mapped from disk."""

    array: np.ndarray

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8."""
        return self.array[indices]


@dataclass(frozen=True)
class LivePictures:
    """Pictures decoded each time they are asked for: no memory, more work."""

    refs: Sequence[ImageRef]
    side: int
    resize: str = "shortest"

    def __len__(self) -> int:
        return len(self.refs)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8."""
        return np.stack([to_square(self.refs[i].open(self.side), self.side, self.resize) for i in indices])


def decode_all(
    refs: Sequence[ImageRef], side: int, resize: str, workers: int, start_method: str, progress: Progress
) -> tuple[np.ndarray, dict[int, str]]:
    """Decode every picture; gives the array and, for each picture that could not be read, the reason."""
    array = np.zeros((len(refs), side, side, 3), np.uint8)
    bad: dict[int, str] = {}
    jobs = [(start, refs[start : start + CHUNK], side, resize) for start in range(0, len(refs), CHUNK)]
    done = 0
    if workers < 2 or len(jobs) < 4:
        results = map(_decode_chunk, jobs)
        pool = None
    else:
        pool = ProcessPoolExecutor(workers, mp_context=get_context(start_method))
        results = pool.map(_decode_chunk, jobs)
    try:
        for start, block, errors in results:
            array[start : start + len(block)] = block
            bad.update(errors)
            done += len(block)
            progress(done, len(refs))
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return array, bad


def _decode_chunk(job: tuple[int, Sequence[ImageRef], int, str]) -> tuple[int, np.ndarray, dict[int, str]]:
    start, refs, side, resize = job
    block = np.zeros((len(refs), side, side, 3), np.uint8)
    errors = {}
    for offset, ref in enumerate(refs):
        try:
            block[offset] = to_square(ref.open(side), side, resize)
        except (OSError, ValueError) as error:  # what decoders raise for a picture they cannot read
            errors[start + offset] = str(error)
    return start, block, errors
