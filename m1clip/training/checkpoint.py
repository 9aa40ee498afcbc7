"""Checkpoints of a run: safetensors and JSON in one folder each, written atomically and verified by hash."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from m1clip import console
from m1clip.errors import UserError
from m1clip.formatting import plural, save_interval, size, table
from m1clip.io import (
    atomic_folder,
    read_small,
    remove_folder,
    remove_leftovers,
    restore_folders,
    write_json,
)
from m1clip.model.weights import read_tensors, write_tensors
from m1clip.runlog import RunLog
from m1clip.schema import format_version, validate

if TYPE_CHECKING:
    from m1clip.training.compose import TrainStep
    from m1clip.training.context import RunContext

CHECKPOINT_FORMAT = 1
STATE = "state.json"
MANIFEST = "manifest.json"  # sha256 of every other file
CHECKPOINT_FOLDER = "checkpoints"
# Writing a large checkpoint can take longer than the steps between two evaluations.
LARGE = 2**27  # bytes of trained weights
LARGE_SECONDS = 60.0  # between two large checkpoints, unless --save-every says otherwise
REQUIRED = {STATE, "weights.safetensors", "optimizer.safetensors"}
MAX_JSON_BYTES = 2**24
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)  # of a damaged JSON file
TensorGroups = dict[str, dict[str, Tensor]]  # file name without extension -> tensors


@dataclass(frozen=True)
class TrainState:
    """What resuming needs besides the tensors.

    No random state: random numbers are a function of the step.
    """

    step: int = 0
    best: float = -1.0
    best_step: int = -1
    stale: int = 0  # evaluations since the best one
    seconds: float = 0.0  # trained so far, over all sessions
    scaler_scale: float = 65536.0
    scaler_growth: int = 0
    skipped: int = 0  # non-finite steps in a row
    rollbacks: int = 0
    lr_factor: float = 1.0  # lowered by each rollback
    micro_batch: int = 0  # reduced after running out of memory; 0: as configured
    frozen_sha256: str = ""  # of the frozen weights, which are not in the checkpoint
    evaluation_due: bool = False  # a signal interrupted the evaluation of this step
    used_seconds: float = 0.0  # of the time that --minutes promises
    evaluation_cost: float = 0.0  # of one evaluation, in steps: see `Costs`
    closing_cost: float = 0.0  # of what follows the last evaluation, in steps


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINT_FOLDER / f"step-{step:06d}"


def saved_steps(run: Path) -> list[int]:
    names = (
        re.fullmatch(r"step-([0-9]{6,18})", item.name)
        for item in (run / CHECKPOINT_FOLDER).glob("step-*")
        if item.is_dir()
    )
    return sorted(int(name[1]) for name in names if name)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(run: Path, state: TrainState, groups: TensorGroups, keep: int) -> Path:
    """Write a checkpoint, then delete those of later steps and all but the newest `keep`."""
    target = checkpoint_folder(run, state.step)
    with atomic_folder(target) as folder, torch.no_grad():
        hashes = {}
        for name, tensors in groups.items():
            file = folder / f"{name}.safetensors"
            hashes[file.name] = write_tensors(file, tensors)
        write_json(folder / STATE, {"format": CHECKPOINT_FORMAT, **asdict(state)})
        hashes[STATE] = sha256(folder / STATE)
        write_json(folder / MANIFEST, {"sha256": dict(sorted(hashes.items()))})
    steps = saved_steps(run)
    later = [step for step in steps if step > state.step]  # damaged, or undone by a rollback
    for step in [*later, *[step for step in steps if step <= state.step][:-keep]]:
        remove_folder(checkpoint_folder(run, step))
    return target


def verify(folder: Path) -> str:
    """Why a checkpoint cannot be used, or "" if it is valid.

    UserError if a newer m1clip wrote it.
    """
    try:
        hashes: dict[str, Any] = dict(
            json.loads(read_small(folder / MANIFEST, MAX_JSON_BYTES))["sha256"]
        )
    except UNREADABLE as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    unlisted = sorted(
        (REQUIRED | {file.name for file in folder.glob("*.safetensors")}) - set(hashes)
    )
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
    except UNREADABLE as error:
        return f"its {STATE} cannot be read ({type(error).__name__})"
    if version > CHECKPOINT_FORMAT:
        raise UserError(
            f"{folder}: written by a newer m1clip (format {version}, this one reads"
            f" {CHECKPOINT_FORMAT}): upgrade"
        )
    return ""


def load_latest(
    run: Path, device: torch.device, without_skips: bool = False
) -> tuple[TrainState, TensorGroups] | None:
    """The latest valid checkpoint; `without_skips` prefers the latest one saved after a finite step.

    A damaged checkpoint is reported and skipped. None if there are none; UserError if none is
    valid, so that hours of work are not dropped silently.
    """
    for name in restore_folders(run / CHECKPOINT_FOLDER):
        console.warn(
            f"{run / CHECKPOINT_FOLDER / name}: was being replaced when the run was killed;"
            " restored the old one"
        )
    for name in remove_leftovers(run / CHECKPOINT_FOLDER):
        console.warn(f"{run / CHECKPOINT_FOLDER / name}: removed an unfinished save")
    steps = saved_steps(run)
    chosen: Path | None = None
    for step in reversed(steps):
        folder = checkpoint_folder(run, step)
        problem = verify(folder)
        if problem and step == steps[0] and chosen is None:
            raise UserError(
                f"{run}: none of its checkpoints is valid (step {step}: {problem}). Restore one"
                f" from a backup, or delete {run / CHECKPOINT_FOLDER} to train from scratch"
            )
        if problem:
            console.warn(f"{folder}: {problem}; using the checkpoint before it")
            continue
        chosen = chosen or folder
        if not without_skips or _read_state(folder / STATE).skipped == 0:
            chosen = folder
            break
    if chosen is None:
        return None
    groups = {file.stem: read_tensors(file, str(device)) for file in chosen.glob("*.safetensors")}
    return _read_state(chosen / STATE), groups


def _read_state(path: Path) -> TrainState:
    try:
        values = dict(json.loads(read_small(path, MAX_JSON_BYTES)))
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__})") from None
    values.pop("format", None)
    return TrainState(**validate(TrainState, values, str(path)))


def _passes(interval: float, step: int) -> bool:
    """Whether a multiple of the interval is reached with this step, not with the one before."""
    almost = (
        step + 1e-6
    )  # rounding, as in 0.1 epochs of 30 steps, must not delay a checkpoint by one
    return almost // interval > (almost - 1) // interval


class SaveTimer:
    """When to save: every N steps, epochs or seconds of a clock that excludes sleep, or after evaluations.

    After evaluations, a `large` checkpoint is saved only if the last one is a minute old.
    """

    def __init__(
        self, every: int | str | None, steps_per_epoch: int = 1, large: bool = False
    ) -> None:
        self.with_evaluations = every is None
        self.least_seconds = LARGE_SECONDS if large else 0.0
        interval = save_interval(every or 0, "train.save_every")
        self.seconds = interval.seconds
        # Not rounded: half an epoch of 5 steps is over after 3, 5, 8, ... steps.
        self.steps = interval.steps or interval.epochs * steps_per_epoch
        self.announced = False  # whether the first checkpoint was shown to the user
        self.reset()

    def reset(self) -> None:
        """Begin to wait for the next checkpoint."""
        self._last = time.monotonic()
        self._due = False

    def due(self, step: int, evaluated: bool) -> bool:
        """Whether a checkpoint is due; stays true until `reset`, because skipped steps delay it."""
        seconds = time.monotonic() - self._last
        elapsed = bool(self.seconds) and seconds >= self.seconds
        at_step = bool(self.steps and step) and _passes(self.steps, step)
        at_evaluation = self.with_evaluations and evaluated and step > 0
        long_ago = seconds >= self.least_seconds
        self._due = self._due or elapsed or at_step or (at_evaluation and long_ago)
        return self._due


def state_to_save(run: RunContext) -> TrainState:
    """The state of a run with what its collaborators know: loss scale, micro-batch, used time."""
    parts = run.train_step.parts
    state = replace(run.state, frozen_sha256=parts.frozen_sha256)
    handler = run.train_step.attempts.handler
    if handler is not None:
        state = replace(state, micro_batch=handler.micro_batch)
    if parts.update.scaler is not None:
        scaler = parts.update.scaler.state_dict()
        scale, growth = float(scaler["scale"]), int(scaler["_growth_tracker"])
        state = replace(state, scaler_scale=scale, scaler_growth=growth)
    if run.pacer is not None:
        costs = run.pacer.costs
        state = replace(
            state,
            used_seconds=run.pacer.budget.used,
            evaluation_cost=costs.evaluation,
            closing_cost=costs.closing,
        )
    return state


def write_checkpoint(run: RunContext) -> None:
    """Save the state and tensors of a run; all ranks take part, rank 0 writes."""
    groups = checkpoint_tensors(run.train_step)
    run.save_timer.reset()
    if run.ranks.rank != 0:  # all ranks have the same state
        return
    keep = run.config.train.save_total_limit
    state = run.state
    step = state.step
    target = checkpoint_folder(run.folder, step)

    def write(groups: TensorGroups) -> float:
        """Save the tensors; returns the seconds."""
        begin = time.monotonic()
        with disk_errors(run.log, run.folder / CHECKPOINT_FOLDER, step):
            save(run.folder, state, groups, keep)
        return round(time.monotonic() - begin, 4)

    def report(seconds: float) -> None:
        nbytes = folder_bytes(target)
        run.log.write("checkpoint", step=step, path=target.name, bytes=nbytes, seconds=seconds)
        if not run.save_timer.announced:
            run.save_timer.announced = True
            console.print(f"checkpoint step {step:,}: {size(nbytes)}; keeping the newest {keep}")

    run.saver.submit(target, groups, write, report)
    run.save_timer.reset()  # saving takes time


@contextlib.contextmanager
def disk_errors(log: RunLog, path: Path, step: int) -> Iterator[None]:
    """Stop the run with one line if the block cannot write to `path`."""
    log.check_folder()
    try:
        yield
    except OSError as error:
        log.check_folder()
        reason = (
            "the disk is full"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else error.strerror or error
        )
        raise UserError(
            f"{path}: could not be saved: {reason} (step {step:,}); earlier checkpoints are intact:"
            f" free some space, then continue with m1clip train --resume {log.path.parent}"
        ) from None


def is_large(model: nn.Module) -> bool:
    """Whether a checkpoint of this model takes seconds to write."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return sum(p.numel() * p.element_size() for p in trained) > LARGE


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    frozen = {
        name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def checkpoint_tensors(train_step: TrainStep) -> TensorGroups:
    """The tensors of a checkpoint by file."""
    groups = {
        "weights": trained_tensors(train_step.model),
        "optimizer": train_step.optimizer.tensors(),
    }
    shards = train_step.parts.world.shards
    if shards is None:
        return groups
    return {name: shards.complete(tensors) for name, tensors in groups.items()}


def share_checkpoint(
    train_step: TrainStep, read: Callable[[torch.device], tuple[TrainState, TensorGroups] | None]
) -> tuple[TrainState, TensorGroups] | None:
    """What rank 0 reads, on all ranks, which need no access to the run folder.

    Of sharded tensors only their rows.
    """
    ranks, shards = train_step.parts.world.ranks, train_step.parts.world.shards
    device = train_step.parts.device.torch if shards is None else torch.device("cpu")
    loaded: list[TensorGroups] = []

    def describe() -> (
        tuple[TrainState, dict[str, dict[str, tuple[torch.Size, torch.dtype]]]] | None
    ):
        checkpoint = read(device)
        if checkpoint is None:
            return None
        loaded.append(checkpoint[1])
        shapes = {
            group: {name: (t.shape, t.dtype) for name, t in ts.items()}
            for group, ts in checkpoint[1].items()
        }
        return checkpoint[0], shapes

    described = ranks.on_rank0(describe)
    if described is None:
        return None
    state, shapes = described
    groups: TensorGroups = {}
    for group, tensors_of_group in shapes.items():
        groups[group] = {}
        for name, (shape, dtype) in tensors_of_group.items():
            tensor = (
                loaded[0][group].pop(name)
                if loaded
                else torch.empty(shape, dtype=dtype, device=device)
            )
            ranks.broadcast([tensor])
            groups[group][name] = tensor if shards is None else shards.own_rows(name, tensor)
    return state, groups


def restore(train_step: TrainStep, state: TrainState, groups: TensorGroups) -> None:
    """Load a checkpoint's tensors.

    UserError, before anything is changed, if they do not match the model.
    """
    mismatch = _mismatch(train_step, state, groups)
    if mismatch:
        raise UserError(
            f"the checkpoint of step {state.step:,} does not match the run: {mismatch}. Restore an"
            " earlier one from a backup, or start a new run"
        )
    train_step.reset()
    weights, moments = groups["weights"], groups["optimizer"]
    shards = train_step.parts.world.shards
    if shards is not None:
        weights = {name: shards.own_rows(name, tensor) for name, tensor in weights.items()}
        moments = {key: shards.local_rows(key, tensor) for key, tensor in moments.items()}
    train_step.model.load_state_dict(weights, strict=False)  # frozen weights are not saved
    train_step.optimizer.load_tensors(moments)
    scaler = train_step.parts.update.scaler
    if scaler is not None:
        scale = {"scale": state.scaler_scale, "_growth_tracker": state.scaler_growth}
        scaler.load_state_dict({**scaler.state_dict(), **scale})


def _mismatch(train_step: TrainStep, state: TrainState, groups: TensorGroups) -> str:
    """The first tensor that is missing, unknown or of another shape; "" if all fit."""
    if state.frozen_sha256 != train_step.parts.frozen_sha256:
        return "the frozen weights have changed since the run started"
    trained = {
        name: p.detach() for name, p in train_step.model.named_parameters() if p.requires_grad
    }
    expected, actual = trained_tensors(train_step.model), groups.get("weights", {})
    for name in sorted(actual.keys() ^ expected.keys()):
        return f"weights: {name} is {'missing' if name in expected else 'unknown'}"
    for name, tensor in expected.items():
        if actual[name].shape != tensor.shape:
            return (
                f"weights: {name} has the shape {tuple(actual[name].shape)}, not"
                f" {tuple(tensor.shape)}"
            )
    moments = groups.get("optimizer", {})
    for part in train_step.optimizer.parts:
        keys = [key.split("/") for key in moments if key.startswith(f"{part}/")]
        for name in {"/".join(words[1:-1]) for words in keys}:
            for kind in {words[-1] for words in keys}:
                moment = moments.get(f"{part}/{name}/{kind}")
                if (
                    moment is None
                    or name not in trained
                    or moment.shape not in (trained[name].shape, ())
                ):
                    return f"optimizer: {part}/{name}/{kind} is missing or has another shape"
    return ""


def list_checkpoints(run: Path, verified: bool = False) -> list[dict[str, Any]]:
    """The checkpoints of a run, oldest first.

    `problem` is None if not verified, and empty if valid.
    """
    if not (run / "config.toml").is_file() and not (run / CHECKPOINT_FOLDER).is_dir():
        raise UserError(f"{run}: not a run (no config.toml, no {CHECKPOINT_FOLDER}/)")
    rows = []
    for step in saved_steps(run):
        path = checkpoint_folder(run, step)
        row = {
            "step": step,
            "path": str(path),
            "bytes": folder_bytes(path),
            "saved": path.stat().st_mtime,
        }
        rows.append({**row, "problem": verify(path) if verified else None})
    return rows


def checkpoint_table(run: Path, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return f"{run}: no checkpoints yet"
    cells = []
    for row in rows:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["saved"]))
        state = Path(row["path"]).name if row["problem"] is None else row["problem"] or "valid"
        cells.append((f"{row['step']:,}", size(row["bytes"]), saved, state))
    text = table(("step", "size", "saved", "state"), cells)
    return f"{text}\n{plural(len(rows), 'checkpoint')}, {size(sum(row['bytes'] for row in rows))} in total"
