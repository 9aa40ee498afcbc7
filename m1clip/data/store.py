"""Pictures by index, as whole batches of uint8: held in memory, mapped from disk, or decoded each time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from m1clip.data import randomness as rnd
from m1clip.data.helpers import stay_with_parent
from m1clip.data.images import BadImage
from m1clip.data.pair import ImageRef
from m1clip.data.patience import PATIENCE, patiently
from m1clip.data.preprocess import to_square
from m1clip.errors import UserError

Progress = Callable[[int, int], None]  # (done, total)
Decoded = tuple[int, np.ndarray, dict[int, str]]  # first index, pixels, reason by index of each that failed
CHUNK = 64
MAX_THREADS = 16  # each holds one decoded picture at full size
# With a tenth of the pictures broken, this many in a row fail once in 10^32.
REPLACEMENT_TRIES = 32
HUNG = "the read did not end"


class Pictures(Protocol):
    """A row of square pictures, all of one size."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8."""


@dataclass(frozen=True)
class ArrayPictures:
    """Pictures decoded once and held in memory."""

    array: np.ndarray

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8."""
        return self.array.take(indices, axis=0)


class MappedPictures:
    """Pictures decoded once and mapped from a .npy file; to a worker process only the path travels."""

    def __init__(self, path: Path, rows: np.ndarray | None = None) -> None:
        self.path, self.rows = path, rows
        array = np.lib.format.open_memmap(path, mode="r")
        # A plain view: np.memmap makes each piece taken from it a memmap again, which costs time.
        self.array = np.asarray(array)

    def __len__(self) -> int:
        return len(self.array) if self.rows is None else len(self.rows)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8, copied out of the map."""
        return self.array.take(indices if self.rows is None else self.rows[indices], axis=0)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedPictures, (self.path, self.rows)


@dataclass(frozen=True, slots=True)
class Failure:
    """A picture that could not be read: its index, where it is, and why."""

    index: int
    where: str
    reason: str


