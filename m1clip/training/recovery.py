"""Losses and gradients that are not finite: counted, named, and in the end a way back or a diagnosis.

The update itself skips such a step before any weight moves (train/update.py), on an accelerator without the host
knowing. Here the host learns of it, where it reads the losses anyway: after each step on the CPU and on MPS, else with
each line of the log and before each checkpoint. Those moments follow from the step, so a resume sees the same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor

from m1clip.errors import UserError
from m1clip.formatting import amount
from m1clip.hardware.memory import NEAR, memory_limit, own_bytes
from m1clip.runlog import RunLog
from m1clip.training.checkpoint import (
    CheckpointWriter,
    Groups,
    TrainState,
    load_latest,
    restore,
    save_schedule,
    trained,
)
from m1clip.training.oom import OOMHandler
from m1clip.training.progress import Screen
from m1clip.training.setup import Job
from m1clip.training.step import TrainStep

WINDOW, ENOUGH = 64, 16  # losses that make the usual one, and how many it takes at least
SPIKE_STEPS = 3  # in a row, before a person is told: single batches differ
SHOWN = 3  # samples on the screen; all are in the log
SKIP_LIMIT = 8  # updates in a row that are not finite before the run rolls back
ROLLBACK_FACTOR = 0.5  # of the learning rate, at each rollback
SPIKE = 8.0  # deviations above the recent median at which a loss is reported as a spike
HISTORY = 6  # losses of a diagnosis
TO_NORMAL = 1.4826  # the median absolute deviation of a normal distribution, as its standard deviation


class Rollback(Exception):
    """Too many updates in a row were not finite: back to the last good checkpoint."""


@dataclass(frozen=True)
class Seen:
    """One step, its figures perhaps still on the device."""

    step: int  # from 1, as the log counts
    images: Tensor  # of the batch, on the host
    loss: Tensor
    grad_norm: Tensor


@dataclass
class SpikeDetector:
    """Finds losses that stay far above the usual one; by medians, which an outlier cannot move."""

    factor: float
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    high: int = 0  # such losses in a row

    def add(self, loss: float) -> float | None:
        """The usual loss, once, when the newest few stand far above it; else None."""
        if self.factor and len(self.usual) >= ENOUGH and loss > self._most():
            self.high += 1
            if self.high < WINDOW:
                return statistics.median(self.usual) if self.high == SPIKE_STEPS else None
            self.usual.clear()  # it has lasted so long that it is the usual now
        self.high = 0
        self.usual.append(loss)
        return None

    def _most(self) -> float:
        middle = statistics.median(self.usual)
        deviation = TO_NORMAL * statistics.median(abs(value - middle) for value in self.usual)
        return middle + self.factor * max(deviation, 0.01 * abs(middle))


class LossGuard:
    """Looks after each step; speaks only of what went wrong."""

    def __init__(
        self,
        write: Callable[..., None],
        warn: Callable[[str], None],
        name: Callable[[int], str],
        suspects: Callable[[int], list[int]],
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`name(image)` is for a person; `suspects(step)` are images that alone give no finite vector.

        `scale()` is how much fp16 scales the loss up now; it is asked only where a gradient is not finite.
        """
        self.scale = scale
        self.write, self.warn, self.name, self.suspects = write, warn, name, suspects
        self.spikes = SpikeDetector(SPIKE)
        self.losses: deque[float] = deque(maxlen=HISTORY)  # the newest finite ones
        self.named: Counter[str] = Counter()  # samples of skipped updates
        self._pending: list[Seen] = []

    def after(self, step: int, images: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        """A step was given to the device; nothing is read."""
        self._pending.append(Seen(step, images, loss, grad_norm))

    def look(self, state: TrainState) -> None:
        """Read what came since the last look, in one go. Rollback after too many in a row that were not finite."""
        seen, self._pending = self._pending, []
        for each, (loss, norm) in zip(seen, _figures(seen), strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                state.skipped = 0
                self.losses.append(loss)
                usual = self.spikes.add(loss)
                if usual is not None:
                    text = f"the loss stays far above the usual {usual:.4g}: {loss:.4g} at step {each.step:,}"
                    self.write("warning", step=each.step, text=text, loss=loss, usual=usual)
                    self.warn(text)
            elif math.isfinite(loss) and self.scale() > 1:
                # fp16 looks for its scale in this way: the next step has half of it, and nothing has diverged.
                self.write("event", step=each.step, event="scale lowered", loss=loss, scale=self.scale())
            else:
                state.skipped += 1
                self._tell(each, loss, norm, first=state.skipped == 1)
                if state.skipped >= SKIP_LIMIT:
                    raise Rollback

    def forget(self) -> None:
        """The run went back: what was seen since belongs to no step of it."""
        self._pending.clear()
        self.spikes = SpikeDetector(SPIKE)

    def went_back(self, state: TrainState, failed: int) -> None:
        """Say that the run is at an earlier step again, with a lower rate."""
        text = (
            f"went back from step {failed:,} to step {state.step:,}: {SKIP_LIMIT} updates in a row were "
            f"not finite; the learning rate is now {state.lr_factor:g} of what was asked "
            f"(rollback {state.rollbacks})"
        )
        self.write("event", step=state.step, event="went back", back_to=state.step, failed=failed,
                   lr_factor=state.lr_factor, rollbacks=state.rollbacks)  # fmt: skip
        self.warn(text)

    def diagnosis(self, state: TrainState, failed: int, precision: str) -> UserError:
        """Why the run cannot go on, in one line."""
        common = [name for name, _ in self.named.most_common(SHOWN)]
        before = ", ".join(f"{loss:.4g}" for loss in self.losses) or "none was finite"
        again = f", and again after {state.rollbacks} returns to a checkpoint" if state.rollbacks else ""
        half = "" if precision == "fp32" else ", --precision fp32"
        return UserError(
            f"training diverged at step {failed:,}: {SKIP_LIMIT} updates in a row had a loss or gradient "
            f"that is not finite{again}; last finite losses: {before}; samples most often there: {', '.join(common)} "
            f"(all are named in run.jsonl). Look at these samples, or try a lower --lr and --muon-lr, a "
            f"longer --warmup{half}"
        )

    def _tell(self, seen: Seen, loss: float, norm: float, first: bool) -> None:
        # Only the first of a row is looked at closely: it takes a forward pass, and the others are likely the same.
        guilty = [self.name(image) for image in self.suspects(seen.step - 1)] if first else []
        samples = [self.name(image) for image in seen.images.tolist()]
        named = guilty or samples
        self.named.update(named)
        why = "the loss is not finite" if not math.isfinite(loss) else "the gradient is not finite"
        figures = {"loss": loss, "grad_norm": norm, "samples": samples, "suspects": guilty}
        self.write("event", step=seen.step, event="update skipped", why=why, **figures)
        if first:
            found = "these give no finite vector" if guilty else "the batch held"
            more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
            self.warn(
                f"step {seen.step:,}: {why}, so no weight was moved; {found}: {', '.join(named[:SHOWN])}{more} "
                f"(run.jsonl names all)"
            )


def _figures(seen: list[Seen]) -> Iterable[tuple[float, float]]:
    """(loss, gradient norm) of each; one read from the device for all."""
    if not seen:
        return []
    both = torch.stack([torch.stack([s.loss.float(), s.grad_norm.float()]) for s in seen])
    read: list[list[float]] = both.tolist()
    return [(row[0], row[1]) for row in read]


class Recovery:
    """Stands beside the loop: guard, memory and disk, with the log and the screen to tell of them."""

    def __init__(self, job: Job, update: TrainStep, run: Path, log: RunLog, screen: Screen, total_steps: int) -> None:
        self.job, self.update, self.run, self.log, self.screen = job, update, run, log, screen
        config, samples = job.config, job.splits["train"].samples
        self.guard = LossGuard(log.write, screen.warn, lambda image: samples[image].id, self._suspects, self._scale)
        schedule = save_schedule(config.train.save_every, total_steps)
        self.saver = CheckpointWriter(
            run,
            config.train.save_total_limit,
            schedule,
            config.train.on_save_error,
            log.write,
            screen.say,
            screen.warn,
            lambda: free_for_a_copy(job.device.kind, update.oom),
            log.check_folder,
        )

    def after(self, state: TrainState, images: Tensor, loss: Tensor, grad_norm: Tensor, look: bool) -> None:
        """A step is done: tell of less memory, and of an update that was skipped where that is known by now."""
        self.guard.after(state.step, images, loss, grad_norm)
        for shrunk in self.update.oom.take() if self.update.oom is not None else ():
            state.chunk = shrunk.chunk
            begin = f"memory {'ran' if shrunk.helps else 'stays'} short at step {shrunk.step:,} ({shrunk.why})"
            text = (
                f"{begin}: {shrunk.chunk} samples at a time; the batch of {self.job.config.train.batch_size} and "
                f"its gradient stay the same"
                if shrunk.helps
                else f"{begin}, and smaller chunks do not help: going on as before"
            )
            self.log.write("event", step=shrunk.step, event="memory short", chunk=shrunk.chunk,
                           batch=self.job.config.train.batch_size, why=shrunk.why, helps=shrunk.helps)  # fmt: skip
            self.screen.warn(text)
        if look or self.update.skip == "host":
            self.look(state)

    def look(self, state: TrainState) -> None:
        """Read which updates were skipped; Rollback after too many."""
        self.guard.look(state)

    def go_back(self, state: TrainState) -> None:
        """Make the run what it was at its newest checkpoint, or at the start, with a lower learning rate."""
        self.saver.finish()
        self.saver.forget()
        self.guard.forget()
        failed = state.step
        if state.rollbacks >= self.job.config.train.max_rollbacks:
            self.log.write("event", step=failed, event="diverged", rollbacks=state.rollbacks)
            raise self.guard.diagnosis(state, failed, self.job.precision)
        kept = load_latest(self.run, self.job.device.torch, self.screen.warn, sound=True)
        begin = TrainState(frozen_sha256=self.update.frozen_sha256)
        earlier, tensors = kept if kept is not None else (begin, self._start())
        earlier.rollbacks = state.rollbacks + 1
        earlier.lr_factor = state.lr_factor * ROLLBACK_FACTOR
        earlier.chunk, earlier.skipped = state.chunk, 0
        # best/ on the disk stays: a worse model must not take its place.
        earlier.best, earlier.best_step, earlier.stale = state.best, state.best_step, state.stale
        if self.update.scaler is not None:  # a scale that was too large then would be too large again
            earlier.scaler_scale = min(earlier.scaler_scale, self.update.scaler.get_scale())
        for item in dataclasses.fields(TrainState):
            setattr(state, item.name, getattr(earlier, item.name))
        self.update.optimizer.drop_state()
        restore(self.update, state, tensors)
        self.update.lr_factor = state.lr_factor
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
        """Numbers of the images of a step that alone give no finite vector."""
        batch = self.job.training[step]
        return [int(batch.sample_ids[row]) for row in self.update.suspects(batch)]

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


def make_oom_handler(job: Job, state: TrainState) -> OOMHandler:
    """The watch over a run's memory: within --memory or the machine's; a full GPU says so itself."""
    train = job.config.train
    limit = amount(train.memory, "B", "--memory") if train.memory else None
    if job.device.kind == "cpu":
        return OOMHandler(state.chunk or train.micro_batch, own_bytes, limit or memory_limit())
    whole = float(job.device.total_bytes()) if job.device.kind == "mps" else None
    return OOMHandler(state.chunk or train.micro_batch, job.device.memory_bytes, limit or whole)


def free_for_a_copy(kind: str, room: OOMHandler | None) -> float:
    """Bytes of main memory that this process could still take without coming near a limit."""
    limit, used = memory_limit(), own_bytes()
    if kind != "cuda" and room is not None and room.limit is not None:  # a GPU's limit is not of main memory
        limit, used = min(limit, int(room.limit)), max(used, room.read())
    return float(min(psutil.virtual_memory().available, NEAR * limit - used))
