"""Which process works on a run: its number, when it began, on which machine. Never found by a name."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from m1clip.files import read_small

LOCK = "run.lock"
SAME_START = 2.0  # seconds: a process's start is known to the clock tick, the boot time to about a second


@dataclass(frozen=True)
class Owner:
    """The process that wrote a run's lock."""

    pid: int
    started: float  # seconds since 1970, as the system says
    host: str
    birth: str = (
        ""  # the same start told by the kernel alone, which no change of the clock moves; "" where unknown
    )

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
            birth = birth_of(self.pid) if self.birth else ""
            # Seconds since 1970 move when the clock is set, and with them the start that the system tells.
            same = birth == self.birth if birth else abs(process.create_time() - self.started) < SAME_START
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.Error, OverflowError, ValueError):  # the last two: a number that no process can have
            return None


def own_mark() -> str:
    """What this process writes into the lock of its run: four lines."""
    started, birth = psutil.Process().create_time(), birth_of(os.getpid())
    return f"{os.getpid()}\n{started:.3f}\n{platform.node()}\n{birth}\n"


def birth_of(pid: int) -> str:
    """Which boot of the machine, and how many ticks after it the process began; "" where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # The name of the program stands in brackets and may hold anything: count from behind it.
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        return f"{boot} {int(fields[19])}"
    except (OSError, ValueError, IndexError):
        return ""


def read_owner(run: Path) -> Owner | None:
    """Who holds, or last held, a run; None where nothing says it."""
    try:
        pid, started, host, *birth = read_small(run / LOCK, 4096).decode("utf-8").split("\n")[:4]
        return Owner(int(pid), float(started), host, birth[0] if birth else "")
    except (OSError, ValueError):
        return None
