"""Train in a new run folder, or resume a run from its newest checkpoint."""

import contextlib
import dataclasses
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m1clip import __version__
from m1clip.config import NAMES, Config, load_config, make_config
from m1clip.data.failures import FailureLog
from m1clip.data.prepare import open_data
from m1clip.data.types import Source
from m1clip.errors import UserError
from m1clip.evaluation.evaluate import Evaluator
from m1clip.evaluation.examples import FOLDER as SNAPSHOTS
from m1clip.evaluation.examples import THUMBNAILS, retrieval_grid
from m1clip.evaluation.statistics import Scores, selection_metric
from m1clip.formatting import clock, plural
from m1clip.hardware.facts import usable_cpus
from m1clip.hardware.memory import return_freed_memory
from m1clip.hardware.timing import timing
from m1clip.inference import load
from m1clip.inference.features import SplitFeatures
from m1clip.inference.model import Model
from m1clip.io import read_small, remove_leftovers, write_json, write_text
from m1clip.model.clip import CLIP, empty_clip
from m1clip.model.presets import CLIPConfig
from m1clip.model.pretrained.packages import installed
from m1clip.model.pretrained.registry import tower_image_size
from m1clip.runlog import NoLog, RunLog, Sink, read_log
from m1clip.schema import matches_schema
from m1clip.training import loop, process
from m1clip.training.checkpoint import TrainState, load_latest, restore, share_checkpoint
from m1clip.training.context import RunContext
from m1clip.training.distributed import RankLost, Ranks, connect, launched
from m1clip.training.duration import Costs, Pacer, TimeBudget
from m1clip.training.logger import check_sink, open_sink
from m1clip.training.measure import drop_contradicted
from m1clip.training.oom import oom_as_user_error
from m1clip.training.parity import check_parity
from m1clip.training.progress import Screen, decode_options
from m1clip.training.resolve import (
    FINETUNE_OPTIONS,
    TOWER_OPTIONS,
    Dataset,
    check_transfer,
    with_recipe,
)
from m1clip.training.setup import Setup, Workbench
from m1clip.training.spec import DecidedSettings, RunSpec, Settings, read_spec, setting
from m1clip.training.transfer import interpolate_weights
from m1clip.training.validation import encode

MAX_GRID_BYTES = 2**26


@dataclass(frozen=True)
class Run:
    path: Path
    scores: Scores  # of the best model
    split: str  # the evaluated split: test, or val or train if the data has no other
    grid: Path  # an image with retrieval examples

    @functools.cached_property
    def model(self) -> Model:
        return load(self.path)

    def _repr_png_(self) -> bytes:
        """In a notebook, a run shows its retrieval examples."""
        return read_small(self.grid, MAX_GRID_BYTES)


def train_config(
    config: Config | Settings,
    run: str | Path | None = None,
    screen: Screen | None = None,
    name: str | None = None,
    on_log: Sink | None = None,
    used_seconds: float = 0.0,
    source: Source | None = None,
) -> Run:
    """Train from the beginning in a new run folder: `run`, or runs/NAME (default: the model's preset).

    `used_seconds` of --minutes have passed already; `source` is the data if it is open already.
    """
    settings = config if isinstance(config, Settings) else DecidedSettings(complete=config)
    config = settings.config
    minutes = config.train.minutes
    budget = None if minutes is None else TimeBudget(60 * minutes, used_seconds)
    screen = screen or Screen()
    check_sink(config.train.report_to)
    max_workers = max(16, 4 * usable_cpus())
    if config.data.workers > max_workers:
        raise UserError(
            f"--workers {config.data.workers}: this machine has {usable_cpus()} CPUs; use at most {max_workers}"
        )
    ranks = connect_same(config.train.device)
    ranks.check_same({f"--{flat.replace('_', '-')}": setting(config, flat) for flat in NAMES})
    name = name or run_name(config)
    started = ranks.first(lambda: started_before(run, name))
    if started is not None:
        return resume(started, screen, on_log)
    folder = ranks.first(
        lambda: process.create_run_folder(Path(run) if run is not None else None, name)
    )
    with _locked(folder, ranks), process.stop_on_signals() as stop:
        try:
            if budget is not None:
                screen.say(f"time       {clock(budget.seconds)} {TIME_INCLUDES}")
            decode = decode_options(screen, folder if ranks.rank == 0 else None)
            workbench = Workbench(decode, screen.say, ranks, budget, source=source)
            spec = workbench.resolve(settings)
            setup = workbench.setup(spec.config, dict(spec.measured))
            _describe(setup, screen)
            ranks.first(lambda: _write_run_files(spec, setup, folder, minutes))
        except BaseException:
            if ranks.rank == 0:
                process.remove_unused_folder(folder)
            raise
        pacer = None if budget is None else Pacer(budget, workbench.costs, 0)
        return _train_and_finish(spec, setup, folder, screen, stop, on_log, pacer, workbench.model)


