"""Is a run running, finished, stopped or dead? From its folder and a verified process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from m1clip.errors import UserError
from m1clip.owner import LOCK, read_owner
from m1clip.runlog import NAME, Preparing, read_preparing
from m1clip.watch.history import History

State = Literal["preparing", "running", "finished", "stopped", "died"]
FRESH = 120.0  # seconds: a run of another machine is taken for alive while its log is younger
STOPPED = ("stopped", "early stop")


@dataclass(frozen=True)
class Status:
    """The state of a run, and why in words."""

    state: State
    words: str
    pid: int | None = None
    preparing: Preparing | None = None


def status_of(history: History, now: float | None = None) -> Status:
    """What the log says and whether its process lives."""
    run, now = history.run, time.time() if now is None else now
    owner = read_owner(run)
    process = owner.process() if owner else None
    if process is not None:
        preparing = read_preparing(run)
        if preparing is not None:
            return Status("preparing", preparing.words(), process.pid, preparing)
        if history.steps or history.start:
            finishing = history.total and history.step >= history.total
            return Status("running", "last evaluation" if finishing else "running", process.pid)
        return Status("preparing", "preparing its data", process.pid)
    if history.end:
        return Status("finished", f"finished at step {history.step:,}")
    if owner is not None and not owner.here and now - history.last_time < FRESH:
        return Status("running", f"running on {owner.host}, as its log says")
    if _was_stopped(history):
        return Status("stopped", f"stopped at step {history.step:,}")
    return Status("died", f"died at step {history.step:,}: its process is gone and it did not finish")


def _was_stopped(history: History) -> bool:
    for record in reversed(history.events):
        if record["kind"] == "event" and str(record.get("event", "")).startswith("stopped"):
            return True
        if record["kind"] in ("start", "event"):
            return False
    return False


def is_run(folder: Path) -> bool:
    """A folder that a run was made in, or is being made in."""
    return any((folder / name).is_file() for name in (NAME, "config.toml", LOCK))


def find_runs(folder: Path) -> list[Path]:
    """The runs in a folder (or the folder itself, if it is one), the newest last."""
    if is_run(folder):
        return [folder]
    if not folder.is_dir():
        return []
    return sorted((item for item in folder.iterdir() if item.is_dir() and is_run(item)), key=_age)


def _age(run: Path) -> float:
    for name in (NAME, "config.toml", LOCK):
        if (run / name).is_file():
            return (run / name).stat().st_mtime
    return 0.0


def need_run(run: Path) -> Path:
    """The folder, or a UserError that says what is there instead."""
    if is_run(run):
        return run
    if not run.exists():
        near = [path.name for path in find_runs(run.parent)][-5:]
        hint = f"; there: {', '.join(near)}" if near else ""
        raise UserError(f"{run}: no such run{hint} (m1clip runs lists them)")
    inside = [str(path) for path in find_runs(run)][-5:]
    hint = f"; it holds the runs {', '.join(inside)}" if inside else ""
    raise UserError(f"{run}: not a run folder (no {NAME}){hint}")


def newest_run(folder: Path) -> Path:
    """The run to look at when none is named: one that is running, else the newest."""
    runs = find_runs(folder)
    if not runs:
        raise UserError(f"{folder}: no runs there; begin one with m1clip train, or name a run folder")
    for run in reversed(runs):
        owner = read_owner(run)
        if owner is not None and owner.process() is not None:
            return run
    return runs[-1]
