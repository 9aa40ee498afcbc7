"""Which checkpoints a run has, and whether each is whole: names, sizes and hashes alone, without torch."""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m1clip import formatting
from m1clip.errors import UserError
from m1clip.formatting import size
from m1clip.io import format_version, read_small, remove_folder
from m1clip.training.process import lock_run

FORMAT = 2  # 1 knew of no returns, smaller chunks and evaluations still to be done; it is read
MANIFEST = "manifest.json"
FOLDER = "checkpoints"
NEEDED = ("state.json", "weights.safetensors", "optimizer.safetensors")
SMALL = 2**24  # bytes of a JSON file of a checkpoint, at most


@dataclass(frozen=True)
class Kept:
    """One checkpoint as a list shows it."""

    step: int
    path: str
    bytes: int
    saved: float  # seconds since 1970


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lives."""
    return run / FOLDER / f"step-{step:06d}"


def found(run: Path) -> list[int]:
    """Steps that have a checkpoint folder."""
    names = (item.name for item in (run / FOLDER).glob("step-*") if item.is_dir())
    steps = [int(name[5:]) for name in names if re.fullmatch(r"step-[0-9]{6,18}", name)]
    return [step for step in steps if checkpoint_folder(run, step).is_dir()]


def size_of(folder: Path) -> int:
    """Bytes of a checkpoint on disk."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def listed(run: Path) -> list[Kept]:
    """All checkpoints of a run, the oldest first."""
    folders = [(step, checkpoint_folder(run, step)) for step in sorted(found(run))]
    return [Kept(step, str(path), size_of(path), path.stat().st_mtime) for step, path in folders]


def prune(run: Path, keep: int, sound: bool = False) -> list[int]:
    """Delete all but the newest `keep`; with `sound` the newest whole one stays, whatever is broken after it."""
    steps = sorted(found(run))
    old = steps[:-keep] if keep > 0 else steps
    if sound:
        whole = next((step for step in reversed(steps) if not verify(checkpoint_folder(run, step))), None)
        old = [step for step in old if step != whole]
    for step in old:
        remove_folder(checkpoint_folder(run, step))
    return old


def verify(folder: Path) -> str:
    """Why a checkpoint cannot be used, in words; empty when it can."""
    try:
        manifest = json.loads(read_small(folder / MANIFEST, SMALL))
        hashes: dict[str, Any] = dict(manifest["sha256"])
        version = format_version(manifest)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    if version > FORMAT:
        if _state_is_readable(folder, hashes):  # a newer m1clip would have said so in both files
            return f"its {MANIFEST} is damaged (its format is not that of state.json)"
        raise UserError(f"{folder}: written by a newer m1clip (format {version}, this one reads {FORMAT}): upgrade")
    unlisted = sorted({*NEEDED, *(file.name for file in folder.glob("*.safetensors"))} - set(hashes))
    if unlisted:
        return f"{MANIFEST} does not list {unlisted[0][:80]}"
    for name, digest in hashes.items():
        file = folder / Path(name).name
        try:
            if not file.is_file():
                return f"{name[:80]} is missing"
            if sha256(file) != digest:
                return f"{name} is damaged (its hash differs)"
        except (OSError, ValueError) as error:  # a disk that fails; a name that no file can have
            return f"{name[:80]!a} cannot be read ({type(error).__name__})"
    return ""


def _state_is_readable(folder: Path, hashes: dict[str, Any]) -> bool:
    """Whether a state.json that is as it was written says a format that we know."""
    file = folder / "state.json"
    try:
        whole = sha256(file) == hashes.get(file.name)
        return whole and format_version(json.loads(read_small(file, SMALL))) <= FORMAT
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return False


def sha256(path: Path) -> str:
    """Hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def prune_checkpoints(run: Path, keep: int) -> str:
    """Delete all but the newest `keep`; says what was done. A run that is training is refused."""
    if keep < 1:
        raise UserError(f"--keep must be at least 1, not {keep}: without a checkpoint the run begins again")
    before = {row.step: row.bytes for row in rows(run)}
    with lock_run(run):
        gone = prune(run, keep, sound=True)
    left = sorted(found(run))
    freed = sum(before.get(step, 0) for step in gone)
    return f"{run}: {_count(len(gone))} deleted ({size(freed)}), {_count(len(left))} left" + (
        f": {', '.join(checkpoint_folder(run, step).name for step in left)}" if left else ""
    )


def as_json(found: list[Row]) -> str:
    """For a program."""
    return json.dumps([asdict(row) for row in found], indent=2)


def table(run: Path, found: list[Row]) -> str:
    """For a person; widths follow the content."""
    if not found:
        return f"{run}: no checkpoints yet"
    looked = any(row.problem is not None for row in found)
    lines = []
    for row in found:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved))
        state = (row.problem or "whole") if looked else Path(row.path).name
        lines.append((f"{row.step:,}", size(row.bytes), saved, state))
    text = formatting.table(("step", "size", "saved", "state" if looked else "folder"), lines)
    return f"{text}\n{_count(len(found))}, {size(sum(row.bytes for row in found))} in all"


def _count(number: int) -> str:
    return f"{number} checkpoint{'' if number == 1 else 's'}"
