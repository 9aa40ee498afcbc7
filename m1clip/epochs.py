"""The table by epoch and the phases of the loss: pure functions of the lines of a log."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from m1clip.formatting import ceil_div, number, percent, plural
from m1clip.runlog import SELECTION, Record, selection_name

MAX_EPOCH_ROWS = 30  # of the table; several epochs share a row in a longer run
MAX_PHASES = 4
MAX_LOSS_POINTS = 120  # of the loss curve that is divided into phases
MIN_PHASE_POINTS = 4  # of a line, also to estimate the interval of its slope
Z95 = 1.959964  # standard errors of a 95% interval
# A phase is a plateau if its loss changes by less than this fraction of the whole change, or not
# significantly.
PLATEAU = 0.03
EPOCH_HEAD = (
    *("epoch", "loss", "train accuracy", "val accuracy", "chance 1/B"),
    *("recall", "95% interval", "seconds"),
)
PHASE_HEAD = ("phase", "steps", "epochs", "loss", "slope per epoch", "95% interval", "trend")
NOT_COMPARABLE = (
    "Accuracies are within a batch of B images: their chance level is 1/B, so they cannot be"
    " compared between runs with different batch sizes. Recall is over the complete validation"
    " split."
)
NOT_LEARNING = (
    "These are phases of the training loss, which also falls while a model memorizes: the {metric}"
    " on validation is within noise of chance."
)


class RunTables:
    """The tables of a run, from the step and evaluation records that were not rolled back."""

    def __init__(self, steps: Iterable[Record], evaluations: Iterable[Record]) -> None:
        self._steps = [row for row in steps if row["step"] > 0]
        self._evaluations = list(evaluations)
        newest = self._evaluations[-1] if self._evaluations else {}
        self._metric = selection_name(newest)

    @property
    def epoch_head(self) -> list[str]:
        """The names of the columns by epoch, including the metric that selects the best model."""
        metric = SELECTION[self._metric]
        return [metric if name == "recall" else name for name in EPOCH_HEAD]

    @property
    def epoch_cells(self) -> list[list[str]]:
        """The table by epoch as text."""
        return [row.cells for row in self.epochs()]

    @property
    def phase_cells(self) -> list[list[str]]:
        """The table of phases as text."""
        return [[str(index), *phase.cells] for index, phase in enumerate(self.phases(), start=1)]

    @property
    def phase_note(self) -> str:
        """What a falling loss does not show, if validation is not above chance; else ""."""
        newest = self._evaluations[-1] if self._evaluations else {}
        low, chance = (_number(newest, f"{self._metric}/{name}") for name in ("low", "chance"))
        if low is None or chance is None or low > chance or not self.phases():
            return ""
        return NOT_LEARNING.format(metric=SELECTION[self._metric])

    def epochs(self) -> list[EpochRow]:
        """Return the table by epoch: means over its log lines, and its last evaluation."""
        return epoch_rows(self._steps, self._evaluations, self._metric)

    def phases(self) -> list[LossPhase]:
        """Return the phases that describe the loss best; [] for fewer than two log lines."""
        points = []
        for row in self._steps:
            loss = _number(row, "loss")
            if loss is not None:
                points.append((row["step"], loss))
        if len(points) < 2:
            return []
        return find_phases(points, _steps_per_epoch(self._steps))


def drop_rolled_back(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Return the step records and evaluations of a log, without those that were rolled back."""
    rows: dict[str, list[Record]] = {"step": [], "eval": []}
    for record in records:
        kind = record["kind"]
        back_to = record.get("step") if kind == "start" else record.get("back_to")
        if back_to is not None:
            rows = {
                name: [row for row in of_kind if row["step"] <= back_to]
                for name, of_kind in rows.items()
            }
        if kind in rows:
            rows[kind].append(record)
    return rows["step"], rows["eval"]


