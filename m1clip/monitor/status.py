"""Is a run running, finished, stopped or dead? From its folder and a verified process."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from m1clip.errors import UserError
from m1clip.formatting import ago, clock, percent, table
from m1clip.io import LOCK, read_owner
from m1clip.monitor.history import History
from m1clip.runlog import NAME, SELECTION, Preparing, RunLog, read_preparing

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


def step_seconds(history: History) -> float | None:
    """The median of the newest steps of this session."""
    values = [r["step_seconds"] for r in history.recent if isinstance(r.get("step_seconds"), int | float)]
    return statistics.median(values) if values else None


def seconds_left(history: History) -> float | None:
    """Steps still to do and evaluations on the way and at the end; None before the first measured step."""
    per_step = step_seconds(history)
    if per_step is None or not history.total or history.end:
        return None
    left = max(0, history.total - history.step)
    evaluations = [r["seconds"] for r in history.evaluations if isinstance(r.get("seconds"), int | float)]
    each = statistics.median(evaluations) if evaluations else 0.0
    every = history.setting("train", "eval_every", int) or history.total
    still = history.total // every - history.step // every + (history.total % every > 0)
    return left * per_step + (still + 1) * each  # and the test split at the end


def elapsed(history: History) -> float | None:
    """Seconds of training so far, over all sessions."""
    last = history.steps.last
    return None if last is None else last.get("elapsed")


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
        raise UserError(f"{folder}: no such folder; m1clip train makes runs/, or name the folder that holds your runs")
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
    """For the terminal."""
    if not rows:
        return f"{folder}: no runs yet; m1clip train starts one"
    lines = []
    for row in rows:
        progress = f"{row.step:,}/{row.steps:,}" if row.steps else "-"
        if row.preparing is not None:
            progress = row.preparing.words()
        if row.seconds_left is not None:
            progress += f" ({clock(row.seconds_left)} left)"
        best = "-" if row.best is None else f"{SELECTION[row.metric]} {percent(row.best)}"
        if row.best is not None and row.chance:
            best += f" (chance {percent(row.chance)})"
        updated = ago(time.time() - row.last_time) if row.last_time else "-"
        lines.append((row.run, row.state, progress, clock(row.seconds), best, updated))
    return table(("run", "state", "progress", "trained", "best so far", "updated"), lines)


def stop_run(run: Path, wait: float) -> str:
    """SIGTERM to the verified process; waits until it is gone, and says where the run stands."""
    owner = read_owner(need_run(run))
    process = owner.process() if owner else None
    if owner is not None and process is None and not owner.here:
        raise UserError(f"{run}: it was started on {owner.host}; stop it there")
    if owner is None or process is None:
        raise UserError(f"{run}: nothing to stop: it {status_of(History(run).poll_all()).words}")
    process.terminate()
    begin = time.monotonic()
    while owner.process() is not None:  # unlike process.wait, a zombie that nobody has reaped counts as gone
        if time.monotonic() - begin > wait:
            raise UserError(
                f"{run}: process {process.pid} was asked to stop {wait:g} s ago and is still at its step; "
                f"it will stop by itself, or wait longer with --wait {10 * wait:g}"
            )
        time.sleep(0.05)
    if not run.exists():
        return f"{run}: stopped while it prepared its data; nothing had been trained, so the folder is gone"
    history = History(run).poll_all()
    status = status_of(history)
    if status.state == "died" and (run / NAME).is_file():
        # Asked before its first step or after its last one, where no step is left to save.
        log = RunLog(run)
        log.write("event", step=history.step, event="stopped by m1clip stop")
        log.close()
    if status.state == "finished":
        return f"{run}: had just finished"
    took = time.monotonic() - begin
    return f"{run}: stopped at step {history.step:,} after {took:.1f} s; continue with: m1clip train --resume {run}"
