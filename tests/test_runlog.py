"""run.jsonl: complete lines even if the writer is killed."""

import ast
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from m1clip import runlog
from m1clip.analyses import ANALYSES, RECORD
from m1clip.log_field import LogField
from m1clip.runlog import (
    FIELDS,
    RECORD_KINDS,
    TOP1,
    Record,
    RunLog,
    curve_fields,
    parse,
    plotted_fields,
    read_log,
)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    made = RunLog(tmp_path)
    yield made
    made.close()


def kinds(run: Path) -> list[str]:
    return [record["kind"] for record in read_log(run)]


def test_written_records_are_readable_immediately(log: RunLog, tmp_path: Path) -> None:
    log.write("start", steps=3, path="müsli\nline")
    assert [(record["kind"], record["path"]) for record in read_log(tmp_path)] == [
        ("start", "müsli\nline")
    ]
    log.write("step", step=1, loss=0.5)
    assert kinds(tmp_path) == ["start", "step"]
    assert all({"v", "kind", "time"} <= record.keys() for record in read_log(tmp_path))
    written = (tmp_path / "run.jsonl").read_bytes()
    assert written.count(b"\n") == 2
    assert "müsli".encode() in written, "as text, not as escapes"


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
    records: list[Record] = []
    log.sinks.append(records.append)
    log.write("step", step=1, loss=math.nan, deep={"list": [math.inf, 1.0, (-math.inf,)]})
    record = json.loads((tmp_path / "run.jsonl").read_text(), parse_constant=pytest.fail)
    assert (record["loss"], record["deep"]) == ("nan", {"list": ["inf", 1.0, ["-inf"]]})
    assert records == list(read_log(tmp_path)) == [record]


def is_valid(kind: str, **values: object) -> bool:
    return parse(json.dumps({"v": 1, "kind": kind, "step": 1, **values}).encode()) is not None


@pytest.mark.parametrize("field", FIELDS.values(), ids=lambda field: field.name)
def test_record_with_a_field_of_another_type_is_invalid(field: LogField) -> None:
    for kind in ("step", "eval", "end"):
        # No field is a boolean; one without a schema may contain anything.
        assert is_valid(kind, **{field.name: False}) == (field.schema_in(kind) is None)
        assert is_valid(kind, **{field.name: None}) == (kind not in field.required_in)


def test_each_analysis_of_an_evaluation_is_checked_and_may_be_missing() -> None:
    assert is_valid("eval", analysis={})
    assert is_valid("eval", analysis={"uniformity_image": -2.5, "of a later version": "x"})
    assert not is_valid("eval", analysis={"uniformity_image": "x"})
    assert not is_valid("eval", analysis={"uniformity_image": -2.5, "modality_gap": []})


def test_schema_of_a_field_may_depend_on_the_kind_of_record() -> None:
    assert is_valid("step", seconds={"data": 0.5})
    assert is_valid("eval", seconds=0.5)
    assert not is_valid("step", seconds=0.5)
    assert not is_valid("eval", seconds={"data": 0.5})
    assert is_valid("memory", data=1024)  # bytes
    assert is_valid("adaptation", data="photos", score_before=0.1, score_after=0.2)
    assert not is_valid("memory", data="photos")


def test_new_entry_in_table_of_fields_is_validated_and_listed_for_curves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_valid("step", sharpness="high")
    plotted = LogField(name="sharpness", curve="step", title="Sharpness")
    unplotted = LogField(
        name="rank", schema=int, schema_by_kind={"eval": str}, required_in=("eval",), curve="eval"
    )
    for field in (plotted, unplotted):
        monkeypatch.setitem(FIELDS, field.name, field)
    assert not is_valid("step", sharpness="high")
    assert is_valid("step", sharpness=2.0)
    assert is_valid("step", sharpness="nan")
    assert is_valid("eval", rank="first")
    assert not is_valid("eval", rank=1)
    assert not is_valid("eval")
    assert curve_fields("step")[-1] is plotted_fields("step")[-1] is plotted
    assert curve_fields("eval")[-1] is unplotted
    assert unplotted not in plotted_fields("eval")


DOCS = Path(__file__).parent.parent / "docs"
METRICS = {name for name in FIELDS if "recall" in name or name == TOP1}
# Written for people; no reader uses them, so the table of fields does not have them.
UNREAD = {"choices", "before", "path", "new_fraction"}


def log_table(page: str) -> dict[str, str]:
    """Kind of record -> its row in the table about the log in a page of the docs."""
    rows = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| `")]
    meanings = {}
    for row in rows:
        _, kinds, contents, *_ = row.split("|")
        for kind in re.findall(r"`(\w+)`", kinds):
            if kind in RECORD_KINDS:
                meanings[kind] = contents
    return meanings


@pytest.mark.parametrize("page", ["run-log.md", "python-runs.md"])
def test_fields_in_the_docs_exist(page: str) -> None:
    for kind, contents in log_table(page).items():
        named = set(re.findall(r"`(\w+)`", contents))
        unknown = named - {name.split("/")[0] for name in FIELDS} - UNREAD
        assert not unknown, f"{page}, {kind}: fields that the log does not have"


def test_docs_list_all_kinds_fields_and_analyses() -> None:
    table = log_table("run-log.md")
    assert table.keys() == RECORD_KINDS.keys()
    page = (DOCS / "run-log.md").read_text()
    for name in FIELDS.keys() - METRICS:
        assert f"`{name.split('/')[0]}`" in page, f"docs/run-log.md does not explain {name}"
    for analysis in ANALYSES.values():
        row = f"| `{analysis.name}` | {analysis.meaning} | {analysis.needs} | {analysis.shown_as} |"
        assert row in page, (
            f"docs/run-log.md: {analysis.name} is missing or differs from analyses.py"
        )


def test_every_kind_that_is_written_is_in_the_table() -> None:
    """Look at all calls of a function `write` with a name and values."""
    written = set()
    for path in Path(runlog.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and node.keywords:
                kind = node.args[0]
                if re.fullmatch(r"(.*\.)?write", ast.unparse(node.func)):
                    written.add(kind.value if isinstance(kind, ast.Constant) else ast.unparse(kind))
    assert written == {*RECORD_KINDS.keys() - {RECORD}, "RECORD"}
