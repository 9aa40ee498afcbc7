"""When memory runs out, a step is done again in smaller chunks: the same batch and gradient, in less memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from m1clip.errors import UserError
from m1clip.hardware.memory import is_near

Result = TypeVar("Result")
WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "could not create a primitive",  # oneDNN, which does not say why; met where memory was short
)  # what torch says on the CPU and on MPS
AGAIN = 50  # steps between two that are done again as they were: else each step might be done twice
HELPS = 0.98  # a smaller chunk that leaves more than this of the memory in use is of no help


class MemoryPressure(Exception):
    """Memory in use came near the limit: no allocation has failed yet."""


@dataclass(frozen=True)
class MicroBatchChange:
    """One change of the chunk, or the word that another would not help (`chunk` is then what it was)."""

    step: int
    chunk: int
    why: str
    helps: bool = True


class OOMHandler:
    """Keeps a step within memory by the size of the chunk, and remembers each change until somebody takes it."""

    def __init__(self, chunk: int, read: Callable[[], int], limit: float | None = None) -> None:
        """`chunk` as in the config (0 = all at once); `read()` gives the bytes in use, `limit` what they may be."""
        self.chunk, self.read, self.limit = chunk, read, limit
        self._told: list[MicroBatchChange] = []
        self._watches = True
        self._earlier = chunk  # what it was before a change that did not help
        self._cleared = -AGAIN  # the step that was last done again as it was
        self._used, self._before = 0, float("inf")  # bytes in use when the limit was near, now and before it

    def look(self) -> None:
        """At the moment of the most memory, between forward and backward: MemoryPressure if the limit is near."""
        if self.limit is None or not self._watches:
            return
        used = self.read()
        if is_near(used, self.limit):
            self._used = used
            raise MemoryPressure(f"{used / 1e9:.2f} GB in use, near the limit of {self.limit / 1e9:.2f} GB")

    def fit(self, work: Callable[[], Result], clear: Callable[[], None], rows: int, step: int) -> Result:
        """Do the work; where memory runs out, clear and do it again in chunks of half the size.

        Where it only came near the limit, what was cleared may do: it is first tried again as it was.
        """
        while True:
            try:
                result = work()
                self._before = float("inf")
                return result
            except MemoryPressure as error:
                why, failed = str(error), False
            except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
                if not is_out_of_memory(error):
                    raise
                why, failed = _first_line(error), True
            clear()  # outside of the except: the error's frames hold on to the tensors
            if not failed and step - self._cleared >= AGAIN:
                self._cleared = step
                continue
            self._shrink(rows, step, why, failed)

    def take(self) -> list[MicroBatchChange]:
        """What happened since the last call."""
        told, self._told = self._told, []
        return told

    def _shrink(self, rows: int, step: int, why: str, failed: bool) -> None:
        now = self.chunk if 0 < self.chunk < rows else rows
        if failed and now <= 1:
            raise UserError(
                f"out of memory at step {step + 1:,} even with one sample at a time ({why}): take a smaller --model, "
                f"--grad-checkpointing, or a machine with more memory"
            )
        useless = self._used > HELPS * self._before
        if not failed and (now <= 1 or useless):
            self._watches = False  # what fills the memory is not the chunk: the run goes on as it was
            self.chunk = self._earlier if useless else self.chunk
            self._told.append(MicroBatchChange(step + 1, self.chunk, why, helps=False))
            return
        self._before = self._before if failed else self._used
        smaller = (now + 1) // 2
        self._earlier = smaller if failed else self.chunk  # a chunk that failed never comes back
        self.chunk = smaller
        self._told.append(MicroBatchChange(step + 1, self.chunk, why))


@contextlib.contextmanager
def oom_as_user_error() -> Iterator[None]:
    """Where smaller chunks cannot help (optimizer, evaluation), running out of memory is one line for a person."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory ({_first_line(error)}): close other programs and continue with --resume, or begin again "
            f"with a smaller --model or --batch-size"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, on whichever device."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error).lower() for words in WORDS)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
