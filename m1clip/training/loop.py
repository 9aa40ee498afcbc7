"""The training loop."""

import contextlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from m1clip.config import to_toml
from m1clip.data.loader import Batch, batches
from m1clip.errors import UserError
from m1clip.io import write_text
from m1clip.runlog import RunLog
from m1clip.training.checkpoint import CheckpointWriter, TrainState, checkpoint_tensors, disk_errors
from m1clip.training.duration import Pacer, step_plan
from m1clip.training.logger import StepLogger
from m1clip.training.process import Interrupted, Stopped, StopRequest
from m1clip.training.progress import Screen
from m1clip.training.recovery import Recovery, Rollback
from m1clip.training.setup import Setup
from m1clip.training.step import TrainStep
from m1clip.training.validation import Validator

ENDLESS = 2**40  # steps


class TrainLoop:
    """Trains from `state.step` to the end of the run, or until stopped: log, evaluate, save, recover."""

    def __init__(
        self,
        setup: Setup,
        train_step: TrainStep,
        state: TrainState,
        run: Path,
        log: RunLog,
        screen: Screen,
        pacer: Pacer | None = None,
    ) -> None:
        self.setup, self.train_step, self.state, self.run = setup, train_step, state, run
        self.log, self.screen = log, screen
        plan = step_plan(setup.config.train)
        assert plan is not None  # resolved before
        self.plan = plan
        self.pacer = pacer  # keeps to the time of --minutes; None: the number of steps is fixed
        self.writer = CheckpointWriter(setup, run, log, screen)
        self.recovery = Recovery(setup, train_step, state, run, log, screen)
        self.validator = Validator(setup, train_step, state, run, log, screen)
        self.logger = StepLogger(setup, train_step, log, screen)
        self.started = time.perf_counter() - state.seconds

    def run_until_stopped(self, stop: StopRequest) -> None:
        """Run the loop; raises Stopped after a signal, once a checkpoint is saved."""
        if self._out_of_patience():
            return  # resumed after an early stop
        self.stop = stop
        self.screen.begin(self.state.step, self.plan.total_steps)
        with stop.interrupting(False):
            while True:
                try:
                    self._train()
                    break
                except Rollback:
                    self.recovery.roll_back()
                    self.writer.reset()
                    self.logger.restart()
                    if self.pacer is not None:
                        self.pacer.restart(self.state.step)
        self.screen.end()

    def _train(self) -> None:
        state, train_step = self.state, self.train_step
        if self._evaluate_first() and self._between_steps():
            return
        with contextlib.closing(self._timed_batches()) as feed:
            while state.step < self.plan.total_steps:
                step = state.step
                waited, batch = self._next(feed)
                loss, grad_norm = train_step(batch, step)
                self.logger.after_step(waited, loss, grad_norm)

                state.step, state.seconds = step + 1, time.perf_counter() - self.started
                logs, evaluates = self.plan.logs(state.step), self.plan.evaluates(state.step)
                if self.pacer is not None and (evaluates or self.plan.checks(state.step)):
                    self.setup.device.synchronize()  # the clock of the host runs ahead of the device
                    self.pacer.record(state.step)
                self.recovery.after_step(batch.sample_ids, loss, grad_norm, read=logs or evaluates)
                if logs:
                    self.logger.write(state, train_step.schedule(step) * train_step.lr_factor)
                state.evaluation_due = evaluates
                if self._between_steps():
                    break

    def _between_steps(self) -> bool:
        """Evaluate, save and stop if due; returns whether the run ends early."""
        state, began = self.state, time.perf_counter()
        evaluates = state.evaluation_due
        if evaluates:
            self.validator.run_due(self.stop)
            self.started += time.perf_counter() - began  # not training time
            self.logger.restart()
        last, early = state.step >= self.plan.total_steps, self._out_of_patience()
        # Read once: a signal that arrives later is handled after the next step, which then saves too.
        signal, due = self.setup.ranks.agree(self.stop.signal, self.writer.due(state.step, evaluates))
        ends = last or early or bool(signal)
        if due or ends:
            self.recovery.read()  # on CUDA, skipped steps are only detected here
        saves = bool(ends or (due and state.skipped == 0))
        if saves:
            self._save()
            self.logger.restart()
        if self.pacer is not None and evaluates:
            self.pacer.evaluated(state.step, time.perf_counter() - began)
        elif self.pacer is not None and saves:
            self.pacer.restart(state.step)
        if signal and (not last or state.evaluation_due):
            self.log.write("event", step=state.step, event=f"stopped by signal {signal}")
            raise Stopped(str(self.run), state.step, signal)
        self._keep_to_the_clock(evaluates)
        if early and not last:
            reason = f"{state.stale} evaluations without improvement of {self.validator.metric_label}"
            self.screen.say(f"stopped    after {reason}")
            self.log.write("event", step=state.step, event="early stop", reason=reason)
        return early

    def _keep_to_the_clock(self, evaluated: bool) -> None:
        """Correct the number of steps if the run would not end with the time of --minutes."""
        pacer, step = self.pacer, self.state.step
        if pacer is None or not (evaluated or self.plan.checks(step)):
            return
        plan = self.setup.ranks.first(lambda: pacer.check(self.plan, step))
        if plan == self.plan:
            return
        self.log.write("plan", step=step, steps=plan.total_steps, before=self.plan.total_steps)
        self.plan = plan
        self.train_step.follow(plan)
        self.screen.change_total(plan.total_steps)
        if self.setup.ranks.rank == 0:  # so that a resumed or repeated run makes the same steps
            with disk_errors(self.log, self.run / "config.toml", step):
                write_text(self.run / "config.toml", to_toml(self.setup.config.changed(**plan.as_settings())))

    def _save(self) -> None:
        if self.pacer is not None:
            self.state.used_seconds = self.pacer.budget.used
            self.state.evaluation_cost = self.pacer.costs.evaluation
            self.state.closing_cost = self.pacer.costs.closing
        self.writer.save(self.state, checkpoint_tensors(self.train_step, self.state))

    def _out_of_patience(self) -> bool:
        patience = self.setup.config.train.patience
        return bool(patience) and self.state.stale >= patience

    def _evaluate_first(self) -> bool:
        """Whether to evaluate before the first step: after an interrupted evaluation, or to score the --init model.

        Training may only make the --init model worse; but --wise-ft interpolates, and needs a trained model.
        """
        state, transfer = self.state, self.setup.config.transfer
        scores_start = (transfer.init is not None and transfer.wise_ft == "off") or self.setup.start.new_heads
        if state.step == 0 and state.best_step < 0 and scores_start:
            state.evaluation_due = True
        return state.evaluation_due

    def _next(self, feed: Iterator[tuple[float, Batch]]) -> tuple[float, Batch]:
        """The next batch; if loading fails, save a checkpoint before raising."""
        try:
            return next(feed)
        except Interrupted:  # while waiting for a worker
            if self.state.step:
                self._between_steps()  # saves, and raises Stopped
            raise
        except UserError as error:
            if self.state.step == 0 or self.train_step.shards is not None:  # a checkpoint needs all ranks
                raise
            self.recovery.read()
            self._save()
            raise UserError(
                f"{error} (step {self.state.step:,} is saved; continue with: m1clip train --resume {self.run})"
            ) from None

    def _timed_batches(self) -> Generator[tuple[float, Batch], None, None]:
        setup, rules = self.setup, self.setup.device.rules
        start, workers = self.state.step, setup.config.data.workers
        # With a clock the last step is not known: the loop leaves the feed when the time is over.
        stop = self.plan.total_steps if self.pacer is None else ENDLESS
        where = (start, stop, workers, rules.worker_start, rules.pin_memory)
        # One rank alone must not leave a step.
        interruptible = self.stop.interrupting if setup.ranks.size == 1 else contextlib.nullcontext
        feed = batches(setup.training, *where, self._warn, interruptible)
        with contextlib.closing(feed):
            begin = time.perf_counter()
            for batch in feed:
                yield time.perf_counter() - begin, batch
                begin = time.perf_counter()

    def _warn(self, text: str) -> None:
        self.log.write("warning", step=self.state.step, text=text)
        self.screen.warn(text)
