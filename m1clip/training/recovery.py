"""Recovery from non-finite losses and gradients: report the samples, roll back, or stop with a
diagnosis.

The update skips such a step before any weight changes, on CUDA without synchronization. The host
detects it here, where it reads the losses anyway: after each step on CPU and MPS, else with each
log line and before each checkpoint. These points depend only on the step, so a resumed run reads at
the same ones.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m1clip import console
from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.optimizers import OPTIMIZERS
from m1clip.training.checkpoint import (
    TensorGroups,
    TrainState,
    load_latest,
    restore,
    share_checkpoint,
    trained_tensors,
)
from m1clip.training.oom import make_oom_handler

if TYPE_CHECKING:
    from m1clip.training.context import RunContext

SKIP_LIMIT = 8  # non-finite steps in a row before a rollback
MAX_ROLLBACKS = 3  # a run that still diverges stops
ROLLBACK_LR_FACTOR = 0.5  # applied to the learning rate at each rollback
SPIKE = 8.0  # deviations above the recent median that count as a spike
LOSS_WINDOW, MIN_LOSSES = 64, 16  # losses used for the median, and the minimum number
SPIKE_STEPS = 3  # in a row before a warning: single batches differ
SHOWN_SAMPLES = 3  # on the screen; the log has all
DIAGNOSIS_LOSSES = 6
MAD_TO_STD = 1.4826  # median absolute deviation -> standard deviation of a normal distribution


class Rollback(Exception):
    """Too many non-finite steps in a row: return to the last good checkpoint."""


class SpikeDetector:
    """Detects losses that stay far above the recent median, which is robust to outliers."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=LOSS_WINDOW)
        self.high = 0  # high losses in a row

    def add(self, loss: float) -> float | None:
        """Return the median loss, once, when the last few losses are far above it; else None."""
        if len(self.recent) >= MIN_LOSSES:
            median = statistics.median(self.recent)
            deviation = MAD_TO_STD * statistics.median(abs(value - median) for value in self.recent)
            if loss > median + SPIKE * max(deviation, 0.01 * abs(median)):
                self.high += 1
                if self.high < LOSS_WINDOW:
                    return median if self.high == SPIKE_STEPS else None
                self.recent.clear()  # after this long it is the new normal
        self.high = 0
        self.recent.append(loss)
        return None


