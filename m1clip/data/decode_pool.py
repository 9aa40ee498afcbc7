"""Processes that decode images on all cores, and write their pixels straight to where they are needed.

Only file names and reports go through pipes. Pixels are written into a file: the cache on disk, or
shared memory without a name, so a killed process leaves nothing behind. A process that is killed is
replaced, and its blocks are decoded again.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import mmap
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import numpy as np

from m1clip import console
from m1clip.data.decode_worker import PROGRAM, Block, Done, Job, RowWork
from m1clip.errors import UserError

IMAGES_PER_BLOCK = 32  # items that are sent to a process at a time
BLOCKS_AHEAD = 2  # of each process, so that it never waits for the parent
# A process starts in 0.2 s of a core, in which it would decode about 100 photos.
FEWEST_ITEMS = 512
ITEMS_PER_PROCESS = 128
MAX_KILLS = 5  # of the processes that decode one item
MOST_DEATHS = 64  # in a row, without one answer
WAIT_SECONDS = 5.0  # for a killed process: one that hangs in a read of a lost disk cannot end


def decode_processes(items: int, cpus: int) -> int:
    """How many processes decode so many images: 0 where threads of this process are done before they have started."""
    if items < FEWEST_ITEMS or cpus < 2 or not hasattr(os, "pwrite"):  # not on Windows
        return 0
    return min(cpus, items // ITEMS_PER_PROCESS)


class PoolStopped(Exception):
    """The pool was stopped by another thread."""


@dataclass
class _Process:
    """A process, its pipe, and the blocks that it has not answered, in order."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    blocks: deque[Block] = field(default_factory=deque)
    ready: bool = False


class DecodePool:
    """Runs work on blocks of items in processes.

    The rows go to a file, the reports to the caller.
    """

    def __init__(
        self,
        work: RowWork,
        processes: int,
        timeout: float,
        out: int = -1,
        row_bytes: int = 0,
        on_restart: Callable[[str], None] = console.warn,
    ) -> None:
        """`out` is the descriptor of the file for rows of `row_bytes` bytes."""
        self.job = Job(work, timeout, out, row_bytes)
        self.on_restart = on_restart
        self.waiting: deque[Block] = deque()
        self.results: dict[int, list[Any]] = {}  # of blocks that are in parts after a restart
        self.left: dict[int, int] = {}  # items of each block without an answer
        self.sizes: dict[int, int] = {}
        self.parts: dict[int, tuple[int, int]] = {}  # of a part: its block and its index in it
        self.tries: dict[int, int] = {}  # restarts of a part
        self._part_numbers = itertools.count(-1, -1)
        self._stopped = False
        self._deaths = 0  # since the last answer
        self.processes: list[_Process] = []
        atexit.register(self.close)
        try:
            self.processes += [self._start() for _ in range(processes)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, number: int, items: Sequence[Any], rows: Sequence[int]) -> None:
        """Queue a block, by a number of the caller's that is not negative."""
        assert number >= 0
        assert len(items) == len(rows)
        self.waiting.append(Block(number, items, rows))
        self.sizes[number] = len(items)
        self._send()

    def next_done(self) -> tuple[int, list[Any]]:
        """(number, reports) of the next block that is complete, in any order."""
        while True:
            ready = wait([worker.pipe for worker in self.processes])
            for worker in [worker for worker in self.processes if worker.pipe in ready]:
                answer = self._receive(worker)
                if answer is not None:
                    return answer

    def stop(self) -> None:
        """Kill the processes; another thread that waits in `next_done` gets PoolStopped."""
        self._stopped = True
        for worker in list(self.processes):
            worker.process.kill()

    def close(self) -> None:
        """Kill the processes: they have no state to save, and may hang in a read."""
        atexit.unregister(self.close)
        self.stop()
        for worker in self.processes:
            worker.pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(WAIT_SECONDS)
        self.processes.clear()

    def _start(self) -> _Process:
        own_end, far_end = Pipe()
        shared = [self.job.out] if self.job.out >= 0 else []
        folders = [folder or os.getcwd() for folder in sys.path]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(far_end.fileno())],
                pass_fds=(far_end.fileno(), *shared),
                stdin=subprocess.DEVNULL,
                env=variables,
            )
        finally:
            far_end.close()  # so that reading ends when the process does
        with contextlib.suppress(OSError):  # it has ended, as is found when its answer is read
            own_end.send(self.job)
        return _Process(process, own_end)

    def _send(self) -> None:
        for ahead in range(BLOCKS_AHEAD):
            for worker in self.processes:
                if not self.waiting:
                    return
                if len(worker.blocks) <= ahead:
                    worker.blocks.append(self.waiting.popleft())
                    # A process that was killed is found when its answer is read.
                    with contextlib.suppress(OSError):
                        worker.pipe.send(worker.blocks[-1])

    def _receive(self, worker: _Process) -> tuple[int, list[Any]] | None:
        try:
            done = worker.pipe.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return None
        if not worker.ready:  # its greeting
            worker.ready = True
            return None
        assert isinstance(done, Done)
        worker.blocks.popleft()
        self._deaths = 0
        self._send()
        if done.error is not None:
            raise done.error
        return self._complete(done)

    def _complete(self, done: Done) -> tuple[int, list[Any]] | None:
        if done.number >= 0:
            del self.sizes[done.number]
            return done.number, done.results
        number, item_index = self.parts.pop(done.number)
        self.results[number][item_index] = done.results[0]
        self.left[number] -= 1
        if self.left[number]:
            return None
        del self.left[number], self.sizes[number]
        return number, self.results.pop(number)

    def _replace(self, dead: _Process) -> None:
        """Start another process for one that was killed, which decodes its blocks again, the first one by items."""
        if self._stopped:
            raise PoolStopped
        code = dead.process.wait()
        dead.pipe.close()
        self.processes.remove(dead)
        self._deaths += 1
        if self._deaths > (MAX_KILLS if code >= 0 and not dead.ready else MOST_DEATHS):
            raise UserError(
                f"a process that decodes images cannot be started (exit code {code}); its messages"
                " are above"
            )
        blocks = list(dead.blocks)
        during = f" while decoding {_name(blocks[0].items[0])}" if blocks else ""
        if blocks and len(blocks[0].items) > 1:
            during += f" or one of the next {len(blocks[0].items) - 1}"
        self.on_restart(
            f"a process that decodes images was killed (exit code {code}){during}; "
            f"the system may be out of memory. Started another"
        )
        self.waiting.extendleft(reversed(blocks[1:]))
        self.waiting.extendleft(reversed(self._split(blocks[0], code) if blocks else []))
        self.processes.append(self._start())
        self._send()

    def _split(self, block: Block, code: int) -> list[Block]:
        """The items of a block one by one, to find the one that ends its process.

        UserError if it does so again.
        """
        if block.number < 0:
            self.tries[block.number] = self.tries.get(block.number, 0) + 1
            if self.tries[block.number] >= MAX_KILLS:
                raise UserError(
                    f"{_name(block.items[0])}: {MAX_KILLS} processes that decoded it were killed"
                    f" (exit code {code}): remove the image if it is damaged, or close other"
                    " programs if memory is short, then run again"
                )
            return [block]
        self.left[block.number] = len(block.items)
        self.results[block.number] = [None] * len(block.items)
        parts = []
        for item_index, (item, row) in enumerate(zip(block.items, block.rows, strict=True)):
            number = next(self._part_numbers)
            self.parts[number] = block.number, item_index
            parts.append(Block(number, [item], [row]))
        return parts


