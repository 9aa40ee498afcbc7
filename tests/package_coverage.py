"""Which fraction of its statements the tests execute, one line per package.

A lower bound: only the pytest processes are measured, not those that tests start, with one case of each parametrized
test and without the examples of hypothesis. Tracing all of it would make the tests slower.
"""

from collections import Counter
from pathlib import Path

from coverage import Coverage

import m1clip

PACKAGE = Path(m1clip.__file__).parent


def package_of(path: Path) -> str:
    """The package of a module; m1clip for the modules of the top level."""
    folders = path.relative_to(PACKAGE).parent.parts
    return f"m1clip.{folders[0]}" if folders else "m1clip"


def coverage_lines(coverage: Coverage) -> list[str]:
    """One line per package, and one for all, from the measured data."""
    statements: Counter[str] = Counter()
    executed: Counter[str] = Counter()
    for file in coverage.get_data().measured_files():
        path = Path(file)
        if not path.is_relative_to(PACKAGE):
            continue
        _, lines, _, missing, _ = coverage.analysis2(file)
        for name in (package_of(path), "all"):
            statements[name] += len(lines)
            executed[name] += len(lines) - len(missing)
    names = [*sorted(statements.keys() - {"all"}), "all"]
    return [
        f"{name:<20}{executed[name] / max(statements[name], 1):5.0%} of {statements[name]:,}"
        for name in names
    ]
