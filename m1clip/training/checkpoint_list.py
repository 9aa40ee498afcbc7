"""List, verify and delete the checkpoints of a run by names, sizes and hashes; does not import torch."""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from m1clip.errors import UserError
from m1clip.formatting import plural, size, table
from m1clip.io import format_version, read_small, remove_folder

FORMAT = 1
STATE = "state.json"
MANIFEST = "manifest.json"  # sha256 of every other file
FOLDER = "checkpoints"
REQUIRED = {STATE, "weights.safetensors", "optimizer.safetensors"}
MAX_JSON_BYTES = 2**24


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint; `problem` is None if it was not verified, and empty if it is valid."""

    step: int
    path: str
    bytes: int
    saved: float  # seconds since 1970
    problem: str | None = None


def checkpoint_folder(run: Path, step: int) -> Path:
    """The checkpoint folder of a step."""
    return run / FOLDER / f"step-{step:06d}"


def saved_steps(run: Path) -> list[int]:
    """Steps that have a checkpoint folder, in order."""
    names = (re.fullmatch(r"step-([0-9]{6,18})", item.name) for item in (run / FOLDER).glob("step-*"))
    steps = sorted(int(name[1]) for name in names if name)
    return [step for step in steps if checkpoint_folder(run, step).is_dir()]


def folder_bytes(folder: Path) -> int:
    """Size of a checkpoint on disk."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def sha256(path: Path) -> str:
    """Hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path) -> str:
    """Why a checkpoint cannot be used, or "" if it is valid; UserError if a newer m1clip wrote it."""
    try:
        hashes: dict[str, Any] = dict(json.loads(read_small(folder / MANIFEST, MAX_JSON_BYTES))["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    unlisted = sorted((REQUIRED | {file.name for file in folder.glob("*.safetensors")}) - set(hashes))
    if unlisted:
        return f"{MANIFEST} does not list {unlisted[0][:80]}"
    for name, digest in hashes.items():
        file = folder / Path(name).name  # a name cannot point outside the folder
        try:
            if not file.is_file():
                return f"{name[:80]} is missing"
            if sha256(file) != digest:
                return f"{name} is damaged (its hash differs)"
        except (OSError, ValueError) as error:  # a failing disk; a name that no file can have
            return f"{name[:80]!a} cannot be read ({type(error).__name__})"
    try:
        # Only after the hash check: a flipped bit must not look like a newer format.
        version = format_version(json.loads(read_small(folder / STATE, MAX_JSON_BYTES)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"its {STATE} cannot be read ({type(error).__name__})"
    if version > FORMAT:
        raise UserError(f"{folder}: written by a newer m1clip (format {version}, this one reads {FORMAT}): upgrade")
    return ""


def list_checkpoints(run: Path, verified: bool = False) -> list[CheckpointInfo]:
    """The checkpoints of a run, oldest first; with `verified`, check the hashes of each."""
    if not (run / "config.toml").is_file() and not (run / FOLDER).is_dir():
        raise UserError(f"{run}: not a run (no config.toml, no {FOLDER}/)")
    folders = [(step, checkpoint_folder(run, step)) for step in saved_steps(run)]
    rows = [CheckpointInfo(step, str(path), folder_bytes(path), path.stat().st_mtime) for step, path in folders]
    return [replace(row, problem=verify(Path(row.path))) for row in rows] if verified else rows


def delete_old(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for step in saved_steps(run)[:-keep]:
        remove_folder(checkpoint_folder(run, step))


def checkpoints_as_json(rows: list[CheckpointInfo]) -> str:
    """JSON for scripts."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def checkpoints_as_text(run: Path, rows: list[CheckpointInfo]) -> str:
    """A table for the terminal."""
    if not rows:
        return f"{run}: no checkpoints yet"
    cells = []
    for row in rows:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved))
        state = Path(row.path).name if row.problem is None else row.problem or "valid"
        cells.append((f"{row.step:,}", size(row.bytes), saved, state))
    text = table(("step", "size", "saved", "state"), cells)
    return f"{text}\n{plural(len(rows), 'checkpoint')}, {size(sum(row.bytes for row in rows))} in total"
