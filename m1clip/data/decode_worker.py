"""A process that decodes images for `DecodePool`. It must start quickly, so nothing here imports torch.

The process is started as a program of its own: a fork would copy the threads' locks and the state
of CUDA, and multiprocessing's spawn would import the caller's script again.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from m1clip.hardware.memory import keep_freed_memory
from m1clip.system import STOP_SIGNALS

# Work on one item: (the values of its row, or None; what to report). Picklable, and never raises
# for a bad image.
RowWork = Callable[[Any], tuple[np.ndarray | None, Any]]
PROGRAM = "from m1clip.data.decode_worker import main; main()"
# Of freed memory, which is otherwise unmapped after each image: 360 page faults and a quarter of
# the time for 500 x 375 pixels.
KEPT_BYTES = 2**25


class Job(NamedTuple):
    """What all blocks of a process have in common.

    Sent once, and small: the parent does not wait for the process.
    """

    work: RowWork
    timeout: float  # seconds for one item
    out: int  # descriptor of the file that gets the rows; -1: none
    row_bytes: int


class Block(NamedTuple):
    """Some items, and where their rows begin."""

    number: int
    items: Sequence[Any]
    rows: Sequence[int]


class Late(NamedTuple):
    """The report of an item whose work did not finish in time."""

    seconds: float


class Done(NamedTuple):
    """The answer to a block: what each item reported (or Late), or the error that ended it."""

    number: int
    results: list[Any]
    error: Exception | None = None


def main() -> None:
    """Answer blocks until the parent closes its end of the pipe, or ends."""
    # Ctrl-C and kill reach the process group: the parent decides what ends.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory(KEPT_BYTES)
    pipe = Connection(int(sys.argv[1]))
    try:
        job: Job = pipe.recv()
        pipe.send(os.getpid())
        while True:
            pipe.send(answer(job, pipe.recv()))
    except (EOFError, OSError):
        os._exit(0)  # at once: a thread may hang in a read


def answer(job: Job, block: Block) -> Done:
    """Compute the rows of a block and write them to the file."""
    from m1clip.data.images import map_with_timeout

    results: list[Any] = []
    try:
        outcomes = map_with_timeout(block.items, job.work, job.timeout)
        for outcome, row in zip(outcomes, block.rows, strict=True):
            if outcome is None:
                results.append(Late(job.timeout))
                continue
            values, result = outcome
            if values is not None and job.out >= 0:
                write_at(job.out, np.ascontiguousarray(values).data, row * job.row_bytes)
            results.append(result)
    except Exception as error:  # noqa: BLE001  raised again in the parent
        return Done(block.number, results, error)
    return Done(block.number, results)


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all bytes to an offset: not by a memory map, where a full disk would kill the process."""
    rest = data.cast("B")
    while len(rest):
        if hasattr(os, "pwrite"):
            written = os.pwrite(file, rest, offset)
        else:  # on Windows, where one process writes
            os.lseek(file, offset, os.SEEK_SET)
            written = os.write(file, rest)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest, offset = rest[written:], offset + written
