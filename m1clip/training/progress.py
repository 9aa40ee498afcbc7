"""Output during training: a live progress bar on a terminal, lines of text otherwise."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from m1clip import console
from m1clip.formatting import clock, size
from m1clip.runlog import MEAN_RECALL

if TYPE_CHECKING:
    from m1clip.evaluation.statistics import Metric, Scores

RECENT_LINES = 25  # log lines whose speed predicts the time left
STEP_SECONDS = 15.0  # between two progress lines without a terminal


class TrainingDisplay:
    """The live line of a run: its last step, score and time left."""

    def __init__(self) -> None:
        self._bar: console.Bar | None = None
        self._step = 0
        self._total = 0
        self._text = ""
        self._score = ""
        self._last_line = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=RECENT_LINES)

    def begin(self, step: int, total: int) -> None:
        self._step = step
        self._total = total
        self._text = "first steps ..."
        self._step_seconds.clear()
        if console.has_bars():
            self._bar = console.Bar()
            self._bar.show(self._text, step, total)

    def change_total(self, total: int) -> None:
        """Show another number of steps: --minutes has corrected it."""
        self._total = total
        if self._bar is not None:
            self._bar.show(self._text, self._step, total)

    def step(self, values: dict[str, Any]) -> None:
        # The median ignores outliers such as an hour of sleep between two steps.
        self._step_seconds.append(values["step_seconds"])
        left = statistics.median(self._step_seconds) * (self._total - values["step"])
        self._step = values["step"]
        self._text = (
            f"step {values['step']:,}/{self._total:,}  loss {values['loss']:.3f}{self._score}  "
            f"{values['images_per_second']:,.0f} images/s  {size(values['memory_bytes'])}  {clock(left)} left"
        )
        if self._bar is not None:
            self._bar.show(self._text, self._step, self._total)
        elif time.monotonic() - self._last_line > STEP_SECONDS or values["step"] == self._total:
            self._last_line = time.monotonic()
            console.print(self._text)

    def evaluation(
        self, step: int, scores: Scores, metric: Metric, best: tuple[float, int] | None
    ) -> None:
        """Show the metric that selects the best model, and `best` (value, step) if an earlier one was better."""
        low, high = 100 * metric.interval.low, 100 * metric.interval.high
        self._score = f"  {metric.label} {100 * metric.value:.1f}%"
        earlier = f"best so far {100 * best[0]:.1f}% at step {best[1]:,}" if best else "best so far"
        line = (
            f"validation step {step:,}:{self._score[1:]} [{low:.1f}, {high:.1f}], chance"
            f" {100 * metric.chance:.3g}%"
        )
        if metric.name == MEAN_RECALL:
            to_image, to_text = (
                100 * scores[f"{name}/recall@1"].value
                for name in ("text_to_image", "image_to_text")
            )
            earlier += f"; recall@1 text to image {to_image:.1f}%, image to text {to_text:.1f}%"
        console.print(f"{line}, {earlier}")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.remove()
            self._bar = None
