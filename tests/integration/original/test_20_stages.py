"""MISSION 20: time by stage of a step."""

from small_run import finished_run

from m1clip.monitor.history import History
from m1clip.monitor.report import costs
from m1clip.monitor.resources import stage_seconds
from m1clip.runlog import read_log

STAGES = {"data", "copy", "preprocess", "forward", "backward", "optimizer"}


def test_run_reports_the_measured_time_of_each_stage() -> None:
    run = finished_run({"train.eval_every": 5})
    lines = [record for record in read_log(run) if record["kind"] == "step"]
    assert all(set(line["seconds"]) >= STAGES for line in lines)
    assert len({line["seconds"]["backward"] for line in lines}) > 1, "measured, not typed in"
    for line in lines:
        assert abs(sum(line["seconds"].values()) - line["step_seconds"]) < 1e-4
    history = History(run).poll()
    assert set(stage_seconds(history)) >= STAGES
    assert "backward" in costs([history])
