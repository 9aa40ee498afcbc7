"""Ctrl-C and SIGTERM: finish the step, save, leave. A second signal leaves at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):
    """The run was asked to stop; a checkpoint of its last step is saved."""

    def __init__(self, run: str, step: int, number: int) -> None:
        super().__init__(f"stopped at step {step:,}; continue with: m1clip train --resume {run}")
        self.exit_code = 128 + number  # as a shell reports a signal


class StopRequest:
    """Holds the number of the signal that asked, or 0."""

    signal = 0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch the first SIGINT or SIGTERM while the block runs; the second has its usual effect."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python allows handlers in the main thread alone
        return

    def ask(number: int, frame: FrameType | None) -> None:
        request.signal = number
        for each, usual in before.items():
            signal.signal(each, usual)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
