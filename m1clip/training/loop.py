"""The only training loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1clip.data.loader import Batch, batches
from m1clip.errors import UserError
from m1clip.evaluation.evaluate import NEGATIVE_IMAGES, Evaluator, eval_batch_size
from m1clip.evaluation.retrieval import retrieval
from m1clip.evaluation.snapshot import write_snapshot
from m1clip.evaluation.statistics import Metric, Scores, selection_metric
from m1clip.inference.encoder import Model, SplitFeatures, encode_split
from m1clip.model.clip import CLIP
from m1clip.runlog import RunLog
from m1clip.training.checkpoint import CheckpointWriter, TrainState, groups
from m1clip.training.logger import StepLogger
from m1clip.training.process import Interrupted, Stopped, StopRequest
from m1clip.training.progress import Screen
from m1clip.training.recovery import Recovery, Rollback
from m1clip.training.setup import Job
from m1clip.training.step import TrainStep

SHARE = 0.015  # of the training time; the cheap parts and the layers take about as much at most
TEXTS_EACH = 13  # six hard negatives, three medium, three easy, and the truth
FEWEST = 4
SMALL_CHANGE = 0.25  # seconds


def encode(job: Job, model: CLIP, split: str, images: int | None = None) -> SplitFeatures:
    """Features of a split, or of its first `images`, in the precision of the run."""
    data = job.splits[split]
    return encode_split(model, data, job.preprocess, eval_batch_size(model), job.autocast, images)


def evaluate(job: Job, model: CLIP, split: str) -> Scores:
    """Every retrieval figure of a split."""
    return retrieval(*encode(job, model, split))


@dataclass
class Budget:
    """Keeps the dear part of the analysis, encoding made-up captions, to a share of the training time."""

    trained_before: float  # seconds, in earlier sessions
    spent: float = 0.0  # on analysis in this one

    def images(self, trained: float, per_text: float) -> int:
        """How many images may be asked now, each a dozen captions; few cheap ones may always."""
        each = max(per_text, 1e-9) * TEXTS_EACH
        left = SHARE * (trained - self.trained_before) - self.spent
        floor = FEWEST if FEWEST * each < SMALL_CHANGE else 0
        count = max(floor, min(NEGATIVE_IMAGES, int(left / each)))
        return count if count >= FEWEST else 0


def look_closer(job: Job, model: CLIP, features: SplitFeatures, run: Path, step: int, images: int) -> dict[str, Any]:
    """The analysis of the validation split for the log, and a snapshot of what it finds for those who watch.

    `images` are asked about made-up captions; with 0 that part waits for a later evaluation.
    """
    begin, training = time.perf_counter(), model.training
    bundle = Model(model, job.tokenizer, job.preprocess)
    found = Evaluator(bundle, job.source, "val", job.splits["val"], job.autocast).analysis(features, images)
    model.train(training)
    write_snapshot(run, step, "val", job.splits["val"], features)
    return {"analysis": found, "analysis_seconds": round(time.perf_counter() - begin, 4)}


def run_loop(
    job: Job, update: TrainStep, state: TrainState, total_steps: int, run: Path, log: RunLog, screen: Screen,
    asked: StopRequest,
) -> None:  # fmt: skip
    """Train from `state.step` to the end, evaluating, logging and saving on the way; stop when asked to."""
    if job.config.train.patience and state.stale >= job.config.train.patience:
        return  # resumed after its early stop: it stays where it stopped
    rescue = Recovery(job, update, run, log, screen, total_steps)
    loop = _Loop(job, update, state, total_steps, run, log, screen, asked, rescue)
    screen.begin(state.step, total_steps)
    with asked.looked_at(), rescue.saver:
        while True:
            try:
                loop.go()
                break
            except Rollback:
                rescue.go_back(state)
                loop.recorder.restart()
    screen.end()


class _Loop:
    """What the steps of a session share; `go` is the loop itself."""

    def __init__(
        self, job: Job, update: TrainStep, state: TrainState, total: int, run: Path, log: RunLog, screen: Screen,
        asked: StopRequest, rescue: Recovery,
    ) -> None:  # fmt: skip
        self.job, self.update, self.state, self.total, self.run = job, update, state, total, run
        self.log, self.screen, self.asked, self.rescue = log, screen, asked, rescue
        self.saver: CheckpointWriter = rescue.saver
        self.recorder = StepLogger(job, update, log, screen, total)
        self.budget = Budget(trained_before=state.seconds)
        self.began = time.perf_counter() - state.seconds
        self.label = ""  # of the figure that chooses the best model

    def go(self) -> None:
        """From the step of the state to the last, or until asked to stop."""
        state = self.state
        if state.step == 0 and state.best_step < 0 and self._start_may_be_best():
            state.evaluation_due = True
        if state.evaluation_due and self._pause(state.step == self.total):
            return
        with contextlib.closing(_timed(self.job, state.step, self.total, self._warn)) as feed:
            self._steps(feed)

    def _steps(self, feed: Iterator[tuple[float, Batch]]) -> None:
        state, update = self.state, self.update
        for step in range(state.step, self.total):
            self.recorder.before(step + 1)
            waited, batch = self._next(feed)
            loss, grad_norm = update(batch, step)
            self.recorder.after(waited, loss, grad_norm)

            state.step, state.seconds = step + 1, time.perf_counter() - self.began
            last = state.step == self.total
            logs, evaluates = state.step % self.recorder.every == 0 or last, self._evaluates()
            self.rescue.after(state, batch.sample_ids, loss, grad_norm, look=logs or evaluates)
            if logs:
                self.recorder.write(state, update.schedule(step) * update.lr_factor)
            state.evaluation_due = evaluates
            if self._pause(last):
                break

    def _next(self, feed: Iterator[tuple[float, Batch]]) -> tuple[float, Batch]:
        """The next batch; if there is none because of the data, the run is saved before it ends."""
        try:
            return next(feed)
        except UserError as error:
            if self.state.step == 0:
                raise
            self.rescue.look(self.state)
            self.saver.save(self.state, groups(self.update, self.state), wait=True)
            raise UserError(
                f"{error} (step {self.state.step:,} is saved; continue with: m1clip train --resume {self.run})"
            ) from None

    def _warn(self, text: str) -> None:
        self.log.write("warning", step=self.state.step, text=text)
        self.screen.warn(text)

    def _start_may_be_best(self) -> bool:
        """From a model, training may only make it worse; where --wise-ft mixes, it wants a model that was trained."""
        transfer = self.job.config.transfer
        return transfer.init is not None and transfer.wise_ft == "off"

    def _evaluates(self) -> bool:
        every = self.job.config.train.eval_every or self.total
        return self.state.step % every == 0 or self.state.step == self.total

    def _pause(self, last: bool) -> bool:
        """What comes between two steps: evaluate, save, stop; whether the run is over."""
        state, patience = self.state, self.job.config.train.patience
        if state.evaluation_due:
            paused = time.perf_counter()
            self._evaluate()
            self.began += time.perf_counter() - paused  # not training
            self.recorder.restart()
        stale = bool(patience) and state.stale >= patience
        # Read once: a signal that comes while this step is being ended belongs to the next, which then saves too.
        signal = self.asked.signal
        due, ends = self.saver.due(state.step), last or stale or bool(signal)
        if due or ends:
            self.rescue.look(state)  # only then is it known whether the newest updates were skipped
        if ends or (due and state.skipped == 0):
            self.saver.save(state, groups(self.update, state), wait=ends)
            self.recorder.restart()
        self.saver.poll()
        if signal and (not last or state.evaluation_due):
            self.log.write("event", step=state.step, event=f"stopped by signal {signal}")
            raise Stopped(str(self.run), state.step, signal)
        if stale and not last:
            reason = f"{state.stale} evaluations without a better {self.label}"
            self.screen.say(f"stopped     after {reason}")
            self.log.write("event", step=state.step, event="early stop", reason=reason)
        return stale

    def _evaluate(self) -> None:
        """Evaluate, with the averaged weights if there are such; a signal breaks it off, and it stays due."""
        ema, model = self.update.ema, self.update.model
        if ema is not None:
            ema.swap(model)
        try:
            with self.asked.at_once():
                found = self._scores()
            if found is not None:
                self._keep_best(*found)
            self.state.evaluation_due = False
        except Interrupted:
            model.train()
        finally:
            if ema is not None:
                ema.swap(model)

    def _scores(self) -> tuple[Metric, bool] | None:
        """(the figure that chooses the best model, whether it is the best); all figures go to log and screen."""
        job, state, model = self.job, self.state, self.update.model
        if "val" not in job.splits:
            return None
        begin = time.perf_counter()
        features = encode(job, model, "val")
        per_text = (time.perf_counter() - begin) / len(features[1])
        scores = retrieval(*features)
        chosen = selection_metric(scores)
        self.label = chosen.label
        seconds = time.perf_counter() - begin
        found = {}
        if job.config.train.analysis_every != 0:
            images = self.budget.images(state.seconds, per_text)
            with self.rescue.disk(state.step, self.run / "watch"):
                found = look_closer(job, model, features, self.run, state.step, images)
        self.budget.spent += found.get("analysis_seconds", 0.0)
        found |= job.also_measured(model, self.screen.say)
        best = chosen.value > state.best
        self.log.write("eval", step=state.step, split="val", seconds=round(seconds, 4), **found,
                       **scores.as_dict())  # fmt: skip
        self.screen.evaluation(state.step, scores, chosen, None if best else (state.best, state.best_step))
        return chosen, best

    def _keep_best(self, chosen: Metric, best: bool) -> None:
        """Keep the best model so far; one that cannot be written is not the best, so that the next one is tried."""
        state, job = self.state, self.job
        if not best:
            state.stale += 1
            return
        with self.rescue.disk(state.step, self.run / "best"):
            Model(self.update.model, job.tokenizer, job.preprocess).save(self.run / "best")
            state.best, state.best_step, state.stale = chosen.value, state.step, 0


def _timed(job: Job, start: int, stop: int, warn: Callable[[str], None]) -> Generator[tuple[float, Batch], None, None]:
    """Batches with the seconds that the loop had to wait for each."""
    workers, rules = job.config.data.workers, job.device.rules
    feed = batches(job.training, start, stop, workers, rules.worker_start, rules.pin_memory, warn)
    while True:
        begin = time.perf_counter()
        batch = next(feed, None)
        if batch is None:
            return
        yield time.perf_counter() - begin, batch
