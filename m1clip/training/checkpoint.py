"""Save and restore a run: safetensors and JSON in one folder, written atomically and verified by hash."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from m1clip.config import Config
from m1clip.errors import UserError
from m1clip.formatting import size, steps_or_seconds
from m1clip.io import atomic_folder, read_small, remove_folder, remove_leftovers, restore_folders, validated, write_json
from m1clip.model.weights import read_tensors, write_tensors
from m1clip.runlog import RunLog
from m1clip.training.checkpoint_list import (
    FOLDER,
    FORMAT,
    MANIFEST,
    MAX_JSON_BYTES,
    STATE,
    checkpoint_folder,
    delete_old,
    folder_bytes,
    saved_steps,
    sha256,
    verify,
)
from m1clip.training.progress import Screen
from m1clip.training.step import TrainStep

TensorGroups = dict[str, dict[str, Tensor]]  # file name without extension -> tensors

# Checkpoints are written in the background only if this many copies plus these bytes are free: a save takes
# a second or two, and a higher memory peak costs more (76.7M parameters: 0.9 GB; benchmarks/step.py).
FREE_COPIES, FREE_BYTES = 50, 512_000_000


@dataclass
class TrainState:
    """What resuming needs besides the tensors. No random state: random numbers are a function of the step."""

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


def save(run: Path, state: TrainState, groups: TensorGroups, keep: int) -> Path:
    """Write a checkpoint, then delete those of later steps and all but the newest `keep`."""
    target = checkpoint_folder(run, state.step)
    with atomic_folder(target) as folder:
        for name, tensors in groups.items():
            write_tensors(folder / f"{name}.safetensors", tensors)
        write_json(folder / STATE, {"format": FORMAT, **asdict(state)})
        write_json(folder / MANIFEST, {"sha256": {file.name: sha256(file) for file in sorted(folder.iterdir())}})
    for later in [step for step in saved_steps(run) if step > state.step]:
        remove_folder(checkpoint_folder(run, later))  # damaged, or undone by a rollback
    delete_old(run, keep)
    return target


def load_latest(
    run: Path, device: torch.device, warn: Callable[[str], None], without_skips: bool = False
) -> tuple[TrainState, TensorGroups] | None:
    """The latest valid checkpoint; `without_skips` prefers the latest one saved after a finite step.

    A damaged checkpoint is reported and skipped. None if there are none; UserError if none is valid, so that hours
    of work are not dropped silently.
    """
    for name in restore_folders(run / FOLDER):
        warn(f"{run / FOLDER / name}: was being replaced when the run was killed; restored the old one")
    for name in remove_leftovers(run / FOLDER):
        warn(f"{run / FOLDER / name}: removed an unfinished save")
    steps = saved_steps(run)
    chosen: Path | None = None
    for step in reversed(steps):
        folder = checkpoint_folder(run, step)
        problem = verify(folder)
        if problem and step == steps[0] and chosen is None:
            raise UserError(
                f"{run}: none of its checkpoints is valid (step {step}: {problem}). Restore one from a backup, "
                f"or delete {run / FOLDER} to train from scratch"
            )
        if problem:
            warn(f"{folder}: {problem}; using the checkpoint before it")
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
        values = json.loads(read_small(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    values.pop("format", None)
    return TrainState(**validated(TrainState, values, str(path)))


@dataclass
class SaveSchedule:
    """Due every N steps, or every N seconds of a monotonic clock that excludes sleep."""

    steps: int
    seconds: float
    clock: Callable[[], float] = time.monotonic
    _last: float = 0.0

    def __post_init__(self) -> None:
        self._last = self.clock()

    @classmethod
    def parse(cls, every: int | str | None, total_steps: int) -> SaveSchedule:
        """Parse train.save_every; 0 means only at the end."""
        return cls(*steps_or_seconds(every or total_steps, "train.save_every"))

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        if self.seconds:
            return self.clock() - self._last >= self.seconds
        return bool(self.steps) and step > 0 and step % self.steps == 0

    def restart(self) -> None:
        """Start a new interval."""
        self._last = self.clock()


@dataclass
class _Save:
    """A checkpoint being written, or just written."""

    step: int
    started: float
    thread: threading.Thread | None = None  # None: written in the training thread
    path: Path | None = None
    error: BaseException | None = None
    seconds: float = 0.0


class CheckpointWriter:
    """Writes the checkpoints of a run one at a time, in the background where memory allows."""

    def __init__(
        self, run: Path, config: Config, total_steps: int, log: RunLog, screen: Screen, free_bytes: Callable[[], float]
    ) -> None:
        """`free_bytes()` is the main memory available for a copy of the tensors."""
        self.run, self.config, self.log, self.screen, self.free_bytes = run, config, log, screen, free_bytes
        self.schedule = SaveSchedule.parse(config.train.save_every, total_steps)
        self._save: _Save | None = None
        self._due = self._announced = False

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due; stays true until `save`, because skipped steps delay it."""
        self._due = self._due or self.schedule.due(step)
        return self._due

    def reset(self) -> None:
        """Clear what is due, after a rollback."""
        self._due = False

    def save(self, state: TrainState, groups: TensorGroups, wait: bool = False) -> None:
        """Start saving a checkpoint; with `wait`, return only once it is on disk or has failed."""
        self.finish()
        self.schedule.restart()
        self._due = False
        nbytes = sum(t.numel() * t.element_size() for group in groups.values() for t in group.values())
        background = not wait and FREE_COPIES * nbytes + FREE_BYTES <= self.free_bytes()
        self._save = save = _Save(state.step, time.monotonic())
        state = replace(state)
        if background:
            groups = {
                name: {key: t.detach().to("cpu", copy=True) for key, t in group.items()}
                for name, group in groups.items()
            }
            # A daemon thread: a second signal does not wait for the disk, and an unfinished checkpoint is never used.
            save.thread = threading.Thread(target=self._write, args=(save, state, groups), daemon=True)
            save.thread.start()
        else:
            self._write(save, state, groups)
            self._report(save)

    def poll(self) -> None:
        """Report a background save once it has finished."""
        if self._save is not None and self._save.thread is not None and not self._save.thread.is_alive():
            self._report(self._save)

    def finish(self) -> None:
        """Wait for the save in progress."""
        if self._save is not None and self._save.thread is not None:
            self._save.thread.join()
            self._report(self._save)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Complete the last checkpoint even if the run failed, unless a second signal arrived."""
        if kind is None:
            self.finish()
        elif issubclass(kind, Exception):
            with contextlib.suppress(Exception):  # the error that ended the run is reported instead
                self.finish()

    def handle_error(self, error: BaseException, path: Path, step: int) -> None:
        """Stop the run: a disk error is reported in one line, others are raised."""
        self.log.check_folder()
        if not isinstance(error, OSError):
            raise error
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"{path}: could not be saved: {'the disk is full' if full else error.strerror or error} (step {step:,}); "
            f"earlier checkpoints are intact: free some space, then continue with m1clip train --resume {self.run}"
        ) from None

    def _write(self, job: _Save, state: TrainState, groups: TensorGroups) -> None:
        try:
            self.log.check_folder()
            with torch.no_grad():
                job.path = save(self.run, state, groups, self.config.train.save_total_limit)
        except BaseException as error:
            if job.thread is None and not isinstance(error, Exception):
                raise  # the training thread was interrupted
            job.error = error
        job.seconds = time.monotonic() - job.started

    def _report(self, job: _Save) -> None:
        self._save = None
        if job.error is not None:
            self.handle_error(job.error, self.run / FOLDER, job.step)
            return
        assert job.path is not None
        nbytes, background = folder_bytes(job.path), job.thread is not None
        values = {"path": job.path.name, "bytes": nbytes, "seconds": round(job.seconds, 4), "background": background}
        self.log.write("checkpoint", step=job.step, **values)
        if not self._announced:
            self._announced = True
            how = "in the background" if background else "while training waited"
            keep = self.config.train.save_total_limit
            self.screen.say(f"checkpoint step {job.step:,}: {size(nbytes)}, saved {how}; keeping the newest {keep}")


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All buffers and trainable weights."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def checkpoint_tensors(train_step: TrainStep, state: TrainState) -> TensorGroups:
    """The tensors of a checkpoint by file; the scaler's two numbers go into the state."""
    if train_step.scaler is not None:
        scaler = train_step.scaler.state_dict()
        state.scaler_scale, state.scaler_growth = float(scaler["scale"]), int(scaler["_growth_tracker"])
    state.frozen_sha256 = train_step.frozen_sha256
    groups = {"weights": trained_tensors(train_step.model), "optimizer": train_step.optimizer.tensors()}
    if train_step.ema is not None:
        groups["ema"] = {name: t for name, t in train_step.ema.weights.items() if name in groups["weights"]}
    return groups


