"""`m1clip runs`: every run of a folder in one table."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from m1clip.errors import UserError
from m1clip.runlog import SELECTION, Preparing
from m1clip.watch.eta import elapsed, seconds_left
from m1clip.watch.history import History
from m1clip.watch.state import find_runs, status_of
from m1clip.watch.words import ago, clock, percent


@dataclass(frozen=True)
class RunRow:
    """One run as the list shows it."""

    run: str
    state: str
    step: int
    steps: int
    metric: str  # the figure that chooses the best model
    best: float | None
    chance: float | None
    seconds: float | None  # trained
    seconds_left: float | None
    last_time: float
    pid: int | None
    preparing: Preparing | None = None


def list_runs(folder: Path) -> list[RunRow]:
    """The runs of a folder, the newest last."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; m1clip train makes runs/, or name the folder that holds your runs"
        )
    return [row_of(run) for run in find_runs(folder)]


def row_of(run: Path) -> RunRow:
    """What the log of one run says."""
    history = History(run).poll_all()
    status = status_of(history)
    best = history.best() or {}
    return RunRow(
        str(run),
        status.state,
        history.step,
        history.total,
        history.metric,
        best.get(history.metric),
        best.get(f"{history.metric}/chance"),
        elapsed(history),
        seconds_left(history) if status.state == "running" else None,
        history.last_time,
        status.pid,
        status.preparing,
    )


def as_json(rows: list[RunRow]) -> str:
    """For a program."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def as_table(rows: list[RunRow], folder: Path) -> str:
    """For a person; widths follow the content."""
    if not rows:
        return f"{folder}: no runs yet; m1clip train begins one"
    head = ("run", "state", "progress", "trained", "best so far", "news")
    cells = [head]
    for row in rows:
        progress = f"{row.step:,}/{row.steps:,}" if row.steps else "-"
        if row.preparing is not None:
            progress = row.preparing.words()
        if row.seconds_left is not None:
            progress += f" ({clock(row.seconds_left)} left)"
        best = "-" if row.best is None else f"{SELECTION[row.metric]} {percent(row.best)}"
        if row.best is not None and row.chance:
            best += f" (chance {100 * row.chance:.2g}%)"
        cells.append((
            row.run, row.state, progress, "-" if row.seconds is None else clock(row.seconds), best,
            ago(time.time() - row.last_time) if row.last_time else "-",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
