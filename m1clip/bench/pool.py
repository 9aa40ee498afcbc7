"""The other end of a measuring process: start it, ask it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from m1clip.hardware.device import environment


class Failed(Exception):
    """A candidate that could not be measured; `kind` is memory, user, time, died or other."""

    def __init__(self, kind: str, line: str) -> None:
        super().__init__(line)
        self.kind, self.line = kind, line


class Worker:
    """One measuring process."""

    def __init__(self, log: Path) -> None:
        """`log` receives what the process and its libraries print."""
        variables = {**os.environ, **environment(platform.system(), os.environ)}
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "m1clip.bench.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=variables,
        )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")  # the process has ended

    def ask(self, do: str, limit: float = 600.0, **values: Any) -> dict[str, Any]:
        """The answer to one request, or `Failed`; a process that is late or gone is ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=limit)
        except (OSError, ValueError):  # gone, or closed by us
            line = ""
        except queue.Empty:
            self.close()
            raise Failed("time", f"no answer within {limit:.0f} s") from None
        if not line:
            self.close()
            code = self._process.returncode
            why = "killed, most likely for want of memory" if code == -9 else f"ended with code {code}"
            raise Failed("died", f"the measuring process was {why}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"], answer["line"])
        return dict(answer["ok"])

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process, by its own hand if it is listening."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