def run_name(config: Config) -> str:
    if config.transfer.init is not None:
        return "finetune"
    return config.model.name if config.transfer.recipe == "scratch" else config.transfer.recipe


def connect_same(device: str) -> Ranks:
    ranks = connect(device)
    ranks.check_same(
        {"the version of m1clip": __version__, "the version of torch": torch.__version__}
    )
    return ranks


def resume(
    run: str | Path,
    screen: Screen | None = None,
    on_log: Sink | None = None,
    device: str | None = None,
    fsdp: str | None = None,
) -> Run:
    """Continue a run from its newest valid checkpoint, exactly as if it had not stopped; on any number of ranks.

    On another `device` the batches are the same, and the numbers are the same up to rounding. `on_log` is called with
    each record of run.jsonl from here on, as in `train`.
    """
    began = time.perf_counter()
    screen = screen or Screen()
    folder = Path(run)
    changes = {
        name: value for name, value in (("device", device), ("fsdp", fsdp)) if value is not None
    }
    checked = make_config(changes)  # an error for a value that the command would reject
    changes = {name: setting(checked, name) for name in changes}
    known = load_config(folder).train.device if (folder / "config.toml").is_file() else "auto"
    ranks = connect_same(changes.get("device", known))
    saved = ranks.first(lambda: read_spec(folder))
    with _locked(folder, ranks), process.stop_on_signals() as stop:
        for part in (
            (folder, folder / SNAPSHOTS, folder / SNAPSHOTS / THUMBNAILS) if ranks.rank == 0 else ()
        ):
            remove_leftovers(part)
        decode = decode_options(screen, folder if ranks.rank == 0 else None)
        workbench = Workbench(decode, screen.say, ranks, saved=folder)
        changed = {
            name: value for name, value in changes.items() if setting(saved.config, name) != value
        }
        if changed:
            # Everything else is decided already, so it stays as it is.
            spec = workbench.resolve(saved.as_settings().changed(**changed))
            setup = workbench.setup(spec.config, dict(spec.measured))
        else:
            spec = saved
            setup = workbench.reopen(spec)
        ranks.first(lambda: _check_same_data(setup, folder))
        captions = saved.config.data.captions_per_step
        if spec.config.data.captions_per_step != captions:
            raise UserError(
                f"{folder}: cannot continue on {spec.config.train.device}, which needs batches of one shape: some "
                f"images have fewer than {captions} captions"
            )
        if spec != saved and ranks.rank == 0:
            write_text(folder / "config.toml", spec.to_toml())
        _describe(setup, screen)
        minutes = ranks.first(lambda: _promised_minutes(folder))
        pacer = (
            None if minutes is None else Pacer(TimeBudget(60 * minutes, began=began), Costs(), 0)
        )
        return _train_and_finish(
            spec, setup, folder, screen, stop, on_log, pacer, workbench.model, resumed=True
        )


def _promised_minutes(folder: Path) -> float | None:
    """The --minutes of a run that is resumed; None if it was not started with them."""
    try:
        minutes = json.loads(read_small(folder / "environment.json")).get("minutes")
    except (OSError, ValueError, AttributeError):
        return None
    return float(minutes) if matches_schema(minutes, float) and minutes > 0 else None