class StepChecks:
    """Checks the loss and gradient norm of every step, and reports those that are not finite."""

    def __init__(self) -> None:
        self.spikes = SpikeDetector()
        self.losses: deque[float] = deque(maxlen=DIAGNOSIS_LOSSES)  # the last finite ones
        self.suspects: Counter[str] = Counter()  # samples of skipped steps
        # Steps done, sample ids, and (loss, grad norm) on the device.
        self._unread: list[tuple[int, Tensor, Tensor]] = []

    def record(self, steps_done: int, sample_ids: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        """Record a step without synchronizing."""
        values = torch.stack([loss.float(), grad_norm.float()])
        self._unread.append((steps_done, sample_ids, values))

    def restart(self) -> None:
        """Forget the steps that are rolled back.

        The diagnosis still needs their losses and samples.
        """
        self._unread.clear()
        self.spikes = SpikeDetector()

    def read(self, run: RunContext) -> int:
        """Check all steps since the last call in one transfer.

        Returns the non-finite steps in a row.

        Raises Rollback after too many in a row.
        """
        steps = self._unread
        self._unread = []
        skipped = run.state.skipped
        values = torch.stack([pair for *_, pair in steps]).tolist() if steps else []
        for (steps_done, sample_ids, _), (loss, norm) in zip(steps, values, strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                skipped = 0
                self.losses.append(loss)
                usual = self.spikes.add(loss)
                if usual is not None:
                    median = f"its recent median of {usual:.4g}"
                    text = f"the loss stays far above {median}: {loss:.4g} at step {steps_done:,}"
                    run.log.write("warning", step=steps_done, text=text, loss=loss, usual=usual)
                    console.warn(text)
            elif math.isfinite(loss) and _loss_scale(run) > 1:
                # Normal in fp16: the scaler halves its scale for the next step; nothing has
                # diverged.
                run.log.write(
                    "event",
                    step=steps_done,
                    event="loss scale lowered",
                    loss=loss,
                    scale=_loss_scale(run),
                )
            else:
                skipped += 1
                self._report_skipped(run, steps_done, sample_ids, loss, norm, is_first=skipped == 1)
                if skipped >= SKIP_LIMIT:
                    raise Rollback
        return skipped

    def _report_skipped(
        self,
        run: RunContext,
        steps_done: int,
        sample_ids: Tensor,
        loss: float,
        norm: float,
        is_first: bool,
    ) -> None:
        samples = run.ranks.gather_lists(
            [_sample_id(run, number) for number in sample_ids.tolist()]
        )
        suspects: list[str] = []
        # The others in a row are likely similar, and finding them takes a forward pass.
        if is_first:
            batch = run.inputs.training[steps_done - 1]
            rows = _nonfinite_rows(run, batch)
            suspects = run.ranks.gather_lists(
                [_sample_id(run, batch.sample_ids[row]) for row in rows]
            )
        named = suspects or samples
        self.suspects.update(named)
        reason = (
            "the loss is not finite" if not math.isfinite(loss) else "the gradient is not finite"
        )
        values = {"loss": loss, "grad_norm": norm, "samples": samples, "suspects": suspects}
        run.log.write("event", step=steps_done, event="update skipped", reason=reason, **values)
        if is_first:
            cause = "samples with non-finite features" if suspects else "the batch contained"
            more = f" and {len(named) - SHOWN_SAMPLES} more" if len(named) > SHOWN_SAMPLES else ""
            shown = ", ".join(named[:SHOWN_SAMPLES]) + more
            console.warn(
                f"step {steps_done:,}: {reason}, so the step was skipped; {cause}: {shown}"
                " (run.jsonl lists all)"
            )


def prepare_recovery(run: RunContext) -> None:
    """Give the step the micro-batch of the state, and report low memory."""

    def report(step_number: int, micro_batch: int, reason: str, helps: bool) -> None:
        batch = run.config.train.batch_size
        values = {"micro_batch": micro_batch, "batch": batch, "reason": reason, "helps": helps}
        run.log.write("event", step=step_number, event="low memory", **values)
        effect = (
            f"using micro-batches of {micro_batch}; the batch of {batch} and its gradient stay the"
            " same"
        )
        if not helps:
            effect = "a smaller micro-batch does not help; continuing as before"
        console.warn(f"low memory at step {step_number:,} ({reason}): {effect}")

    micro_batch = run.state.micro_batch or run.config.train.micro_batch
    run.train_step.attempts.handler = make_oom_handler(run.inputs, micro_batch, report)


def roll_back(run: RunContext) -> TrainState:
    """Restore the latest checkpoint, or the start, with a lower learning rate; returns its state.

    UserError after too many rollbacks.
    """
    run.checks.restart()
    train_step = run.train_step
    failed = run.state
    if failed.rollbacks >= MAX_ROLLBACKS:
        run.log.write("event", step=failed.step, event="diverged", rollbacks=failed.rollbacks)
        raise _diagnosis(run)
    run.saver.wait()
    loaded = share_checkpoint(
        train_step, lambda device: load_latest(run.folder, device, without_skips=True)
    )
    if loaded is None:
        initial: TensorGroups = {
            "weights": trained_tensors(run.inputs.build_model()),
            "optimizer": {},
        }
        loaded = TrainState(frozen_sha256=train_step.parts.frozen_sha256), initial
    earlier, tensors = loaded
    scaler_scale = earlier.scaler_scale
    scaler = train_step.parts.update.scaler
    if scaler is not None:  # the restored scale would be too large again
        scaler_scale = min(scaler_scale, scaler.get_scale())
    state = dataclasses.replace(
        earlier,
        rollbacks=failed.rollbacks + 1,
        lr_factor=failed.lr_factor * ROLLBACK_LR_FACTOR,
        micro_batch=failed.micro_batch,
        skipped=0,
        scaler_scale=scaler_scale,
        # Keep best/ on disk: a worse model must not replace it.
        best=failed.best,
        best_step=failed.best_step,
        stale=failed.stale,
    )
    train_step.optimizer.drop_state()
    restore(train_step, state, tensors)
    values = {"lr_factor": state.lr_factor, "rollbacks": state.rollbacks}
    run.log.write(
        "event",
        step=state.step,
        event="rolled back",
        back_to=state.step,
        failed=failed.step,
        **values,
    )
    console.warn(
        f"rolled back from step {failed.step:,} to step {state.step:,}: {SKIP_LIMIT} steps in a row"
        f" were not finite; the learning rate is now {state.lr_factor:g} times the configured one"
        f" (rollback {state.rollbacks} of {MAX_ROLLBACKS})"
    )
    return state


def _diagnosis(run: RunContext) -> UserError:
    names = ", ".join(name for name, _ in run.checks.suspects.most_common(SHOWN_SAMPLES))
    losses = ", ".join(f"{loss:.4g}" for loss in run.checks.losses) or "none"
    fp32 = "" if run.inputs.precision == "fp32" else ", --precision fp32"
    lower = " and ".join(OPTIMIZERS[run.config.optim.optimizer].lr_options)
    return UserError(
        f"training diverged at step {run.state.step:,}: {SKIP_LIMIT} steps in a row had a loss or"
        f" gradient that is not finite, and again after {run.state.rollbacks} rollbacks; last"
        f" finite losses: {losses}; samples most often involved: {names} (run.jsonl lists all)."
        f" Check these samples, or try a lower {lower}, a longer --warmup{fp32}"
    )


def _nonfinite_rows(run: RunContext, batch: Batch) -> list[int]:
    encoder = run.train_step.parts.encoder
    # With sharded weights a copy: ranks may have different numbers of rows to inspect.
    model = run.inputs.complete_model(run.train_step)
    if model is not encoder.model:
        encoder = encoder.for_check(model)
    return encoder.nonfinite_rows(batch)


def _sample_id(run: RunContext, number: int | Tensor) -> str:
    return run.inputs.splits["train"].samples[int(number)].id


def _loss_scale(run: RunContext) -> float:
    scaler = run.train_step.parts.update.scaler
    return 1.0 if scaler is None else float(scaler.get_scale())
