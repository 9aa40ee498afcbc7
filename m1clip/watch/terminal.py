"""The terminal as a device: full screen, single keys, size; always left as it was found."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType

from m1clip.errors import UserError
from m1clip.watch.line import Line, ansi

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[0m\x1b[?25h\x1b[?1049l"
ARROWS = {
    "\x1b[C": "n",
    "\x1b[D": "b",
    "\x1b[A": "M",
    "\x1b[B": "m",
    "\t": "m",
    "\x03": "q",
    "\x1b": "q",
    "\x04": "q",
}


def is_utf8() -> bool:
    """Whether standard output takes every letter."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


class Terminal:
    """Draws only the lines that changed: little to send over a slow ssh line."""

    def __init__(self) -> None:
        self.colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")
        self.unicode = is_utf8() and os.environ.get("TERM") != "linux"
        self._shown: list[str] = []
        self._size = (0, 0)

    def size(self) -> tuple[int, int]:
        """Width and height now."""
        width, height = shutil.get_terminal_size((80, 24))
        with contextlib.suppress(OSError):
            width, height = os.get_terminal_size(sys.stdout.fileno())  # COLUMNS would hide a resize
        return max(1, width), max(1, height)

    def show(self, lines: list[Line]) -> None:
        """Bring the screen to these lines."""
        size = self.size()
        if size != self._size:
            self._shown, self._size = [], size
            sys.stdout.write("\x1b[2J")
        rows = [ansi(line, self.colour) for line in lines]
        out = []
        for number, row in enumerate(rows):
            if number >= len(self._shown) or self._shown[number] != row:
                out.append(f"\x1b[{number + 1};1H{row}\x1b[0m")
        self._shown = rows
        if out:
            sys.stdout.write("".join(out))
            sys.stdout.flush()

    def key(self, seconds: float) -> str | None:
        """The next key within some time, arrows as letters; None when nothing was pressed (or the size changed)."""
        try:
            ready, _, _ = select.select([sys.stdin], [], [], seconds)
        except InterruptedError:
            return None
        if not ready:
            return None
        pressed = os.read(sys.stdin.fileno(), 32).decode("utf-8", "ignore")
        if not pressed:
            return "q"  # the terminal is gone
        return ARROWS.get(pressed, pressed[0])


@contextlib.contextmanager
def full_screen() -> Iterator[Terminal]:
    """A terminal in full-screen mode; a signal or an error leaves it as clean as `q` does."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("the monitor needs a terminal; --once prints one picture, --web shows a page")
    before = termios.tcgetattr(sys.stdin)

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def resized(number: int, frame: FrameType | None) -> None:
        """Only so that waiting for a key ends."""

    usual = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    usual[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, resized)
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(ENTER)
        sys.stdout.flush()
        yield Terminal()
    finally:
        with contextlib.suppress(OSError):  # a closed window cannot be tidied
            sys.stdout.write(LEAVE)
            sys.stdout.flush()
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        for number, handler in usual.items():
            signal.signal(number, handler)
