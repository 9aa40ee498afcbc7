"""Losses and gradients that are not finite: counted, named, and in the end a way back or a diagnosis.

The update itself skips such a step before any weight moves (train/update.py), on an accelerator without the host
knowing. Here the host learns of it, where it reads the losses anyway: after each step on the CPU and on MPS, else with
each line of the log and before each checkpoint. Those moments follow from the step, so a resume sees the same ones.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from m1clip.config_guard import GuardConfig
from m1clip.errors import UserError
from m1clip.train.checkpoint import LoopState

WINDOW, ENOUGH = 64, 16  # losses that make the usual one, and how many it takes at least
SPIKE_STEPS = 3  # in a row, before a person is told: single batches differ
SHOWN = 3  # samples on the screen; all are in the log
HISTORY = 6  # losses of a diagnosis
TO_NORMAL = 1.4826  # the median absolute deviation of a normal distribution, as its standard deviation


class GoBack(Exception):
    """Too many updates in a row were not finite: back to the last good checkpoint."""


@dataclass(frozen=True)
class Seen:
    """One step, its figures perhaps still on the device."""

    step: int  # from 1, as the log counts
    pictures: Tensor  # of the batch, on the host
    loss: Tensor
    grad_norm: Tensor


@dataclass
class Spikes:
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


class Guard:
    """Looks after each step; speaks only of what went wrong."""

    def __init__(
        self,
        config: GuardConfig,
        write: Callable[..., None],
        warn: Callable[[str], None],
        name: Callable[[int], str],
        suspects: Callable[[int], list[int]],
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`name(picture)` is for a person; `suspects(step)` are pictures that alone give no finite vector.

        `scale()` is how much fp16 scales the loss up now; it is asked only where a gradient is not finite.
        """
        self.scale = scale
        self.config, self.write, self.warn, self.name, self.suspects = config, write, warn, name, suspects
        self.spikes = Spikes(config.spike)
        self.losses: deque[float] = deque(maxlen=HISTORY)  # the newest finite ones
        self.named: Counter[str] = Counter()  # samples of skipped updates
        self._pending: list[Seen] = []

    def after(self, step: int, pictures: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        """A step was given to the device; nothing is read."""
        self._pending.append(Seen(step, pictures, loss, grad_norm))

    def look(self, state: LoopState) -> None:
        """Read what came since the last look, in one go. GoBack after too many in a row that were not finite."""
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
                if state.skipped >= self.config.skip_limit:
                    raise GoBack

    def forget(self) -> None:
        """The run went back: what was seen since belongs to no step of it."""
        self._pending.clear()
        self.spikes = Spikes(self.config.spike)

    def went_back(self, state: LoopState, failed: int) -> None:
        """Say that the run is at an earlier step again, with a lower rate."""
        text = (
            f"went back from step {failed:,} to step {state.step:,}: {self.config.skip_limit} updates in a row were "
            f"not finite; the learning rate is now {state.rate_factor:g} of what was asked "
            f"(return {state.rollbacks} of {self.config.rollbacks})"
        )
        self.write("event", step=state.step, event="went back", back_to=state.step, failed=failed,
                   rate_factor=state.rate_factor, rollbacks=state.rollbacks)  # fmt: skip
        self.warn(text)

    def diagnosis(self, state: LoopState, failed: int, precision: str) -> UserError:
        """Why the run cannot go on, in one line."""
        common = [name for name, _ in self.named.most_common(SHOWN)]
        before = ", ".join(f"{loss:.4g}" for loss in self.losses) or "none was finite"
        again = f", and again after {state.rollbacks} returns to a checkpoint" if state.rollbacks else ""
        half = "" if precision == "fp32" else ", --train.precision fp32"
        return UserError(
            f"training diverged at step {failed:,}: {self.config.skip_limit} updates in a row had a loss or gradient "
            f"that is not finite{again}; last finite losses: {before}; samples most often there: {', '.join(common)} "
            f"(all are named in run.jsonl). Look at these samples, or try a lower --optim.lr and --optim.muon-lr, a "
            f"longer --optim.warmup{half}"
        )

    def _tell(self, seen: Seen, loss: float, norm: float, first: bool) -> None:
        # Only the first of a row is looked at closely: it takes a forward pass, and the others are likely the same.
        guilty = [self.name(picture) for picture in self.suspects(seen.step - 1)] if first else []
        samples = [self.name(picture) for picture in seen.pictures.tolist()]
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
