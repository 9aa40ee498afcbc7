"""A run is a folder. Begin one, or continue one from its newest checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from m1clip import __version__
from m1clip.config import Config
from m1clip.configfile import load_config, to_toml
from m1clip.data.bad import Ledger
from m1clip.data.prepare import DecodePlan
from m1clip.data.store import Progress
from m1clip.errors import UserError
from m1clip.evaluate.bundle import Bundle, load
from m1clip.evaluate.metric import MEAN_RECALL, Scores, selection_metric
from m1clip.files import read_small, remove_leftovers, write_json, write_text
from m1clip.hardware.device import rules
from m1clip.hardware.facts import Facts, usable_cpus
from m1clip.hardware.heap import return_freed_memory
from m1clip.plain import fits
from m1clip.runlog import RunLog, read_log
from m1clip.train.checkpoint import LoopState, load_newest
from m1clip.train.duration import run_length
from m1clip.train.finish import Exam, energy_figures, examine
from m1clip.train.folder import claim_folder, give_back, hold
from m1clip.train.loop import run_loop
from m1clip.train.parity import check_parity
from m1clip.train.recipe import decided, prepare, run_name
from m1clip.train.rescue import make_room
from m1clip.train.room import memory_in_words
from m1clip.train.saving import save_failure
from m1clip.train.schedule import warmup_steps
from m1clip.train.screen import Screen
from m1clip.train.setup import Job
from m1clip.train.sinks import check_sink, open_sink
from m1clip.train.snapshot import FOLDER as WATCH
from m1clip.train.snapshot import THUMBS
from m1clip.train.stopping import Interrupted, StopRequest, stop_on_signals
from m1clip.train.tensors import restore
from m1clip.train.update import Update

LOG_EVERY, LOG_LINES = 10, 50  # steps between two log lines at most, lines of a run at least


@dataclass(frozen=True)
class Result:
    """What a finished run gives."""

    run: Path
    scores: Scores
    split: str
    grid: Path


def train(
    config: Config, run: str | Path | None = None, screen: Screen | None = None, name: str | None = None
) -> Result:
    """Train from the beginning in a new run folder: `run`, or runs/NAME (default: the model's preset)."""
    screen = screen or Screen()
    check_sink(config.train.log)
    most = max(16, 4 * usable_cpus())
    if config.data.workers > most:
        raise UserError(
            f"--data.workers {config.data.workers}: {usable_cpus()} CPUs here; give at most {most}"
        )
    config = decided(config, screen.say)
    folder = claim_folder(Path(run) if run is not None else None, name or run_name(config))
    with hold(folder), stop_on_signals() as asked:
        try:
            job = _with_steps(prepare(config, screen.say, decode_plan(screen, folder)), screen.warn)
            _describe(job, screen)
            _write_head(job, folder)
        except BaseException:
            give_back(folder)
            raise
        return _go(job, folder, screen, LoopState(), None, asked)


def resume(run: str | Path, screen: Screen | None = None) -> Result:
    """Continue a run from its newest whole checkpoint, exactly as if it had never stopped."""
    screen, folder = screen or Screen(), Path(run)
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder}: no run there (no config.toml)")
    with hold(folder), stop_on_signals() as asked:
        for part in (folder, folder / WATCH, folder / WATCH / THUMBS):
            remove_leftovers(part)
        job = prepare(
            load_config(folder / "config.toml"), screen.say, decode_plan(screen, folder), saved=folder
        )
        _check_same_data(job, folder)
        _describe(job, screen)
        kept = load_newest(folder, job.device.torch, screen.warn)
        state, tensors = kept if kept is not None else (LoopState(), None)
        screen.say(f"resume     step {state.step:,} of {job.config.train.steps:,}")
        return _go(job, folder, screen, state, tensors, asked)


@memory_in_words()
def _go(
    job: Job,
    folder: Path,
    screen: Screen,
    state: LoopState,
    tensors: dict[str, dict[str, torch.Tensor]] | None,
    asked: StopRequest,
) -> Result:
    log = RunLog(folder)
    if job.config.guard.on_save_error == "go-on":
        log.on_full = _warn_once(screen, log.path)
    steps = job.config.train.steps or 0
    sink = open_sink(job.config.train.log, folder)
    if sink is not None:
        log.sinks.append(sink[0])
    log.write("start", step=state.step, steps=steps, choices=job.choices, version=__version__)
    for line in screen.warned:
        log.write("warning", step=state.step, text=line)
    job.training.report = _ledger(job, folder, log, screen)
    update = Update(
        job.build_model(), job.config, job.device, job.precision, job.preprocess, job.autocast, job.teacher
    )
    if tensors is not None:
        restore(update, state, tensors)
    update.room, update.rate_factor = make_room(job, state), state.rate_factor
    difference = check_parity(job, update.model)
    if difference is not None:
        log.write("parity", gradient_difference=difference)
        screen.say(f"parity     gradients on {job.device.kind} differ from the CPU's by {difference:.2%}")
    try:
        run_loop(job, update, state, steps, folder, log, screen, asked)
        return _finish(job, update, folder, log, screen, state)
    except Interrupted as stopped:
        log.write("event", step=state.step, event=str(stopped))
        raise
    finally:
        screen.end()
        log.close()
        if sink is not None:
            sink[1]()


