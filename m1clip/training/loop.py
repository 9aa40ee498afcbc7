"""The training loop. Evaluate, save, log and recover are called by name with the context of the
run.

The state of a run (`RunContext.state`) is changed in this module only.
"""

import contextlib
import time
from collections.abc import Generator, Iterator

from m1clip import console, time_use
from m1clip.data.loader import Batch, batches
from m1clip.errors import UserError
from m1clip.io import write_text
from m1clip.training.checkpoint import disk_errors, state_to_save, write_checkpoint
from m1clip.training.context import RunContext
from m1clip.training.process import Interrupted, Stopped
from m1clip.training.recovery import Rollback, prepare_recovery, roll_back
from m1clip.training.step_analyses import StepAnalyses
from m1clip.training.validation import BestSoFar, evaluate

ENDLESS = 2**40  # steps


@time_use.count_as("training")
def train(run: RunContext) -> None:
    """Train from the step of `run.state` to the end of the run.

    Raises Stopped after a signal, once all is saved.
    """
    if _out_of_patience(run):
        return  # resumed after an early stop
    prepare_recovery(run)
    run.display.begin(run.state.step, run.plan.total_steps)
    with run.stop.interrupting(False):
        while True:
            try:
                _train_steps(run)
                break
            except Rollback:
                run.state = roll_back(run)
                run.save_timer.reset()
                _restart_clocks(run)
    run.display.end()


def _train_steps(run: RunContext) -> None:
    """Make the steps of the plan, and what is due between them."""
    train_step = run.train_step
    attempts = train_step.attempts
    update = train_step.parts.update
    if _evaluates_first(run):
        run.update(evaluation_due=True)
        if _between_steps(run):
            return
    with contextlib.closing(_timed_batches(run)) as feed:
        while run.state.step < run.plan.total_steps:
            step = run.state.step  # counted from 0, as batches and random numbers are
            steps_done = step + 1  # when this step is over, as the log and checkpoints count
            purpose = run.plan.purpose(steps_done)
            waited, batch = _next_batch(run, feed)
            analyses = StepAnalyses(purpose.analyses)
            update.optimizer.set_lr(run.lr_fraction(step))
            with run.measurements.during(run, batch, step):
                for attempt in attempts.at(step, len(batch)):  # one, while memory suffices
                    with attempt as micro_batch:
                        result = train_step.attempt(
                            batch, step, micro_batch, attempts.mark, analyses.probe
                        )

            run.update(step=steps_done, seconds=time.perf_counter() - run.training_began)
            analyses.write(run)
            run.step_log.record(waited, result)
            run.checks.record(steps_done, batch.sample_ids, result.loss, result.grad_norm)
            if run.pacer is not None and purpose.checks_clock:
                run.inputs.device.synchronize()  # the clock of the host runs ahead of the device
                run.pacer.record(steps_done)
            if purpose.logs or purpose.evaluates or update.skip == "host":
                run.update(skipped=run.checks.read(run))
            if purpose.logs:
                run.step_log.write(run)
            run.update(evaluation_due=purpose.evaluates)
            if _between_steps(run):
                break


def _between_steps(run: RunContext) -> bool:
    """Evaluate, save and stop if due; returns whether the run ends early."""
    began = time.perf_counter()
    evaluates = run.state.evaluation_due
    evaluation = _evaluate(run) if evaluates else None
    step = run.state.step
    last = step >= run.plan.total_steps
    early = _out_of_patience(run)
    # Read once: a signal that arrives later is handled after the next step, which then saves too.
    signal, save_due = run.ranks.all_reduce_max(
        run.stop.signal, run.save_timer.due(step, evaluates)
    )
    ends = last or early or bool(signal)
    if save_due or ends:
        run.update(skipped=run.checks.read(run))  # on CUDA, skipped steps are only detected here
    saves = ends or (bool(save_due) and run.state.skipped == 0)
    if saves:
        _save(run)
        run.step_log.restart(run)
    run.saver.poll()
    if run.pacer is not None and evaluates:
        run.pacer.evaluated(step, time.perf_counter() - began)
    elif run.pacer is not None and saves:
        run.pacer.restart(step)
    if signal and (not last or run.state.evaluation_due):
        run.saver.wait()
        run.log.write("event", step=step, event=f"stopped by signal {signal}")
        raise Stopped(str(run.folder), step, signal)
    if run.pacer is not None and (evaluates or run.plan.checks(step)):
        _keep_to_the_clock(run)
    if early and not last:
        label = "the validation metric" if evaluation is None else evaluation.metric
        reason = f"{run.state.stale} evaluations without improvement of {label}"
        console.print(f"stopped    after {reason}")
        run.log.write("event", step=step, event="early stop", reason=reason)
    return early


