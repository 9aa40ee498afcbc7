"""Durations become a number of steps here and nowhere else."""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import NamedTuple

from m1clip.data.loader import batches
from m1clip.errors import UserError
from m1clip.hardware.clock import timing
from m1clip.train.evaluation import encode, evaluate
from m1clip.train.setup import Job
from m1clip.train.update import Update

DEFAULT_EPOCHS = 10.0
EVALUATIONS = 5  # a run, unless the config says otherwise
WARM_STEPS, TIMED_STEPS = 2, 5
# Steps that differ by more than this between their quartiles were disturbed: more of them are timed, for at most this
# share of the time.
STEADY, PATIENCE = 1.25, 0.05
CALIBRATION = 0.05  # of the time, at most; --device auto takes as much again (train/choose.py)
EVALUATING = 0.3  # of the time, at most: a short run evaluates less often
FEW_STEPS = 10
SMALL = (2, 8)  # images in the steps that predict what one with the complete batch takes
SAMPLE_IMAGES = 16
PAUSE = 50  # a step that takes so many times the usual was no step: the machine slept, or was stopped


class Length(NamedTuple):
    """How long a run is, and how often it evaluates unless the config says."""

    steps: int
    evaluations: int = EVALUATIONS


def run_length(job: Job, warn: Callable[[str], None]) -> Length:
    """The length of the run, from --steps, --epochs or --minutes."""
    train, plan = job.config.train, job.training.plan
    if train.steps is not None:
        return Length(train.steps)
    if train.minutes is not None:
        return calibrate(job, train.minutes * 60, warn)
    epochs = DEFAULT_EPOCHS if train.epochs is None else train.epochs
    steps = round(epochs * plan.steps_per_epoch)
    if steps < 1:
        raise UserError(
            f"--epochs {epochs:g} is less than one step of this data: give a larger number, or --steps"
        )
    return Length(steps)


def calibrate(job: Job, seconds: float, warn: Callable[[str], None]) -> Length:
    """How many steps fit into the time: a throw-away model makes a few real ones and evaluates.

    What would take more than CALIBRATION of the time is estimated from smaller batches and fewer images.
    """
    begin = time.perf_counter()
    deadline = begin + CALIBRATION * seconds
    update = Update(
        job.build_model(), job.config, job.device, job.precision, job.preprocess, job.autocast, job.teacher
    )
    per_step, paused = _step_seconds(job, update, deadline, PATIENCE * seconds)
    evaluation_seconds = _evaluation_seconds(job, update, deadline) if "val" in job.splits else 0.0
    left = seconds - (time.perf_counter() - begin - paused)
    train, evaluations = job.config.train, EVALUATIONS
    if train.eval_every is None:
        affordable = int(EVALUATING * seconds / max(evaluation_seconds, 1e-9)) - 1
        evaluations = max(1, min(EVALUATIONS, affordable))
        left -= (evaluations + 1) * evaluation_seconds  # and one of the test split at the end
    elif train.eval_every:
        left -= evaluation_seconds
        per_step += evaluation_seconds / train.eval_every
    update.forget_graph()
    del update  # it hangs in a circle with what holds on to it
    gc.collect()
    job.device.release()
    steps = max(1, int(left / per_step))
    if steps < FEW_STEPS:
        warn(
            f"{seconds / 60:g} minutes are only {steps} steps of {per_step:.1f} s here, too few to learn much; "
            f"give more minutes, a smaller --batch or a smaller --model"
        )
    return Length(steps, evaluations)


def _step_seconds(job: Job, update: Update, deadline: float, patience: float) -> tuple[float, float]:
    """(seconds of a step, seconds in which the machine paused); no step that would pass the deadline is made."""
    plan = job.training.plan
    most = max(WARM_STEPS + TIMED_STEPS, plan.steps_per_epoch)
    # A compiled model compiles anew for each shape, and its first steps tell nothing.
    least = WARM_STEPS + 1 if job.config.model.compile else 0
    expected = 0.0 if least else _small_batches(job, update)
    taken: list[float] = []
    for step, batch in enumerate(batches(job.training, 0, most, 0, "fork", pin=False)):
        start = time.perf_counter()
        if step >= least and start + (taken[-1] if taken else expected) > deadline:
            break
        update(batch, step, 0, most)
        job.device.synchronize()
        taken.append(time.perf_counter() - start)
        if enough(taken[WARM_STEPS:], patience):
            break
    timed = taken[WARM_STEPS:] or taken[-1:] or [expected]
    per_step = usual(timed)
    return per_step, sum(timed) - without_pauses(timed, per_step)


def _small_batches(job: Job, update: Update) -> float:
    """The seconds of a step with the complete batch, as two small batches predict them."""
    data, plan = copy.copy(job.training), job.training.plan
    settles, update.settles = update.settles, False  # memory is kept for the sizes of the complete batch
    taken = {}
    for size in [min(size, plan.batch) for size in (SMALL[0], *SMALL)]:  # the first step is cold
        data.plan = dataclasses.replace(plan, batch=size)
        start = time.perf_counter()
        update.plainly(data[0], 0)
        job.device.synchronize()
        taken[size] = time.perf_counter() - start
    update.settles = settles
    (small, first), (large, second) = min(taken.items()), max(taken.items())
    slope = max(0.0, second - first) / max(large - small, 1)
    return second + slope * (plan.batch - large)


def _evaluation_seconds(job: Job, update: Update, deadline: float) -> float:
    """Seconds of an evaluation: measured, or estimated from a few images where that would pass the deadline."""
    images = len(job.splits["val"].pairs)
    few = min(images, SAMPLE_IMAGES)
    start = time.perf_counter()
    encode(job, update.model, "val", few)
    expected = (time.perf_counter() - start) * images / few
    start = time.perf_counter()
    if start + expected > deadline:
        return expected
    evaluate(job, update.model, "val")
    return time.perf_counter() - start


def enough(timed: list[float], patience: float) -> bool:
    """Whether the timed steps tell how long a step takes: there are several, and they agree or time is up."""
    if len(timed) < TIMED_STEPS:
        return False
    found = timing(timed)
    return found.high <= STEADY * found.low or sum(timed) > patience


def usual(timed: list[float]) -> float:
    """Seconds of a step: the median of steps that agree, else their lower quartile, which others disturbed least."""
    found = timing(timed)
    return found.median if found.high <= STEADY * found.low else found.low


def without_pauses(step_seconds: list[float], usual: float) -> float:
    """Seconds that the steps took together; a pause of the machine in one of them does not eat up the budget."""
    return sum(seconds if seconds < PAUSE * usual else usual for seconds in step_seconds)
