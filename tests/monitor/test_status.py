"""The state of a run, the time left, the list of runs and stopping one."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from m1clip.errors import UserError
from m1clip.io import Owner, lock_content, process_start_id
from m1clip.monitor import status
from m1clip.monitor.history import History
from m1clip.monitor.status import as_table, list_runs, newest_run, require_run, status_of, stop_run

from .made_runs import BEGIN, append, evaluation, full_run, line, make_run, step


def state_of(run: Path, now: float | None = None) -> str:
    return status_of(History(run).poll(), now).state


def test_time_left_from_measured_steps_and_evaluations(tmp_path: Path) -> None:
    history = History(make_run(tmp_path, [step(40), step(60), evaluation(50, 0.1)])).poll()
    # 40 steps of half a second, one evaluation at 100 and the test split, two seconds each
    assert status.seconds_left(history) == pytest.approx(40 * 0.5 + 2 * 2.0)
    assert status.seconds_left(History(make_run(tmp_path / "new", [])).poll()) is None
    assert status.seconds_left(History(full_run(tmp_path / "done")).poll()) is None


def test_state_of_finished_stopped_and_dead_runs(tmp_path: Path) -> None:
    assert state_of(full_run(tmp_path / "done")) == "finished"
    dead = make_run(tmp_path / "dead", [step(10)])
    assert state_of(dead) == "crashed"
    append(dead, [line("event", step=10, event="stopped by signal 15")])
    assert state_of(dead) == "stopped"
    append(dead, [line("start", step=10, steps=100), step(20)])
    assert state_of(dead) == "crashed"  # it continued, and then crashed


def test_state_of_run_on_another_machine_comes_from_log(tmp_path: Path) -> None:
    run = make_run(tmp_path, [step(10)])
    (run / "run.lock").write_text("1\nsomewhere-else\n1.0\n")
    assert state_of(run, now=BEGIN + 20) == "running"
    assert state_of(run, now=BEGIN + 5000) == "crashed"
    with pytest.raises(UserError, match="started on somewhere-else; stop it there"):
        stop_run(run, 1.0)


def test_zombie_process_counts_as_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner(child.pid, platform.node(), process_start_id(psutil.Process(child.pid)))
    assert owner.process() is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert owner.process() is None
    child.communicate(timeout=300)
    assert owner.process() is None


def test_runs_are_found_listed_and_required(tmp_path: Path) -> None:
    full_run(tmp_path / "b-done", recall=0.4)
    make_run(tmp_path / "a-dead", [step(10), evaluation(10, 0.2), evaluation(20, 0.1)])
    (tmp_path / "not-a-run").mkdir()
    os.utime(tmp_path / "a-dead" / "run.jsonl", (BEGIN, BEGIN))
    assert [run.name for run in status.find_runs(tmp_path)] == ["a-dead", "b-done"]
    assert newest_run(tmp_path).name == "b-done"
    rows = {Path(row["run"]).name: row for row in list_runs(tmp_path)}
    assert [rows["a-dead"][name] for name in ("state", "step", "best")] == ["crashed", 10, 0.2]
    assert [rows["b-done"][name] for name in ("state", "step", "steps")] == ["finished", 100, 100]
    assert "mean recall 40.0% (chance 1.0%)" in as_table(list(rows.values()), tmp_path)
    (tmp_path / "a-dead" / "run.lock").write_text(lock_content())
    assert newest_run(tmp_path).name == "a-dead"  # the one that is running
    with pytest.raises(UserError, match="not a run folder"):
        require_run(tmp_path / "not-a-run")
    with pytest.raises(UserError, match="no such run; there: a-dead, b-done"):
        stop_run(tmp_path / "dome", 1.0)
    with pytest.raises(UserError, match="nothing to stop: it finished at step 100"):
        stop_run(tmp_path / "b-done", 1.0)
