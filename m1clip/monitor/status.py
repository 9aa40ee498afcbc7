"""The state of a run (running, finished, stopped, crashed), from its folder and process."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from m1clip.errors import UserError
from m1clip.formatting import ago, ceil_div, clock, percent, table
from m1clip.io import RUN_LOCK, read_owner
from m1clip.monitor.history import History, numbers
from m1clip.runlog import NAME, SELECTION, RunLog, read_preparing

State = Literal["preparing", "running", "finished", "stopped", "crashed"]
FRESH = 120.0  # seconds: a run on another machine counts as running while its log is younger


@dataclass(frozen=True)
class Status:
    state: State
    message: str
    pid: int | None = None


def status_of(history: History, now: float | None = None) -> Status:
    owner = read_owner(history.run)
    process = owner.process() if owner else None
    if process is not None:
        preparing = read_preparing(history.run)
        if preparing is not None or not (history.start or history.steps.last):
            return Status("preparing", preparing or "preparing its data", process.pid)
        finishing = history.total and history.step >= history.total
        return Status("running", "last evaluation" if finishing else "running", process.pid)
    if history.end:
        return Status("finished", f"finished at step {history.step:,}")
    if (
        owner is not None
        and not owner.on_this_machine
        and (now or time.time()) - history.last_time < FRESH
    ):
        return Status("running", f"running on {owner.host}, according to its log")
    last = next(
        (event for event in reversed(history.latest.events) if event["kind"] in ("start", "event")),
        {},
    )
    if str(last.get("event", "")).startswith("stopped"):
        return Status("stopped", f"stopped at step {history.step:,}")
    return Status(
        "crashed", f"crashed at step {history.step:,}: its process ended before the run finished"
    )


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (NAME, "config.toml", RUN_LOCK))


def find_runs(folder: Path) -> list[Path]:
    """The runs in a folder (or the folder itself, if it is one), the newest last."""
    if is_run(folder):
        return [folder]
    if not folder.is_dir():
        return []

    def changed(run: Path) -> float:
        return next(
            (
                (run / name).stat().st_mtime
                for name in (NAME, "config.toml", RUN_LOCK)
                if (run / name).is_file()
            ),
            0,
        )

    return sorted(
        (item for item in folder.iterdir() if item.is_dir() and is_run(item)), key=changed
    )


def require_run(run: Path) -> Path:
    """Return the folder, or raise UserError if it is not a run."""
    if is_run(run):
        return run
    if not run.exists():
        near = [path.name for path in find_runs(run.parent)][-5:]
        hint = f"; there: {', '.join(near)}" if near else ""
        raise UserError(f"{run}: no such run{hint} (m1clip runs lists them)")
    inside = [str(path) for path in find_runs(run)][-5:]
    hint = f"; it contains the runs {', '.join(inside)}" if inside else ""
    raise UserError(f"{run}: not a run folder (no {NAME}){hint}")


def newest_run(folder: Path) -> Path:
    """The run to show when none is named: one that is running, else the newest."""
    runs = find_runs(folder)
    if not runs:
        raise UserError(
            f"{folder}: contains no runs; start one with m1clip train, or give a run folder"
        )
    running = [
        run
        for run in runs
        if (owner := read_owner(run)) is not None and owner.process() is not None
    ]
    return (running or runs)[-1]


def seconds_left(history: History) -> float | None:
    """The remaining steps and evaluations; None before the first measured step."""
    step_seconds = numbers(history.latest.steps, "step_seconds")
    if not step_seconds or not history.total or history.end:
        return None
    evaluation = statistics.median(numbers(history.evaluations, "seconds") or [0.0])
    steps = max(0, history.total - history.step)
    if per_run := history.files.setting("train", "evaluations", int):
        evaluations = ceil_div(per_run * steps, history.total)
    else:
        every = history.files.setting("train", "eval_every", int) or history.total
        evaluations = history.total // every - history.step // every + (history.total % every > 0)
    # And the test split at the end.
    return steps * statistics.median(step_seconds) + (evaluations + 1) * evaluation


def elapsed(history: History) -> float | None:
    """Seconds of training so far, over all sessions."""
    return (history.steps.last or {}).get("elapsed")


def summary(history: History) -> dict[str, Any]:
    """What the list of runs and the page show of a run."""
    status, best = status_of(history), history.best()
    return {
        "run": str(history.run),
        "state": status.state,
        "message": status.message,
        "step": history.step,
        "steps": history.total,
        "metric": SELECTION[history.metric],  # selects the best model
        "best": best.get(history.metric),
        "best_step": best.get("step"),
        "chance": best.get(f"{history.metric}/chance"),
        "seconds": elapsed(history),
        "seconds_left": seconds_left(history) if status.state == "running" else None,
        "last_time": history.last_time,
        "pid": status.pid,
    }


def list_runs(folder: Path) -> list[dict[str, Any]]:
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; m1clip train creates runs/, or give the folder of your runs"
        )
    return [summary(History(run).poll()) for run in find_runs(folder)]


def as_table(rows: list[dict[str, Any]], folder: Path) -> str:
    if not rows:
        return f"{folder}: no runs yet; m1clip train starts one"
    lines = []
    for row in rows:
        progress = f"{row['step']:,}/{row['steps']:,}" if row["steps"] else "-"
        if row["state"] == "preparing":
            progress = row["message"]
        if row["seconds_left"] is not None:
            progress += f" ({clock(row['seconds_left'])} left)"
        best = "-" if row["best"] is None else f"{row['metric']} {percent(row['best'])}"
        if row["best"] is not None and row["chance"]:
            best += f" (chance {percent(row['chance'])})"
        updated = ago(time.time() - row["last_time"]) if row["last_time"] else "-"
        lines.append((row["run"], row["state"], progress, clock(row["seconds"]), best, updated))
    return table(("run", "state", "progress", "trained", "best so far", "updated"), lines)


def stop_run(run: Path, wait: float) -> str:
    """Send SIGTERM to the verified process and wait for it to exit; returns a summary."""
    owner = read_owner(require_run(run))
    process = owner.process() if owner else None
    if owner is not None and process is None and not owner.on_this_machine:
        raise UserError(f"{run}: it was started on {owner.host}; stop it there")
    if owner is None or process is None:
        raise UserError(f"{run}: nothing to stop: it {status_of(History(run).poll()).message}")
    process.terminate()
    start = time.monotonic()
    while owner.process() is not None:  # unlike process.wait, counts a zombie as gone
        if time.monotonic() - start > wait:
            raise UserError(
                f"{run}: process {process.pid} has not finished its step within {wait:g} s; "
                f"it will still stop on its own; to wait longer, use --wait {10 * wait:g}"
            )
        time.sleep(0.05)
    if not run.exists():
        return (
            f"{run}: stopped while preparing data; nothing had been trained, so the folder was"
            " removed"
        )
    history = History(run).poll()
    status = status_of(history)
    if status.state == "finished":
        return f"{run}: had just finished"
    if status.state == "crashed" and (run / NAME).is_file():
        # Stopped before its first step or after its last one, where no step is left to save.
        log = RunLog(run)
        log.write("event", step=history.step, event="stopped by m1clip stop")
        log.close()
    took = time.monotonic() - start
    return (
        f"{run}: stopped at step {history.step:,} after {took:.1f} s; continue with: m1clip train"
        f" --resume {run}"
    )