def _name(item: Any) -> str:
    return os.fsdecode(item) if isinstance(item, bytes) else str(item)


class SharedRows:
    """Rows in memory that other processes write: a file without a name, which ends with its last user."""

    def __init__(self, rows: int, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self.row_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("m1clip-decode")
        else:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())
        os.ftruncate(self.file, max(1, rows * self.row_bytes))
        memory = mmap.mmap(self.file, max(1, rows * self.row_bytes))
        self.array = np.frombuffer(memory, dtype)[: rows * math.prod(shape)].reshape(rows, *shape)

    def close(self) -> None:
        """Release the descriptor; the memory is freed with the last view of the array."""
        os.close(self.file)


def decode_in_order(
    work: RowWork, items: Iterable[Any], processes: int, shape: tuple[int, ...], timeout: float
) -> Generator[tuple[list[Any], np.ndarray]]:
    """(reports, rows) of blocks of items in order.

    The rows are those of the caller until the next block.
    """
    blocks = 2 * BLOCKS_AHEAD * processes
    shared = SharedRows(blocks * IMAGES_PER_BLOCK, shape, np.uint8)
    try:
        with DecodePool(work, processes, timeout, shared.file, shared.row_bytes) as pool:
            for number, reports in enumerate(_in_order(pool, items, blocks, IMAGES_PER_BLOCK)):
                first = number % blocks * IMAGES_PER_BLOCK
                yield reports, shared.array[first : first + len(reports)]
    finally:
        shared.close()


def reports_in_order(
    work: RowWork, items: Iterable[Any], processes: int, timeout: float, block: int
) -> Generator[list[Any]]:
    """The reports of blocks of items in order, of work that has no rows."""
    with DecodePool(work, processes, timeout) as pool:
        yield from _in_order(pool, items, 2 * BLOCKS_AHEAD * processes, block)


def _in_order(
    pool: DecodePool, items: Iterable[Any], blocks: int, block: int
) -> Generator[list[Any]]:
    """The reports of blocks of items in order; so many blocks are in work or wait to be used.

    The rows of block n begin at n % blocks * block.
    """
    done: dict[int, list[Any]] = {}
    remaining = iter(items)
    submitted = 0

    def fill() -> None:
        nonlocal submitted
        chunk = list(itertools.islice(remaining, block))
        if chunk:
            first = submitted % blocks * block
            pool.submit(submitted, chunk, range(first, first + len(chunk)))
            submitted += 1

    for _ in range(blocks):
        fill()
    number = 0
    while number < submitted:
        while number not in done:
            finished, reports = pool.next_done()
            done[finished] = reports
        yield done.pop(number)
        number += 1
        fill()
