"""Recovery from non-finite losses and gradients: report the samples, roll back, or stop with a diagnosis.

TrainStep skips such a step before any weight changes, on CUDA without synchronization. The host detects it here,
where it reads the losses anyway: after each step on CPU and MPS, else with each log line and before each checkpoint.
These points depend only on the step, so a resumed run reads at the same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor

from m1clip.errors import UserError
from m1clip.formatting import amount
from m1clip.hardware.memory import NEAR, memory_limit, own_bytes
from m1clip.runlog import RunLog
from m1clip.training.checkpoint import CheckpointWriter, TensorGroups, TrainState, load_latest, restore, trained_tensors
from m1clip.training.oom import OOMHandler
from m1clip.training.progress import Screen
from m1clip.training.setup import Setup
from m1clip.training.step import TrainStep

SKIP_LIMIT = 8  # non-finite steps in a row before a rollback
MAX_ROLLBACKS = 3  # a run that still diverges stops
ROLLBACK_LR_FACTOR = 0.5  # applied to the learning rate at each rollback
SPIKE = 8.0  # deviations above the recent median that count as a spike
WINDOW, MIN_LOSSES = 64, 16  # losses used for the median, and the minimum number
SPIKE_STEPS = 3  # in a row before a warning: single batches differ
SHOWN_SAMPLES = 3  # on the screen; the log has all
DIAGNOSIS_LOSSES = 6
MAD_TO_STD = 1.4826  # median absolute deviation -> standard deviation of a normal distribution


class Rollback(Exception):
    """Too many non-finite steps in a row: return to the last good checkpoint."""


@dataclass
class SpikeDetector:
    """Detects losses that stay far above the recent median, which is robust to outliers."""

    factor: float  # 0: off
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    high: int = 0  # high losses in a row

    def add(self, loss: float) -> float | None:
        """Return the median loss, once, when the last few losses are far above it; else None."""
        if self.factor and len(self.recent) >= MIN_LOSSES and loss > self._threshold():
            self.high += 1
            if self.high < WINDOW:
                return statistics.median(self.recent) if self.high == SPIKE_STEPS else None
            self.recent.clear()  # after this long it is the new normal
        self.high = 0
        self.recent.append(loss)
        return None

    def _threshold(self) -> float:
        median = statistics.median(self.recent)
        deviation = MAD_TO_STD * statistics.median(abs(value - median) for value in self.recent)
        return median + self.factor * max(deviation, 0.01 * abs(median))


class LossGuard:
    """Checks the loss and gradient norm of every step; reports only problems."""

    def __init__(
        self,
        write: Callable[..., None],
        warn: Callable[[str], None],
        sample_name: Callable[[int], str],
        find_suspects: Callable[[int], list[int]],
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`find_suspects(step)` returns the samples of a step whose own features are not finite.

        `loss_scale()` is fp16's current scale; it is read only if a gradient is not finite.
        """
        self.write, self.warn = write, warn
        self.sample_name, self.find_suspects, self.loss_scale = sample_name, find_suspects, loss_scale
        self.spikes = SpikeDetector(SPIKE)
        self.losses: deque[float] = deque(maxlen=DIAGNOSIS_LOSSES)  # the last finite ones
        self.suspects: Counter[str] = Counter()  # samples of skipped steps
        self._unread: list[tuple[int, Tensor, Tensor]] = []  # step from 1, sample ids, (loss, grad norm) on the device

    def after_step(self, step: int, sample_ids: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        """Record a step without synchronizing."""
        self._unread.append((step, sample_ids, torch.stack([loss.float(), grad_norm.float()])))

    def read(self, state: TrainState) -> None:
        """Read all steps since the last call in one transfer; raise Rollback after too many non-finite in a row."""
        steps, self._unread = self._unread, []
        values = torch.stack([pair for *_, pair in steps]).tolist() if steps else []
        for (step, sample_ids, _), (loss, norm) in zip(steps, values, strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                state.skipped = 0
                self.losses.append(loss)
                usual = self.spikes.add(loss)
                if usual is not None:
                    text = f"the loss stays far above its recent median of {usual:.4g}: {loss:.4g} at step {step:,}"
                    self.write("warning", step=step, text=text, loss=loss, usual=usual)
                    self.warn(text)
            elif math.isfinite(loss) and self.loss_scale() > 1:
                # Normal in fp16: the scaler halves its scale for the next step; nothing has diverged.
                self.write("event", step=step, event="loss scale lowered", loss=loss, scale=self.loss_scale())
            else:
                state.skipped += 1
                self._report(step, sample_ids, loss, norm, first=state.skipped == 1)
                if state.skipped >= SKIP_LIMIT:
                    raise Rollback

    def reset(self) -> None:
        """Discard the steps undone by a rollback."""
        self._unread.clear()
        self.spikes = SpikeDetector(SPIKE)

    def diagnosis(self, state: TrainState, failed_step: int, precision: str) -> UserError:
        """The error for a run that cannot continue."""
        names = ", ".join(name for name, _ in self.suspects.most_common(SHOWN_SAMPLES))
        losses = ", ".join(f"{loss:.4g}" for loss in self.losses) or "none"
        rollbacks = f", and again after {state.rollbacks} rollbacks" if state.rollbacks else ""
        fp32 = "" if precision == "fp32" else ", --precision fp32"
        return UserError(
            f"training diverged at step {failed_step:,}: {SKIP_LIMIT} steps in a row had a loss or "
            f"gradient that is not finite{rollbacks}; last finite losses: {losses}; samples most often involved: "
            f"{names} (run.jsonl lists all). Check these samples, or try a lower --lr and --muon-lr, a "
            f"longer --warmup{fp32}"
        )

    def _report(self, step: int, sample_ids: Tensor, loss: float, norm: float, first: bool) -> None:
        # Only the first in a row is examined: it takes a forward pass, and the others are likely similar.
        suspects = [self.sample_name(number) for number in self.find_suspects(step - 1)] if first else []
        samples = [self.sample_name(number) for number in sample_ids.tolist()]
        named = suspects or samples
        self.suspects.update(named)
        reason = "the loss is not finite" if not math.isfinite(loss) else "the gradient is not finite"
        values = {"loss": loss, "grad_norm": norm, "samples": samples, "suspects": suspects}
        self.write("event", step=step, event="update skipped", why=reason, **values)
        if first:
            found = "samples with non-finite features" if suspects else "the batch contained"
            more = f" and {len(named) - SHOWN_SAMPLES} more" if len(named) > SHOWN_SAMPLES else ""
            shown = ", ".join(named[:SHOWN_SAMPLES])
            self.warn(f"step {step:,}: {reason}, so the step was skipped; {found}: {shown}{more} (run.jsonl lists all)")


class Recovery:
    """Reports and handles failures in the loop: non-finite steps, out of memory, failed writes."""

    def __init__(
        self, job: Setup, train_step: TrainStep, run: Path, log: RunLog, screen: Screen, writer: CheckpointWriter
    ) -> None:
        self.job, self.train_step, self.run, self.log, self.screen = job, train_step, run, log, screen
        self.writer = writer
        samples = job.splits["train"].samples
        self.guard = LossGuard(log.write, screen.warn, lambda n: samples[n].id, self._suspects, self._loss_scale)

    def after_step(self, state: TrainState, sample_ids: Tensor, loss: Tensor, grad_norm: Tensor, read: bool) -> None:
        """Report a smaller micro-batch; with `read`, or where it is free, check for skipped steps."""
        self.guard.after_step(state.step, sample_ids, loss, grad_norm)
        for change in self.train_step.oom.take_changes() if self.train_step.oom is not None else ():
            state.micro_batch = change.micro_batch
            batch = self.job.config.train.batch_size
            text = f"low memory at step {change.step:,} ({change.reason}): " + (
                f"using micro-batches of {change.micro_batch}; the batch of {batch} and its gradient stay the same"
                if change.helps
                else "a smaller micro-batch does not help; continuing as before"
            )
            self.log.write(
                "event",
                step=change.step,
                event="memory short",
                micro_batch=change.micro_batch,
                batch=batch,
                why=change.reason,
                helps=change.helps,
            )
            self.screen.warn(text)
        if read or self.train_step.skip == "host":
            self.guard.read(state)

    def roll_back(self, state: TrainState) -> None:
        """Return to the latest checkpoint, or to the start, with a lower learning rate; UserError after too many."""
        self.writer.finish()
        self.writer.reset()
        self.guard.reset()
        failed_step = state.step
        if state.rollbacks >= MAX_ROLLBACKS:
            self.log.write("event", step=failed_step, event="diverged", rollbacks=state.rollbacks)
            raise self.guard.diagnosis(state, failed_step, self.job.precision)
        loaded = load_latest(self.run, self.job.device.torch, self.screen.warn, without_skips=True)
        if loaded is None:
            loaded = TrainState(frozen_sha256=self.train_step.frozen_sha256), self._initial_tensors()
        earlier, tensors = loaded
        earlier.rollbacks = state.rollbacks + 1
        earlier.lr_factor = state.lr_factor * ROLLBACK_LR_FACTOR
        earlier.micro_batch, earlier.skipped = state.micro_batch, 0
        # Keep best/ on disk: a worse model must not replace it.
        earlier.best, earlier.best_step, earlier.stale = state.best, state.best_step, state.stale
        if self.train_step.scaler is not None:  # the restored scale would be too large again
            earlier.scaler_scale = min(earlier.scaler_scale, self.train_step.scaler.get_scale())
        for item in dataclasses.fields(TrainState):
            setattr(state, item.name, getattr(earlier, item.name))
        self.train_step.optimizer.drop_state()
        restore(self.train_step, state, tensors)
        self.train_step.lr_factor = state.lr_factor
        values = {"lr_factor": state.lr_factor, "rollbacks": state.rollbacks}
        self.log.write("event", step=state.step, event="rolled back", back_to=state.step, failed=failed_step, **values)
        self.screen.warn(
            f"rolled back from step {failed_step:,} to step {state.step:,}: {SKIP_LIMIT} steps in a row were "
            f"not finite; the learning rate is now {state.lr_factor:g} times the configured one (rollback "
            f"{state.rollbacks} of {MAX_ROLLBACKS})"
        )

    @contextlib.contextmanager
    def disk_errors(self, step: int, path: Path) -> Iterator[None]:
        """Stop the run on a failed write in the block."""
        self.log.check_folder()
        try:
            yield
        except OSError as error:
            self.writer.handle_error(error, path, step)

    def _suspects(self, step: int) -> list[int]:
        batch = self.job.training[step]
        return [int(batch.sample_ids[row]) for row in self.train_step.nonfinite_rows(batch)]

    def _loss_scale(self) -> float:
        return 1.0 if self.train_step.scaler is None else float(self.train_step.scaler.get_scale())

    def _initial_tensors(self) -> TensorGroups:
        model = self.job.build_model()
        tensors: TensorGroups = {"weights": trained_tensors(model), "optimizer": {}}
        if self.train_step.ema is not None:
            tensors["ema"] = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        return tensors


def make_oom_handler(job: Setup, state: TrainState) -> OOMHandler:
    """The handler of a run: the limit is --memory or the machine's memory; CUDA raises its own errors."""
    train, device = job.config.train, job.device
    limit = amount(train.memory, "B", "--memory") if train.memory else None
    if device.kind == "cpu":
        return OOMHandler(state.micro_batch or train.micro_batch, own_bytes, limit or memory_limit())
    total = float(device.total_bytes()) if device.kind == "mps" else None
    return OOMHandler(state.micro_batch or train.micro_batch, device.memory_bytes, limit or total)


def free_host_bytes(kind: str, oom: OOMHandler | None) -> float:
    """Main memory that this process could still use without coming close to a limit."""
    limit, used = memory_limit(), own_bytes()
    if kind != "cuda" and oom is not None and oom.limit is not None:  # a GPU limit does not apply to main memory
        limit, used = min(limit, int(oom.limit)), max(used, oom.used_bytes())
    return float(min(psutil.virtual_memory().available, NEAR * limit - used))
