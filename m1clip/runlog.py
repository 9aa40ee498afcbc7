"""run.jsonl: one object a line, appended, readable while it is written."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = 1
NAME = "run.jsonl"


class RunLog:
    """Appends to a run's log. Each line is one write, so that a reader sees whole lines."""

    def __init__(self, run: Path) -> None:
        self.path = run / NAME
        _end_torn_line(self.path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, kind: str, **values: Any) -> None:
        """Append one object; `kind` says what it tells: start, step, eval, checkpoint, warning, end."""
        record = {"v": VERSION, "kind": kind, "time": round(time.time(), 3), **values}
        line = json.dumps(_finite(record), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file; what was written is already there."""
        self._file.close()


def read_log(run: Path) -> Iterator[dict[str, Any]]:
    """All whole lines of a run's log; a torn or foreign line is passed over."""
    with (run / NAME).open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "kind" in record:
                yield record


def _end_torn_line(path: Path) -> None:
    """A killed writer may leave half a line: end it, so that the next object starts on its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite becomes its name."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
