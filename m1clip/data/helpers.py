"""Processes that help this one: they leave signals to it, and never outlive it."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process


def stay_with_parent() -> None:
    """For the start of a helper: Ctrl-C reaches the whole group, but the parent says when its helpers end.

    A parent that was killed can say nothing, so a thread waits for its end. SIGTERM has its usual effect:
    concurrent.futures ends the others with it when one was killed, and waits for them.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
