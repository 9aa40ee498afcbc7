"""Whether training in a precision is stable: loss spikes and skipped updates over a few steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from m1clip.training.recovery import MAD_TO_STD, SPIKE

STABILITY_STEPS = 50
STABILITY_BATCHES = 4  # different random batches, in turn
COMPARED_LOSSES = 16  # recent losses that a spike is compared with
MIN_COMPARED_LOSSES = 5


@dataclass(frozen=True)
class Stability:
    """What a short run in one precision showed."""

    model: str  # the model, or "reduced" and how
    batch_size: int
    steps: int
    spikes: int  # losses that were not finite or far above the recent ones
    skipped: int  # updates without a finite gradient, as fp16's loss scaler skips them
    first_loss: float
    last_loss: float

    def __str__(self) -> str:
        return (
            f"{self.spikes} spikes and {self.skipped} skipped updates in {self.steps} steps "
            f"(loss {self.first_loss:.3g} to {self.last_loss:.3g})"
        )


def count_spikes(losses: Sequence[float]) -> int:
    """Losses that are not finite, or far above the median of the recent ones.

    "Far" means the same as for a run of `train`: 8 deviations, which are robust to outliers.
    """
    spikes = 0
    recent: list[float] = []
    for loss in losses:
        is_spike = not math.isfinite(loss)
        if not is_spike and len(recent) >= MIN_COMPARED_LOSSES:
            median = statistics.median(recent)
            deviations = [abs(value - median) for value in recent]
            deviation = MAD_TO_STD * statistics.median(deviations)
            is_spike = loss > median + SPIKE * max(deviation, 0.01 * abs(median))
        if is_spike:
            spikes += 1
        else:
            recent = [*recent, loss][-COMPARED_LOSSES:]
    return spikes


def summarize(
    model: str, batch_size: int, losses: Sequence[float], grad_norms: Sequence[float]
) -> Stability:
    """The stability of a run from the loss and gradient norm of each of its steps."""
    skipped = sum(not math.isfinite(norm) for norm in grad_norms)
    return Stability(
        model, batch_size, len(losses), count_spikes(losses), skipped, losses[0], losses[-1]
    )
