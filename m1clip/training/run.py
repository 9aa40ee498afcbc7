"""Train in a new run folder, or resume a run from its newest checkpoint."""

import contextlib
import dataclasses
import functools
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from m1clip import __version__
from m1clip.config import ALIASES, NAMES, Config, load_config, make_config, read_preset, read_recipe, read_toml, to_toml
from m1clip.data.failures import FailureLog
from m1clip.data.loader import batches
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
from m1clip.model.clip import empty_clip
from m1clip.model.presets import CLIPConfig
from m1clip.runlog import NoLog, RunLog, Sink, read_log
from m1clip.schema import matches_schema
from m1clip.text.base import Tokenizer
from m1clip.training import process
from m1clip.training.autotune import drop_contradicted
from m1clip.training.checkpoint import TrainState, load_latest, restore, share_checkpoint
from m1clip.training.distributed import RankLost, Ranks, connect, launched
from m1clip.training.duration import (
    EVALUATIONS,
    MAX_EVALUATION_FRACTION,
    MIN_TRAINING_FRACTION,
    Costs,
    Pacer,
    Segment,
    StepPlan,
    TimeBudget,
    planned_steps,
)
from m1clip.training.logger import check_sink, open_sink
from m1clip.training.loop import TrainLoop
from m1clip.training.oom import oom_as_user_error
from m1clip.training.parity import check_parity
from m1clip.training.progress import Screen, decode_options
from m1clip.training.schedule import warmup_steps
from m1clip.training.setup import FINETUNE_OPTIONS, TOWER_OPTIONS, Setup, check_transfer, choose_recipe, prepare
from m1clip.training.step import TrainStep
from m1clip.training.transfer import WISE_FT_GRID, interpolate_weights
from m1clip.training.validation import encode

WARM_STEPS, TIMED_STEPS = 2, 5
CALIBRATION = 0.05  # of the time, at most, unless one step takes longer; --device auto may take as much again
FEW_STEPS = 10
MAX_GRID_BYTES = 2**26
SAMPLE_IMAGES = 64


class Length(NamedTuple):
    """Number of steps, and the number of evaluations unless configured."""

    steps: int
    evaluations: int = EVALUATIONS


def run_length(setup: Setup) -> Length:
    """The length of a run with --steps or --epochs."""
    train, plan = setup.config.train, setup.training.plan
    if train.steps is not None:
        return Length(train.steps)
    epochs = read_recipe("scratch").settings["train"]["epochs"] if train.epochs is None else train.epochs
    steps = round(epochs * plan.steps_per_epoch)
    if steps < 1:
        raise UserError(f"--epochs {epochs:g} is less than one step of this data: use a larger number, or --steps")
    return Length(steps)


def calibrate(setup: Setup, budget: TimeBudget, warn: Callable[[str], None]) -> tuple[Length, Costs]:
    """The number of steps that fit in the time, from a few steps and a part of an evaluation of a temporary model.

    This is a first estimate: the run compares it with the clock and corrects it.
    """
    least = MIN_TRAINING_FRACTION * budget.seconds
    if budget.left < least:
        warn(
            f"preparing the data has taken {clock(budget.used)} of the {clock(budget.seconds)} of --minutes: training "
            f"for {least:.0f} s more; what is cached now is not prepared again in the next run"
        )
        budget.exclude(least - budget.left)
    train_step = setup.make_step()
    step_seconds = _step_seconds(setup, train_step, budget)
    evaluation_seconds = _evaluation_seconds(setup, train_step) if "val" in setup.splits else 0.0
    train_step.reset_graph()
    del train_step  # it is part of a reference cycle
    gc.collect()
    setup.device.release()
    costs = Costs(evaluation_seconds / step_seconds)
    costs.closing = closing_evaluations(setup) * costs.evaluation
    train = setup.config.train
    evaluations = train.evaluations or 0
    if not evaluations:
        affordable = int(MAX_EVALUATION_FRACTION * budget.left / max(evaluation_seconds, 1e-9)) - 1
        evaluations = max(1, min(EVALUATIONS, affordable))
    empty = StepPlan((Segment(0, 1),), train.eval_every, evaluations)
    steps = planned_steps(empty, 0, budget.left, step_seconds, costs)
    if steps < FEW_STEPS:
        warn(
            f"{budget.seconds / 60:g} minutes are only {plural(steps, 'step')} of {step_seconds:.1f} s each, too few "
            f"to learn much; use more --minutes, a smaller --batch-size or a smaller --model"
        )
    return Length(steps, evaluations), costs