def started_before(run: str | Path | None, name: str) -> Path | None:
    """The run that this very command started before torchrun restarted it; None for a new run."""
    if not launched():
        return None
    folders = [Path(run)] if run is not None else []
    if run is None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        folders = sorted(
            Path("runs").glob(f"{name}*"), key=lambda folder: folder.stat().st_mtime, reverse=True
        )
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            same = json.loads(read_small(folder / "environment.json")).get("command") == sys.argv
            if same and (folder / "config.toml").is_file():
                return folder
    return None


def _locked(folder: Path, ranks: Ranks) -> AbstractContextManager[None]:
    return process.lock_run(folder) if ranks.rank == 0 else contextlib.nullcontext()


@oom_as_user_error()
def _train_and_finish(
    spec: RunSpec,
    setup: Setup,
    folder: Path,
    screen: Screen,
    stop: process.StopRequest,
    on_log: Sink | None = None,
    pacer: Pacer | None = None,
    model: CLIP | None = None,
    resumed: bool = False,
) -> Run:
    """Train, and evaluate the best model; `model` is the initial one, if it is built already."""
    gc.collect()  # models that were built for measurements may be in reference cycles
    ranks = setup.ranks
    state = TrainState()
    train_step = setup.make_step(model)
    if resumed:
        kept = share_checkpoint(train_step, lambda device: load_latest(folder, device, screen.warn))
        if kept is not None:
            state = kept[0]
            restore(train_step, *kept)
            if pacer is not None:
                pacer.resume(
                    state.step, state.used_seconds, Costs(state.evaluation_cost, state.closing_cost)
                )
        screen.say(f"resume     from step {state.step:,} of {setup.config.train.steps:,}")
    log = RunLog(folder) if ranks.rank == 0 else NoLog(folder)
    log.sinks += [on_log] if on_log is not None else []
    steps = setup.config.train.steps or 0
    sink = open_sink(setup.config.train.report_to, folder) if ranks.rank == 0 else None
    if sink is not None:
        log.sinks.append(sink[0])
    log.write(
        "start",
        step=state.step,
        steps=steps,
        choices=setup.choices,
        version=__version__,
        ranks=ranks.size,
    )
    for line in screen.warned:
        log.write("warning", step=state.step, text=line)
    setup.training.report = _failure_log(setup, folder, log, screen)
    parity = check_parity(setup, train_step)
    if parity is not None:
        skipped = {"skipped": parity.skipped} if parity.skipped else {}
        log.write("parity", gradient_difference=parity.difference, **skipped)
        note = f"; {parity.skipped}" if parity.skipped else ""
        screen.say(
            f"parity     gradients on {setup.device.kind} differ by at most {parity.difference:.2%}{note}"
        )
    run = RunContext(spec, setup, train_step, folder, log, screen, stop, state, pacer)
    try:
        loop.train(run)
        evaluator, features = _best_on_test(run)
        return ranks.first(lambda: _finish(run, evaluator, features))
    except (process.Interrupted, RankLost) as stopped:
        log.write("event", step=run.state.step, event=str(stopped))
        raise
    finally:
        screen.end()
        log.close()
        if sink is not None:
            sink[1]()


def _failure_log(setup: Setup, folder: Path, log: RunLog, screen: Screen) -> FailureLog:
    """Records each unreadable image once in the run log, starting with those found before training."""
    records = read_log(folder) if setup.ranks.rank == 0 else ()
    named = [str(record.get("where")) for record in records if record["kind"] == "skipped"]
    failures = FailureLog(
        setup.training.plan.images, setup.config.data.max_unreadable, log.write, screen.warn, named
    )
    for name, split in setup.splits.items():
        failures.record(name, split.failures)
    return failures


