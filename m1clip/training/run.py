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
from m1clip.config import ALIASES, NAMES, Config, load_config, make_config, read_preset, read_toml, to_toml
from m1clip.data.cache import FailureLog
from m1clip.data.loader import batches
from m1clip.errors import UserError
from m1clip.evaluation.evaluate import Evaluator
from m1clip.evaluation.examples import FOLDER as SNAPSHOTS
from m1clip.evaluation.examples import THUMBNAILS, retrieval_grid
from m1clip.evaluation.statistics import Scores, selection_metric
from m1clip.formatting import plural
from m1clip.hardware.facts import usable_cpus
from m1clip.hardware.memory import return_freed_memory
from m1clip.hardware.timing import timing
from m1clip.inference.encoder import Model, SplitFeatures, load
from m1clip.io import matches_schema, read_small, remove_leftovers, write_json, write_text
from m1clip.model.clip import empty_clip
from m1clip.model.presets import CLIPConfig
from m1clip.runlog import NoLog, RunLog, Sink, read_log
from m1clip.text.base import Tokenizer
from m1clip.training import process
from m1clip.training.checkpoint import TrainState, load_latest, restore, share_checkpoint
from m1clip.training.distributed import RankLost, Ranks, connect, launched
from m1clip.training.logger import check_sink, open_sink
from m1clip.training.loop import TrainLoop
from m1clip.training.oom import oom_as_user_error
from m1clip.training.parity import check_parity
from m1clip.training.progress import Screen, decode_plan
from m1clip.training.schedule import warmup_steps
from m1clip.training.setup import FINETUNE_OPTIONS, TOWER_OPTIONS, Setup, check_transfer, choose_recipe, prepare
from m1clip.training.step import TrainStep
from m1clip.training.transfer import interpolate_weights
from m1clip.training.validation import encode

DEFAULT_EPOCHS = 10.0
EVALUATIONS = 5  # per run, unless configured
WARM_STEPS, TIMED_STEPS = 2, 5
# Steps with a larger relative spread between quartiles were disturbed: more are timed, within the time of calibration.
STEADY = 1.25
CALIBRATION = 0.05  # of the time, at most, unless one step takes longer; --device auto may take as much again
EVALUATING = 0.3  # of the time, at most: a short run evaluates less often
FEW_STEPS = 10
MAX_GRID_BYTES = 2**26
SAMPLE_IMAGES = 64
PAUSE = 50  # a step of this many times the median contains a pause: the machine slept, or the process was stopped


class Length(NamedTuple):
    """Number of steps, and the number of evaluations unless configured."""

    steps: int
    evaluations: int = EVALUATIONS


def run_length(setup: Setup, warn: Callable[[str], None]) -> Length:
    train, plan = setup.config.train, setup.training.plan
    if train.steps is not None:
        return Length(train.steps)
    if train.minutes is not None:
        return calibrate(setup, train.minutes * 60, warn)
    epochs = DEFAULT_EPOCHS if train.epochs is None else train.epochs
    steps = round(epochs * plan.steps_per_epoch)
    if steps < 1:
        raise UserError(f"--epochs {epochs:g} is less than one step of this data: use a larger number, or --steps")
    return Length(steps)


def calibrate(setup: Setup, seconds: float, warn: Callable[[str], None]) -> Length:
    """Number of steps that fit in the time, measured by training and evaluating a temporary model."""
    begin = time.perf_counter()
    train_step = setup.make_step()
    step_seconds, paused = _step_seconds(setup, train_step, begin + CALIBRATION * seconds)
    evaluation_seconds = _evaluation_seconds(setup, train_step) if "val" in setup.splits else 0.0
    left = seconds - (time.perf_counter() - begin - paused)
    train, evaluations = setup.config.train, EVALUATIONS
    if train.eval_every is None:
        affordable = int(EVALUATING * seconds / max(evaluation_seconds, 1e-9)) - 1
        evaluations = max(1, min(EVALUATIONS, affordable))
        left -= (evaluations + 1) * evaluation_seconds  # plus the test split at the end
    elif train.eval_every:
        left -= evaluation_seconds
        step_seconds += evaluation_seconds / train.eval_every
    train_step.reset_graph()
    del train_step  # it is part of a reference cycle
    gc.collect()
    setup.device.release()
    steps = max(1, int(left / step_seconds))
    if steps < FEW_STEPS:
        warn(
            f"{seconds / 60:g} minutes are only {steps} steps of {step_seconds:.1f} s each, too few to learn much; "
            f"use more --minutes, a smaller --batch-size or a smaller --model"
        )
    return Length(steps, evaluations)


def _step_seconds(setup: Setup, train_step: TrainStep, deadline: float) -> tuple[float, float]:
    """(seconds per step, seconds in which the machine paused); after the first step, the deadline is kept."""
    most = max(WARM_STEPS + TIMED_STEPS, setup.training.plan.steps_per_epoch)
    # A compiled model recompiles for each shape, so its first steps are not representative.
    least = WARM_STEPS + 1 if setup.config.model.compile else 1
    taken: list[float] = []
    for step, batch in enumerate(batches(setup.training, 0, most, 0, "fork", pin=False)):
        start = time.perf_counter()
        if any(setup.ranks.agree(step >= least and start + taken[-1] > deadline)):
            break
        train_step(batch, step)
        setup.device.synchronize()
        taken.append(time.perf_counter() - start)
        if any(setup.ranks.agree(len(taken) >= WARM_STEPS + TIMED_STEPS and is_steady(taken[WARM_STEPS:]))):
            break
    timed = taken[WARM_STEPS:] or taken[-1:]
    # The lower quartile of disturbed steps is disturbed least.
    usual = timing(timed).median if is_steady(timed) else timing(timed).low
    return usual, sum(timed) - without_pauses(timed, usual)


