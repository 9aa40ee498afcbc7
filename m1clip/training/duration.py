"""How long a run is: its steps, and for `--minutes` a clock that corrects them while the run goes
on.

A run has a `StepPlan`. With `--steps` or `--epochs` the plan never changes. With `--minutes` it is
made from a short calibration and corrected whenever the machine turns out to be faster or slower,
so that the learning rate schedule ends with the time. Each correction is a fact of the run: it is
logged and saved in config.toml, so that a resumed run and a run repeated from config.toml make the
same steps without a clock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

from m1clip.analyses import ANALYSES, RECORD, Analysis
from m1clip.config import TrainConfig
from m1clip.formatting import ceil_div

if TYPE_CHECKING:
    from m1clip.training.spec import DecidedTrain

EVALUATIONS = 5  # per run, unless configured
MAX_EVALUATION_FRACTION = 0.3  # of the time: a short run evaluates less often
CLOCK_CHECKS = 200  # times in a run at which the clock is compared with the plan
MIN_INTERVALS = 3  # between checks, whose speed predicts the rest; more while much time is left:
# As many as cover this fraction of the time left, so that a short burst changes little.
RECENT_FRACTION = 0.1
MAX_INTERVALS = 64
TOLERATED_ERROR = 0.01  # fraction of the promised time by which a plan may be wrong
TOLERATED_OF_LEFT = 0.1  # or fraction of the time left: there is time to correct it later
MAX_FINAL_STEPS = 5  # to bring the learning rate down when the time is over
FINAL_FRACTION = 0.02  # of the time, at most, for these steps; one step is always made
MIN_TRAINING_FRACTION = 0.05  # of the time, for training, if preparing the data took all of it
# An interval of this many times the usual one contains a pause: sleep, or a stopped process.
PAUSE = 50

LOG_EVERY = 10  # maximum steps between two log lines
LOG_LINES = 50  # minimum number of log lines of a run


@dataclass(frozen=True)
class Segment:
    """From step `start` on, the run was planned to have `total_steps` steps."""

    start: int
    total_steps: int


class Purpose(NamedTuple):
    """What a step is for, known before it is made."""

    logs: bool  # a log line follows
    evaluates: bool  # an evaluation follows
    checks_clock: bool  # the time since the last check is recorded
    analyses: tuple[Analysis, ...]  # what is computed during the step, from its gradients


@dataclass(frozen=True)
class StepPlan:
    """The number of steps of a run, with every correction.

    The schedule (learning rate, evaluations) is a function of the *position*: the step of the first
    plan that corresponds to a step of this one. Without corrections they are the same.
    """

    segments: tuple[Segment, ...]
    eval_every: int | None = (
        None  # steps between evaluations, 0: only at the end; None: evenly by position
    )
    evaluations: int = EVALUATIONS  # number of evaluations if `eval_every` is None

    @property
    def total_steps(self) -> int:
        return self.segments[-1].total_steps

    def position(self, step: int) -> float:
        """The step of the first plan that corresponds to `step`.

        The same number if there were no corrections.
        """
        first = self.segments[0]
        position: float = 0
        for segment, following in zip(self.segments, [*self.segments[1:], None], strict=True):
            end = step if following is None else min(step, following.start)
            if segment is first:
                position = end
            else:
                remaining_steps = max(segment.total_steps - segment.start, 1)
                position += (end - segment.start) * (first.total_steps - position) / remaining_steps
            if end == step:
                break
        return position

    def fraction(self, step: int) -> float:
        """Fraction of the schedule that is done before `step`."""
        return self.position(step) / max(self.segments[0].total_steps, 1)

    def _planned_at(self, steps_done: int) -> int:
        """The total that was planned when the last of `steps_done` steps was made."""
        return max(
            (segment for segment in self.segments if segment.start < max(steps_done, 1)),
            key=lambda segment: segment.start,
        ).total_steps

    def evaluates(self, steps_done: int) -> bool:
        """Whether the model is evaluated after `steps_done` steps."""
        if steps_done == self._planned_at(steps_done):
            return True
        if self.eval_every is not None:
            return bool(self.eval_every) and steps_done % self.eval_every == 0
        interval = ceil_div(self.segments[0].total_steps, self.evaluations)
        return self.position(steps_done) // interval > self.position(steps_done - 1) // interval

    def evaluations_left(self, steps_done: int, total_steps: int | None = None) -> int:
        """Evaluations after `steps_done` steps, the last one included."""
        total = self.total_steps if total_steps is None else total_steps
        if self.eval_every is not None:
            return max(
                1,
                ceil_div(total, self.eval_every) - steps_done // self.eval_every
                if self.eval_every
                else 1,
            )
        first = self.segments[0].total_steps
        interval = ceil_div(first, self.evaluations)
        return max(1, ceil_div(first, interval) - int(self.position(steps_done) // interval))

    def logs(self, steps_done: int) -> bool:
        """Whether a log line is written after `steps_done` steps; the same in a repeated run."""
        planned = self._planned_at(steps_done)
        return steps_done == planned or steps_done % log_interval(planned) == 0

    def checks(self, steps_done: int) -> bool:
        """Whether the plan is compared with the clock after `steps_done` steps."""
        interval = max(1, self.total_steps // CLOCK_CHECKS)
        return steps_done >= self.total_steps or steps_done % interval == 0

    def purpose(self, steps_done: int) -> Purpose:
        """What the step is for that is the last of `steps_done` steps."""
        evaluates = self.evaluates(steps_done)
        during_step = [analysis for analysis in ANALYSES.values() if analysis.record_kind == RECORD]
        analyses = tuple(during_step) if evaluates else ()
        checks_clock = evaluates or self.checks(steps_done)
        return Purpose(self.logs(steps_done), evaluates, checks_clock, analyses)

    def as_settings(self) -> dict[str, object]:
        """The settings of config.toml that describe this plan."""
        parts = tuple((segment.start, segment.total_steps) for segment in self.segments)
        return {"steps": self.total_steps, "plan": parts if len(parts) > 1 else ()}

    def corrected(self, step: int, total_steps: int) -> StepPlan:
        """The plan if the run has `total_steps` steps from `step` on."""
        earlier = tuple(segment for segment in self.segments if segment.start < step)
        if not earlier:
            return StepPlan((Segment(0, total_steps),), self.eval_every, self.evaluations)
        return StepPlan((*earlier, Segment(step, total_steps)), self.eval_every, self.evaluations)


@overload
def step_plan(train: DecidedTrain) -> StepPlan: ...
@overload
def step_plan(train: TrainConfig) -> StepPlan | None: ...
def step_plan(train: TrainConfig) -> StepPlan | None:
    """The plan of a run as its config.toml has it; None if its number of steps is not known yet."""
    if train.steps is None:
        return None
    segments = tuple(Segment(*part) for part in train.plan or ((0, train.steps),))
    return StepPlan(segments, train.eval_every, train.evaluations or EVALUATIONS)


def log_interval(total_steps: int) -> int:
    return max(1, min(LOG_EVERY, total_steps // LOG_LINES))


class TimeBudget:
    """The time that `--minutes` promises, counted from the start of the command.

    Pauses of the machine (a closed lid, a stopped process) do not count: they are added to the end.
    """

    def __init__(self, seconds: float, used: float = 0.0, began: float | None = None) -> None:
        self.seconds = seconds
        self._begin = (time.perf_counter() if began is None else began) - used

    @property
    def used(self) -> float:
        return time.perf_counter() - self._begin

    @property
    def remaining(self) -> float:
        return self.seconds - self.used

    def exclude(self, seconds: float) -> None:
        """Do not count this much of the time that has passed."""
        self._begin += seconds


@dataclass
class Costs:
    """What the rest of a run will take, in steps: other programs slow down everything by about as
    much as a step.
    """

    evaluation: float = 0.0  # one evaluation with saving the best model
    closing: float = 0.0  # test evaluation and saving, after the last evaluation


def planned_steps(
    plan: StepPlan, step: int, seconds_left: float, step_seconds: float, costs: Costs
) -> int:
    """The total number of steps with which the run ends in `seconds_left`.

    At least one step is left.
    """
    affordable = seconds_left / step_seconds - costs.closing
    total = float(step)
    if plan.eval_every:
        # Each step pays for its part of an evaluation; the last evaluation may come before a full
        # interval.
        total = step + (affordable - costs.evaluation) / (1 + costs.evaluation / plan.eval_every)
    else:
        total = step + affordable - plan.evaluations_left(step) * costs.evaluation
    return max(step + 1, math.floor(total))


class Pacer:
    """Keeps a run within its time budget: compares the clock with the plan and corrects
    the plan.
    """

    def __init__(
        self, budget: TimeBudget, costs: Costs, step: int, max_steps: int | None = None
    ) -> None:
        """`max_steps` is the number of steps after which more time would not help.

        None: there is none.
        """
        self.budget = budget
        self.costs = costs
        self.max_steps = max_steps
        self._intervals: deque[tuple[int, float]] = deque(maxlen=MAX_INTERVALS)  # (steps, seconds)
        self._last_step = step
        self._last_time = time.perf_counter()

    @property
    def step_seconds(self) -> float | None:
        """Recent seconds per step; None before the first check."""
        needed_seconds = RECENT_FRACTION * self.budget.remaining
        steps, seconds = 0, 0.0
        for count, (interval_steps, interval_seconds) in enumerate(reversed(self._intervals)):
            if count >= MIN_INTERVALS and seconds >= needed_seconds:
                break
            steps += interval_steps
            seconds += interval_seconds
        return seconds / steps if steps else None

    def record(self, step: int) -> None:
        """Record the time of the steps since the last call."""
        now = time.perf_counter()
        steps = step - self._last_step
        seconds = now - self._last_time
        usual = self.step_seconds
        if steps > 0 and usual is not None and seconds > PAUSE * usual * steps:
            self.budget.exclude(seconds - usual * steps)
        elif steps > 0:
            self._intervals.append((steps, seconds))
        self._last_step = step
        self._last_time = now

    def resume(self, step: int, used_seconds: float, costs: Costs) -> None:
        """Continue where a checkpoint was saved: its part of the time is used already."""
        self.budget.exclude(-used_seconds)
        self.costs = costs
        self.restart(step)

    def restart(self, step: int) -> None:
        """Do not count the time since the last check as steps, such as an evaluation."""
        self._last_step = step
        self._last_time = time.perf_counter()

    def evaluated(self, step: int, seconds: float) -> None:
        """Record how long an evaluation took."""
        usual = self.step_seconds
        if usual:
            measured = seconds / usual
            # The test split takes as long in relation to the validation split as was estimated
            # before.
            if self.costs.evaluation:
                self.costs.closing *= measured / self.costs.evaluation
            self.costs.evaluation = measured
        self.restart(step)

    def check(self, plan: StepPlan, step: int) -> StepPlan:
        """The plan, corrected if it would miss the promised time by more than is tolerated.

        To be called after `step` and its evaluation, with the time of both recorded.
        """
        step_seconds = self.step_seconds
        if step_seconds is None:
            return plan
        remaining = self.budget.remaining
        steps_left = plan.total_steps - step
        evaluations = plan.evaluations_left(step) if steps_left > 0 else 0
        expected = step_seconds * (
            steps_left + evaluations * self.costs.evaluation + self.costs.closing
        )
        tolerated = max(TOLERATED_ERROR * self.budget.seconds, TOLERATED_OF_LEFT * remaining)
        if abs(expected - remaining) <= tolerated:
            return plan
        if (
            expected < remaining
            and self.max_steps is not None
            and plan.total_steps >= self.max_steps
        ):
            return plan  # the time that is left is given back
        final_steps = int(FINAL_FRACTION * self.budget.seconds / step_seconds)
        final_steps = max(1, min(MAX_FINAL_STEPS, final_steps))
        total = planned_steps(plan, step, remaining, step_seconds, self.costs)
        if self.max_steps is not None:
            total = min(total, self.max_steps)
        total = max(step + final_steps, total)
        if steps_left <= 0 and total <= step + final_steps:
            return plan  # the run is over, as planned
        if steps_left <= final_steps and total < plan.total_steps + final_steps:
            return plan  # the last few steps bring the learning rate down
        return plan if total == plan.total_steps else plan.corrected(step, total)
