"""Reads that hang, as on a lost disk: they time out at once, and no other read does on a busy machine."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from m1clip.data import images

HANGING: set[int] = set()  # threads
TIMEOUT = 300.0  # seconds; a process imports this module, so it does not import small_run


def hang(until: threading.Event) -> None:
    """Stay in a read until the event is set."""
    HANGING.add(threading.get_ident())
    until.wait(TIMEOUT)
    HANGING.discard(threading.get_ident())


class ReadWithoutClock(images._Read):
    """A read that times out when it hangs, and not when the machine is slow."""

    thread = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "started":  # by the thread that reads
            self.thread = threading.get_ident()
        super().__setattr__(name, value)

    def result(self, timeout: float | None = None) -> Any:
        while timeout is not None and not self.done():
            if self.thread in HANGING:
                raise TimeoutError
            time.sleep(0.001)
        return super().result(None)


def replace_clock_of_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only reads that `hang` time out, at once."""
    monkeypatch.setattr(images, "_Read", ReadWithoutClock)
