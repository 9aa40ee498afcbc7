"""`m1clip monitor`: the loop that polls, draws and listens to keys."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from m1clip.watch.frame import View, frame
from m1clip.watch.history import History
from m1clip.watch.line import plain
from m1clip.watch.state import Status, status_of
from m1clip.watch.terminal import Terminal, full_screen, is_utf8

REFRESH = 0.25  # seconds between two looks at the log
STATE = 1.0  # and at the process


class Watched:
    """One run with its state, looked at no more often than needed."""

    def __init__(self, run: Path) -> None:
        self.history = History(run)
        self._status: Status | None = None
        self._looked = 0.0

    def poll(self) -> bool:
        """Take in what is new."""
        return self.history.poll()

    @property
    def status(self) -> Status:
        """The state, at most a second old."""
        if self._status is None or time.monotonic() - self._looked > STATE:
            self._status, self._looked = status_of(self.history), time.monotonic()
        return self._status


def monitor(runs: Sequence[Path]) -> None:
    """Watch runs in the terminal until `q`."""
    watched: dict[Path, Watched] = {}
    view, place = View(), 0
    with full_screen() as terminal:
        view.unicode, view.colour = terminal.unicode, terminal.colour
        while True:
            run = runs[place]
            if run not in watched:
                watched[run] = Watched(run)
            current = watched[run]
            if not view.paused:
                current.poll()
            view.place = f"{place + 1} of {len(runs)}" if len(runs) > 1 else ""
            _show(terminal, view, current)
            # A long log is looked through bit by bit while nobody presses a key.
            key = terminal.key(REFRESH if current.history.follower.complete else 0.01)
            if key in ("q", "Q"):
                return
            place = _press(key, view, place, len(runs))


def _show(terminal: Terminal, view: View, current: Watched) -> None:
    view.width, view.height = terminal.size()
    terminal.show(frame(current.history, current.status, view, time.time()))


def _press(key: str | None, view: View, place: int, count: int) -> int:
    """Act on a key; gives the run to show."""
    if key == "p":
        view.paused = not view.paused
    elif key in ("m", "M"):
        view.left += 1 if key == "m" else -1
    elif key == "r":
        view.right += 1
    elif key == "l":
        view.log = not view.log
    elif key in ("?", "h"):
        view.help = not view.help
    elif key in ("n", "b"):
        return (place + (1 if key == "n" else -1)) % count
    return place


def once(run: Path) -> str:
    """One picture as plain text, for a pipe or a log."""
    watched = Watched(run)
    watched.history.poll_all()
    width, height = shutil.get_terminal_size((100, 30))
    view = View(width=width, height=height, colour=False, unicode=is_utf8())
    return plain(frame(watched.history, watched.status, view, time.time()))