def _best_on_test(run: RunContext) -> tuple[Evaluator, SplitFeatures]:
    """Save the last model, then encode the test split once with the best validation model; each rank a part of it."""
    setup, train_step, folder = run.setup, run.train_step, run.folder
    ranks, last, found = setup.ranks, setup.complete_model(train_step), list[Model]()
    train_step.optimizer.drop_state()  # free memory for the second model
    return_freed_memory()

    def save_and_load() -> CLIPConfig:
        run.log.check_folder()
        setup.bundle(last).save(folder / "model")
        if setup.config.transfer.wise_ft != "off":
            interpolate_weights(setup, folder, run.screen.say, run.log.write)
        found.append(load(folder, device=setup.device.torch.type, precision=setup.precision))
        return found[0].clip.config

    config = ranks.first(save_and_load)
    best = found[0] if found else setup.bundle(empty_clip(config, setup.device.torch))
    ranks.share(list(best.clip.state_dict().values()))
    split = next((name for name in ("test", "val") if name in setup.splits), "train")
    return Evaluator(best, setup.source, split, setup.splits[split]), encode(
        setup, best.clip, split
    )


def _finish(run: RunContext, evaluator: Evaluator, features: SplitFeatures) -> Run:
    setup, state, folder = run.setup, run.state, run.folder
    split, grid = evaluator.split, folder / "retrieval.png"
    scores = evaluator.scores(features)
    retrieval_grid(evaluator.data, features, split, grid)
    if state.best_step >= 0:
        label = selection_metric(scores).label
        run.screen.say(
            f"best       step {state.best_step:,}: validation {label} {100 * state.best:.1f}%"
        )
    steps = [record for record in read_log(folder) if record["kind"] == "step"]
    _check_choice(run, steps)
    fractions = [
        record["data_fraction"]
        for record in steps
        if matches_schema(record.get("data_fraction"), float)
    ]
    run.log.write(
        "end",
        step=state.step,
        split=split,
        best_step=state.best_step,
        seconds=state.seconds,
        data_fraction=sum(fractions) / max(len(fractions), 1),
        peak_bytes=setup.device.peak_bytes(),
        **energy_figures(steps, state.step / setup.training.plan.steps_per_epoch),
        **scores.as_dict(),
    )
    return Run(folder, scores, split, grid)


def _check_choice(run: RunContext, steps: Sequence[dict[str, Any]]) -> None:
    """Drop a kept choice of device and precision that the speed of this run contradicts."""
    choice = run.setup.choices.get("hardware")
    busy = [
        record["step_seconds"] * (1 - record["data_fraction"])
        for record in steps
        if "data_fraction" in record
    ]
    if choice is None or not busy:
        return
    text = drop_contradicted(choice, timing(busy).median / run.setup.training.plan.batch)
    if text:
        run.log.write("event", step=run.state.step, event="choice dropped", reason=text)
        run.screen.say(f"device     {text}")


def energy_figures(steps: Sequence[dict[str, Any]], epochs: float) -> dict[str, float]:
    """Energy of training and of one epoch in joules; {} if not measured."""
    joules = sum(float(record.get("joules", 0.0)) for record in steps)
    return {"joules": joules, "joules_per_epoch": joules / epochs} if joules and epochs else {}


# What the time of --minutes contains, as printed at the start.
TIME_INCLUDES = (
    "in all: reading and caching the data, training, evaluation and saving; the number of steps is corrected "
    "during the run, so that it ends then"
)


def _describe(setup: Setup, screen: Screen) -> None:
    shape, train = setup.shape, setup.config.train
    counts = ", ".join(f"{len(split.samples):,} {name}" for name, split in setup.splits.items())
    screen.say(
        f"data       {', '.join(setup.config.data.source)}: {counts} images of {shape.image_size} px"
    )
    screen.say(f"model      {setup.describe_model()}")
    epochs = (train.steps or 0) / setup.training.plan.steps_per_epoch
    captions_per_image = setup.training.captions_per_image
    captions = (
        f" with {captions_per_image} captions each" if captions_per_image > 1 else " and captions"
    )
    screen.say(
        f"training   {plural(train.steps or 0, 'step')} of {train.batch_size} images{captions} ({epochs:.1f} epochs), "
        f"{setup.config.optim.optimizer}"
    )