def closing_evaluations(setup: Setup) -> float:
    """What follows the last step, in evaluations of the validation split: the test split, and WiSE-FT's choice."""
    if "val" not in setup.splits:
        return 0.0
    test = len(setup.splits["test"].samples) if "test" in setup.splits else len(setup.splits["val"].samples)
    wise_ft = {"off": 0, "search": len(WISE_FT_GRID)}.get(setup.config.transfer.wise_ft, 1)
    return test / max(len(setup.splits["val"].samples), 1) + wise_ft


def _step_seconds(setup: Setup, train_step: TrainStep, budget: TimeBudget) -> float:
    """Median seconds of a few steps, after some that warm up; within a small part of the time if one step is."""
    # A compiled model recompiles for each shape, so its first steps are not representative.
    least = WARM_STEPS + 1 if setup.config.model.compile else 1
    limit = CALIBRATION * budget.left
    begin = time.perf_counter()
    taken: list[float] = []
    for step, batch in enumerate(batches(setup.training, 0, WARM_STEPS + TIMED_STEPS, 0, "fork", pin=False)):
        start = time.perf_counter()
        if any(setup.ranks.agree(step >= least and start + taken[-1] - begin > limit)):
            break
        train_step(batch, step)
        setup.device.synchronize()
        taken.append(time.perf_counter() - start)
    return timing(taken[WARM_STEPS:] or taken[-1:]).median


def _evaluation_seconds(setup: Setup, train_step: TrainStep) -> float:
    images = len(setup.splits["val"].samples)
    sample = min(images, SAMPLE_IMAGES)
    start = time.perf_counter()
    encode(setup, setup.complete_model(train_step), "val", sample)
    return (time.perf_counter() - start) * images / sample


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
    config: Config,
    run: str | Path | None = None,
    screen: Screen | None = None,
    name: str | None = None,
    on_log: Sink | None = None,
    used_seconds: float = 0.0,
) -> Run:
    """Train from the beginning in a new run folder: `run`, or runs/NAME (default: the model's preset).

    `used_seconds` of --minutes have passed already.
    """
    budget = None if config.train.minutes is None else TimeBudget(60 * config.train.minutes, used_seconds)
    screen = screen or Screen()
    check_sink(config.train.report_to)
    most = max(16, 4 * usable_cpus())
    if config.data.workers > most:
        raise UserError(f"--workers {config.data.workers}: this machine has {usable_cpus()} CPUs; use at most {most}")
    ranks = connect_same(config.train.device)
    settings = {
        f"--{flat.replace('_', '-')}": getattr(getattr(config, section) if section else config, key)
        for flat, (section, key) in NAMES.items()
    }
    ranks.check_same(settings)
    name = name or run_name(config)
    started = ranks.first(lambda: started_before(run, name))
    if started is not None:
        return resume(started, screen, on_log)
    folder = ranks.first(lambda: process.create_run_folder(Path(run) if run is not None else None, name))
    with _locked(folder, ranks), process.stop_on_signals() as stop:
        try:
            if budget is not None:
                screen.say(f"time       {clock(budget.seconds)} {TIME_INCLUDES}")
            setup, costs = _with_steps(_prepare(config, folder, screen, ranks), budget, screen.warn)
            _describe(setup, screen)
            ranks.first(lambda: _write_run_files(setup, folder, config.train.minutes))
        except BaseException:
            if ranks.rank == 0:
                process.remove_unused_folder(folder)
            raise
        pacer = None if budget is None else Pacer(budget, costs, 0)
        return _train_and_finish(setup, folder, screen, stop, on_log, pacer)


def run_name(config: Config) -> str:
    if config.transfer.init is not None:
        return "finetune"
    return config.model.name if config.transfer.recipe == "scratch" else config.transfer.recipe


