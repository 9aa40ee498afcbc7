"""Save and continue a run: safetensors and JSON in one folder, whole or not there, checked by hash."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from m1clip import formatting
from m1clip.errors import UserError
from m1clip.formatting import steps_or_seconds
from m1clip.io import atomic_folder, read_small, remove_folder, remove_leftovers, validated, write_json
from m1clip.io import restore_folders as files_restore
from m1clip.model.weights import read_tensors, write_tensors
from m1clip.training.checkpoint_files import (
    FOLDER,
    FORMAT,
    MANIFEST,
    SMALL,
    checkpoint_folder,
    found,
    prune,
    sha256,
    size_of,
    verify,
)
from m1clip.training.step import TrainStep


@dataclass
class TrainState:
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
    lr_factor: float = 1.0  # of the learning rate, lowered by each return
    chunk: int = 0  # smaller than the config's where memory was short; 0: as the config says
    frozen_sha256: str = ""  # of the weights that the run never changes: they are not in the checkpoint
    evaluation_due: bool = False  # a signal broke off the evaluation of this step


Groups = dict[str, dict[str, Tensor]]  # file name without ending -> tensors


def save(run: Path, state: TrainState, groups: Groups, keep: int) -> Path:
    """Write a checkpoint, then delete those of later steps, and all but the newest `keep`."""
    target = checkpoint_folder(run, state.step)
    with atomic_folder(target) as folder:
        for name, tensors in groups.items():
            write_tensors(folder / f"{name}.safetensors", tensors)
        write_json(folder / "state.json", {"format": FORMAT, **asdict(state)})
        hashes = {file.name: sha256(file) for file in sorted(folder.iterdir())}
        write_json(folder / MANIFEST, {"format": FORMAT, "sha256": hashes})
    for later in [step for step in found(run) if step > state.step]:
        remove_folder(checkpoint_folder(run, later))  # rotten, or of a future that was given up: not one of the `keep`
    prune(run, keep)
    return target


def load_latest(
    run: Path, device: torch.device, warn: Callable[[str], None], sound: bool = False
) -> tuple[TrainState, Groups] | None:
    """The newest whole checkpoint, with `sound` one not saved among skipped updates where there is such a one.

    A broken one is named and passed over. None when there is none at all; when there are but none is whole, a
    UserError: hours of work are not dropped in silence.
    """
    for name in files_restore(run / FOLDER):
        warn(f"{run / FOLDER / name}: was being replaced when the run was killed; the old one is back")
    for name in remove_leftovers(run / FOLDER):
        warn(f"{run / FOLDER / name}: an unfinished save, removed")
    steps = sorted(found(run))
    chosen: Path | None = None
    for step in reversed(steps):
        folder = checkpoint_folder(run, step)
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


def _state(path: Path) -> TrainState:
    """What a whole checkpoint says of the loop; fields that an older format lacks stand at their default."""
    try:
        values = json.loads(read_small(path, SMALL))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no table of values")
    known = {item.name for item in fields(TrainState)}
    told: dict[str, Any] = {**asdict(TrainState()), **{k: v for k, v in values.items() if k in known}}
    return TrainState(**validated(TrainState, told, str(path)))


# So many copies, and bytes beside them, must be free for one. Many: a save takes a second or two, and the peak of
# memory counts for people too (76.7M parameters: 0.9 GB more; benchmarks/step.py shows it).
MARGIN, RESERVE = 50, 512_000_000
Tell = Callable[[str], None]


def writes_aside(size: int, free: float) -> bool:
    """Whether nobody would miss the memory of a second copy, so that training need not wait for the disk."""
    return MARGIN * size + RESERVE <= free


def save_failure(error: BaseException, path: Path) -> str | None:
    """What a failed write means, in words; None where it is no trouble of the disk."""
    if not isinstance(error, OSError):
        return None
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    why = "the disk is full" if full else (error.strerror or str(error))
    return f"{path}: could not be saved: {why}"


@dataclass
class Schedule:
    """Due after so many steps, or so much time by a clock that neither jumps nor runs while the machine sleeps."""

    steps: int
    seconds: float
    clock: Callable[[], float] = time.monotonic
    _last: float = 0.0

    def __post_init__(self) -> None:
        self._last = self.clock()

    def due(self, step: int) -> bool:
        """Whether the checkpoint after this step is to be written."""
        if self.seconds:
            return self.clock() - self._last >= self.seconds
        return bool(self.steps) and step > 0 and step % self.steps == 0

    def done(self) -> None:
        """One was begun now."""
        self._last = self.clock()


def save_schedule(every: int | str | None, total_steps: int) -> Schedule:
    """From train.save_every; 0 means once, at the end."""
    steps, seconds = steps_or_seconds(every or total_steps, "train.save_every")
    return Schedule(steps, seconds)


@dataclass
class _Work:
    """A checkpoint that is being written, or was."""

    step: int
    began: float
    aside: bool
    path: Path | None = None
    error: BaseException | None = None
    seconds: float = 0.0
    thread: threading.Thread | None = None


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(
        self, run: Path, keep: int, schedule: Schedule, on_save_error: str, log: Callable[..., None], say: Tell,
        warn: Tell, free: Callable[[], float], check_folder: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`free()` gives the bytes of memory a copy could take; `check_folder()` raises if the run folder is gone."""
        self.run, self.keep, self.schedule, self.on_save_error = run, keep, schedule, on_save_error
        self.log, self.say, self.warn, self.free = log, say, warn, free
        self.check_folder = check_folder
        self._work: _Work | None = None
        self._owed = self._said = False

    def due(self, step: int) -> bool:
        """Whether a checkpoint is owed; it stays so until `save`: a run whose last update was skipped waits with it."""
        self._owed = self._owed or self.schedule.due(step)
        return self._owed

    def forget(self) -> None:
        """The run went back: what was owed belongs to a step that has not been."""
        self._owed = False

    def save(self, state: TrainState, groups: Groups, wait: bool = False) -> None:
        """Begin a checkpoint; with `wait` it is on the disk, or an error, when this returns."""
        self.finish()
        self.schedule.done()
        self._owed = False
        size = sum(t.numel() * t.element_size() for group in groups.values() for t in group.values())
        aside = not wait and writes_aside(size, self.free())
        self._work = work = _Work(state.step, time.monotonic(), aside)
        kept = replace(state)
        if aside:
            copies = {
                name: {key: t.detach().to("cpu", copy=True) for key, t in group.items()}
                for name, group in groups.items()
            }
            # A daemon: a second signal need not wait for the disk, and half a checkpoint is never used.
            work.thread = threading.Thread(target=self._write, args=(work, kept, copies), daemon=True)
            work.thread.start()
        else:
            self._write(work, kept, groups)
            self._close(work, must=wait)

    def poll(self) -> None:
        """Tell of a checkpoint that has become whole, or could not be written; costs nothing otherwise."""
        work = self._work
        if work is not None and work.thread is not None and not work.thread.is_alive():
            self._close(work)

    def finish(self, must: bool = False) -> None:
        """Wait for what is being written; with `must` its failure is an error, whatever the config says."""
        work = self._work
        if work is not None and work.thread is not None:
            work.thread.join()
            self._close(work, must)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """A run that ends by an error still gets its last checkpoint whole; a second signal does not wait for it."""
        if kind is None:
            self.finish(must=True)
        elif issubclass(kind, Exception):
            with contextlib.suppress(Exception):  # the error that ends the run is the one to tell of
                self.finish()

    def failed(self, error: BaseException, path: Path, step: int, must: bool = False) -> None:
        """Stop, or warn and go on, as configured; an error that is not the disk's is raised as it is."""
        self.check_folder()
        words = save_failure(error, path)
        if words is None:
            raise error
        if must or self.on_save_error == "stop":
            raise UserError(
                f"{words} (step {step:,}); what was saved before is untouched: make room, then continue with "
                f"m1clip train --resume {self.run}"
            ) from None
        self.log("event", step=step, event="could not save", why=words)
        self.warn(f"{words} (step {step:,}); training goes on, and tries again with the next one")

    def _write(self, work: _Work, state: TrainState, groups: Groups) -> None:
        try:
            self.check_folder()
            with torch.no_grad():
                work.path = save(self.run, state, groups, self.keep)
        except BaseException as error:
            if work.thread is None and not isinstance(error, Exception):
                raise  # an interrupt of the training thread
            work.error = error
        work.seconds = time.monotonic() - work.began

    def _close(self, work: _Work, must: bool = False) -> None:
        self._work = None
        if work.error is not None:
            self.failed(work.error, self.run / "checkpoints", work.step, must)
            return
        assert work.path is not None
        size = size_of(work.path)
        self.log("checkpoint", step=work.step, path=work.path.name, bytes=size,
                 seconds=round(work.seconds, 4), aside=work.aside)  # fmt: skip
        if not self._said:
            self._said = True
            how = "beside the training" if work.aside else "while training waits"
            self.say(f"checkpoint  step {work.step:,}: {formatting.size(size)}, written {how}; {self.keep} are kept")


