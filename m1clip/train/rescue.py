"""What a run does when something goes wrong: skipped updates, a way back, too little memory, a full disk."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import psutil
from torch import Tensor

from m1clip.hardware.limits import NEAR, memory_limit, own_bytes
from m1clip.runlog import RunLog
from m1clip.train.checkpoint import Groups, LoopState, load_newest
from m1clip.train.guard import Guard
from m1clip.train.room import Room
from m1clip.train.saving import Saver, schedule_of
from m1clip.train.screen import Screen
from m1clip.train.setup import Job
from m1clip.train.tensors import restore, trained
from m1clip.train.update import Update
from m1clip.units import amount


class Rescue:
    """Stands beside the loop: guard, memory and disk, with the log and the screen to tell of them."""

    def __init__(
        self, job: Job, update: Update, run: Path, log: RunLog, screen: Screen, total_steps: int
    ) -> None:
        self.job, self.update, self.run, self.log, self.screen = job, update, run, log, screen
        config, pairs = job.config, job.splits["train"].pairs
        self.guard = Guard(
            config.guard,
            log.write,
            screen.warn,
            lambda picture: pairs[picture].id,
            self._suspects,
            self._scale,
        )
        schedule = schedule_of(config.train.save_every, total_steps)
        self.saver = Saver(run, config.train.keep, schedule, config.guard, log.write, screen.say, screen.warn,
                           lambda: free_for_a_copy(job.device.kind, update.room), log.check_folder)  # fmt: skip

    def after(self, state: LoopState, pictures: Tensor, loss: Tensor, grad_norm: Tensor, look: bool) -> None:
        """A step is done: tell of less memory, and of an update that was skipped where that is known by now."""
        self.guard.after(state.step, pictures, loss, grad_norm)
        for shrunk in self.update.room.take() if self.update.room is not None else ():
            state.chunk = shrunk.chunk
            begin = (
                f"memory {'ran' if shrunk.helps else 'stays'} short at step {shrunk.step:,} ({shrunk.why})"
            )
            text = (
                f"{begin}: {shrunk.chunk} pairs at a time from now on; the batch of {self.job.config.train.batch} and "
                f"its gradient stay the same"
                if shrunk.helps
                else f"{begin}, and smaller chunks do not help: going on as before"
            )
            self.log.write("event", step=shrunk.step, event="memory short", chunk=shrunk.chunk,
                           batch=self.job.config.train.batch, why=shrunk.why, helps=shrunk.helps)  # fmt: skip
            self.screen.warn(text)
        if look or self.update.skip == "host":
            self.look(state)

    def look(self, state: LoopState) -> None:
        """Read which updates were skipped; GoBack after too many."""
        self.guard.look(state)

    def go_back(self, state: LoopState) -> None:
        """Make the run what it was at its newest checkpoint, or at the start, with a lower learning rate."""
        self.saver.finish()
        self.saver.forget()
        self.guard.forget()
        failed, config = state.step, self.job.config.guard
        if state.rollbacks >= config.rollbacks:
            self.log.write("event", step=failed, event="diverged", rollbacks=state.rollbacks)
            raise self.guard.diagnosis(state, failed, self.job.precision)
        kept = load_newest(self.run, self.job.device.torch, self.screen.warn, sound=True)
        begin = LoopState(frozen_sha256=self.update.frozen_sha256)
        earlier, tensors = kept if kept is not None else (begin, self._start())
        earlier.rollbacks = state.rollbacks + 1
        earlier.rate_factor = state.rate_factor * config.rollback_rate
        earlier.chunk, earlier.skipped = state.chunk, 0
        # best/ on the disk stays: a worse model must not take its place.
        earlier.best, earlier.best_step, earlier.stale = state.best, state.best_step, state.stale
        if self.update.scaler is not None:  # a scale that was too large then would be too large again
            earlier.scaler_scale = min(earlier.scaler_scale, self.update.scaler.get_scale())
        for item in dataclasses.fields(LoopState):
            setattr(state, item.name, getattr(earlier, item.name))
        self.update.optimizer.drop_state()
        restore(self.update, state, tensors)
        self.update.rate_factor = state.rate_factor
        self.guard.went_back(state, failed)

    @contextlib.contextmanager
    def disk(self, step: int, path: Path) -> Iterator[None]:
        """A write in the block that fails stops the run, or is told of and left, as configured."""
        self.log.check_folder()
        try:
            yield
        except OSError as error:
            self.saver.failed(error, path, step)

    def _suspects(self, step: int) -> list[int]:
        """Numbers of the pictures of a step that alone give no finite vector."""
        batch = self.job.training[step]
        return [int(batch.pictures[row]) for row in self.update.suspects(batch)]

    def _scale(self) -> float:
        """How much the loss is scaled up; 1 where it is not."""
        return 1.0 if self.update.scaler is None else float(self.update.scaler.get_scale())

    def _start(self) -> Groups:
        """The tensors of a run that has not begun."""
        model = self.job.build_model()
        start: Groups = {"weights": trained(model), "optimizer": {}}
        if self.update.ema is not None:
            start["ema"] = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        return start


def make_room(job: Job, state: LoopState) -> Room:
    """The watch over a run's memory: within --memory or the machine's; a full GPU says so itself."""
    train = job.config.train
    limit = amount(train.memory, "B", "--memory") if train.memory else None
    if job.device.kind == "cpu":
        return Room(state.chunk or train.chunk, own_bytes, limit or memory_limit())
    whole = float(job.device.total_bytes()) if job.device.kind == "mps" else None
    return Room(state.chunk or train.chunk, job.device.memory_bytes, limit or whole)


def free_for_a_copy(kind: str, room: Room | None) -> float:
    """Bytes of main memory that this process could still take without coming near a limit."""
    limit, used = memory_limit(), own_bytes()
    if kind != "cuda" and room is not None and room.limit is not None:  # a GPU's limit is not of main memory
        limit, used = min(limit, int(room.limit)), max(used, room.read())
    return float(min(psutil.virtual_memory().available, NEAR * limit - used))
