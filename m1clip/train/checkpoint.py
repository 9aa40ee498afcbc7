"""Save and continue a run: safetensors and JSON in one folder, whole or not there, checked by hash."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from m1clip.errors import UserError
from m1clip.files import remove_leftovers, restore, whole_folder, write_json

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass
class LoopState:
    """Everything a resume needs beside the tensors. Randomness is not here: it follows from the step."""

    step: int = 0
    best: float = -1.0
    best_step: int = -1
    stale: int = 0  # evaluations since the best
    seconds: float = 0.0  # trained so far, over all sessions
    scaler_scale: float = 65536.0
    scaler_growth: int = 0


Groups = dict[str, dict[str, Tensor]]  # file name without ending -> tensors


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lives."""
    return run / "checkpoints" / f"step-{step:06d}"


def save(run: Path, state: LoopState, groups: Groups, keep: int) -> Path:
    """Write a checkpoint, then delete all but the newest `keep`."""
    target = folder_of(run, state.step)
    with whole_folder(target) as folder:
        for name, tensors in groups.items():
            save_file(
                {key: t.detach().contiguous() for key, t in tensors.items()}, folder / f"{name}.safetensors"
            )
        write_json(folder / "state.json", {"format": FORMAT, **asdict(state)})
        hashes = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
        write_json(folder / MANIFEST, {"format": FORMAT, "sha256": hashes})
    for old in sorted(found(run))[:-keep]:
        shutil.rmtree(folder_of(run, old))
    return target


def found(run: Path) -> list[int]:
    """Steps that have a checkpoint folder."""
    names = (item.name for item in (run / "checkpoints").glob("step-*") if item.is_dir())
    return [int(name[5:]) for name in names if name[5:].isdigit()]


def load_newest(
    run: Path, device: torch.device, warn: Callable[[str], None]
) -> tuple[LoopState, Groups] | None:
    """The newest checkpoint that is whole; a broken one is named and the one before it used.

    None when there is none at all; when there are but none is whole, a UserError: hours of work are not dropped
    in silence.
    """
    for name in restore(run / "checkpoints"):
        warn(f"{run / 'checkpoints' / name}: was being replaced when the run was killed; the old one is back")
    for name in remove_leftovers(run / "checkpoints"):
        warn(f"{run / 'checkpoints' / name}: an unfinished save, removed")
    steps = sorted(found(run))
    for step in reversed(steps):
        folder = folder_of(run, step)
        reason = verify(folder)
        if reason and step == steps[0]:
            raise UserError(
                f"{run}: none of its checkpoints is whole (step {step}: {reason}). Bring one back from a copy, "
                f"or delete {run / 'checkpoints'} to train from the start"
            )
        if reason:
            warn(f"{folder}: {reason}; using the checkpoint before it")
            continue
        groups = {file.stem: load_file(file, device=str(device)) for file in folder.glob("*.safetensors")}
        values = json.loads((folder / "state.json").read_text())
        known = {item.name for item in fields(LoopState)}
        return LoopState(**{key: value for key, value in values.items() if key in known}), groups
    return None


def verify(folder: Path) -> str:
    """Why a checkpoint cannot be used, in words; empty when it can."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        hashes: dict[str, Any] = dict(manifest["sha256"])
        version = int(manifest["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    if version > FORMAT:
        raise UserError(
            f"{folder}: written by a newer m1clip (format {version}, this one reads {FORMAT}): upgrade"
        )
    for name, digest in hashes.items():
        file = folder / Path(name).name
        if not file.is_file():
            return f"{name} is missing"
        if _sha256(file) != digest:
            return f"{name} is damaged (its hash differs)"
    return "" if "state.json" in hashes else "state.json is missing"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