def _write_run_files(spec: RunSpec, setup: Setup, folder: Path, minutes: float | None) -> None:
    setup.tokenizer.save(folder)
    environment = {
        "m1clip": __version__,
        "command": sys.argv,
        "data": _fingerprint(setup),
        "minutes": minutes,
    }
    write_json(
        folder / "environment.json", {**environment, "facts": dataclasses.asdict(setup.facts)}
    )
    # Last: a folder with a config is a complete run.
    write_text(folder / "config.toml", spec.to_toml())


def _check_same_data(setup: Setup, folder: Path) -> None:
    try:
        known = json.loads(read_small(folder / "environment.json")).get("data")
    except (OSError, ValueError, AttributeError):
        known = None
    if known != _fingerprint(setup):
        raise UserError(
            f"{folder}: the training data has changed since the run started, so it cannot be continued exactly; "
            f"restore the data, or start a new run with --config {folder / 'config.toml'}"
        )


def _fingerprint(setup: Setup) -> str:
    return setup.source.fingerprint(setup.splits["train"].samples)


# Fine-tuning settings that also apply to the first stage, on frozen towers; the others are for the second.
FIRST_STAGE = {"batch_size", "device", "precision", "threads", "report_to", "loss"}


def train(
    data: str | Sequence[str] | None = None,
    minutes: float | None = None,
    *,
    out: str | Path | None = None,
    config: str | Path | None = None,
    preset: str | None = None,
    screen: Screen | None = None,
    on_log: Sink | None = None,
    **options: Any,
) -> Run:
    """Train in a new run folder: `out`, or runs/NAME. `options` are those of `m1clip train`, such as batch_size=64.

    `config` is a TOML file, `preset` the name of a built-in one; options override it. `on_log` is called with each
    record of run.jsonl, such as {"kind": "step", "step": 10, "loss": 2.3, ...}; an exception in it stops the run.
    """
    began = time.perf_counter()
    options |= {
        name: value for name, value in (("data", data), ("minutes", minutes)) if value is not None
    }
    screen = screen or Screen()
    settings, source = decide_recipe(Settings(options, config, preset), screen)
    transfer = settings.config.transfer
    if transfer.recipe == "finetune" and transfer.init is None:
        if out is not None and not launched():
            process.check_unused(Path(out))  # fail before the first stage, which takes minutes
        screen.say("stage 1    training heads on frozen towers")
        folder = None if out is None else Path(f"{out}-frozen")
        first = train_config(first_stage(settings), folder, screen, on_log=on_log, source=source)
        screen.say(f"stage 2    training the towers too, starting from {first.path}")
        settings = second_stage(settings, first.path)
    used_seconds = time.perf_counter() - began  # of the time of both stages
    return train_config(settings, out, screen, preset, on_log, used_seconds, source)


def decide_recipe(settings: Settings, screen: Screen) -> tuple[Settings, Source | None]:
    """The settings with a recipe, and the data if it was opened to choose one."""
    opened: list[Source] = []

    def dataset() -> Dataset:
        config = settings.config
        with screen.counter("reading the data"):
            size = tower_image_size(config.transfer.image_tower)
            opened.append(open_data(config.data, size, config.seed))
        return Dataset(images=len(opened[0].samples("train")), streamed=opened[0].streamed)

    decided = with_recipe(settings, dataset, installed, screen.say)
    check_transfer(decided.config.transfer)
    return decided, opened[0] if opened else None


def first_stage(settings: Settings) -> Settings:
    """Fine-tuning's first stage: default duration and optimizer; data, heads, towers and hardware as given."""
    options: dict[str, Any] = {}
    for name, value in settings.flat.items():
        section = NAMES[name][0]
        if (
            name not in FINETUNE_OPTIONS
            and section != "optim"
            and (section != "train" or name in FIRST_STAGE)
        ):
            options[name] = value
    return Settings(options | {"recipe": "frozen"})


def second_stage(settings: Settings, init: Path) -> Settings:
    """Fine-tuning's second stage, which starts from the run of the first."""
    options = {name: value for name, value in settings.flat.items() if name not in TOWER_OPTIONS}
    return Settings(options | {"recipe": "finetune", "init": str(init)})
