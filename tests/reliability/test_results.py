"""The rows of the long tests: what did not end well says so, parts add up, and several processes may write."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from long_parallel import FAILED, NOT_OVER, PASSED, main, run_all
from reliability_merge import add_up, merge
from reliability_results import COMMIT, ROWS, UNFINISHED, record, recorded, rows_of, write_rows
from reliability_table import PROMISES, line, measured

FORK = multiprocessing.get_context("fork")


def row(counts: dict[str, Any], result: str = "passed", commit: str = "abc") -> dict[str, Any]:
    return {"counts": counts, "result": result, "long_form": True, "machine": "m", "torch": "2", "commit": commit}


def test_a_test_that_does_not_end_has_failed(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    with recorded("two writers", file=file) as counts:
        counts |= {"rounds": 3, "processes a round": 2}
    assert rows_of(file)["two writers"]["result"] == "passed"
    with pytest.raises(ZeroDivisionError), recorded("two writers", file=file):
        1 / 0  # noqa: B018
    found = rows_of(file)["two writers"]
    assert (found["result"], found["counts"]) == (UNFINISHED, {})
    (promise,) = [each for each in PROMISES if each.keys == ("two writers",)]
    assert f"| - | {UNFINISHED} |" in line(promise, rows_of(file), {})
    (told,) = measured(rows_of(file))
    assert all(found[name] in told for name in ("commit", "machine", "torch"))


def test_rows_go_where_the_environment_says_or_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROWS, raising=False)
    with recorded("clock"):
        pass
    monkeypatch.setenv(ROWS, str(tmp_path / "rows.json"))
    monkeypatch.setenv(COMMIT, "a copy")
    with recorded("clock", 2, 3) as counts:
        counts["n"] = 1
    assert list(rows_of(tmp_path / "rows.json")) == ["clock, part 2 of 3"]
    assert rows_of(tmp_path / "rows.json")["clock, part 2 of 3"]["commit"] == "a copy"


def write_many(file: Path, who: int) -> None:
    for number in range(20):
        record(f"{who} {number}", {"n": 1}, "passed", file=file)


def test_many_processes_write_to_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT, "abc")
    file = tmp_path / "rows.json"
    processes = [FORK.Process(target=write_many, args=(file, who)) for who in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(rows_of(file)) == 80


def test_parts_add_up() -> None:
    rows = {
        "signals, saving, part 1 of 2": row({"signals": 3, "by kind": {"a": 3}, "slowest exit in seconds": 2.0}),
        "signals, saving, part 2 of 2": row({"signals": 4, "by kind": {"a": 1, "b": 3}, "slowest exit in seconds": 1}),
        "soak": row({"minutes": 60}),
    }  # fmt: skip
    whole, missing = add_up(rows)
    assert missing == []
    assert whole["signals, saving"]["counts"] == {
        "signals": 7,
        "by kind": {"a": 4, "b": 3},
        "slowest exit in seconds": 2.0,
    }
    assert whole["signals, saving"]["result"] == "passed"
    assert whole["soak"] == rows["soak"]


def test_a_missing_part_is_named_a_failed_one_fails_the_promise() -> None:
    rows = {
        "a, part 1 of 3": row({"n": 1}),
        "a, part 3 of 3": row({"n": 1}),
        "b, part 1 of 3": row({"n": 1}),
        "b, part 2 of 3": row({}, UNFINISHED),
        "c, part 1 of 2": row({"n": 1}),
        "c, part 2 of 2": row({"n": 1}, commit="another"),
    }
    whole, missing = add_up(rows)
    assert missing == ["a: part 2 of 3", "b: part 3 of 3"]
    assert set(whole) == {"b", "c"}
    assert whole["b"]["result"] == UNFINISHED
    assert whole["c"]["result"] == "FAILED (parts of more than one commit)"


def test_a_merge_keeps_what_was_not_run_again(tmp_path: Path) -> None:
    old, one, other = (tmp_path / name for name in ("old.json", "one.json", "other.json"))
    write_rows({"soak": row({"minutes": 60}), "clock, part 1": row({"n": 9}), "nan": row({"n": 5})}, old)
    write_rows({"clock, part 1 of 2": row({"n": 1}), "nan, part 1 of 2": row({"n": 1})}, one)
    write_rows({"clock, part 2 of 2": row({"n": 2})}, other)
    assert merge([one, other], old) == ["nan: part 2 of 2"]
    assert {name: each["counts"] for name, each in rows_of(old).items()} == {
        "soak": {"minutes": 60},
        "clock": {"n": 3},
        "nan": {"n": 5},
    }


TESTS = """
import subprocess, sys, time
import pytest
sys.path[:0] = [{here!r}]
from reliability_results import recorded

@pytest.mark.parametrize("part", [1, 2, 3])
def test_part(part):
    with recorded("made up", part, 3) as counts:
        counts["n"] = part
        assert part != 2
        if part == 3:
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            open({pid!r}, "w").write(str(child.pid))
            time.sleep(600)
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three made-up parts: one passes, one fails, one never ends. In the order in which they are run."""
    made = TESTS.format(here=str(Path(__file__).parent), pid=str(tmp_path / "pid"))
    (tmp_path / "test_made_up.py").write_text(made)
    words = ["-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    monkeypatch.setattr("long_parallel.pytest_words", lambda *rest: [sys.executable, *words, *rest])
    monkeypatch.setenv(COMMIT, "abc")
    return [f"{tmp_path}/test_made_up.py::test_part[{part}]" for part in (3, 1, 2)]


@pytest.mark.slow
def test_parts_run_side_by_side_and_the_clock_stops_them(tmp_path: Path, parts: list[str]) -> None:
    pid, place = tmp_path / "pid", tmp_path / "jobs"
    place.mkdir()
    over = lambda: pid.exists() and len(rows_of(tmp_path / "jobs.json")) == 2  # noqa: E731
    ends = run_all(parts, tmp_path, 3, over, place)
    assert list(ends.values()) == [NOT_OVER, PASSED, FAILED]
    found = rows_of(tmp_path / "rows.json")
    assert {name: each["result"] for name, each in found.items()} == {
        "made up, part 1 of 3": "passed",
        "made up, part 2 of 3": UNFINISHED,
    }
    assert rows_of(tmp_path / "jobs.json") == ends
    assert "assert 2 != 2" in (tmp_path / "output.txt").read_text()
    child = int(pid.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, (
        "what a part has started is stopped with it"
    )


@pytest.mark.slow
def test_the_rest_is_run_alone(
    tmp_path: Path, parts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("long_parallel.collected", lambda where, chosen: parts[1:])
    for words, first in (([], "2 parts"), (["--rest"], "1 parts")):
        monkeypatch.setattr(sys, "argv", ["long_parallel.py", str(tmp_path / "out"), "--processes", "2", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr().out
        assert ended.value.code == 1
        assert told.startswith(first)
        assert "MISSING made up: part 3 of 3" in told
        assert f"FAILED {parts[2]}" in told
    assert len(rows_of(tmp_path / "out" / "rows.json")) == 2, "what had passed is kept"
