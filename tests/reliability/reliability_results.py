"""The results of the long tests: rows that the tests write themselves, one for each promise or part of one.

They go to the file that the environment variable M1CLIP_RELIABILITY names; without it nothing is kept. Any number of
processes may write to one file. `reliability_merge.py` adds the parts up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from m1clip.hardware.facts import read_facts
from m1clip.io import write_text

ROOT = Path(__file__).parents[2]
ROWS = "M1CLIP_RELIABILITY"  # the file of rows
COMMIT = "M1CLIP_COMMIT"  # which source it is, where the tree is a copy without git
UNFINISHED = "FAILED (not finished)"
PASSED = "passed"
Rows = dict[str, Any]


def record(promise: str, counts: dict[str, Any], result: str, whole: bool = True, file: Path | None = None) -> None:
    """Put the row of a promise, or of a part, in its place; `whole` says that the counts are those of the long form."""
    if file is None and ROWS not in os.environ:
        return
    row = {"counts": counts, "result": result, "long_form": whole, **place(), "commit": commit()}
    put({promise: row}, file or Path(os.environ[ROWS]))


@contextlib.contextmanager
def recorded(promise: str, part: int = 1, of: int = 1, file: Path | None = None) -> Iterator[dict[str, Any]]:
    """A long test, or one of its parts: FAILED stands in its row from its start, until it ends well.

    It puts its counts into the dict; those of the parts are added up later.
    """
    name = f"{promise}, part {part} of {of}" if of > 1 else promise
    counts: dict[str, Any] = {}
    record(name, counts, UNFINISHED, file=file)
    yield counts
    record(name, counts, PASSED, file=file)


def put(rows: Rows, file: Path) -> None:
    """Put rows into a file beside those that are there; one process after the other."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:  # stays: who removes it takes it from one who waits for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_rows({**rows_of(file), **rows}, file)


def write_rows(rows: Rows, file: Path) -> None:
    """All rows of a file, in order of their names."""
    write_text(file, json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


def rows_of(file: Path) -> Rows:
    """All rows by name."""
    rows: Rows = json.loads(file.read_text()) if file.exists() else {}
    return rows


@cache
def place() -> dict[str, str]:
    """Where a row was counted: processor, cores, system, torch."""
    facts = read_facts()
    cpu = facts.cpu or facts.machine
    return {"machine": f"{cpu}, {os.cpu_count()} cores, {facts.system}", "torch": torch.__version__}


def commit() -> str:
    """Which source was tested; with a + where it was changed since."""
    if told := os.environ.get(COMMIT):
        return told
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()
