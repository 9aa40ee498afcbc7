"""MISSION 22: use of each core, performance and efficiency cores apart."""

from pathlib import Path

from monitor.made_runs import append, line, make_run, step
from small_run import finished_run

from m1clip.monitor.history import History
from m1clip.monitor.resources import core_table
from m1clip.runlog import read_log


def test_run_logs_the_use_of_each_core() -> None:
    run = finished_run({"train.eval_every": 5})
    records = list(read_log(run))
    kinds = next(record["core_kinds"] for record in records if record["kind"] == "sensors")
    used = [record["cores"] for record in records if record["kind"] == "step"]
    assert all(len(cores) == len(kinds) for cores in used)
    assert all(0 <= value <= 100 for cores in used for value in cores)


def test_performance_and_efficiency_cores_are_shown_apart(tmp_path: Path) -> None:
    kinds = ["efficiency", "performance", "performance"]
    run = make_run(tmp_path / "run", [line("sensors", core_kinds=kinds)])
    append(run, [step(1, cores=[10, 90, 80]), step(2, cores=[20, 100, 90])])
    rows = dict(core_table(History(run).poll()))
    assert rows["1 efficiency core"] == "15%"
    assert rows["2 performance cores"] == "90%"
    assert rows["performance 1"] == "95%"
