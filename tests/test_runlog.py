"""run.jsonl: complete lines even if the writer is killed."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from m1clip.runlog import Record, RunLog, read_log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    made = RunLog(tmp_path)
    yield made
    made.close()


def kinds(run: Path) -> list[str]:
    return [record["kind"] for record in read_log(run)]


def test_written_records_are_readable_immediately(log: RunLog, tmp_path: Path) -> None:
    log.write("start", steps=3, path="müsli\nline")
    assert [(record["kind"], record["path"]) for record in read_log(tmp_path)] == [("start", "müsli\nline")]
    log.write("step", step=1, loss=0.5)
    assert kinds(tmp_path) == ["start", "step"]
    assert all({"v", "kind", "time"} <= record.keys() for record in read_log(tmp_path))
    assert (tmp_path / "run.jsonl").read_bytes().count(b"\n") == 2


def test_partial_line_after_kill_is_skipped(log: RunLog, tmp_path: Path) -> None:
    log.write("start", step=0)
    with (tmp_path / "run.jsonl").open("ab") as file:
        file.write(b'{"v":1,"kind":"step","lo')
    assert kinds(tmp_path) == ["start"]
    resumed = RunLog(tmp_path)
    resumed.write("step", step=1)
    resumed.close()
    assert kinds(tmp_path) == ["start", "step"]
    assert (tmp_path / "run.jsonl").read_bytes().count(b"\n") == 3  # the partial line was ended


def test_reopened_log_of_complete_lines_gets_no_empty_line(log: RunLog, tmp_path: Path) -> None:
    log.write("start", step=0)
    RunLog(tmp_path).close()
    assert (tmp_path / "run.jsonl").read_bytes().count(b"\n") == 1


def test_time_of_a_record_is_rounded_to_milliseconds(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1234567890.123456)
    log.write("start")
    assert [record["time"] for record in read_log(tmp_path)] == [1234567890.123]


def test_non_finite_numbers_are_written_as_valid_json(log: RunLog, tmp_path: Path) -> None:
    seen: list[Record] = []
    log.sinks.append(seen.append)
    log.write("step", step=1, loss=math.nan, deep={"list": [math.inf, 1.0, (-math.inf,)]})
    record = json.loads((tmp_path / "run.jsonl").read_text(), parse_constant=pytest.fail)
    assert (record["loss"], record["deep"]) == ("nan", {"list": ["inf", 1.0, ["-inf"]]})
    assert seen == list(read_log(tmp_path)) == [record]
