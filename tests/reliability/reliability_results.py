"""The results of the long tests: one row a promise in docs/results/reliability.json, merged, never typed in."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "results" / "reliability.json"
UNFINISHED = "FAILED (not finished)"


def record(promise: str, counts: dict[str, Any], result: str, whole: bool = True, file: Path = FILE) -> None:
    """Put the row of a promise in its place; `whole` says that the counts are those of the long form."""
    row = {
        "counts": counts,
        "result": result,
        "long_form": whole,
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores",
        "commit": commit(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:  # several tests may end at the same moment
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = rows_of(file)
        rows[promise] = row
        file.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    file.with_suffix(".lock").unlink(missing_ok=True)


@contextlib.contextmanager
def recorded(promise: str, file: Path = FILE) -> Iterator[dict[str, Any]]:
    """A long test: FAILED stands in its row from its start, until it ends well with the counts put into the dict."""
    counts: dict[str, Any] = {}
    record(promise, counts, UNFINISHED, file=file)
    yield counts
    record(promise, counts, "passed", file=file)


def rows_of(file: Path = FILE) -> dict[str, Any]:
    """All rows by promise."""
    rows: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return rows


def commit() -> str:
    """Which source was tested; with a + where it was changed since."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told.stdout.strip()
