"""The table of docs/reliability.md: counts are summed by promise, and a failed test is shown."""

from __future__ import annotations

from record import PROMISES, merge, table


def test_counts_are_summed_and_failures_shown() -> None:
    def ran(name: str, promise: str, outcome: str = "passed", **counts: float) -> dict[str, object]:
        return {"name": name, "promise": promise, "outcome": outcome, "counts": counts}

    old = {
        "Soak": {
            "counts": {"minutes": 60},
            "result": "passed",
            "measured": "commit `abc` on a machine",
        }
    }
    tests = [
        ran("a", "Signals", signals=3, **{"slowest exit in seconds": 2.0}),
        ran("b", "Signals", signals=1004, **{"slowest exit in seconds": 1.0}),
        ran("c", "Fuzzing", "failed"),
    ]
    rows = merge(old, tests)
    assert rows["Soak"] == old["Soak"]
    text = table(rows)
    assert "| 1,007 signals, slowest exit in seconds: 2 | passed |" in text
    assert "| FAILED: c |" in text
    assert text.count("long version not run yet") == len(PROMISES) - 3
    assert "- Row 12: commit `abc` on a machine." in text