def connect_same(device: str) -> Ranks:
    ranks = connect(device)
    ranks.check_same({"the version of m1clip": __version__, "the version of torch": torch.__version__})
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
    screen, folder = screen or Screen(), Path(run)
    changes = {name: value for name, value in (("device", device), ("fsdp", fsdp)) if value is not None}
    checked = make_config(changes).train  # an error for a value that the command would reject
    on_device = None if device is None else checked.device
    known = load_config(folder).train.device if (folder / "config.toml").is_file() else "auto"
    ranks = connect_same(on_device or known)

    def saved_config() -> Config:
        if not (folder / "config.toml").is_file():
            raise UserError(f"{folder}: not a run folder (no config.toml)")
        return load_config(folder / "config.toml")

    config = ranks.first(saved_config)
    with _locked(folder, ranks), process.stop_on_signals() as stop:
        for part in (folder, folder / SNAPSHOTS, folder / SNAPSHOTS / THUMBNAILS) if ranks.rank == 0 else ():
            remove_leftovers(part)
        moved = on_device not in (None, config.train.device)
        chosen = config.changed(device=on_device) if moved else config
        chosen = chosen.changed(fsdp=fsdp) if fsdp is not None else chosen
        setup = _prepare(chosen, folder, screen, ranks, resumed=True)
        ranks.first(lambda: _check_same_data(setup, folder))
        if moved and setup.config.data.captions_per_step != config.data.captions_per_step:
            raise UserError(
                f"{folder}: cannot continue on {on_device}, which needs batches of one shape: some images have fewer "
                f"than {config.data.captions_per_step} captions"
            )
        if setup.config != config and ranks.rank == 0:
            write_text(folder / "config.toml", to_toml(setup.config))
        _describe(setup, screen)
        minutes = ranks.first(lambda: _promised_minutes(folder))
        pacer = None if minutes is None else Pacer(TimeBudget(60 * minutes, began=began), Costs(), 0)
        return _train_and_finish(setup, folder, screen, stop, on_log, pacer, resumed=True)


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
        folders = sorted(Path("runs").glob(f"{name}*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            same = json.loads(read_small(folder / "environment.json")).get("command") == sys.argv
            if same and (folder / "config.toml").is_file():
                return folder
    return None


def _locked(folder: Path, ranks: Ranks) -> AbstractContextManager[None]:
    return process.lock_run(folder) if ranks.rank == 0 else contextlib.nullcontext()


def _prepare(config: Config, folder: Path, screen: Screen, ranks: Ranks, resumed: bool = False) -> Setup:
    """Resolve the settings on rank 0; the other ranks then open the same data with them."""
    decode, found = decode_options(screen, folder if ranks.rank == 0 else None), list[Setup]()

    def on_first() -> tuple[Config, Tokenizer]:
        found.append(prepare(config, screen.say, decode, saved=folder if resumed else None))
        return found[0].config, found[0].tokenizer

    def on_others() -> Setup:
        with tempfile.TemporaryDirectory() as saved:  # like a resumed run: every setting is resolved already
            tokenizer.save(Path(saved))
            return prepare(resolved, screen.say, decode, saved=Path(saved))

    resolved, tokenizer = ranks.first(on_first)
    setup = ranks.everywhere(lambda: found[0] if found else on_others())
    if ranks.size > 1:
        count = setup.training.plan.images
        ranks.check_same({"the number of training images": count, "the hash of their captions": _fingerprint(setup)})
    return setup.divided(ranks)


@oom_as_user_error()
def _train_and_finish(
    setup: Setup,
    folder: Path,
    screen: Screen,
    stop: process.StopRequest,
    on_log: Sink | None = None,
    pacer: Pacer | None = None,
    resumed: bool = False,
) -> Run:
    gc.collect()  # models that were built for measurements may be in reference cycles
    ranks, state, train_step = setup.ranks, TrainState(), setup.make_step()
    if resumed:
        kept = share_checkpoint(train_step, lambda device: load_latest(folder, device, screen.warn))
        if kept is not None:
            state = kept[0]
            restore(train_step, *kept)
            if pacer is not None:
                pacer.resume(state.step, state.used_seconds, Costs(state.evaluation_cost, state.closing_cost))
        screen.say(f"resume     from step {state.step:,} of {setup.config.train.steps:,}")
    log = RunLog(folder) if ranks.rank == 0 else NoLog(folder)
    log.sinks += [on_log] if on_log is not None else []
    steps = setup.config.train.steps or 0
    sink = open_sink(setup.config.train.report_to, folder) if ranks.rank == 0 else None
    if sink is not None:
        log.sinks.append(sink[0])
    log.write("start", step=state.step, steps=steps, choices=setup.choices, version=__version__, ranks=ranks.size)
    for line in screen.warned:
        log.write("warning", step=state.step, text=line)
    setup.training.report = _failure_log(setup, folder, log, screen)
    parity = check_parity(setup, train_step)
    if parity is not None:
        skipped = {"skipped": parity.skipped} if parity.skipped else {}
        log.write("parity", gradient_difference=parity.difference, **skipped)
        note = f"; {parity.skipped}" if parity.skipped else ""
        screen.say(f"parity     gradients on {setup.device.kind} differ by at most {parity.difference:.2%}{note}")
    try:
        loop = TrainLoop(setup, train_step, state, folder, log, screen, pacer)
        loop.run_until_stopped(stop)
        evaluator, features = _best_on_test(loop)
        return ranks.first(lambda: _finish(loop, evaluator, features))
    except (process.Interrupted, RankLost) as stopped:
        log.write("event", step=state.step, event=str(stopped))
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
    failures = FailureLog(setup.training.plan.images, setup.config.data.max_unreadable, log.write, screen.warn, named)
    for name, split in setup.splits.items():
        failures.record(name, split.failures)
    return failures


def _best_on_test(loop: TrainLoop) -> tuple[Evaluator, SplitFeatures]:
    """Save the last model, then encode the test split once with the best validation model; each rank a part of it."""
    setup, train_step, folder = loop.setup, loop.train_step, loop.run
    ranks, last, found = setup.ranks, setup.complete_model(train_step), list[Model]()
    train_step.optimizer.drop_state()  # free memory for the second model
    return_freed_memory()

    def save_and_load() -> CLIPConfig:
        loop.log.check_folder()
        setup.bundle(last).save(folder / "model")
        if setup.config.transfer.wise_ft != "off":
            interpolate_weights(setup, folder, loop.screen.say, loop.log.write)
        found.append(load(folder, device=setup.device.torch.type, precision=setup.precision))
        return found[0].clip.config

    config = ranks.first(save_and_load)
    best = found[0] if found else setup.bundle(empty_clip(config, setup.device.torch))
    ranks.share(list(best.clip.state_dict().values()))
    split = next((name for name in ("test", "val") if name in setup.splits), "train")
    return Evaluator(best, setup.source, split, setup.splits[split]), encode(setup, best.clip, split)


def _finish(loop: TrainLoop, evaluator: Evaluator, features: SplitFeatures) -> Run:
    setup, state, folder = loop.setup, loop.state, loop.run
    split, grid = evaluator.split, folder / "retrieval.png"
    scores = evaluator.scores(features)
    retrieval_grid(evaluator.data, features, split, grid)
    if state.best_step >= 0:
        label = selection_metric(scores).label
        loop.screen.say(f"best       step {state.best_step:,}: validation {label} {100 * state.best:.1f}%")
    steps = [record for record in read_log(folder) if record["kind"] == "step"]
    _check_choice(loop, steps)
    fractions = [record["data_fraction"] for record in steps if matches_schema(record.get("data_fraction"), float)]
    loop.log.write(
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


def _check_choice(loop: TrainLoop, steps: Sequence[dict[str, Any]]) -> None:
    """Drop a kept choice of device and precision that the speed of this run contradicts."""
    choice = loop.setup.choices.get("hardware")
    busy = [record["step_seconds"] * (1 - record["data_fraction"]) for record in steps if "data_fraction" in record]
    if choice is None or not busy:
        return
    text = drop_contradicted(choice, timing(busy).median / loop.setup.training.plan.batch)
    if text:
        loop.log.write("event", step=loop.state.step, event="choice dropped", reason=text)
        loop.screen.say(f"device     {text}")


def energy_figures(steps: Sequence[dict[str, Any]], epochs: float) -> dict[str, float]:
    """Energy of training and of one epoch in joules; {} if not measured."""
    joules = sum(float(record.get("joules", 0.0)) for record in steps)
    return {"joules": joules, "joules_per_epoch": joules / epochs} if joules and epochs else {}


# What the time of --minutes contains, as printed at the start.
TIME_INCLUDES = (
    "in all: reading and caching the data, training, evaluation and saving; the number of steps is corrected "
    "during the run, so that it ends then"
)


def _with_steps(setup: Setup, budget: TimeBudget | None, warn: Callable[[str], None]) -> tuple[Setup, Costs]:
    """Convert the duration to steps, and resolve the settings that depend on it."""
    measured = (run_length(setup), Costs()) if budget is None else calibrate(setup, budget, warn)
    (steps, evaluations), costs = setup.ranks.first(lambda: measured)
    warmup_steps(setup.config.optim.warmup, steps)  # raises if the run would never leave warmup
    train = setup.config.train
    if train.eval_every is None and train.evaluations is None:
        setup = dataclasses.replace(setup, config=setup.config.changed(evaluations=evaluations))
    length = {"steps": steps, "minutes": None, "epochs": None}
    return dataclasses.replace(setup, config=setup.config.changed(**length)), costs


def _describe(setup: Setup, screen: Screen) -> None:
    shape, train = setup.shape, setup.config.train
    counts = ", ".join(f"{len(split.samples):,} {name}" for name, split in setup.splits.items())
    screen.say(f"data       {', '.join(setup.config.data.source)}: {counts} images of {shape.image_size} px")
    screen.say(f"model      {setup.describe_model()}")
    epochs = (train.steps or 0) / setup.training.plan.steps_per_epoch
    captions_per_image = setup.training.captions_per_image
    captions = f" with {captions_per_image} captions each" if captions_per_image > 1 else " and captions"
    screen.say(
        f"training   {plural(train.steps or 0, 'step')} of {train.batch_size} images{captions} ({epochs:.1f} epochs), "
        f"{setup.config.optim.optimizer}"
    )


def _write_run_files(setup: Setup, folder: Path, minutes: float | None) -> None:
    setup.tokenizer.save(folder)
    environment = {"m1clip": __version__, "command": sys.argv, "data": _fingerprint(setup), "minutes": minutes}
    write_json(folder / "environment.json", {**environment, "facts": dataclasses.asdict(setup.facts)})
    write_text(folder / "config.toml", to_toml(setup.config))  # last: a folder with a config is a complete run


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
    options |= {name: value for name, value in (("data", data), ("minutes", minutes)) if value is not None}
    screen = screen or Screen()
    settings, options["recipe"] = with_recipe(options, config, preset, screen)
    if settings.transfer.recipe != "finetune" or settings.transfer.init is not None:
        return train_config(settings, out, screen, preset, on_log, time.perf_counter() - began)
    if out is not None and not launched():
        process.check_unused(Path(out))  # fail before the first stage, which takes minutes
    options = _flat(config, preset) | options
    screen.say("stage 1    training heads on frozen towers")
    folder = None if out is None else Path(f"{out}-frozen")
    first = train_config(make_config(frozen_options(options)), folder, screen, on_log=on_log)
    screen.say(f"stage 2    training the towers too, starting from {first.path}")
    options = {name: value for name, value in options.items() if name not in TOWER_OPTIONS}
    second = make_config(options | {"init": str(first.path)})
    return train_config(second, out, screen, preset, on_log, time.perf_counter() - began)  # of the time of both stages


def with_recipe(
    options: dict[str, Any], config: str | Path | None, preset: str | None, screen: Screen
) -> tuple[Config, str]:
    """The settings of a run and its recipe; what `auto` chooses is printed with the reason."""
    settings = make_config(options, config, preset)
    if settings.transfer.recipe == "auto":
        with screen.counter("reading the data"):
            given = {name for name, value in {**_flat(config, preset), **options}.items() if value is not None}
            recipe, reason = choose_recipe(settings, given)
        others = " or ".join(name for name in ("frozen", "finetune", "scratch") if name != recipe)
        screen.say(f"recipe     {recipe}: {reason} (to choose otherwise: --recipe {others})")
        settings = make_config({**options, "recipe": recipe}, config, preset)
    check_transfer(settings.transfer)
    return settings, settings.transfer.recipe


def frozen_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of the first stage: default duration and optimizer; data, heads, towers and hardware as given."""
    kept = {}
    for name, value in options.items():
        section = NAMES[ALIASES.get(name, name)][0]
        if name not in FINETUNE_OPTIONS and section != "optim" and (section != "train" or name in FIRST_STAGE):
            kept[name] = value
    return kept | {"recipe": "frozen"}


def _flat(config: str | Path | None, preset: str | None) -> dict[str, Any]:
    values = read_toml(Path(config)) if config is not None else read_preset(preset) if preset is not None else {}
    flat = {place: name for name, place in NAMES.items()}
    return {
        flat[section, key]: value
        for section, table in values.items()
        if isinstance(table, dict)
        for key, value in table.items()
    }
