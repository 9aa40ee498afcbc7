"""Promise 11: elapsed time, time left and diagnostics stay right if the clock is changed or the machine sleeps."""

from __future__ import annotations

import itertools
import random
import sys
import time
from pathlib import Path

import psutil
import pytest
from small_run import run_small

from m1clip import console
from m1clip.formatting import ago
from m1clip.io import RUN_LOCK, lock_content, process_start_id, read_owner
from m1clip.monitor.diagnostics import diagnose
from m1clip.monitor.history import History
from m1clip.monitor.status import elapsed as elapsed_seconds
from m1clip.monitor.status import seconds_left, status_of
from m1clip.runlog import read_log
from m1clip.training.logger import TrainingDisplay

sys.path.append(str(Path(__file__).parents[1]))
from monitor.made_runs import BEGIN, evaluation, make_run, step

HOUR = 3600.0


def history_of(run: Path) -> History:
    history = History(run)
    history.poll()
    return history


def test_durations_are_right_while_the_clock_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = itertools.cycle([0.0, HOUR, -2 * HOUR, 5.0, -24 * HOUR])
    original = time.time
    monkeypatch.setattr(time, "time", lambda: original() + next(jumps))
    begin = time.perf_counter()
    run_small(tmp_path / "run", {"train.steps": 24, "train.eval_every": 8})
    spent = time.perf_counter() - begin
    monkeypatch.undo()
    records = list(read_log(tmp_path / "run"))
    stamps = [record["time"] for record in records]
    assert max(stamps) - min(stamps) > HOUR, "the clock did jump"
    elapsed = [record["elapsed"] for record in records if record["kind"] == "step"]
    assert elapsed == sorted(elapsed)
    assert 0 < elapsed[-1] < spent
    assert all(0 < record["step_seconds"] < spent for record in records if record["kind"] == "step")
    assert all(0 < record["seconds"] < spent for record in records if record["kind"] == "eval")


@pytest.mark.parametrize("jump", [-HOUR, HOUR, -10 * 365 * 24 * HOUR])
def test_time_left_and_diagnostics_ignore_the_clock(tmp_path: Path, jump: float) -> None:
    rows = [step(n, time=BEGIN + 0.5 * n + (jump if n > 40 else 0)) for n in range(10, 90, 2)]
    original = make_run(
        tmp_path / "original", [evaluation(8, 0.2), *(step(n) for n in range(10, 90, 2))]
    )
    run = make_run(tmp_path / "jumped", [evaluation(8, 0.2), *rows])
    assert seconds_left(history_of(run)) == seconds_left(history_of(original))
    assert elapsed_seconds(history_of(run)) == elapsed_seconds(history_of(original))
    now = rows[-1]["time"] + 1
    words = " ".join(diagnosis.message for diagnosis in diagnose(history_of(run), now, "running"))
    assert "slower" not in words
    assert "nothing logged" not in words


def test_run_that_stops_logging_after_the_clock_was_set_back_is_stalled(tmp_path: Path) -> None:
    times = [BEGIN + 10 * HOUR + n for n in range(8)] + [BEGIN + n for n in range(3)]
    history = history_of(
        make_run(tmp_path, [step(n, time=time) for n, time in enumerate(times, 1)])
    )
    assert history.last_time == times[-1]
    words = [
        " ".join(diagnosis.message for diagnosis in diagnose(history, times[-1] + after, "running"))
        for after in (1, 200)
    ]
    assert ["nothing logged" in text for text in words] == [False, True]
    assert ago(-HOUR) == "0 s ago"


def test_one_step_of_an_hour_does_not_change_the_time_left(tmp_path: Path) -> None:
    """Where the system counts the sleep as time, one step seems to have taken an hour."""
    display = TrainingDisplay()
    with console.capture() as output:
        display.begin(0, 1000)
        for number in range(1, 12):
            display._last_line = -1e9
            display.step({**step(number), "step_seconds": HOUR / 10 if number == 5 else 0.1})
    assert output.getvalue().endswith("1:39 left\n")
    rows = [step(n, step_seconds=HOUR if n == 70 else 0.5) for n in range(10, 90, 2)]
    history = history_of(make_run(tmp_path, rows))
    left = seconds_left(history)
    assert left is not None
    assert left < 60
    words = " ".join(
        diagnosis.message for diagnosis in diagnose(history, rows[-1]["time"] + 1, "running")
    )
    assert "slower" not in words


def test_running_process_is_found_after_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if " " not in process_start_id(psutil.Process()):
        pytest.skip("this system measures the start of a process by the clock only")
    (tmp_path / RUN_LOCK).write_text(lock_content())
    make_run(tmp_path, [step(10)])
    original = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: original(self) - HOUR)
    owner = read_owner(tmp_path)
    assert owner is not None
    assert owner.process() is not None
    assert status_of(history_of(tmp_path)).state == "running"
    # A later process with the same pid is a different one.
    boot, ticks = owner.start_id.split()
    for other in (f"{boot} {int(ticks) + 1}", f"0000-{boot[5:]} {ticks}"):
        (tmp_path / RUN_LOCK).write_text(lock_content().replace(owner.start_id, other))
        reused = read_owner(tmp_path)
        assert reused is not None
        assert reused.process() is None


@pytest.mark.long("Clock and sleep")
def test_many_clock_jumps(tmp_path: Path, counts: dict[str, float]) -> None:
    draw = random.Random(0)
    expected = seconds_left(
        history_of(make_run(tmp_path / "undisturbed", [step(n) for n in range(2, 90, 2)]))
    )
    for number in range(500):
        clock, rows = BEGIN, []
        for n in range(2, 90, 2):
            clock += draw.choice([1.0, 1.0, 1.0, draw.uniform(-5 * HOUR, 5 * HOUR)])
            rows.append(step(n, time=clock))
        assert seconds_left(history_of(make_run(tmp_path / str(number), rows))) == expected
    counts["logs with a clock that jumps"] = 500