def _evaluation_seconds(setup: Setup, train_step: TrainStep) -> float:
    images = len(setup.splits["val"].samples)
    sample = min(images, SAMPLE_IMAGES)
    start = time.perf_counter()
    encode(setup, setup.complete_model(train_step), "val", sample)
    return (time.perf_counter() - start) * images / sample


def is_steady(timed: list[float]) -> bool:
    found = timing(timed)
    return found.high <= STEADY * found.low


def without_pauses(step_seconds: list[float], usual: float) -> float:
    """Total seconds of the steps, without pauses of the machine."""
    return sum(seconds if seconds < PAUSE * usual else usual for seconds in step_seconds)


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
) -> Run:
    """Train from the beginning in a new run folder: `run`, or runs/NAME (default: the model's preset)."""
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
            setup = _with_steps(_prepare(config, folder, screen, ranks), screen.warn)
            _describe(setup, screen)
            ranks.first(lambda: _write_run_files(setup, folder))
        except BaseException:
            if ranks.rank == 0:
                process.remove_unused_folder(folder)
            raise
        return _train_and_finish(setup, folder, screen, stop, on_log)


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
    shard: str | None = None,
) -> Run:
    """Continue a run from its newest valid checkpoint, exactly as if it had not stopped; on any number of ranks.

    On another `device` the batches are the same, and the numbers are the same up to rounding. `on_log` is called with
    each record of run.jsonl from here on, as in `train`.
    """
    screen, folder = screen or Screen(), Path(run)
    changes = {name: value for name, value in (("device", device), ("shard", shard)) if value is not None}
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
        chosen = chosen.changed(shard=shard) if shard is not None else chosen
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
        return _train_and_finish(setup, folder, screen, stop, on_log, resumed=True)


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
    decode, found = decode_plan(screen, folder if ranks.rank == 0 else None), list[Setup]()

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
    resumed: bool = False,
) -> Run:
    gc.collect()  # models that were built for measurements may be in reference cycles
    ranks, state, train_step = setup.ranks, TrainState(), setup.make_step()
    if resumed:
        kept = share_checkpoint(train_step, lambda device: load_latest(folder, device, screen.warn))
        if kept is not None:
            state = kept[0]
            restore(train_step, *kept)
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
        loop = TrainLoop(setup, train_step, state, folder, log, screen)
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
    failures = FailureLog(setup.training.plan.images, setup.config.data.max_bad, log.write, screen.warn, named)
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


def energy_figures(steps: Sequence[dict[str, Any]], epochs: float) -> dict[str, float]:
    """Energy of training and of one epoch in joules; {} if not measured."""
    joules = sum(float(record.get("joules", 0.0)) for record in steps)
    return {"joules": joules, "joules_per_epoch": joules / epochs} if joules and epochs else {}


def _with_steps(setup: Setup, warn: Callable[[str], None]) -> Setup:
    """Convert the duration to steps, and resolve the settings that depend on it."""
    measured = run_length(setup, warn)
    steps, evaluations = setup.ranks.first(lambda: measured)
    warmup_steps(setup.config.optim.warmup, steps)  # raises if the run would never leave warm-up
    train = setup.config.train
    every = train.eval_every if train.eval_every is not None else max(1, -(-steps // evaluations))
    saves = train.save_every if train.save_every is not None else every
    length = {"steps": steps, "minutes": None, "epochs": None, "eval_every": every, "save_every": saves}
    return dataclasses.replace(setup, config=setup.config.changed(**length))


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


def _write_run_files(setup: Setup, folder: Path) -> None:
    setup.tokenizer.save(folder)
    environment = {"m1clip": __version__, "command": sys.argv, "data": _fingerprint(setup)}
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
    run: str | Path | None = None,
    config: str | Path | None = None,
    preset: str | None = None,
    screen: Screen | None = None,
    on_log: Sink | None = None,
    **options: Any,
) -> Run:
    """Train in a new run folder: `run`, or runs/NAME. `options` are those of `m1clip train`, such as batch_size=64.

    `config` is a TOML file, `preset` the name of a built-in one; options override it. `on_log` is called with each
    record of run.jsonl, such as {"kind": "step", "step": 10, "loss": 2.3, ...}; an exception in it stops the run.
    """
    options |= {name: value for name, value in (("data", data), ("minutes", minutes)) if value is not None}
    screen = screen or Screen()
    settings, options["recipe"] = with_recipe(options, config, preset, screen)
    if settings.transfer.recipe != "finetune":
        return train_config(settings, run, screen, preset, on_log)
    if run is not None and not launched():
        process.check_unused(Path(run))  # fail before the first stage, which takes minutes
    options = _flat(config, preset) | options
    if settings.transfer.init is None:
        screen.say("stage 1    training heads on frozen towers")
        folder, begin = None if run is None else Path(f"{run}-frozen"), time.monotonic()
        first = train_config(make_config(frozen_options(options)), folder, screen, on_log=on_log)
        screen.say(f"stage 2    training the towers too, starting from {first.path}")
        options["init"] = str(first.path)
        if settings.train.minutes is not None:  # of both stages; at least half of them for the second
            spent = (time.monotonic() - begin) / 60
            options["minutes"] = max(settings.train.minutes / 2, settings.train.minutes - spent)
    options = {name: value for name, value in options.items() if name not in TOWER_OPTIONS}
    return train_config(make_config(options | {"recipe": "scratch"}), run, screen, preset, on_log)


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
