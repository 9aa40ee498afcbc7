"""Reading a log that grows, tears, is replaced, or is very long."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from m1clip.monitor import history as follow
from m1clip.monitor.history import Follower, History

from .made_runs import append, evaluation, line, make_run, step


def test_only_whole_lines_are_given_and_each_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, [step(1)])
    follower = Follower(run)
    assert [record["kind"] for record in follower.read()[1]] == ["start", "step"]
    text = json.dumps(step(2)).encode()
    with (run / "run.jsonl").open("ab") as file:
        file.write(text[:20])
    assert follower.read() == (False, [])
    with (run / "run.jsonl").open("ab") as file:
        file.write(text[20:] + b"\n")
    assert [record["step"] for record in follower.read()[1]] == [2]
    assert follower.read() == (False, [])


def test_a_torn_line_that_a_later_session_ended_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path, [step(1)])
    with (run / "run.jsonl").open("ab") as file:
        file.write(b'{"v":1,"kind":"step","lo\n\xff\xfe\n[1,2]\n{"kind":7}\n{"v":99,"kind":"step"}\n')
    append(run, [step(2)])
    assert [record.get("step") for record in Follower(run).read()[1]] == [0, 1, 2]


def test_a_log_that_is_not_there_yet_and_one_that_is_replaced(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.read() == (False, [])
    make_run(tmp_path, [step(1), step(2)])
    assert len(follower.read()[1]) == 3
    (tmp_path / "run.jsonl").unlink()
    make_run(tmp_path, [step(5)])
    replaced, records = follower.read()
    assert replaced
    assert [record["step"] for record in records] == [0, 5]
    (tmp_path / "run.jsonl").unlink()
    assert follower.read() == (True, [])


def long_log(run: Path, steps: int, every: int) -> int:
    """Many steps and few evaluations; gives the size in bytes."""
    make_run(run, [], steps=steps)
    records = []
    for number in range(1, steps + 1):
        records.append(step(number))
        if number % every == 0:
            records.append(evaluation(number, number / steps))
    append(run, records)
    return (run / "run.jsonl").stat().st_size


def test_of_a_long_log_little_is_read_at_first_and_every_evaluation_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("HEAD", 4096), ("TAIL", 8192), ("SAMPLES", 32), ("SAMPLE", 2048), ("AT_ONCE", 50_000)):
        monkeypatch.setattr(follow, name, value)
    size = long_log(tmp_path, 3000, 250)
    assert size > 10 * (4096 + 8192 + 32 * 2048)
    parsed = []
    real = follow.parse
    monkeypatch.setattr(follow, "parse", lambda text: parsed.append(len(text)) or real(text))
    history = History(tmp_path)
    history.poll()
    assert sum(parsed) < 4096 + 8192 + 32 * 2048
    assert history.step == 3000
    assert history.total == 3000
    assert not history.follower.complete
    seen = [row["step"] for row in history.steps]
    assert seen == sorted(seen)
    assert len(seen) > 40
    assert max(b - a for a, b in pairwise(seen)) < 400  # no large hole in the curve
    history.poll_all()
    assert history.follower.complete
    assert [row["step"] for row in history.evaluations] == list(range(250, 3001, 250))
    assert sum(parsed) < size / 4  # the steps in between were never parsed
    append(tmp_path, [step(3001)])
    assert history.poll()
    assert history.step == 3001


def test_memory_stays_bounded_however_long_it_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path, [])
    history = History(run)
    for begin in range(0, 20_000, 5000):
        append(run, [step(number) for number in range(begin + 1, begin + 5001)])
        append(run, [line("event", step=begin, event="x")] * 300)
        history.poll_all()
    assert len(history.steps) <= 2001
    assert len(history.events) <= 200
    assert len(history.arrived) <= 2000
    assert history.steps.last is not None
    assert history.steps.last["step"] == 20_000
    gaps = [b["step"] - a["step"] for a, b in pairwise(history.steps)]
    assert max(gaps[:-1]) == min(gaps[:-1])  # thinned evenly
