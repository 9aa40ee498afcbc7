"""Where the time of a command goes: parts within parts count once, and the sum is the time of the command."""

import json
import threading
import time

import psutil
import pytest
from simulated_load import SimulatedTime
from small_run import finished_run

from m1clip import time_use
from m1clip.time_use import TimeUse


def test_nested_parts_count_once() -> None:
    times = iter([0.0, 1.0, 4.0, 6.0, 7.0, 7.5])
    use = TimeUse(lambda: next(times))
    with use.part("training"), use.part("evaluation"):
        pass
    assert use.by_part() == {"training": 4.0, "evaluation": 2.0, "other": 1.5}


def test_other_threads_are_ignored() -> None:
    use = TimeUse()

    def work() -> None:
        with use.part("saving"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert use.by_part().keys() == {"other"}


def test_part_of_a_failed_block_ends() -> None:
    use = TimeUse()
    try:
        with use.part("data"):
            raise ValueError
    except ValueError:
        pass
    assert use.stack == []


def test_description_names_the_largest_first() -> None:
    seconds = {"imports": 2.0, "training": 60.04, "other": 0.01}
    assert time_use.describe(seconds) == "1:02 in all: training 60.0 s, imports 2.0 s"


def test_command_is_counted_from_the_start_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: what a notebook does afterwards begins when it is called."""
    clock = SimulatedTime()
    clock.now = 20.0
    clock.install(monkeypatch, time_use)
    monkeypatch.setattr(time_use, "process_seconds", lambda: 7.5)
    assert time_use.begin() == 20.0
    assert time_use.by_part() == {"other": 0.0}
    time_use.count_process()
    assert time_use.begin() == 12.5
    assert time_use.by_part() == {"imports": 7.5, "other": 0.0}
    assert time_use.begin() == 20.0


def test_seconds_of_the_process_are_those_since_its_start() -> None:
    # psutil knows the time of the boot in complete seconds only.
    since = time.time() - psutil.Process().create_time()
    assert time_use.process_seconds() == pytest.approx(since, abs=3)


def test_run_logs_its_parts() -> None:
    lines = (finished_run() / "run.jsonl").read_text().splitlines()
    (end,) = [record for record in map(json.loads, lines) if record["kind"] == "end"]
    assert (
        {"data", "decoding", "checks", "training", "evaluation", "saving", "report"}
        <= end["time_use"].keys()
        <= {*time_use.PARTS, "other"}
    )
