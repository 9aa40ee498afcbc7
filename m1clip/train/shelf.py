"""`m1clip checkpoint`: the checkpoints of a run for a person, without torch."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from m1clip.errors import UserError
from m1clip.train.folder import hold
from m1clip.train.manifest import FOLDER, folder_of, found, listed, prune, verify


@dataclass(frozen=True)
class Row:
    """One checkpoint; `problem` is None where nobody has looked, and empty where it is whole."""

    step: int
    path: str
    bytes: int
    saved: float
    problem: str | None = None


def rows(run: Path) -> list[Row]:
    """The checkpoints of a run, the oldest first."""
    if not (run / "config.toml").is_file() and not (run / FOLDER).is_dir():
        raise UserError(f"{run}: no run there (no config.toml, no {FOLDER}/)")
    return [Row(**asdict(each)) for each in listed(run)]


def checked_rows(run: Path) -> list[Row]:
    """The same, each read and compared with its hashes."""
    return [Row(**{**asdict(row), "problem": verify(Path(row.path))}) for row in rows(run)]


def thin_out(run: Path, keep: int) -> str:
    """Delete all but the newest `keep`; says what was done. A run that is training is refused."""
    if keep < 1:
        raise UserError(f"--keep must be at least 1, not {keep}: without a checkpoint the run begins again")
    before = {row.step: row.bytes for row in rows(run)}
    with hold(run):
        gone = prune(run, keep, sound=True)
    left = sorted(found(run))
    freed = sum(before.get(step, 0) for step in gone)
    return f"{run}: {_count(len(gone))} deleted ({_size(freed)}), {_count(len(left))} left" + (
        f": {', '.join(folder_of(run, step).name for step in left)}" if left else ""
    )


def as_json(found: list[Row]) -> str:
    """For a program."""
    return json.dumps([asdict(row) for row in found], indent=2)


def table(run: Path, found: list[Row]) -> str:
    """For a person; widths follow the content."""
    if not found:
        return f"{run}: no checkpoints yet"
    looked = any(row.problem is not None for row in found)
    cells = [("step", "size", "saved", "state" if looked else "folder")]
    for row in found:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved))
        state = (row.problem or "whole") if looked else Path(row.path).name
        cells.append((f"{row.step:,}", _size(row.bytes), saved, state))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells
    ]
    return "\n".join([*lines, f"{_count(len(found))}, {_size(sum(row.bytes for row in found))} in all"])


def _count(number: int) -> str:
    return f"{number} checkpoint{'' if number == 1 else 's'}"


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
