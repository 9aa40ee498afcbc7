"""What is known of a run: restarts, late finds, time left, state."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from m1clip.errors import UserError
from m1clip.io import Owner, lock_content, read_owner
from m1clip.monitor.history import History, Thinned, decline
from m1clip.monitor.status import (
    as_table,
    find_runs,
    list_runs,
    need_run,
    newest_run,
    seconds_left,
    status_of,
    stop_run,
)

from .made_runs import BEGIN, append, ended, evaluation, full_run, line, make_run, step


def test_a_killed_run_that_goes_on_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, [step(n) for n in range(10, 60, 10)] + [evaluation(50, 0.5)])
    history = History(run).poll_all()
    generation = history.generation
    append(run, [line("start", step=30, steps=100), step(40, loss=9.0)])
    history.poll_all()
    assert [row["step"] for row in history.steps] == [10, 20, 30, 40]
    assert list(history.steps)[-1]["loss"] == 9.0
    assert list(history.evaluations) == []
    assert history.generation > generation
    assert history.sessions == 2


def test_numbers_that_are_none_leave_a_gap(tmp_path: Path) -> None:
    history = History(make_run(tmp_path, [step(1), step(2, loss="nan"), line("step"), step(3)])).poll_all()
    assert [("loss" in row) for row in history.steps] == [True, False, True]


def test_the_time_left_comes_from_measured_steps_and_evaluations(tmp_path: Path) -> None:
    history = History(make_run(tmp_path, [step(40), step(60), evaluation(50, 0.1)])).poll_all()
    # 40 steps of half a second, one evaluation at 100 and the test split, two seconds each
    assert seconds_left(history) == pytest.approx(40 * 0.5 + 2 * 2.0)
    assert seconds_left(History(make_run(tmp_path / "new", []))) is None
    assert seconds_left(History(full_run(tmp_path / "done")).poll_all()) is None


def test_late_rows_find_their_place_and_stay_few() -> None:
    curve = Thinned(10)
    curve.add({"step": 100})
    for number in (50, 30, 30, 70):
        curve.insert({"step": number})
    assert [row["step"] for row in curve] == [30, 50, 70, 100]
    for number in range(1000):
        curve.insert({"step": 2 * number + 1})
    assert len(curve) <= 12
    assert curve.last == {"step": 1999}


def test_state_of_finished_stopped_and_dead_runs(tmp_path: Path) -> None:
    assert status_of(History(full_run(tmp_path / "done")).poll_all()).state == "finished"
    dead = make_run(tmp_path / "dead", [step(10)])
    assert status_of(History(dead).poll_all()).state == "died"
    append(dead, [line("event", step=10, event="stopped by signal 15")])
    assert status_of(History(dead).poll_all()).state == "stopped"
    append(dead, [line("start", step=10, steps=100), step(20)])
    assert status_of(History(dead).poll_all()).state == "died"  # it went on, and then died


def test_a_process_counts_only_if_it_began_when_the_lock_says(tmp_path: Path) -> None:
    run = make_run(tmp_path, [step(10)])
    (run / "run.lock").write_text(lock_content())
    status = status_of(History(run).poll_all())
    assert (status.state, status.pid) == ("running", os.getpid())
    started = psutil.Process().create_time()
    (run / "run.lock").write_text(f"{os.getpid()}\n{started - 60}\n{platform.node()}\n")
    assert status_of(History(run).poll_all()).state == "died"  # the number was given to another process
    (run / "run.lock").write_text(f"{os.getpid()}\n")  # as older versions wrote it
    assert read_owner(run) is None
    assert status_of(History(run).poll_all()).state == "died"


def test_a_run_of_another_machine_is_judged_by_its_log(tmp_path: Path) -> None:
    run = make_run(tmp_path, [step(10)])
    (run / "run.lock").write_text("1\n1.0\nsomewhere-else\n")
    assert status_of(History(run).poll_all(), now=BEGIN + 20).state == "running"
    assert status_of(History(run).poll_all(), now=BEGIN + 5000).state == "died"
    with pytest.raises(UserError, match="started on somewhere-else; stop it there"):
        stop_run(run, 1.0)


def test_a_process_that_ended_is_gone_even_before_its_parent_looked(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner(child.pid, psutil.Process(child.pid).create_time(), platform.node())
    assert owner.process() is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert owner.process() is None
    child.communicate(timeout=30)
    assert owner.process() is None


def test_stopping_what_does_not_run_says_how_it_ended(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to stop: it finished at step 100"):
        stop_run(full_run(tmp_path / "done"), 1.0)
    with pytest.raises(UserError, match=r"no such run; there: done"):
        stop_run(tmp_path / "dome", 1.0)


def test_runs_are_found_and_listed(tmp_path: Path) -> None:
    full_run(tmp_path / "b-done", recall=0.4)
    make_run(tmp_path / "a-dead", [step(10), evaluation(10, 0.2), evaluation(20, 0.1)])
    (tmp_path / "not-a-run").mkdir()
    os.utime(tmp_path / "a-dead" / "run.jsonl", (BEGIN, BEGIN))
    assert [run.name for run in find_runs(tmp_path)] == ["a-dead", "b-done"]
    assert newest_run(tmp_path).name == "b-done"
    rows = {Path(row.run).name: row for row in list_runs(tmp_path)}
    assert (rows["a-dead"].state, rows["a-dead"].step, rows["a-dead"].best) == ("died", 10, 0.2)
    assert (rows["b-done"].state, rows["b-done"].step, rows["b-done"].steps) == ("finished", 100, 100)
    table = as_table(list(rows.values()), tmp_path)
    assert "finished" in table
    assert "40.0% (chance 1.0%)" in table
    (tmp_path / "a-dead" / "run.lock").write_text(lock_content())
    assert newest_run(tmp_path).name == "a-dead"  # the one that runs
    with pytest.raises(UserError, match="not a run folder"):
        need_run(tmp_path / "not-a-run")


def test_the_decline_is_divided_among_the_phases() -> None:
    points = [(n, 10.0 - n / 10) for n in range(0, 101)]
    phases = decline(points, warmup=10)
    assert [phase.name for phase in phases] == ["warm-up", "first third", "middle third", "last third"]
    assert sum(phase.share for phase in phases) == pytest.approx(1.0)
    assert phases[0].share == pytest.approx(0.1, abs=0.02)
    assert decline(points[:5], 0) == []
    assert decline(points, 0)[0].name == "first third"
    assert ended(5, 0.5)["kind"] == "end"