def groups(update: TrainStep, state: TrainState) -> Groups:
    """All tensors of a checkpoint, by file; the scaler's two numbers go into the state."""
    if update.scaler is not None:
        scaler = update.scaler.state_dict()
        state.scaler_scale, state.scaler_growth = float(scaler["scale"]), int(scaler["_growth_tracker"])
    state.frozen_sha256 = update.frozen_sha256
    kept = {"weights": trained(update.model), "optimizer": update.optimizer.tensors()}
    if update.ema is not None:
        kept["ema"] = {name: t for name, t in update.ema.weights.items() if name in kept["weights"]}
    return kept


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The weights that training may change, and all buffers."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def restore(update: TrainStep, state: TrainState, kept: Groups) -> None:
    """Put a checkpoint's tensors back; a UserError, before anything is changed, where they are not this model's."""
    wrong = _misfit(update, state, kept)
    if wrong:
        raise UserError(
            f"the checkpoint of step {state.step:,} does not fit the run: {wrong}. Bring an earlier one back from a "
            f"copy, or begin a new run"
        )
    update.reset_graph()
    update.model.load_state_dict(kept["weights"], strict=False)  # without what is frozen
    update.optimizer.load_tensors(kept["optimizer"])
    if update.ema is not None:
        update.ema.weights |= kept["ema"]
    if update.scaler is not None:
        scale = {"scale": state.scaler_scale, "_growth_tracker": state.scaler_growth}
        update.scaler.load_state_dict({**update.scaler.state_dict(), **scale})


