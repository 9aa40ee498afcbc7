"""Where the time of a step goes: marks that cost next to nothing, and are read only when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, Self

_FOLD_AT = (
    4096  # marks kept before those that are done are added up: memory stays bounded if nobody ever asks
)


class Stamp(Protocol):
    """A moment on a device; torch.cuda.Event is one, and so is the host's clock below."""

    def record(self) -> None:
        """Set the moment to now, or to when the device gets there."""

    def query(self) -> bool:
        """Has the device got there?"""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end_event: Self, /) -> float:
        """Milliseconds from this moment to a later one."""


class HostStamp:
    """A moment on the host, where work is done when the call returns."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        """Now."""
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        """The host is always there."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: HostStamp, /) -> float:
        """Milliseconds, as CUDA counts them."""
        return (end_event.seconds - self.seconds) * 1e3


def stamps_of(kind: str) -> Callable[[], Stamp] | None:
    """What makes moments for a device; None where none can be had without making the host wait."""
    if kind == "cpu":
        return HostStamp
    if kind == "cuda":
        import torch

        return lambda: torch.cuda.Event(enable_timing=True)
    return None  # MPS: the host's clock would show when work was handed over, not when it was done


class Phases:
    """Seconds of each named phase of a step. `mark` ends one and begins the next; `take` reads and clears."""

    def __init__(self, kind: str = "cpu", stamps: Callable[[], Stamp] | None = None) -> None:
        """For a kind of device, or with other `stamps` than its own."""
        self._new = stamps or stamps_of(kind)
        self._marks: list[tuple[str, Stamp]] = []  # in time; the name "" is no phase
        self._free: list[Stamp] = []
        self._seconds: dict[str, float] = {}
        self.silent = False  # while a step is recorded for replay: marks would become part of it

    def mark(self, name: str) -> None:
        """The phase `name` begins here, and the one before ends; the host does not wait."""
        if self._new is None or self.silent or (self._marks and self._marks[-1][0] == name):
            return
        stamp = self._free.pop() if self._free else self._new()
        stamp.record()
        self._marks.append((name, stamp))
        if len(self._marks) >= _FOLD_AT and self._marks[-2][1].query():
            self._fold()

    def stop(self) -> None:
        """What follows belongs to no phase."""
        self.mark("")

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call; {} where the device cannot tell. Waits for the device."""
        if self._marks:
            self._marks[-1][1].synchronize()
            self._fold()
        taken, self._seconds = self._seconds, {}
        return taken

    def _fold(self) -> None:
        """Add up all phases that have ended; the last mark stays, as the begin of the next."""
        for (name, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
            self._free.append(begin)
        self._marks = self._marks[-1:]
