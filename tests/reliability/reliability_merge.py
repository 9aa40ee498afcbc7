"""Add up what the parts of the long tests have counted, and put it into docs/results/reliability.json and the table.

    .venv/bin/python tests/reliability/reliability_merge.py build/long/rows.json [another machine's rows.json]

A promise of which parts are missing is named and left as it was; one of which a part has failed is written as failed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import reliability_table  # noqa: E402
from reliability_results import PASSED, ROOT, Rows, rows_of, write_rows  # noqa: E402

FILE = ROOT / "docs" / "results" / "reliability.json"
PART = re.compile(r"(?P<promise>.+), part (?P<part>\d+) of (?P<of>\d+)")
# Counts that are facts of each part, or the worst case among them; all others are added.
LARGEST = {
    "slowest exit in seconds",
    "memory limit in MiB",
    "processes a round",
    "kinds of file in the fast form",
    "largest relative difference",
}


def add_up(rows: Rows) -> tuple[Rows, list[str]]:
    """The rows of whole promises, and in words which parts are missing."""
    whole: Rows = {}
    parts: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for name, row in rows.items():
        if match := PART.fullmatch(name):
            parts.setdefault((match["promise"], int(match["of"])), {})[int(match["part"])] = row
        else:
            whole[name] = row
    missing = []
    for (promise, of), found in sorted(parts.items()):
        gone = sorted(set(range(1, of + 1)) - set(found))
        made = _sum_of([found[part] for part in sorted(found)])
        if gone:
            missing.append(f"{promise}: part {', '.join(map(str, gone))} of {of}")
        if not gone or made["result"] != PASSED:
            whole[promise] = made
    return whole, missing


def _sum_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several: failed where one of them has, or where they do not belong together."""
    failed = list(dict.fromkeys(row["result"] for row in rows if row["result"] != PASSED))
    same = {key: sorted({row[key] for row in rows}) for key in ("machine", "torch", "commit")}
    if mixed := [key for key, found in same.items() if len(found) > 1]:
        failed.append(f"FAILED (parts of more than one {' and '.join(mixed)})")
    counts: dict[str, Any] = {}
    for row in rows:
        counts = added(counts, row["counts"])
    return {
        "counts": counts,
        "result": "; ".join(failed) or PASSED,
        "long_form": all(row["long_form"] for row in rows),
        **{key: " and ".join(found) for key, found in same.items()},
        "parts": len(rows),
    }


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two tables of counts as one; tables inside of them too."""
    total = dict(one)
    for name, value in other.items():
        if name not in total:
            total[name] = value
        elif isinstance(value, dict):
            total[name] = added(total[name], value)
        else:
            total[name] = max(total[name], value) if name in LARGEST else total[name] + value
    return total


def merge(files: list[Path], into: Path = FILE) -> list[str]:
    """Put the promises of some files of rows into another; gives what is missing. A later file comes before."""
    rows: Rows = {}
    for file in files:
        if not file.is_file():
            raise SystemExit(f"{file}: no such file of rows")
        rows |= rows_of(file)
    whole, missing = add_up(rows)
    # Rows of parts that stood there are of an older way to count.
    kept = {name: row for name, row in rows_of(into).items() if name.partition(", part ")[0] not in whole}
    write_rows({**kept, **whole}, into)
    return missing


def main() -> None:
    """Parse the words, merge, write the table, tell what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="rows.json of long_parallel.py")
    parser.add_argument("--into", type=Path, default=FILE, help="default: docs/results/reliability.json")
    words = parser.parse_args()
    missing = merge(words.files, words.into)
    if words.into == FILE:
        reliability_table.main()
    for line in missing:
        print(f"MISSING {line}", file=sys.stderr)
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