def _misfit(update: TrainStep, state: TrainState, kept: Groups) -> str:
    """Which tensor is missing, unknown or of another shape, in words; empty when all fit."""
    if state.frozen_sha256 != update.frozen_sha256:
        return "the frozen weights are not those that it began with"
    own = {name: p.detach() for name, p in update.model.named_parameters() if p.requires_grad}
    wanted: Groups = {"weights": trained(update.model), **({} if update.ema is None else {"ema": own})}
    for group, tensors in wanted.items():
        wrong = _difference(kept.get(group, {}), tensors)
        if wrong:
            return f"{group}: {wrong}"
    moments = kept.get("optimizer", {})
    for part_name in update.optimizer.parts:
        found = [key.split("/") for key in moments if key.startswith(f"{part_name}/")]
        kinds = {words[-1] for words in found}
        for name in {"/".join(words[1:-1]) for words in found}:
            for kind in kinds:
                tensor = moments.get(f"{part_name}/{name}/{kind}")
                if tensor is None or name not in own or tensor.shape not in (own[name].shape, ()):
                    return f"optimizer: {part_name}/{name}/{kind} is missing or has another shape"
    return ""


def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    for name in sorted(found.keys() ^ wanted.keys()):
        return f"{name} is {'missing' if name in wanted else 'unknown'}"
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            return f"{name} has the shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}"
    return ""
