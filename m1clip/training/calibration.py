"""How many steps fit into the time of --minutes, from a few steps and a part of an evaluation."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m1clip import console
from m1clip.data.loader import batches
from m1clip.formatting import clock, plural
from m1clip.hardware.timing import timing
from m1clip.training.compose import TrainStep
from m1clip.training.duration import (
    EVALUATIONS,
    MAX_EVALUATION_FRACTION,
    MIN_TRAINING_FRACTION,
    Costs,
    Segment,
    StepPlan,
    TimeBudget,
    planned_steps,
)
from m1clip.training.transfer import WISE_FT_GRID
from m1clip.training.validation import encode

if TYPE_CHECKING:
    from m1clip.training.inputs import RunInputs

WARMUP_STEPS, TIMED_STEPS = 2, 5  # of a calibration
CALIBRATION_FRACTION = 0.05  # of the time, at most, unless two steps take longer
FIRST_STEP_FRACTION = 0.15  # of the time: a first step that takes longer is the only one
FEW_STEPS = 10  # a shorter run learns little
SAMPLE_IMAGES = 64  # of the validation split, to time an evaluation
WARMUP_IMAGES = 16  # encoded before them: the first pass takes twice as long


@dataclass(frozen=True)
class Calibration:
    """Steps and evaluations that fit in a time, and the cost of what is not a step."""

    steps: int
    evaluations: int
    costs: Costs


def calibrate(inputs: RunInputs, budget: TimeBudget) -> Calibration:
    """The number of steps that fit in the time, from a few steps and a part of an evaluation of a
    temporary model.

    This is a first estimate: the run compares it with the clock and corrects it.
    """
    min_seconds = MIN_TRAINING_FRACTION * budget.seconds
    if budget.remaining < min_seconds:
        console.warn(
            f"preparing the data has taken {clock(budget.used)} of the {clock(budget.seconds)} of"
            f" --minutes: training for {min_seconds:.0f} s more; what is cached now is not prepared again"
            " in the next run"
        )
        budget.exclude(min_seconds - budget.remaining)
    train_step = inputs.make_step()
    step_seconds = _step_seconds(inputs, train_step, budget)
    evaluation_seconds = _evaluation_seconds(inputs, train_step) if "val" in inputs.splits else 0.0
    train_step.reset()
    del train_step  # it is part of a reference cycle
    gc.collect()
    inputs.device.release()
    costs = Costs(evaluation_seconds / step_seconds)
    costs.closing = closing_evaluations(inputs) * costs.evaluation
    train = inputs.config.train
    evaluations = train.evaluations or 0
    if not evaluations:
        affordable = (
            int(MAX_EVALUATION_FRACTION * budget.remaining / max(evaluation_seconds, 1e-9)) - 1
        )
        evaluations = max(1, min(EVALUATIONS, affordable))
    empty = StepPlan((Segment(0, 1),), train.eval_every, evaluations)
    steps = planned_steps(empty, 0, budget.remaining, step_seconds, costs)
    if steps < FEW_STEPS:
        console.warn(few_steps_warning(budget.seconds, budget.remaining, steps, step_seconds))
    return Calibration(steps, evaluations, costs)


def few_steps_warning(
    budget_seconds: float, remaining_seconds: float, steps: int, step_seconds: float
) -> str:
    """Why a run has few steps: what a step takes, and what is not for steps."""
    before = budget_seconds - remaining_seconds
    after = max(0.0, remaining_seconds - steps * step_seconds)
    return (
        f"{budget_seconds / 60:g} minutes are only {plural(steps, 'step')} of {step_seconds:.1f} s"
        f" each, too few to learn much: {before:.0f} s were for preparing and checks before the first"
        f" step, and about {after:.0f} s are for evaluations and saving; run it when the computer is"
        " less busy, or use m1clip train with more --minutes, a smaller --batch-size or a smaller"
        " --model"
    )


def closing_evaluations(inputs: RunInputs) -> float:
    """What follows the last step, in evaluations of the validation split: the test split, and
    WiSE-FT's choice.
    """
    if "val" not in inputs.splits:
        return 0.0
    test = (
        len(inputs.splits["test"].samples)
        if "test" in inputs.splits
        else len(inputs.splits["val"].samples)
    )
    wise_ft = {"off": 0, "search": len(WISE_FT_GRID)}.get(inputs.config.transfer.wise_ft, 1)
    return test / max(len(inputs.splits["val"].samples), 1) + wise_ft


def _step_seconds(inputs: RunInputs, train_step: TrainStep, budget: TimeBudget) -> float:
    """Median seconds of a few steps, after some that warm up.

    Within a small part of the time if two steps are.
    """
    # The first step of a model takes two to three times as long: everything else is estimated in
    # steps, and would be estimated too low. A compiled model recompiles for each shape.
    compiles = inputs.config.model.compile
    min_steps = WARMUP_STEPS + 1 if compiles else 2
    remaining = budget.remaining
    limit = CALIBRATION_FRACTION * remaining
    begin = time.perf_counter()
    step_times: list[float] = []
    for step, batch in enumerate(
        batches(inputs.training, 0, WARMUP_STEPS + TIMED_STEPS, 0, "fork", pin=False)
    ):
        start = time.perf_counter()
        is_enough = step >= min_steps and start + step_times[-1] - begin > limit
        is_slow = step == 1 and step_times[0] > FIRST_STEP_FRACTION * remaining
        if any(inputs.ranks.all_reduce_max(is_enough or (is_slow and not compiles))):
            break
        train_step.run(batch, step)
        inputs.device.synchronize()
        step_times.append(time.perf_counter() - start)
    return timing(step_times[WARMUP_STEPS:] or step_times[-1:]).median


def _evaluation_seconds(inputs: RunInputs, train_step: TrainStep) -> float:
    images = len(inputs.splits["val"].samples)
    sample = min(images, SAMPLE_IMAGES)
    encode(inputs, inputs.complete_model(train_step), "val", min(images, WARMUP_IMAGES))
    start = time.perf_counter()
    encode(inputs, inputs.complete_model(train_step), "val", sample)
    return (time.perf_counter() - start) * images / sample
