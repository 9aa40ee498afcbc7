"""The rows of the long tests: what did not end well says so, and counts belong to one commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import remember
from reliability_results import UNFINISHED, recorded, rows_of
from reliability_table import PROMISES, line, measured


def test_a_test_that_does_not_end_has_failed(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    with recorded("two writers", file) as counts:
        counts |= {"rounds": 3, "processes a round": 2}
    assert rows_of(file)["two writers"]["result"] == "passed"
    with pytest.raises(ZeroDivisionError), recorded("two writers", file):
        1 / 0  # noqa: B018
    row = rows_of(file)["two writers"]
    assert (row["result"], row["counts"]) == (UNFINISHED, {})
    (promise,) = [each for each in PROMISES if each.keys == ("two writers",)]
    assert f"| - | {UNFINISHED} |" in line(promise, rows_of(file), {})
    assert row["commit"] in measured(rows_of(file))[0]


def test_readers_are_counted_one_by_one_within_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    monkeypatch.setattr("fuzz.commit", lambda: "one")
    monkeypatch.setattr("reliability_results.commit", lambda: "one")
    remember("csv", 100, 1, True, file)
    remember("json", 50, 1, True, file)
    remember("json", 50, 1, True, file)
    remember("json", 50, 2, True, file)
    row = rows_of(file)["fuzzing"]
    assert row["counts"]["by reader"] == {"csv": 100, "json": 100}
    remember("csv", 0, 2, False, file)
    row = rows_of(file)["fuzzing"]
    assert (row["result"], row["counts"]["inputs"]) == ("FAILED or not finished: csv", 200)
    for name in ("fuzz.commit", "reliability_results.commit"):
        monkeypatch.setattr(name, lambda: "two")
    remember("csv", 10, 3, True, file)
    row = rows_of(file)["fuzzing"]
    assert (row["counts"]["by reader"], row["result"]) == ({"csv": 10}, "passed: no crash, no hang")