@time_use.count_as("evaluation")
def _evaluate(run: RunContext) -> BestSoFar | None:
    """Evaluate on the validation split.

    None without one, or after a signal, when the evaluation stays due.
    """
    began = time.perf_counter()
    evaluation = None
    try:
        # One rank alone must not leave an exchange.
        with run.stop.interrupting(run.ranks.size == 1):
            if "val" in run.inputs.splits:
                evaluation = evaluate(run)
                run.update(
                    best=evaluation.best, best_step=evaluation.best_step, stale=evaluation.stale
                )
        run.update(evaluation_due=False)
    except Interrupted:
        run.train_step.model.train()
    run.training_began += time.perf_counter() - began  # not training time
    run.step_log.restart(run)
    return evaluation


@time_use.count_as("saving")
def _save(run: RunContext) -> None:
    run.state = state_to_save(run)
    write_checkpoint(run)


def _keep_to_the_clock(run: RunContext) -> None:
    """Correct the number of steps if the run would not end with the time of --minutes."""
    pacer = run.pacer
    assert pacer is not None
    step = run.state.step
    before = run.plan
    plan = run.ranks.on_rank0(lambda: pacer.check(before, step))
    if plan == before:
        return
    run.log.write("plan", step=step, steps=plan.total_steps, before=before.total_steps)
    run.plan = plan
    run.display.change_total(plan.total_steps)
    if run.ranks.rank == 0:  # so that a resumed or repeated run makes the same steps
        path = run.folder / "config.toml"
        with disk_errors(run.log, path, step):
            write_text(path, run.spec.with_plan(plan).to_toml())


def _restart_clocks(run: RunContext) -> None:
    """Do not count the time since the last log line and the last check of the clock."""
    run.step_log.restart(run)
    if run.pacer is not None:
        run.pacer.restart(run.state.step)


def _out_of_patience(run: RunContext) -> bool:
    patience = run.config.train.patience
    return bool(patience) and run.state.stale >= patience


def _evaluates_first(run: RunContext) -> bool:
    """Whether to evaluate before the first step: after an interrupted evaluation, or to score the
    --init model.

    Training may only make the --init model worse; but --wise-ft interpolates, and needs a trained
    model.
    """
    transfer = run.config.transfer
    scores_init = (
        transfer.init is not None and transfer.wise_ft == "off"
    ) or run.inputs.model.init.new_heads
    is_new = run.state.step == 0 and run.state.best_step < 0
    return run.state.evaluation_due or (is_new and scores_init)


def _next_batch(run: RunContext, feed: Iterator[tuple[float, Batch]]) -> tuple[float, Batch]:
    """The seconds that the loop waited for the next batch, and the batch.

    Saves a checkpoint if loading fails.
    """
    try:
        return next(feed)
    except Interrupted:  # while waiting for a worker
        if run.state.step:
            _between_steps(run)  # saves, and raises Stopped
        raise
    except UserError as error:
        if (
            run.state.step == 0 or run.train_step.parts.world.shards is not None
        ):  # a checkpoint needs all ranks
            raise
        run.update(skipped=run.checks.read(run))
        _save(run)
        raise UserError(
            f"{error} (step {run.state.step:,} is saved; continue with: m1clip train --resume"
            f" {run.folder})"
        ) from None


def _timed_batches(run: RunContext) -> Generator[tuple[float, Batch], None, None]:
    rules = run.inputs.device.capabilities
    feed = batches(
        run.inputs.training,
        run.state.step,
        # With a clock the last step is not known: the loop leaves the feed when the time is over.
        run.plan.total_steps if run.pacer is None else ENDLESS,
        run.config.data.workers,
        rules.worker_start,
        rules.pin_memory,
        run.warn,
        # One rank alone must not leave a step.
        run.stop.interrupting if run.ranks.size == 1 else contextlib.nullcontext,
    )
    with contextlib.closing(feed):
        begin = time.perf_counter()
        for batch in feed:
            yield time.perf_counter() - begin, batch
            begin = time.perf_counter()