def _warn_once(screen: Screen, path: Path) -> Callable[[OSError], None]:
    """What to do with a line of the log that the disk did not take, where the run is to go on."""
    said: list[str] = []

    def warn(error: OSError) -> None:
        if not said:
            said.append(save_failure(error, path) or str(error))
            screen.warn(f"{said[0]}; training goes on, and the log says later how many lines it lacks")

    return warn


def _ledger(job: Job, folder: Path, log: RunLog, screen: Screen) -> Ledger:
    """Names each picture that cannot be read once in the run log, those found before training first."""
    named = [str(record.get("where")) for record in read_log(folder) if record["kind"] == "skipped"]
    ledger = Ledger(len(job.training.pictures), job.config.data.max_bad, log.write, screen.warn, named)
    for name, split in job.splits.items():
        ledger.record(name, split.failures)
    return ledger


def _finish(job: Job, update: Update, folder: Path, log: RunLog, screen: Screen, state: LoopState) -> Result:
    """Keep the last model too, and report the test split once, with the model that validation chose."""
    if update.ema is not None:
        update.ema.swap(update.model)
    log.check_folder()
    Bundle(update.model, job.tokenizer, job.preprocess).save(folder / "model")
    update.optimizer.drop_state()  # makes room for the second model
    return_freed_memory()
    job.polish(folder, screen.say, log.write)
    best = load(folder, device=job.device.kind)
    best.model.set_attention(job.config.model.attention_image, job.config.model.attention_text)  # type: ignore[arg-type]
    split = next((name for name in ("test", "val") if name in job.splits), "train")
    grid = folder / "retrieval.png"
    scores = examine(Exam(best, job.source, split, job.splits[split], job.autocast), grid)
    if state.best_step >= 0:
        label = selection_metric(scores).label
        screen.say(f"best       step {state.best_step:,}: validation {label} {100 * state.best:.1f}%")
    steps = [record for record in read_log(folder) if record["kind"] == "step"]
    shares = [record["data_share"] for record in steps if fits(record.get("data_share"), float)]
    epochs = state.step / job.training.plan.steps_per_epoch
    log.write("end", step=state.step, split=split, best_step=state.best_step, seconds=state.seconds,
              data_share=sum(shares) / max(len(shares), 1), peak_bytes=job.device.peak_bytes(),
              **energy_figures(steps, epochs, scores[MEAN_RECALL].value), **scores.as_dict())  # fmt: skip
    return Result(folder, scores, split, grid)


def _with_steps(job: Job, warn: Callable[[str], None]) -> Job:
    """Turn the duration into steps, and write down what follows from their number."""
    steps, evaluations = run_length(job, warn)
    warmup_steps(job.config.optim.warmup, steps)  # refuses a run that would never leave warm-up
    train = job.config.train
    every = train.eval_every if train.eval_every is not None else max(1, -(-steps // evaluations))
    logs = train.log_every or max(1, min(LOG_EVERY, steps // LOG_LINES))
    saves = train.save_every if train.save_every is not None else every
    train = dataclasses.replace(
        train, steps=steps, minutes=None, epochs=None, eval_every=every, save_every=saves, log_every=logs
    )
    return dataclasses.replace(job, config=dataclasses.replace(job.config, train=train))


def _describe(job: Job, screen: Screen) -> None:
    shape, train = job.shape, job.config.train
    counts = ", ".join(f"{len(split.pairs):,} {name}" for name, split in job.splits.items())
    screen.say(f"data       {', '.join(job.config.data.source)}: {counts} pictures of {shape.image_size} px")
    screen.say(f"model      {job.describe_model()}")
    epochs = (train.steps or 0) / job.training.plan.steps_per_epoch
    several = job.training.several
    captions = f" with {several} captions each" if several > 1 else " and captions"
    screen.say(
        f"training   {train.steps:,} steps of {train.batch} pictures{captions} ({epochs:.1f} epochs), "
        f"{job.config.optim.name}"
    )


def _write_head(job: Job, folder: Path) -> None:
    job.tokenizer.save(folder)
    environment = {
        "m1clip": __version__,
        "command": sys.argv,
        "data": _fingerprint(job),
        "facts": job.facts.to_dict(),
    }
    write_json(folder / "environment.json", environment)
    write_text(folder / "config.toml", to_toml(job.config))  # last: a folder with a config is a whole run


def _check_same_data(job: Job, folder: Path) -> None:
    try:
        known = json.loads(read_small(folder / "environment.json")).get("data")
    except (OSError, ValueError, AttributeError):
        known = None
    if known != _fingerprint(job):
        raise UserError(
            f"{folder}: the training data is not what it was when the run began, so it cannot be continued exactly; "
            f"bring the data back, or begin a new run with --config {folder / 'config.toml'}"
        )


def _fingerprint(job: Job) -> str:
    """What the training pairs are: names and captions in order."""
    digest = hashlib.sha256()
    for pair in job.splits["train"].pairs:
        digest.update("\x1f".join((pair.id, *pair.captions, "\x1e")).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def decode_plan(screen: Screen, run: Path | None = None) -> Callable[[Facts], DecodePlan]:
    """How this machine decodes pictures, with progress on the screen and in the folder of a run."""

    def plan(facts: Facts) -> DecodePlan:
        def progress(title: str) -> AbstractContextManager[Progress]:
            return screen.counter(title, run)

        start = rules("cpu", facts).worker_start
        return DecodePlan(usable_cpus(), start, facts.memory_bytes, progress, screen.warn)

    return plan
