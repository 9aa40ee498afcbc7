"""MISSION 17: the temperature of the loss by epoch."""

from pathlib import Path

from small_run import finished_run, run_small

from m1clip.monitor.report import write_report
from m1clip.runlog import read_log


def temperatures(run: Path) -> list[float]:
    return [record["temperature"] for record in read_log(run) if record["kind"] == "step"]


def test_temperature_is_logged_by_epoch(tmp_path: Path) -> None:
    run = finished_run()
    steps = [record for record in read_log(run) if record["kind"] == "step"]
    assert steps[-1]["epoch"] > steps[0]["epoch"]
    assert len(set(temperatures(run))) > 1, "the temperature is trained"
    assert "Temperature" in write_report([run], tmp_path / "report.html").read_text()
    run_small(tmp_path / "faster", {"optim.lr": 0.01, "train.steps": 4})
    assert temperatures(tmp_path / "faster") != temperatures(run)[:4]
