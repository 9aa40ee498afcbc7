"""MISSION 14: the table by epoch, printed at the end, in the report and on the page."""

import json
import shutil
from pathlib import Path

from small_run import finished_run

from m1clip.monitor.history import History
from m1clip.monitor.report import write_report
from m1clip.web.server import rows

COLUMNS = ["epoch", "loss", "train accuracy", "val accuracy", "chance 1/B"]


def test_table_by_epoch_is_measured(tmp_path: Path) -> None:
    run = finished_run()
    history = History(run).poll()
    tables = history.tables()
    assert tables.epoch_head[:5] == COLUMNS
    assert [cells[0] for cells in tables.epoch_cells] == ["1", "2", "2.5"]
    last = tables.epochs()[-1]
    assert last.low is not None
    assert last.recall is not None
    assert last.low < last.recall
    assert all(row.seconds and row.seconds > 0 for row in tables.epochs())
    sent = rows(history, "new")
    assert sent["tables"]["epochs"]["rows"] == tables.epoch_cells
    assert "tables" not in rows(history, sent["cursor"]), "only when the log has changed"
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "<h3>By epoch</h3>" in page
    assert f"<th scope='row'>2.5</th><td>{tables.epoch_cells[-1][1]}</td>" in page
    # Another log gives another table.
    shutil.copytree(run, tmp_path / "other")
    log = tmp_path / "other" / "run.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    changed = [
        {**record, "loss": 9.0} if record["kind"] == "step" else record for record in records
    ]
    log.write_text("".join(f"{json.dumps(record)}\n" for record in changed))
    other = History(tmp_path / "other").poll().tables()
    assert {row.loss for row in other.epochs()} == {9.0}
    assert 9.0 not in {row.loss for row in tables.epochs()}
