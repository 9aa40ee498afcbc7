"""Durations become a number of steps here and nowhere else."""

from __future__ import annotations

import gc
import time

from m1clip.data.loader import batches
from m1clip.errors import UserError
from m1clip.hardware.clock import timing
from m1clip.train.evaluation import evaluate
from m1clip.train.setup import Job
from m1clip.train.update import Update

DEFAULT_EPOCHS = 10.0
EVALUATIONS = 5  # a run, unless the config says otherwise
WARM_STEPS, TIMED_STEPS = 2, 5
# Steps that differ by more than this between their quartiles were disturbed: more of them are timed, for at most this
# share of the time.
STEADY, PATIENCE = 1.25, 0.05
PAUSE = 50  # a step that takes so many times the usual was no step: the machine slept, or was stopped


def total_steps(job: Job) -> int:
    """Steps of the run, from --steps, --epochs or --minutes."""
    train, plan = job.config.train, job.training.plan
    if train.steps is not None:
        return train.steps
    if train.minutes is not None:
        return calibrate(job, train.minutes * 60)
    epochs = DEFAULT_EPOCHS if train.epochs is None else train.epochs
    steps = round(epochs * plan.steps_per_epoch)
    if steps < 1:
        raise UserError(
            f"--epochs {epochs:g} is less than one step of this data: give a larger number, or --steps"
        )
    return steps


def calibrate(job: Job, seconds: float) -> int:
    """How many steps fit into the time: a throw-away model makes a few real ones and one real evaluation."""
    begin = time.perf_counter()
    update = Update(
        job.build_model(), job.config, job.device, job.precision, job.preprocess, job.autocast, job.teacher
    )
    most = max(WARM_STEPS + TIMED_STEPS, job.training.plan.steps_per_epoch)
    step_seconds: list[float] = []
    for step, batch in enumerate(batches(job.training, 0, most, 0, "fork", pin=False)):
        start = time.perf_counter()
        update(batch, step, 0, most)
        job.device.synchronize()
        step_seconds.append(time.perf_counter() - start)
        if enough(step_seconds[WARM_STEPS:], PATIENCE * seconds):
            break
    start = time.perf_counter()
    if "val" in job.splits:
        evaluate(job, update.model, "val")
    evaluation_seconds = time.perf_counter() - start
    train = job.config.train
    timed = step_seconds[WARM_STEPS:]  # the first ones count in full: they may have compiled the model
    per_step = usual(timed)
    paused = sum(timed) - without_pauses(timed, per_step)
    left = seconds - (time.perf_counter() - begin - paused)
    if train.eval_every is None:
        left -= (EVALUATIONS + 1) * evaluation_seconds  # and one of the test split at the end
    elif train.eval_every:
        left -= evaluation_seconds
        per_step += evaluation_seconds / train.eval_every
    update.forget_graph()
    del update  # it hangs in a circle with what holds on to it
    gc.collect()
    job.device.release()
    steps = int(left / per_step)
    if steps < 10:
        raise UserError(
            f"{seconds / 60:g} minutes are {max(steps, 0)} steps of {per_step:.1f} s here: too few to learn from; "
            f"give more minutes, a smaller --batch or a smaller --model"
        )
    return steps


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
