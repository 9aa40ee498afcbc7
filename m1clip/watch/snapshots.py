"""What an evaluation left in `watch/` of a run folder: snapshots and thumbnails, read with care."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from m1clip.files import read_small
from m1clip.plain import fits, sane

NAME = re.compile(r"step-(\d{1,12})\.json")
MAX_BYTES = 2**22
MAX_MATRIX = 256  # rows
SHAPE: dict[str, Any] = {
    "step": int,
    "queries": [
        {"caption": str, "right": int, "rank": int, "found": [int], "correct": [bool], "scores": [float]}
    ],
    "matrix": {"captions": [str], "values": [[float]]},
    "confusions": [{"caption": str, "found": int, "right": int, "margin": float, "truth": str}],
}


def snapshot_steps(run: Path) -> dict[int, Path]:
    """The step of each snapshot file, in order."""
    matches = [(NAME.fullmatch(path.name), path) for path in (run / "watch").glob("step-*.json")]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def read_snapshot(run: Path, step: int) -> dict[str, Any] | None:
    """The snapshot of one step; None where there is no valid one."""
    path = snapshot_steps(run).get(step)
    if path is None:
        return None
    try:
        value = json.loads(read_small(path, MAX_BYTES, inside=run))
    except (OSError, ValueError, RecursionError):
        return None
    return value if sane(value) and fits(value, SHAPE) and _consistent(value) else None


def _consistent(value: dict[str, Any]) -> bool:
    rows, captions = value["matrix"]["values"], value["matrix"]["captions"]
    square = 0 < len(rows) <= MAX_MATRIX and all(len(row) == len(rows) for row in [*rows, captions])
    return square and all(
        len(each["scores"]) == len(each["correct"]) == len(each["found"]) for each in value["queries"]
    )


def read_thumbnail(run: Path, picture: int) -> bytes | None:
    """A thumbnail by the number of its picture; None where there is none inside the run folder."""
    try:
        return read_small(run / "watch" / "thumbs" / f"{picture}.jpg", MAX_BYTES, inside=run)
    except OSError:
        return None
