"""Recovery from non-finite losses and gradients: report the samples, roll back, or stop with a diagnosis.

TrainStep skips such a step before any weight changes, on CUDA without synchronization. The host detects it here,
where it reads the losses anyway: after each step on CPU and MPS, else with each log line and before each checkpoint.
These points depend only on the step, so a resumed run reads at the same ones.
"""

import dataclasses
import math
import statistics
from collections import Counter, deque
from pathlib import Path

import torch
from torch import Tensor

from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.runlog import RunLog
from m1clip.training.checkpoint import TensorGroups, TrainState, load_latest, restore, share_checkpoint, trained_tensors
from m1clip.training.oom import make_oom_handler
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


class SpikeDetector:
    """Detects losses that stay far above the recent median, which is robust to outliers."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.high = 0  # high losses in a row

    def add(self, loss: float) -> float | None:
        """Return the median loss, once, when the last few losses are far above it; else None."""
        if len(self.recent) >= MIN_LOSSES:
            median = statistics.median(self.recent)
            deviation = MAD_TO_STD * statistics.median(abs(value - median) for value in self.recent)
            if loss > median + SPIKE * max(deviation, 0.01 * abs(median)):
                self.high += 1
                if self.high < WINDOW:
                    return median if self.high == SPIKE_STEPS else None
                self.recent.clear()  # after this long it is the new normal
        self.high = 0
        self.recent.append(loss)
        return None


class Recovery:
    """Checks the loss and gradient norm of every step, reports problems, and rolls back."""

    def __init__(
        self, setup: Setup, train_step: TrainStep, state: TrainState, run: Path, log: RunLog, screen: Screen
    ) -> None:
        self.setup, self.train_step, self.state, self.run = setup, train_step, state, run
        self.log, self.screen = log, screen
        train_step.lr_factor = state.lr_factor
        micro_batch = state.micro_batch or setup.config.train.micro_batch
        train_step.oom = make_oom_handler(setup, micro_batch, self._report_memory)
        self.spikes = SpikeDetector()
        self.losses: deque[float] = deque(maxlen=DIAGNOSIS_LOSSES)  # the last finite ones
        self.suspects: Counter[str] = Counter()  # samples of skipped steps
        self._unread: list[tuple[int, Tensor, Tensor]] = []  # step from 1, sample ids, (loss, grad norm) on the device

    def after_step(self, sample_ids: Tensor, loss: Tensor, grad_norm: Tensor, read: bool) -> None:
        """Record the step of `state` without synchronizing; with `read`, or where it is free, check it."""
        self._unread.append((self.state.step, sample_ids, torch.stack([loss.float(), grad_norm.float()])))
        if read or self.train_step.parts.update.skip == "host":
            self.read()

    def read(self) -> None:
        """Check all steps since the last call in one transfer; raise Rollback after too many non-finite in a row."""
        steps, self._unread = self._unread, []
        values = torch.stack([pair for *_, pair in steps]).tolist() if steps else []
        for (step, sample_ids, _), (loss, norm) in zip(steps, values, strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                self.state.skipped = 0
                self.losses.append(loss)
                usual = self.spikes.add(loss)
                if usual is not None:
                    text = f"the loss stays far above its recent median of {usual:.4g}: {loss:.4g} at step {step:,}"
                    self.log.write("warning", step=step, text=text, loss=loss, usual=usual)
                    self.screen.warn(text)
            elif math.isfinite(loss) and self._loss_scale() > 1:
                # Normal in fp16: the scaler halves its scale for the next step; nothing has diverged.
                self.log.write("event", step=step, event="loss scale lowered", loss=loss, scale=self._loss_scale())
            else:
                self.state.skipped += 1
                self._report_skipped(step, sample_ids, loss, norm)
                if self.state.skipped >= SKIP_LIMIT:
                    raise Rollback

    def roll_back(self) -> None:
        """Return to the latest checkpoint, or to the start, with a lower learning rate; UserError after too many."""
        self._unread.clear()
        self.spikes = SpikeDetector()
        state, train_step, failed_step = self.state, self.train_step, self.state.step
        if state.rollbacks >= MAX_ROLLBACKS:
            self.log.write("event", step=failed_step, event="diverged", rollbacks=state.rollbacks)
            raise self._diagnosis()
        loaded = share_checkpoint(
            train_step, lambda device: load_latest(self.run, device, self.screen.warn, without_skips=True)
        )
        if loaded is None:
            initial: TensorGroups = {"weights": trained_tensors(self.setup.build_model()), "optimizer": {}}
            loaded = TrainState(frozen_sha256=train_step.frozen_sha256), initial
        earlier, tensors = loaded
        earlier.rollbacks = state.rollbacks + 1
        earlier.lr_factor = state.lr_factor * ROLLBACK_LR_FACTOR
        earlier.micro_batch, earlier.skipped = state.micro_batch, 0
        # Keep best/ on disk: a worse model must not replace it.
        earlier.best, earlier.best_step, earlier.stale = state.best, state.best_step, state.stale
        if train_step.scaler is not None:  # the restored scale would be too large again
            earlier.scaler_scale = min(earlier.scaler_scale, train_step.scaler.get_scale())
        for name, value in dataclasses.asdict(earlier).items():
            setattr(state, name, value)
        train_step.optimizer.drop_state()
        restore(train_step, state, tensors)
        train_step.lr_factor = state.lr_factor
        values = {"lr_factor": state.lr_factor, "rollbacks": state.rollbacks}
        self.log.write("event", step=state.step, event="rolled back", back_to=state.step, failed=failed_step, **values)
        self.screen.warn(
            f"rolled back from step {failed_step:,} to step {state.step:,}: {SKIP_LIMIT} steps in a row were "
            f"not finite; the learning rate is now {state.lr_factor:g} times the configured one (rollback "
            f"{state.rollbacks} of {MAX_ROLLBACKS})"
        )

    def _diagnosis(self) -> UserError:
        names = ", ".join(name for name, _ in self.suspects.most_common(SHOWN_SAMPLES))
        losses = ", ".join(f"{loss:.4g}" for loss in self.losses) or "none"
        fp32 = "" if self.setup.precision == "fp32" else ", --precision fp32"
        return UserError(
            f"training diverged at step {self.state.step:,}: {SKIP_LIMIT} steps in a row had a loss or gradient that "
            f"is not finite, and again after {self.state.rollbacks} rollbacks; last finite losses: {losses}; samples "
            f"most often involved: {names} (run.jsonl lists all). Check these samples, or try a lower --lr and "
            f"--muon-lr, a longer --warmup{fp32}"
        )

    def _report_skipped(self, step: int, sample_ids: Tensor, loss: float, norm: float) -> None:
        ranks = self.setup.ranks
        samples = ranks.chained([self._sample(number) for number in sample_ids.tolist()])
        suspects, first = list[str](), self.state.skipped == 1
        if first:  # the others in a row are likely similar, and finding them takes a forward pass
            batch = self.setup.training[step - 1]
            rows = self._nonfinite_rows(batch)
            suspects = ranks.chained([self._sample(batch.sample_ids[row]) for row in rows])
        named = suspects or samples
        self.suspects.update(named)
        reason = "the loss is not finite" if not math.isfinite(loss) else "the gradient is not finite"
        values = {"loss": loss, "grad_norm": norm, "samples": samples, "suspects": suspects}
        self.log.write("event", step=step, event="update skipped", reason=reason, **values)
        if first:
            found = "samples with non-finite features" if suspects else "the batch contained"
            more = f" and {len(named) - SHOWN_SAMPLES} more" if len(named) > SHOWN_SAMPLES else ""
            shown = ", ".join(named[:SHOWN_SAMPLES]) + more
            self.screen.warn(
                f"step {step:,}: {reason}, so the step was skipped; {found}: {shown} (run.jsonl lists all)"
            )

    def _nonfinite_rows(self, batch: Batch) -> list[int]:
        train_step = self.train_step
        if train_step.shards is None:
            return train_step.nonfinite_rows(batch)
        # Ranks may have different numbers of rows to inspect, which sharded weights do not allow.
        complete = self.setup.complete_model(train_step)
        return train_step.parts.encoder.for_check(complete).nonfinite_rows(batch)

    def _report_memory(self, step: int, micro_batch: int, reason: str, helps: bool) -> None:
        self.state.micro_batch, batch = micro_batch, self.setup.config.train.batch_size
        values = {"micro_batch": micro_batch, "batch": batch, "reason": reason, "helps": helps}
        self.log.write("event", step=step, event="low memory", **values)
        effect = f"using micro-batches of {micro_batch}; the batch of {batch} and its gradient stay the same"
        if not helps:
            effect = "a smaller micro-batch does not help; continuing as before"
        self.screen.warn(f"low memory at step {step:,} ({reason}): {effect}")

    def _sample(self, number: int | Tensor) -> str:
        return self.setup.splits["train"].samples[int(number)].id

    def _loss_scale(self) -> float:
        return 1.0 if self.train_step.scaler is None else float(self.train_step.scaler.get_scale())
