"""Runs a command in a pseudo-terminal and reads its screen."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TIMEOUT = 60.0
CODES = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\x1b.")


class Screen:
    """The visible screen. `until` waits for a state."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.text = ""  # the screen's lines
        self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.alternate = False

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def until(self, true: Callable[[str], object]) -> str:
        """Read until the condition holds for the screen."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            if true(self.text):
                return self.text
            if not self._read(0.1) and self.process.poll() is not None:
                break
        raise AssertionError(f"never seen (ended: {self.process.poll()}); the screen is\n{self.text}")

    def ends(self) -> int:
        """Wait for the program to exit; returns its exit code."""
        deadline = time.monotonic() + TIMEOUT
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.process.wait(timeout=1)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = self._decoder.decode(os.read(self._master, 65536))  # a character may come in two parts
        except OSError:  # on Linux: the other end is closed
            return False
        self.raw += data
        self._show()
        return bool(data)

    def _show(self) -> None:
        """The last complete frame, which starts at the home position; colors are skipped."""
        frames = self.raw.split("\x1b[H")
        self.text = CODES.sub("", frames[-1]).replace("\r", "")
        self.alternate = self.raw.rfind("\x1b[?1049h") > self.raw.rfind("\x1b[?1049l")


@contextlib.contextmanager
def in_terminal(*words: str, cwd: Path, width: int = 80, height: int = 24, **env: str) -> Iterator[Screen]:
    """Run m1clip in a terminal of this size; it is ended when the block ends."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "m1clip", *words],
        cwd=cwd,
        stdin=slave,
        stdout=slave,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**clean, "TERM": "xterm-256color", "PYTHONUTF8": "1", **env},
    )
    os.close(slave)
    try:
        yield Screen(process, master)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)
        os.close(master)
