"""Which process works on a run: its number, when it began, on which machine. Never found by a name."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

LOCK = "run.lock"
SAME_START = 2.0  # seconds: a process's start is known to the clock tick, the boot time to about a second


@dataclass(frozen=True)
class Owner:
    """The process that wrote a run's lock."""

    pid: int
    started: float  # seconds since 1970, as the system says
    host: str

    @property
    def here(self) -> bool:
        """On this machine, so that it can be looked up."""
        return self.host == platform.node()

    def process(self) -> psutil.Process | None:
        """The living process, if it is this very one and not a later one with the same number."""
        if not self.here:
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < SAME_START
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


def own_mark() -> str:
    """What this process writes into the lock of its run: three lines."""
    return f"{os.getpid()}\n{psutil.Process().create_time():.3f}\n{platform.node()}\n"


def read_owner(run: Path) -> Owner | None:
    """Who holds, or last held, a run; None where nothing says it."""
    try:
        pid, started, host = (run / LOCK).read_text(encoding="utf-8").split("\n")[:3]
        return Owner(int(pid), float(started), host)
    except (OSError, ValueError):
        return None
