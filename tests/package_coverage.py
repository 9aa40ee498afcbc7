"""Which fraction of its lines the tests execute, one line per package, from what slipcover has measured.

    python tests/package_coverage.py .coverage.json

A lower bound: only the pytest processes are measured, not those that tests start.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PACKAGE = "m1clip"


def package_of(path: Path) -> str:
    """The package of a module; m1clip for the modules of the top level."""
    parts = path.parts
    inside = parts[len(parts) - parts[::-1].index(PACKAGE) :]
    return ".".join([PACKAGE, *inside[:-1][:1]])


def coverage_lines(measured: dict[str, Any]) -> list[str]:
    """One line per package, and one for all."""
    lines: Counter[str] = Counter()
    executed: Counter[str] = Counter()
    for file, coverage in measured["files"].items():
        for name in (package_of(Path(file)), "all"):
            executed[name] += len(coverage["executed_lines"])
            lines[name] += len(coverage["executed_lines"]) + len(coverage["missing_lines"])
    names = [*sorted(lines.keys() - {"all"}), "all"]
    return [
        f"{name:<20}{executed[name] / max(lines[name], 1):5.0%} of {lines[name]:,}"
        for name in names
    ]


if __name__ == "__main__":
    print("lines executed in the pytest processes (those they start are not counted)")
    print("\n".join(coverage_lines(json.loads(Path(sys.argv[1]).read_text()))))
