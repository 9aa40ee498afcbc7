"""run.jsonl: complete lines, whatever happens to the writer."""

from __future__ import annotations

import json
import math
from pathlib import Path

from m1clip.runlog import Record, RunLog, read_log


def test_what_is_written_can_be_read_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("start", steps=3, path="müsli\nline")
    assert [(line["kind"], line["path"]) for line in read_log(tmp_path)] == [("start", "müsli\nline")]
    log.write("step", step=1, loss=0.5)
    assert [line["kind"] for line in read_log(tmp_path)] == ["start", "step"]
    assert all({"v", "kind", "time"} <= line.keys() for line in read_log(tmp_path))
    log.close()
    assert (tmp_path / "run.jsonl").read_bytes().count(b"\n") == 2


def test_it_is_appended_to(tmp_path: Path) -> None:
    for number in range(2):
        log = RunLog(tmp_path)
        log.write("start", number=number)
        log.close()
    assert [line["number"] for line in read_log(tmp_path)] == [0, 1]


def test_a_line_torn_by_a_kill_costs_only_that_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("start", step=0)
    log.close()
    with (tmp_path / "run.jsonl").open("ab") as file:
        file.write(b'{"v":1,"kind":"step","lo')
    assert [line["kind"] for line in read_log(tmp_path)] == ["start"]
    log = RunLog(tmp_path)
    log.write("step", step=1)
    log.close()
    assert [line["kind"] for line in read_log(tmp_path)] == ["start", "step"]


def test_invalid_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(b'\n[1]\n"x"\n{"a": 1}\n\xff\xfe\n{"kind": "end"}\n')
    assert list(read_log(tmp_path)) == [{"kind": "end"}]


def test_every_line_is_json_even_where_numbers_are_not_finite(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("step", loss=math.nan, deep={"list": [math.inf, 1.0, (-math.inf,)]})
    log.close()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads((tmp_path / "run.jsonl").read_text(), parse_constant=refuse)
    assert (record["loss"], record["deep"]) == ("nan", {"list": ["inf", 1.0, ["-inf"]]})


def test_a_line_of_a_newer_version_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(
        b'{"v": 2, "kind": "step"}\n{"v": "x", "kind": "step"}\n{"v": 1, "kind": "end"}\n'
    )
    assert [record["kind"] for record in read_log(tmp_path)] == ["end"]


def test_sinks_receive_each_record(tmp_path: Path) -> None:
    seen: list[Record] = []
    log = RunLog(tmp_path)
    log.sinks.append(seen.append)
    log.write("step", step=1, loss=math.nan)
    log.close()
    assert seen == list(read_log(tmp_path))
    assert seen[0]["loss"] == "nan"