@dataclass(frozen=True)
class LivePictures:
    """Pictures decoded each time they are asked for: no memory, more work."""

    refs: Sequence[ImageRef]
    side: int
    resize: str = "shortest"
    patience: float = PATIENCE  # seconds for one picture

    def __len__(self) -> int:
        return len(self.refs)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8; a picture that has gone since the run began stops it."""
        squares = self.squares(indices)
        for found in squares:
            if isinstance(found, Failure):
                raise UserError(
                    f"{found.where}: {found.reason}; it could be read when the run began: "
                    f"bring it back, then continue with --resume"
                )
        return np.stack([square for square in squares if not isinstance(square, Failure)])

    def squares(self, indices: np.ndarray) -> list[np.ndarray | Failure]:
        """The pictures in the order asked for, decoded by threads: Pillow lets go of the interpreter."""
        # A worker process is one of many already: threads in each would only fight for the cores.
        threads = 1 if parent_process() is not None else min(MAX_THREADS, os.cpu_count() or 1)
        return patiently(indices.tolist(), self.square, self.hung, self.patience, threads, self.where)

    def square(self, index: int) -> np.ndarray | Failure:
        """(side, side, 3) uint8, or why there is none."""
        ref = self.refs[index]
        try:
            return to_square(ref.open(self.side), self.side, self.resize)
        # What decoders raise for a picture they cannot read; the last two for one of an absurd size.
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            return Failure(index, str(ref), reason_of(error))

    def where(self, index: int) -> str:
        """Which picture it is, for a person."""
        return str(self.refs[index])

    def hung(self, index: int) -> np.ndarray | Failure:
        """The failure of a picture whose read does not come back."""
        return Failure(index, self.where(index), f"{HUNG} within {self.patience:g} s")


def reason_of(error: Exception) -> str:
    """Why a picture could not be read, without its name, which the caller knows."""
    if isinstance(error, BadImage):
        return error.reason
    if isinstance(error, MemoryError | OverflowError):
        return "too large for the memory"
    return str(error) or type(error).__name__


def read_or_replace(
    pictures: Pictures, members: np.ndarray, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray, tuple[Failure, ...]]:
    """(members, their pixels, what failed): a picture that fails live gives its place to another one.

    Which one is a function of (seed, epoch, sample), so it is the same for any number of workers.
    """
    if not isinstance(pictures, LivePictures):
        return members, pictures.read(members), ()
    chosen, squares, failures = members.copy(), [], []
    first_read = pictures.squares(members)
    for place, member in enumerate(members):
        found = first_read[place]
        tries = 0
        while isinstance(found, Failure):
            failures.append(found)
            if tries == REPLACEMENT_TRIES:
                raise UserError(
                    f"{found.where}: {found.reason}; {tries} others tried in its place cannot be read either: "
                    f"is the disk with the pictures still there?"
                )
            chosen[place] = _replacement(seed, epoch, int(member), tries, len(pictures))
            found = pictures.squares(chosen[place : place + 1])[0]
            tries += 1
        squares.append(found)
    return chosen, np.stack(squares), tuple(failures)


def _replacement(seed: int, epoch: int, sample: int, tries: int, count: int) -> int:
    draw = rnd.bits(seed, epoch, np.array([sample + tries * count]), rnd.REPLACEMENT)
    return int(draw[0] % np.uint64(count))


def decode_chunks(
    refs: Sequence[ImageRef],
    starts: Iterable[int],
    side: int,
    resize: str,
    workers: int,
    start_method: str | None,
    patience: float = PATIENCE,
) -> Iterator[Decoded]:
    """Decode the chunks that begin at `starts`, in order; by threads, or by processes where a method is given.

    Threads are right for files: Pillow lets go of the interpreter while it decodes, nothing is pickled, and none
    is left behind when the process is killed. Drawn pictures are Python throughout and need processes.
    """
    jobs = ((start, refs[start : start + CHUNK], side, resize, patience) for start in starts)
    if workers < 2:
        yield from map(_decode_chunk, jobs)
        return
    pool: Executor
    if start_method is None:
        pool = ThreadPoolExecutor(workers)
    else:
        pool = ProcessPoolExecutor(workers, get_context(start_method), stay_with_parent)
    waiting: deque[Any] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(_decode_chunk, job))
            # A bounded queue: a slow disk must not fill the memory with decoded pictures.
            if len(waiting) > 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a process that decodes pictures was killed; the system may be out of memory: "
            "close other programs and run again, a cache on disk continues where it stopped"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def decode_all(
    refs: Sequence[ImageRef],
    side: int,
    resize: str,
    workers: int,
    start_method: str | None,
    progress: Progress,
    patience: float = PATIENCE,
) -> tuple[np.ndarray, dict[int, str]]:
    """Decode every picture; gives the array and, for each picture that could not be read, the reason."""
    array = np.zeros((len(refs), side, side, 3), np.uint8)
    bad: dict[int, str] = {}
    few = len(refs) < 4 * CHUNK  # then starting processes takes longer than the work
    starts = range(0, len(refs), CHUNK)
    progress(0, len(refs))
    for start, block, errors in decode_chunks(
        refs, starts, side, resize, 1 if few else workers, start_method, patience
    ):
        array[start : start + len(block)] = block
        bad.update(errors)
        progress(start + len(block), len(refs))
    return array, bad


def find_bad(
    refs: Sequence[ImageRef], indices: Sequence[int], workers: int, patience: float = PATIENCE
) -> dict[int, str]:
    """Decode these pictures only to see whether they can be: the reason for each that cannot."""
    live = LivePictures(refs, side=32, patience=patience)
    found = patiently(list(indices), live.square, live.hung, patience, max(1, workers), live.where)
    return {failure.index: failure.reason for failure in found if isinstance(failure, Failure)}


def _decode_chunk(job: tuple[int, Sequence[ImageRef], int, str, float]) -> Decoded:
    start, refs, side, resize, patience = job
    block = np.zeros((len(refs), side, side, 3), np.uint8)
    errors = {}
    live = LivePictures(refs, side, resize, patience)
    squares = patiently(range(len(refs)), live.square, live.hung, patience, name=live.where)
    for offset, square in enumerate(squares):
        if isinstance(square, Failure):
            if square.reason.startswith(HUNG):
                # It may be there again tomorrow: what is kept for all runs must not say that it cannot be read.
                raise UserError(
                    f"{square.where}: {square.reason}; is the disk with the pictures still there? Run again when it is"
                )
            errors[start + offset] = square.reason
        else:
            block[offset] = square
    return start, block, errors
