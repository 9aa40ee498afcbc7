"""The training loop."""

import contextlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from m1clip.data.loader import Batch, batches
from m1clip.errors import UserError
from m1clip.runlog import RunLog
from m1clip.training.checkpoint import CheckpointWriter, TrainState, checkpoint_tensors
from m1clip.training.logger import StepLogger
from m1clip.training.process import Interrupted, Stopped, StopRequest
from m1clip.training.progress import Screen
from m1clip.training.recovery import Recovery, Rollback
from m1clip.training.setup import Setup
from m1clip.training.step import TrainStep
from m1clip.training.validation import Validator


class TrainLoop:
    """Trains from `state.step` to the end of the run, or until stopped: log, evaluate, save, recover."""

    def __init__(
        self, setup: Setup, train_step: TrainStep, state: TrainState, run: Path, log: RunLog, screen: Screen
    ) -> None:
        self.setup, self.train_step, self.state, self.run = setup, train_step, state, run
        self.log, self.screen = log, screen
        self.total_steps = setup.config.train.steps or 0
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
        self.screen.begin(self.state.step, self.total_steps)
        with stop.interrupting(False):
            while True:
                try:
                    self._train()
                    break
                except Rollback:
                    self.recovery.roll_back()
                    self.writer.reset()
                    self.logger.restart()
        self.screen.end()

    def _train(self) -> None:
        state, train_step, total = self.state, self.train_step, self.total_steps
        if self._evaluate_first() and self._between_steps():
            return
        with contextlib.closing(self._timed_batches()) as feed:
            for step in range(state.step, total):
                waited, batch = self._next(feed)
                loss, grad_norm = train_step(batch, step)
                self.logger.after_step(waited, loss, grad_norm)

                state.step, state.seconds = step + 1, time.perf_counter() - self.started
                logs = state.step % self.logger.every == 0 or state.step == total
                evaluates = state.step % (self.setup.config.train.eval_every or total) == 0 or state.step == total
                self.recovery.after_step(batch.sample_ids, loss, grad_norm, read=logs or evaluates)
                if logs:
                    self.logger.write(state, train_step.schedule(step) * train_step.lr_factor)
                state.evaluation_due = evaluates
                if self._between_steps():
                    break

    def _between_steps(self) -> bool:
        """Evaluate, save and stop if due; returns whether the run ends early."""
        state = self.state
        if state.evaluation_due:
            paused = time.perf_counter()
            self.validator.run_due(self.stop)
            self.started += time.perf_counter() - paused  # not training time
            self.logger.restart()
        last, early = state.step == self.total_steps, self._out_of_patience()
        # Read once: a signal that arrives later is handled after the next step, which then saves too.
        signal, due = self.setup.ranks.agree(self.stop.signal, self.writer.due(state.step))
        ends = last or early or bool(signal)
        if due or ends:
            self.recovery.read()  # on CUDA, skipped steps are only detected here
        if ends or (due and state.skipped == 0):
            self.writer.save(state, checkpoint_tensors(self.train_step, state))
            self.logger.restart()
        if signal and (not last or state.evaluation_due):
            self.log.write("event", step=state.step, event=f"stopped by signal {signal}")
            raise Stopped(str(self.run), state.step, signal)
        if early and not last:
            reason = f"{state.stale} evaluations without improvement of {self.validator.metric_label}"
            self.screen.say(f"stopped    after {reason}")
            self.log.write("event", step=state.step, event="early stop", reason=reason)
        return early

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
            self.writer.save(self.state, checkpoint_tensors(self.train_step, self.state))
            raise UserError(
                f"{error} (step {self.state.step:,} is saved; continue with: m1clip train --resume {self.run})"
            ) from None

    def _timed_batches(self) -> Generator[tuple[float, Batch], None, None]:
        setup, rules = self.setup, self.setup.device.rules
        start, workers = self.state.step, setup.config.data.workers
        where = (start, self.total_steps, workers, rules.worker_start, rules.pin_memory)
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
