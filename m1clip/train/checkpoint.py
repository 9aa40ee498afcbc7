"""Save and continue a run: safetensors and JSON in one folder, whole or not there, checked by hash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m1clip.errors import UserError
from m1clip.files import read_small, remove_folder, remove_leftovers, restore, whole_folder, write_json
from m1clip.model.weights import read_tensors, write_tensors
from m1clip.plain import checked
from m1clip.train.manifest import FOLDER, FORMAT, MANIFEST, SMALL, folder_of, found, prune, sha256, verify


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
    skipped: int = 0  # updates in a row that were not finite, up to now
    rollbacks: int = 0  # how often the run went back to a checkpoint
    rate_factor: float = 1.0  # of the learning rate, lowered by each return
    chunk: int = 0  # smaller than the config's where memory was short; 0: as the config says
    frozen_sha256: str = ""  # of the weights that the run never changes: they are not in the checkpoint
    evaluation_due: bool = False  # a signal broke off the evaluation of this step


Groups = dict[str, dict[str, Tensor]]  # file name without ending -> tensors


def save(run: Path, state: LoopState, groups: Groups, keep: int) -> Path:
    """Write a checkpoint, then delete those of later steps, and all but the newest `keep`."""
    target = folder_of(run, state.step)
    with whole_folder(target) as folder:
        for name, tensors in groups.items():
            write_tensors(folder / f"{name}.safetensors", tensors)
        write_json(folder / "state.json", {"format": FORMAT, **asdict(state)})
        hashes = {file.name: sha256(file) for file in sorted(folder.iterdir())}
        write_json(folder / MANIFEST, {"format": FORMAT, "sha256": hashes})
    for later in [step for step in found(run) if step > state.step]:
        remove_folder(
            folder_of(run, later)
        )  # rotten, or of a future that was given up: not one of the `keep`
    prune(run, keep)
    return target


def load_newest(
    run: Path, device: torch.device, warn: Callable[[str], None], sound: bool = False
) -> tuple[LoopState, Groups] | None:
    """The newest whole checkpoint, with `sound` one not saved among skipped updates where there is such a one.

    A broken one is named and passed over. None when there is none at all; when there are but none is whole, a
    UserError: hours of work are not dropped in silence.
    """
    for name in restore(run / FOLDER):
        warn(f"{run / FOLDER / name}: was being replaced when the run was killed; the old one is back")
    for name in remove_leftovers(run / FOLDER):
        warn(f"{run / FOLDER / name}: an unfinished save, removed")
    steps = sorted(found(run))
    chosen: Path | None = None
    for step in reversed(steps):
        folder = folder_of(run, step)
        reason = verify(folder)
        if reason and step == steps[0] and chosen is None:
            raise UserError(
                f"{run}: none of its checkpoints is whole (step {step}: {reason}). Bring one back from a copy, "
                f"or delete {run / FOLDER} to train from the start"
            )
        if reason:
            warn(f"{folder}: {reason}; using the checkpoint before it")
            continue
        chosen = chosen or folder
        if not sound or _state(folder / "state.json").skipped == 0:
            chosen = folder
            break
    if chosen is None:
        return None
    groups = {file.stem: read_tensors(file, str(device)) for file in chosen.glob("*.safetensors")}
    return _state(chosen / "state.json"), groups


def _state(path: Path) -> LoopState:
    """What a whole checkpoint says of the loop; fields that an older format lacks stand at their default."""
    try:
        values = json.loads(read_small(path, SMALL))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no table of values")
    known = {item.name for item in fields(LoopState)}
    told: dict[str, Any] = {**asdict(LoopState()), **{k: v for k, v in values.items() if k in known}}
    return LoopState(**checked(LoopState, told, str(path)))
