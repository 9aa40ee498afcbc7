"""Sums the counts of the long tests into docs/results/reliability.json and the table of docs/reliability.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from m1clip.hardware.machine_info import read_machine_info

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
TABLE = re.compile(r"(?<=<!-- table: begin -->\n).*(?=<!-- table: end -->)", re.DOTALL)
Rows = dict[str, dict[str, Any]]

# The argument of `pytest.mark.long`, and the files with its tests.
PROMISES = {
    "Kill and resume, bit for bit": "test_kill_and_resume.py",
    "Kill while saving": "test_kill_while_saving.py",
    "Damaged checkpoint": "test_damaged_checkpoint.py",
    "Disk full": "test_disk_full.py",
    "Signals": "test_signals.py",
    "Two writers": "test_two_writers.py",
    "NaN and spikes": "training/test_recovery.py, test_nan.py",
    "Out of memory": "training/test_oom.py, test_tight_memory.py, training/test_oom_cuda.py",
    "Bad data": "test_bad_data.py",
    "Hostile files": "test_hostile_files.py, test_hostile_config.py",
    "Clock and sleep": "test_clock_jumps.py",
    "Soak": "test_soak.py",
    "Fuzzing": "test_fuzz.py",
    "Kill while indexing photos": "search/test_index.py",
    "Many clients of the search page": "web/test_photos.py",
    "Kill ranks, continue on another number": "test_ranks.py",
    "Killed decoding processes": "data/test_decode_pool.py",
}


def merge(rows: Rows, tests: list[dict[str, Any]]) -> Rows:
    """Replace the rows of all promises that were tested: counts added up, failed if one test failed."""
    rows = dict(rows)
    for promise in PROMISES:
        ran = [test for test in tests if test["promise"] == promise]
        if ran:
            counts: dict[str, float] = {}
            for name, value in [count for test in ran for count in test["counts"].items()]:
                largest = name.startswith(("slowest", "largest"))
                counts[name] = (
                    max(counts.get(name, 0), value) if largest else counts.get(name, 0) + value
                )
            failed = [test["name"] for test in ran if test["outcome"] != "passed"]
            rows[promise] = {
                "counts": counts,
                "result": f"FAILED: {', '.join(failed)}" if failed else "passed",
            }
            rows[promise]["measured"] = measured()
    return rows


def measured() -> str:
    """The commit and the machine of these counts."""
    describe = ["git", "describe", "--always", "--dirty=+"]
    git = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    commit = os.environ.get("M1CLIP_COMMIT") or git.stdout.strip() or "unknown"
    facts = read_machine_info()
    machine = f"{facts.cpu or facts.machine}, {os.cpu_count()} cores, {facts.system}"
    return f"commit `{commit}` on {machine}, torch {torch.__version__}"


def table(rows: Rows) -> str:
    """The Markdown table, and below it where the rows were measured."""
    lines = ["| | promise | test | count | result |", "|---|---|---|---|---|"]
    rows_by_place: dict[str, list[str]] = {}
    for number, (promise, files) in enumerate(PROMISES.items(), 1):
        row = rows.get(promise)
        counts = (
            ", ".join(_count(*counted) for counted in row["counts"].items())
            if row
            else "long version not run yet"
        )
        lines.append(
            f"| {number} | {promise} | `{files}` | {counts} | {row['result'] if row else '-'} |"
        )
        if row:
            rows_by_place.setdefault(row["measured"], []).append(str(number))
    lines += [
        "",
        *(
            f"- Row{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {text}."
            for text, numbers in rows_by_place.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _count(name: str, value: float) -> str:
    return (
        f"{name}: {value:.2g}"
        if name.startswith(("slowest", "largest"))
        else f"{value:,.10g} {name}"
    )


def record(tests: list[dict[str, Any]]) -> None:
    """Write the results of these tests to the docs."""
    rows = merge(json.loads(RESULTS.read_text()), tests)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(TABLE.sub(lambda _: table(rows), PAGE.read_text()))
