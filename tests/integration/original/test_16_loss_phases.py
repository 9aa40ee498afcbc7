"""MISSION 16: the phases of the loss, in the log, in the report and on the page."""

from pathlib import Path

from monitor.made_runs import make_run, step
from small_run import finished_run

from m1clip.monitor.history import History
from m1clip.monitor.report import write_report
from m1clip.runlog import read_log
from m1clip.web.server import rows


def test_phases_of_the_loss_are_measured(tmp_path: Path) -> None:
    run = finished_run()
    *_, end = read_log(run)
    history = History(run).poll()
    assert [phase["last_step"] for phase in end["loss_phases"]][-1] == 10
    assert end["loss_phases"] == [phase.as_dict() for phase in history.tables().phases()]
    assert rows(history, "new")["tables"]["phases"]["rows"] == history.tables().phase_cells
    assert "Phases of the loss" in write_report([run], tmp_path / "report.html").read_text()
    falls = [step(number, loss=max(1.0, 4.0 - number / 10)) for number in range(1, 101)]
    flat = [step(number, loss=2.0) for number in range(1, 101)]
    trends = [
        [
            phase.trend
            for phase in History(make_run(tmp_path / name, lines)).poll().tables().phases()
        ]
        for name, lines in (("falls", falls), ("flat", flat))
    ]
    assert trends == [["falling fast", "plateau"], ["plateau"]]