def restore(train_step: TrainStep, state: TrainState, groups: TensorGroups) -> None:
    """Load a checkpoint's tensors; UserError, before anything is changed, if they do not match the model."""
    mismatch = _mismatch(train_step, state, groups)
    if mismatch:
        raise UserError(
            f"the checkpoint of step {state.step:,} does not match the run: {mismatch}. Restore an earlier one from a "
            f"backup, or start a new run"
        )
    train_step.reset_graph()
    train_step.model.load_state_dict(groups["weights"], strict=False)  # frozen weights are not saved
    train_step.optimizer.load_tensors(groups["optimizer"])
    if train_step.ema is not None:
        train_step.ema.weights |= groups["ema"]
    if train_step.scaler is not None:
        scale = {"scale": state.scaler_scale, "_growth_tracker": state.scaler_growth}
        train_step.scaler.load_state_dict({**train_step.scaler.state_dict(), **scale})


def _mismatch(train_step: TrainStep, state: TrainState, groups: TensorGroups) -> str:
    """The first tensor that is missing, unknown or of another shape; "" if all fit."""
    if state.frozen_sha256 != train_step.frozen_sha256:
        return "the frozen weights have changed since the run started"
    trained = {name: p.detach() for name, p in train_step.model.named_parameters() if p.requires_grad}
    expected = {"weights": trained_tensors(train_step.model)} | ({} if train_step.ema is None else {"ema": trained})
    for group, tensors in expected.items():
        found = groups.get(group, {})
        for name in sorted(found.keys() ^ tensors.keys()):
            return f"{group}: {name} is {'missing' if name in tensors else 'unknown'}"
        for name, tensor in tensors.items():
            if found[name].shape != tensor.shape:
                return f"{group}: {name} has the shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}"
    moments = groups.get("optimizer", {})
    for part in train_step.optimizer.parts:
        keys = [key.split("/") for key in moments if key.startswith(f"{part}/")]
        for name in {"/".join(words[1:-1]) for words in keys}:
            for kind in {words[-1] for words in keys}:
                moment = moments.get(f"{part}/{name}/{kind}")
                if moment is None or name not in trained or moment.shape not in (trained[name].shape, ()):
                    return f"optimizer: {part}/{name}/{kind} is missing or has another shape"
    return ""
