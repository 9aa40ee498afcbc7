"""When a checkpoint is written, and by whom: by the training thread, or beside it where memory allows a copy."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from m1clip.config_guard import GuardConfig
from m1clip.errors import UserError
from m1clip.train.checkpoint import Groups, LoopState, save
from m1clip.train.manifest import size_of
from m1clip.units import steps_or_seconds

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


def schedule_of(every: int | str | None, total_steps: int) -> Schedule:
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


class Saver:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(
        self, run: Path, keep: int, schedule: Schedule, config: GuardConfig, log: Callable[..., None], say: Tell,
        warn: Tell, free: Callable[[], float], check_folder: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`free()` gives the bytes of memory a copy could take; `check_folder()` raises if the run folder is gone."""
        self.run, self.keep, self.schedule, self.config = run, keep, schedule, config
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

    def save(self, state: LoopState, groups: Groups, wait: bool = False) -> None:
        """Begin a checkpoint; with `wait` it is on the disk, or an error, when this returns."""
        self.finish()
        self.schedule.done()
        self._owed = False
        size = sum(t.numel() * t.element_size() for group in groups.values() for t in group.values())
        aside = not wait and self.config.save_aside == "auto" and writes_aside(size, self.free())
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

    def __enter__(self) -> Saver:
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
        if must or self.config.on_save_error == "stop":
            raise UserError(
                f"{words} (step {step:,}); what was saved before is untouched: make room, then continue with "
                f"m1clip train --resume {self.run}"
            ) from None
        self.log("event", step=step, event="could not save", why=words)
        self.warn(f"{words} (step {step:,}); training goes on, and tries again with the next one")

    def _write(self, work: _Work, state: LoopState, groups: Groups) -> None:
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
            self.say(f"checkpoint  step {work.step:,}: {_size(size)}, written {how}; {self.keep} are kept")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
