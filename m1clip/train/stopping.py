"""Ctrl-C, SIGTERM and SIGHUP: finish the step, save, leave. A second signal leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):
    """The run was asked to stop; a checkpoint of its last step is saved."""

    def __init__(self, run: str, step: int, number: int) -> None:
        super().__init__(f"stopped at step {step:,}; continue with: m1clip train --resume {run}")
        self.exit_code = 128 + number  # as a shell reports a signal


class Interrupted(KeyboardInterrupt):
    """A signal came where there is no step to finish: while data is prepared, or a model evaluated."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number
        self.exit_code = 128 + number


class StopRequest:
    """Holds the number of the signal that asked, or 0; and whether somebody will look at it soon."""

    def __init__(self) -> None:
        self.signal = 0
        self.patient = False

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """The block looks at `signal` itself, so that a step and a save are finished first."""
        before, self.patient = self.patient, True
        try:
            yield
        finally:
            self.patient = before

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A signal breaks the block off with `Interrupted`: it may be long, and can be done again."""
        before, self.patient = self.patient, False
        try:
            if self.signal:
                raise Interrupted(self.signal)
            yield
        finally:
            self.patient = before


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch the first SIGINT, SIGTERM or SIGHUP while the block runs; the second has its usual effect."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python allows handlers in the main thread alone
        return

    owner = os.getpid()

    def ask(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked helper has inherited this: for it a signal has its usual effect
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        request.signal = number
        for each, usual in before.items():
            signal.signal(each, usual)
        if not request.patient:
            raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # started with nohup: a closed terminal changes nothing
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
