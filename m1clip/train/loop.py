"""The only training loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from m1clip.data.loader import Batch, batches
from m1clip.evaluate.bundle import Bundle
from m1clip.evaluate.heldout import held_out
from m1clip.runlog import RunLog
from m1clip.train.checkpoint import Groups, LoopState, save
from m1clip.train.evaluation import Budget, encode, look_closer, mean_recall
from m1clip.train.record import Recorder
from m1clip.train.schedule import rate, warmup_steps
from m1clip.train.screen import Screen
from m1clip.train.setup import Job
from m1clip.train.stopping import Stopped, StopRequest
from m1clip.train.update import Update


def run_loop(
    job: Job, update: Update, state: LoopState, total_steps: int, run: Path, log: RunLog, screen: Screen,
    asked: StopRequest,
) -> None:  # fmt: skip
    """Train from `state.step` to the end, evaluating, logging and saving on the way; stop when asked to."""
    config = job.config
    if config.train.patience and state.stale >= config.train.patience:
        return  # resumed after its early stop: it stays where it stopped
    warmup = warmup_steps(config.optim.warmup, total_steps)
    eval_every, save_every = config.train.eval_every or total_steps, config.train.save_every or total_steps
    feed = _timed(job, state.step, total_steps)
    recorder, began = Recorder(job, update, log, screen, total_steps), time.perf_counter() - state.seconds
    budget = Budget(trained_before=state.seconds)
    screen.begin(state.step, total_steps)
    for step in range(state.step, total_steps):
        recorder.before(step + 1)
        waited, batch = next(feed)
        loss, grad_norm = update(batch, step, warmup, total_steps)
        recorder.after(waited, loss, grad_norm)

        state.step, state.seconds = step + 1, time.perf_counter() - began
        last = state.step == total_steps
        if state.step % config.train.log_every == 0 or last:
            recorder.write(state, rate(step, warmup, total_steps, config.optim.lr_end))
        if state.step % eval_every == 0 or last:
            paused = time.perf_counter()
            _evaluate(job, update, state, run, log, screen, budget)
            began += time.perf_counter() - paused  # not training
            recorder.restart()
        stop = bool(config.train.patience) and state.stale >= config.train.patience
        if state.step % save_every == 0 or last or stop or asked.signal:
            _save(update, state, run, config.train.keep, log)
            recorder.restart()
        if asked.signal and not last:
            log.write("event", step=state.step, event=f"stopped by signal {asked.signal}")
            raise Stopped(str(run), state.step, asked.signal)
        if stop and not last:
            screen.say(f"stopped     after {state.stale} evaluations without a better recall")
            log.write("event", step=state.step, event="early stop")
            break
    screen.end()


def _timed(job: Job, start: int, stop: int) -> Iterator[tuple[float, Batch]]:
    """Batches with the seconds that the loop had to wait for each."""
    workers, rules = job.config.data.workers, job.device.rules
    feed = batches(job.training, start, stop, workers, rules.worker_start, rules.pin_memory)
    while True:
        begin = time.perf_counter()
        batch = next(feed, None)
        if batch is None:
            return
        yield time.perf_counter() - begin, batch


def _evaluate(
    job: Job, update: Update, state: LoopState, run: Path, log: RunLog, screen: Screen, budget: Budget
) -> None:
    """Score the validation split with the averaged weights, if there are such; keep the best model."""
    if "val" not in job.splits:
        return
    if update.ema is not None:
        update.ema.swap(update.model)
    begin = time.perf_counter()
    features = encode(job, update.model, "val")
    per_text = (time.perf_counter() - begin) / len(features[1])
    scores = held_out(*features)
    value = mean_recall(scores)
    seconds = time.perf_counter() - begin
    found = (
        {}
        if job.config.train.analysis_every == 0
        else look_closer(
            job, update.model, features, run, state.step, budget.pictures(state.seconds, per_text)
        )
    )
    log.write("eval", step=state.step, split="val", mean_recall=value, seconds=round(seconds, 4), **found,
              **scores.as_dict())  # fmt: skip
    budget.spent += found.get("analysis_seconds", 0.0)
    if value > state.best:
        state.best, state.best_step, state.stale = value, state.step, 0
        Bundle(update.model, job.tokenizer, job.preprocess).save(run / "best")
    else:
        state.stale += 1
    screen.evaluation(state.step, scores, best=state.best_step == state.step)
    if update.ema is not None:
        update.ema.swap(update.model)


def _save(update: Update, state: LoopState, run: Path, keep: int, log: RunLog) -> None:
    if update.scaler is not None:
        scaler = update.scaler.state_dict()
        state.scaler_scale, state.scaler_growth = float(scaler["scale"]), int(scaler["_growth_tracker"])
    log.write("checkpoint", step=state.step, path=save(run, state, groups(update), keep).name)


def groups(update: Update) -> Groups:
    """All tensors of a checkpoint, by file."""
    kept = {"weights": update.model.state_dict(), "optimizer": update.optimizer.tensors()}
    if update.ema is not None:
        kept["ema"] = update.ema.weights
    return kept


def restore(update: Update, state: LoopState, kept: Groups) -> None:
    """Put a checkpoint's tensors back."""
    update.model.load_state_dict(kept["weights"])
    update.optimizer.load_tensors(kept["optimizer"])
    if update.ema is not None:
        update.ema.weights = kept["ema"]
    if update.scaler is not None:
        scale = {"scale": state.scaler_scale, "_growth_tracker": state.scaler_growth}
        update.scaler.load_state_dict({**update.scaler.state_dict(), **scale})