@dataclass(frozen=True)
class EpochRow:
    """One or more epochs of a run; None is not measured."""

    first: int  # the first epoch, counted from 1
    last: float  # the last one; a fraction if the run ended within it
    loss: float | None
    accuracy: float | None  # within a training batch
    chance: float | None  # of both accuracies
    val_accuracy: float | None  # within a validation batch of the same size
    recall: float | None  # the metric that selects the best model, on the validation split
    low: float | None
    high: float | None
    seconds: float | None  # of training, without evaluations

    @property
    def name(self) -> str:
        """3, or 3-4, or 2.5 for a part of the third epoch."""
        last = f"{self.last:.4g}"
        return last if _epoch_number(self.last) == self.first else f"{self.first}-{last}"

    @property
    def cells(self) -> list[str]:
        """The row as text, in the order of EPOCH_HEAD."""
        interval = "-" if self.low is None else f"{percent(self.low)} to {percent(self.high)}"
        return [
            self.name,
            number(self.loss),
            percent(self.accuracy),
            percent(self.val_accuracy),
            percent(self.chance),
            percent(self.recall),
            interval,
            "-" if self.seconds is None else f"{self.seconds:,.1f}",
        ]


def epoch_rows(
    steps: Sequence[Record], evaluations: Sequence[Record], metric: str
) -> list[EpochRow]:
    """Group the lines of a log by epoch; a line belongs to the epoch in which it was written."""
    lines = [row for row in steps if _number(row, "epoch")]
    steps_per_epoch = _steps_per_epoch(lines)
    if steps_per_epoch is None:
        return []
    end = lines[-1]["epoch"]
    total = _epoch_number(end)
    width = max(1, ceil_div(total, MAX_EPOCH_ROWS), ceil_div(total, len(lines)))
    groups: dict[int, list[Record]] = {}
    for row in lines:
        groups.setdefault((_epoch_number(row["epoch"]) - 1) // width, []).append(row)
    evaluated: dict[int, Record] = {}
    for row in evaluations:
        if row["step"] > 0:
            evaluated[(_epoch_number(row["step"] / steps_per_epoch) - 1) // width] = row
    rows = []
    seconds_before: float | None = 0.0
    for group in sorted(groups):
        last = min(float(end), float((group + 1) * width))
        seconds_after = _elapsed_at(lines, last)
        seconds = None
        if seconds_before is not None and seconds_after is not None:
            seconds = max(0.0, seconds_after - seconds_before)
        seconds_before = seconds_after
        evaluation = evaluated.get(group, {})
        in_batch = val_batch_accuracy(evaluation)
        rows.append(
            EpochRow(
                first=group * width + 1,
                last=last,
                loss=_mean(groups[group], "loss"),
                accuracy=_mean(groups[group], "batch_accuracy"),
                chance=_mean(groups[group], "batch_chance"),
                val_accuracy=_number(in_batch, "value"),
                recall=_number(evaluation, metric),
                low=_number(evaluation, f"{metric}/low"),
                high=_number(evaluation, f"{metric}/high"),
                seconds=seconds,
            )
        )
    return rows


def _number(row: Record, name: str) -> float | None:
    """A finite number of a record; the log writes NaN as text."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def val_batch_accuracy(evaluation: Record) -> Record:
    """Return the rate of an evaluation's accuracy within a batch; {} without one."""
    rates = evaluation.get("analysis", {}).get("held_out_batch_accuracy", {})
    rates_of_split: Record = rates.get(evaluation.get("split"), {})
    return rates_of_split


def _steps_per_epoch(lines: Sequence[Record]) -> float | None:
    epochs = _number(lines[-1], "epoch") if lines else None
    return lines[-1]["step"] / epochs if epochs else None


def _epoch_number(epochs: float) -> int:
    """Return the number of an epoch, from 1; the log rounds epochs to four digits."""
    return max(1, math.ceil(epochs - 1e-3))


def _mean(rows: Iterable[Record], name: str) -> float | None:
    values = [value for row in rows if (value := _number(row, name)) is not None]
    return statistics.fmean(values) if values else None


def _elapsed_at(lines: Sequence[Record], epoch: float) -> float | None:
    """Interpolate the seconds of training at an epoch between two log lines."""
    curve = [(0.0, 0.0)]
    curve += [
        (row["epoch"], elapsed) for row in lines if (elapsed := _number(row, "elapsed")) is not None
    ]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= epoch <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (epoch - x0) / (x1 - x0)
    return None


@dataclass(frozen=True)
class LossPhase:
    """A part of a run in which the loss follows a straight line."""

    first_step: int
    last_step: int
    first_epoch: float | None
    last_epoch: float | None
    first_loss: float  # of the line
    last_loss: float
    slope: float  # of the loss per epoch; per 1,000 steps if epochs are unknown
    low: float | None  # 95% interval of the slope; None with too few points
    high: float | None
    points: int  # of the loss, to which the line was fitted
    trend: str  # falling fast (compared with other phases), falling, plateau or rising

    @property
    def cells(self) -> list[str]:
        """The phase as text, in the order of PHASE_HEAD without the first column."""
        epochs = "-"
        if self.first_epoch is not None and self.last_epoch is not None:
            epochs = f"{self.first_epoch:.3g} to {self.last_epoch:.3g}"
        interval = f"not measured: {plural(self.points, 'point')}"
        if self.low is not None and self.high is not None:
            interval = f"{_format_signed(self.low)} to {_format_signed(self.high)}"
        return [
            f"{self.first_step:,} to {self.last_step:,}",
            epochs,
            f"{number(self.first_loss)} to {number(self.last_loss)}",
            _format_signed(self.slope),
            interval,
            self.trend,
        ]

    def as_dict(self) -> dict[str, Any]:
        """The phase for the log."""
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def _format_signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


Point = tuple[float, float]  # step, loss


def find_phases(points: Sequence[Point], steps_per_epoch: float | None = None) -> list[LossPhase]:
    """Divide a loss curve into the straight lines with the smallest squared error.

    The number of phases follows from a Bayesian information criterion, a little stricter than
    usual. Steps must increase.
    """
    means = _bin_means(points)
    lines = [fit_line(means[first:last]) for first, last in itertools.pairwise(_best_edges(means))]
    lines[0] = lines[0].extend_to(points[0][0], lines[0].stop)
    lines[-1] = lines[-1].extend_to(lines[-1].start, points[-1][0])
    losses = [loss for _, loss in means]
    largest_change = max(losses) - min(losses)
    steepest = min(line.slope for line in lines) if len(lines) > 1 else -math.inf
    unit = steps_per_epoch or 1000.0
    phases = []
    for line in lines:
        margin = line.margin
        phases.append(
            LossPhase(
                first_step=round(line.start),
                last_step=round(line.stop),
                first_epoch=None if steps_per_epoch is None else line.start / steps_per_epoch,
                last_epoch=None if steps_per_epoch is None else line.stop / steps_per_epoch,
                first_loss=line.first,
                last_loss=line.last,
                slope=line.slope * unit,
                low=None if margin is None else (line.slope - margin) * unit,
                high=None if margin is None else (line.slope + margin) * unit,
                points=line.points,
                trend=_trend(line, largest_change, steepest),
            )
        )
    return phases


@dataclass(frozen=True)
class Line:
    """A straight line through some points of the loss."""

    start: float  # its first and last step
    stop: float
    first: float  # its loss at these
    last: float
    slope: float  # per step
    margin: float | None  # of the 95% interval of the slope; None with too few points
    points: int

    def extend_to(self, start: float, stop: float) -> Line:
        """Return the same line between two other steps."""
        first = self.first + self.slope * (start - self.start)
        last = self.last + self.slope * (stop - self.stop)
        return replace(self, start=start, stop=stop, first=first, last=last)


def fit_line(points: Sequence[Point]) -> Line:
    """Fit the line with the smallest squared error; the interval assumes independent errors."""
    steps = [step for step, _ in points]
    mean_step = statistics.fmean(steps)
    mean_loss = statistics.fmean(loss for _, loss in points)
    spread = sum((step - mean_step) ** 2 for step in steps)
    slope = sum((step - mean_step) * loss for step, loss in points) / spread if spread else 0.0

    def value(step: float) -> float:
        return mean_loss + slope * (step - mean_step)

    error = sum((loss - value(step)) ** 2 for step, loss in points)
    margin = None
    if len(points) >= MIN_PHASE_POINTS and spread:
        margin = Z95 * math.sqrt(error / (len(points) - 2) / spread)
    return Line(
        start=steps[0],
        stop=steps[-1],
        first=value(steps[0]),
        last=value(steps[-1]),
        slope=slope,
        margin=margin,
        points=len(points),
    )


def _trend(line: Line, largest_change: float, steepest: float) -> str:
    change = line.last - line.first
    if abs(change) <= PLATEAU * largest_change or abs(line.slope) <= (line.margin or 0.0):
        return "plateau"
    if change > 0:
        return "rising"
    return "falling fast" if line.slope < steepest / 2 else "falling"


def _bin_means(points: Sequence[Point]) -> list[Point]:
    """Average neighboring points, to at most MAX_LOSS_POINTS."""
    size = ceil_div(len(points), MAX_LOSS_POINTS)
    if size == 1:
        return list(points)
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    means = []
    for bin_points in bins:
        step = statistics.fmean(step for step, _ in bin_points)
        loss = statistics.fmean(loss for _, loss in bin_points)
        means.append((step, loss))
    return means


def _best_edges(points: Sequence[Point]) -> list[int]:
    """Return the index of the first point of each phase, and the number of points at the end."""
    n = len(points)
    if n < 2 * MIN_PHASE_POINTS:
        return [0, n]
    error = _line_errors(points)
    # For each number of phases: the smallest error of the first points, and where the last phase
    # begins.
    best = [[error(0, last) for last in range(n + 1)]]
    begins = [[0] * (n + 1)]
    for _ in range(1, MAX_PHASES):
        before = best[-1]
        totals = [math.inf] * (n + 1)
        starts = [0] * (n + 1)
        for last in range(2 * MIN_PHASE_POINTS, n + 1):
            for first in range(MIN_PHASE_POINTS, last - MIN_PHASE_POINTS + 1):
                total = before[first] + error(first, last)
                if total < totals[last]:
                    totals[last] = total
                    starts[last] = first
        best.append(totals)
        begins.append(starts)
    losses = [loss for _, loss in points]
    # An error below a millionth of the variance is no reason for another phase.
    floor = 1e-6 * statistics.pvariance(losses) + 1e-12

    def criterion(phases: int) -> float:
        # A phase has three parameters: its line and where it begins. Two more, as neighboring
        # losses are correlated.
        return n * math.log(best[phases - 1][n] / n + floor) + 5 * phases * math.log(n)

    # Infinite for more phases than there are points for.
    count = min(range(1, MAX_PHASES + 1), key=criterion)
    edges = [n]
    for level in range(count - 1, 0, -1):
        edges.append(begins[level][edges[-1]])
    return [0, *reversed(edges)]


def _line_errors(points: Sequence[Point]) -> Callable[[int, int], float]:
    """Return a function: the squared error of the best line through points first to last - 1.

    It takes constant time, and gives inf if there are too few points.
    """
    mean_step = statistics.fmean(step for step, _ in points)
    scale = statistics.pstdev(step for step, _ in points) or 1.0
    mean_loss = statistics.fmean(loss for _, loss in points)
    sums = [[0.0] * 5]
    for step, loss in points:
        x = (step - mean_step) / scale
        y = loss - mean_loss
        parts = (x, y, x * x, x * y, y * y)
        sums.append([total + part for total, part in zip(sums[-1], parts, strict=True)])

    def error(first: int, last: int) -> float:
        n = last - first
        if n < MIN_PHASE_POINTS:
            return math.inf
        x, y, xx, xy, yy = (b - a for a, b in zip(sums[first], sums[last], strict=True))
        by_x = xx - x * x / n
        by_xy = xy - x * y / n
        by_y = yy - y * y / n
        return max(0.0, by_y - by_xy * by_xy / by_x if by_x > 0 else by_y)

    return error
