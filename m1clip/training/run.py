"""Train in a new run folder, or resume a run from its newest checkpoint."""

import contextlib
import dataclasses
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m1clip import __version__, console, time_use
from m1clip.config import NAMES, Config, load_config, make_config
from m1clip.data.failures import FailureLog
from m1clip.data.prepare import open_data
from m1clip.data.split_record import write_splits
from m1clip.data.types import Source
from m1clip.epochs import NOT_COMPARABLE, PHASE_HEAD, RunTables, drop_rolled_back
from m1clip.errors import UserError
from m1clip.evaluation.evaluate import Evaluator
from m1clip.evaluation.examples import SNAPSHOT_FOLDER as SNAPSHOTS
from m1clip.evaluation.examples import THUMBNAILS, retrieval_grid
from m1clip.evaluation.statistics import Scores, selection_metric, too_few_to_judge
from m1clip.formatting import clock, plural, table
from m1clip.hardware.machine_info import usable_cpus
from m1clip.hardware.memory import return_freed_memory
from m1clip.hardware.timing import timing
from m1clip.inference import load
from m1clip.inference.features import SplitFeatures
from m1clip.inference.model import Model
from m1clip.io import parse_json, read_small, remove_leftovers, write_json, write_text
from m1clip.model.clip import CLIP, empty_clip
from m1clip.model.presets import CLIPConfig
from m1clip.model.pretrained.packages import installed
from m1clip.model.pretrained.registry import tower_image_size
from m1clip.resource_use import ResourceUse, energy_figures
from m1clip.runlog import PREPARING, NoLog, RunLog, Sink, read_log
from m1clip.schema import matches_schema
from m1clip.training import loop, process
from m1clip.training.checkpoint import (
    TrainState,
    load_latest,
    restore,
    saved_steps,
    share_checkpoint,
)
from m1clip.training.compose import TrainStep
from m1clip.training.context import RunContext
from m1clip.training.decision import Dataset
from m1clip.training.device_choice import drop_contradicted
from m1clip.training.distributed import RankLost, Ranks, connect, launched
from m1clip.training.duration import Costs, Pacer, TimeBudget
from m1clip.training.forgetting import (
    GeneralData,
    describe_changes,
    measure_forgetting,
    open_general_data,
)
from m1clip.training.inputs import RunInputs
from m1clip.training.logger import check_sink, open_sink
from m1clip.training.oom import oom_as_user_error
from m1clip.training.parity import check_parity
from m1clip.training.recipe_choice import (
    FINETUNE_OPTIONS,
    INIT_OPTIONS,
    TOWER_OPTIONS,
    check_transfer,
    with_recipe,
)
from m1clip.training.saving import BEST_MODEL, save_last
from m1clip.training.spec import DecidedSettings, RunSpec, Settings, read_spec, setting
from m1clip.training.tower_choice import base_of
from m1clip.training.transfer import interpolate_weights
from m1clip.training.validation import encode
from m1clip.training.workbench import Workbench

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
    name: str | None = None,
    on_log: Sink | None = None,
    used_seconds: float = 0.0,
    source: Source | None = None,
) -> Run:
    """Train from the beginning in a new run folder: `run`, or runs/NAME (default: the model's
    preset).

    `used_seconds` of --minutes have passed already; `source` is the data if it is open already.
    """
    settings = config if isinstance(config, Settings) else DecidedSettings(complete=config)
    config = settings.config
    minutes = config.train.minutes
    budget = None if minutes is None else TimeBudget(60 * minutes, used_seconds)
    check_sink(config.train.report_to)
    max_workers = max(16, 4 * usable_cpus())
    if config.data.workers > max_workers:
        raise UserError(
            f"--workers {config.data.workers}: this machine has {usable_cpus()} CPUs; use at most"
            f" {max_workers}"
        )
    general = open_general_data(config)
    ranks = connect_same(config.train.device)
    ranks.check_same({f"--{flat.replace('_', '-')}": setting(config, flat) for flat in NAMES})
    name = name or run_name(config)
    started = ranks.on_rank0(lambda: started_before(run, name))
    if started is not None:
        return resume(started, on_log)
    folder = ranks.on_rank0(
        lambda: process.create_run_folder(Path(run) if run is not None else None, name)
    )
    with _open_session(folder, ranks, on_log) as session:
        # Again, now that no other process can begin here: one may have begun and ended meanwhile.
        ranks.on_rank0(lambda: process.check_unused(folder))
        try:
            if budget is not None:
                console.print(f"time       {clock(budget.seconds)} {TIME_INCLUDES}")
            workbench = Workbench(ranks, budget, source=source)
            spec = workbench.resolve(settings)
            inputs = workbench.inputs(spec)
            _describe(inputs)
            ranks.on_rank0(lambda: _write_run_files(spec, inputs, folder, minutes))
        except BaseException:
            if ranks.rank == 0:
                process.remove_unused_folder(folder)
            raise
        pacer = None if budget is None else Pacer(budget, workbench.costs, 0, inputs.max_steps)
        model = workbench.initial_model(inputs)
        return _train_and_finish(session, inputs, model, pacer, general)


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
    run: str | Path, on_log: Sink | None = None, device: str | None = None, fsdp: str | None = None
) -> Run:
    """Continue a run from its newest valid checkpoint, exactly as if it had not stopped.

    On any number of ranks.

    On another `device` the batches are the same, and the numbers are the same up to rounding.
    `on_log` is called with each record of run.jsonl from here on, as in `train`.
    """
    began = time_use.begin()
    folder = Path(run)
    changes = {
        name: value for name, value in (("device", device), ("fsdp", fsdp)) if value is not None
    }
    checked = make_config(changes)  # an error for a value that the command would reject
    changes = {name: setting(checked, name) for name in changes}
    saved_device = (
        load_config(folder).train.device if (folder / "config.toml").is_file() else "auto"
    )
    ranks = connect_same(changes.get("device", saved_device))
    saved = ranks.on_rank0(lambda: read_spec(folder))
    with _open_session(folder, ranks, on_log) as session:
        for part in (
            (folder, folder / SNAPSHOTS, folder / SNAPSHOTS / THUMBNAILS) if ranks.rank == 0 else ()
        ):
            remove_leftovers(part)
        workbench = Workbench(ranks, saved=folder)
        changed = {
            name: value for name, value in changes.items() if setting(saved.config, name) != value
        }
        if changed:
            # Everything else is decided already, so it stays as it is.
            spec = workbench.resolve(saved.as_settings().with_values(**changed))
            inputs = workbench.inputs(spec)
        else:
            spec = saved
            inputs = workbench.reopen(spec)
        ranks.on_rank0(lambda: _check_same_data(inputs, folder))
        captions = saved.config.data.captions_per_step
        if spec.config.data.captions_per_step != captions:
            raise UserError(
                f"{folder}: cannot continue on {spec.config.train.device}, which needs batches of"
                f" one shape: some images have fewer than {captions} captions"
            )
        if spec != saved and ranks.rank == 0:
            write_text(folder / "config.toml", spec.to_toml())
        _describe(inputs)
        minutes = ranks.on_rank0(lambda: _promised_minutes(folder))
        pacer = (
            None
            if minutes is None
            else Pacer(TimeBudget(60 * minutes, began=began), Costs(), 0, inputs.max_steps)
        )
        general = open_general_data(inputs.config)
        model = workbench.initial_model(inputs)
        return _train_and_finish(session, inputs, model, pacer, general, resumed=True)


def _promised_minutes(folder: Path) -> float | None:
    """The --minutes of a run that is resumed; None if it was not started with them."""
    try:
        minutes = parse_json(read_small(folder / "environment.json")).get("minutes")
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
            same = parse_json(read_small(folder / "environment.json")).get("command") == sys.argv
            if same and (folder / "config.toml").is_file():
                return folder
    return None


@dataclass(frozen=True)
class Session:
    """A run folder while a process works in it."""

    folder: Path
    stop: process.StopRequest
    warnings: list[str]  # printed so far, for the log
    on_log: Sink | None  # called with each record of the log


@contextlib.contextmanager
def _open_session(folder: Path, ranks: Ranks, on_log: Sink | None) -> Iterator[Session]:
    """Lock a run folder, stop on signals, and report the progress of preparing in the folder."""
    is_first = ranks.rank == 0
    try:
        with (
            process.lock_run(folder) if is_first else contextlib.nullcontext(),
            process.stop_on_signals() as stop,
            console.progress_file(folder / PREPARING if is_first else None),
            console.record_warnings() as warnings,
        ):
            yield Session(folder, stop, warnings, on_log)
    except process.Interrupted as interrupted:
        if saved_steps(folder):
            interrupted.add_note(f"continue with: m1clip train --resume {folder}")
        raise


@oom_as_user_error()
def _train_and_finish(
    session: Session,
    inputs: RunInputs,
    model: CLIP | None,
    pacer: Pacer | None,
    general: GeneralData | None,
    resumed: bool = False,
) -> Run:
    """Train, and evaluate the best model; `model` is the initial one, if it is built already."""
    gc.collect()  # models that were built for measurements may be in reference cycles
    if inputs.device.kind == "cuda":
        inputs.device.reset_peak()  # of what this process has done before, as in a notebook
    train_step = inputs.make_step(model)
    state = _restore(session.folder, inputs, train_step, pacer) if resumed else TrainState()
    log, close_sink = _open_log(session, inputs, state)
    inputs.training.report = _failure_log(inputs, session.folder, log)
    _check_gradients(inputs, train_step, log)
    run = RunContext(inputs, train_step, session.folder, log, session.stop, state, pacer=pacer)
    try:
        loop.train(run)
        evaluator, features = _best_on_test(run)
        return inputs.ranks.on_rank0(lambda: _finish(run, evaluator, features, general))
    except (process.Interrupted, RankLost) as stopped:
        log.write("event", step=run.state.step, event=str(stopped))
        raise
    finally:
        run.display.end()
        run.saver.close()
        log.close()
        close_sink()


def _restore(
    folder: Path, inputs: RunInputs, train_step: TrainStep, pacer: Pacer | None
) -> TrainState:
    """Continue from the newest checkpoint; from the first step if there is none."""
    state = TrainState()
    checkpoint = share_checkpoint(train_step, lambda device: load_latest(folder, device))
    if checkpoint is not None:
        state = checkpoint[0]
        restore(train_step, *checkpoint)
        if pacer is not None:
            costs = Costs(state.evaluation_cost, state.closing_cost)
            pacer.resume(state.step, state.used_seconds, costs)
    console.print(f"resume     from step {state.step:,} of {inputs.config.train.steps:,}")
    return state


def _open_log(
    session: Session, inputs: RunInputs, state: TrainState
) -> tuple[RunLog, Callable[[], None]]:
    """The log of a run, which begins with what was decided; and how to close what else gets it."""
    folder = session.folder
    is_rank0 = inputs.ranks.rank == 0
    log = RunLog(folder) if is_rank0 else NoLog(folder)
    log.sinks += [session.on_log] if session.on_log is not None else []
    sink = open_sink(inputs.config.train.report_to, folder) if is_rank0 else None
    if sink is not None:
        log.sinks.append(sink[0])
    log.write(
        "start",
        step=state.step,
        steps=inputs.config.train.steps,
        choices=inputs.spec.measured,
        version=__version__,
        ranks=inputs.ranks.size,
    )
    for line in session.warnings:
        log.write("warning", step=state.step, text=line)
    return log, (lambda: None) if sink is None else sink[1]


def _check_gradients(inputs: RunInputs, train_step: TrainStep, log: RunLog) -> None:
    """Compare the gradients of this device with the CPU's, and log the difference."""
    with time_use.part("checks"):
        parity = check_parity(inputs, train_step)
    if parity is None:
        return
    skipped = {"skipped": parity.skipped} if parity.skipped else {}
    log.write("parity", gradient_difference=parity.difference, **skipped)
    note = f"; {parity.skipped}" if parity.skipped else ""
    console.print(
        f"parity     gradients on {inputs.device.name} differ by at most"
        f" {parity.difference:.2%}{note}"
    )


def _failure_log(inputs: RunInputs, folder: Path, log: RunLog) -> FailureLog:
    """Records each unreadable image once in the run log, starting with those found before
    training.
    """
    records = read_log(folder) if inputs.ranks.rank == 0 else ()
    named = [str(record.get("where")) for record in records if record["kind"] == "skipped"]
    failures = FailureLog(
        inputs.training.plan.images, inputs.config.data.max_unreadable, log.write, named
    )
    for name, split in inputs.splits.items():
        failures.record(name, split.failures)
    return failures


@time_use.count_as("evaluation")
def _best_on_test(run: RunContext) -> tuple[Evaluator, SplitFeatures]:
    """Save the last model, then encode the test split once with the best validation model.

    Each rank a part of it.
    """
    inputs, train_step, folder = run.inputs, run.train_step, run.folder
    ranks, last, best_models = inputs.ranks, inputs.complete_model(train_step), list[Model]()
    train_step.optimizer.drop_state()  # free memory for the second model
    return_freed_memory()

    def save_and_load() -> CLIPConfig:
        run.log.check_folder()
        with time_use.part("saving"):
            save_last(run, last)
            run.saver.wait(folder / BEST_MODEL)
        if inputs.config.transfer.wise_ft != "off":
            run.saver.wait()
            interpolate_weights(inputs, folder, run.log.write)
        best_models.append(
            load(folder, device=inputs.device.torch.type, precision=inputs.precision)
        )
        return best_models[0].clip.config

    config = ranks.on_rank0(save_and_load)
    best = (
        best_models[0] if best_models else inputs.to_model(empty_clip(config, inputs.device.torch))
    )
    ranks.broadcast(list(best.clip.state_dict().values()))
    split = next((name for name in ("test", "val") if name in inputs.splits), "train")
    features = encode(inputs, best.clip, split)
    with time_use.part("saving"):
        run.saver.wait()
    return Evaluator(best, inputs.source, split, inputs.splits[split]), features


@time_use.count_as("report")
def _finish(
    run: RunContext, evaluator: Evaluator, features: SplitFeatures, general: GeneralData | None
) -> Run:
    inputs, state, folder = run.inputs, run.state, run.folder
    split, grid = evaluator.split, folder / "retrieval.png"
    scores = evaluator.scores(features)
    retrieval_grid(evaluator.data, features, split, grid)
    if state.best_step >= 0:
        label = selection_metric(scores).label
        console.print(
            f"best       step {state.best_step:,}: validation {label} {100 * state.best:.1f}%"
            + _unimproved(inputs.config, state.best_step)
        )
    if general is not None:
        score = selection_metric(scores)
        changes = measure_forgetting(inputs.config, general, evaluator, score, inputs.precision)
        for change in changes:
            run.log.write("adaptation", step=state.best_step, **change.as_record())
        console.print(f"\n{describe_changes(changes)}\n")
    steps = [record for record in read_log(folder) if record["kind"] == "step"]
    _check_choice(run, steps)
    tables = RunTables(*drop_rolled_back(read_log(folder)))
    _print_tables(tables)
    fractions = [
        record["data_fraction"]
        for record in steps
        if matches_schema(record.get("data_fraction"), float)
    ]
    use = ResourceUse()
    seconds_by_part = time_use.by_part()
    console.print(f"time       {time_use.describe(seconds_by_part)}")
    for record in steps:
        use.add(record)
    epochs = state.step / inputs.training.plan.steps_per_epoch
    run.log.write(
        "end",
        step=state.step,
        split=split,
        best_step=state.best_step,
        seconds=state.seconds,
        time_use=seconds_by_part,
        data_fraction=sum(fractions) / max(len(fractions), 1),
        peak_bytes=inputs.device.peak_bytes(),
        **energy_figures(use, epochs, selection_metric(scores).value),
        loss_phases=[phase.as_dict() for phase in tables.phases()],
        **scores.as_dict(),
    )
    return Run(folder, scores, split, grid)


def _unimproved(config: Config, best_step: int) -> str:
    """What to add if no step was better than the start, as happens with few captions."""
    if best_step > 0:
        return ""
    start = config.transfer.init
    outcome = f"{start} is unchanged" if start else "the model is that before the first step"
    return f"; training did not improve on the start: {outcome}; more captions may help"


def _print_tables(tables: RunTables) -> None:
    """Print the table by epoch and the phases of the loss at the end of a run."""
    epochs = tables.epoch_cells
    if epochs:
        console.print(f"\n{table(tables.epoch_head, epochs)}\n{NOT_COMPARABLE}\n")
    phases = tables.phase_cells
    if phases:
        note = tables.phase_note
        console.print(f"{table(PHASE_HEAD, phases)}\n" + (f"{note}\n" if note else ""))


def _check_choice(run: RunContext, steps: Sequence[dict[str, Any]]) -> None:
    """Drop a kept choice of device and precision that the speed of this run contradicts."""
    choice = run.spec.measured.get("hardware")
    busy = [
        record["step_seconds"] * (1 - record["data_fraction"])
        for record in steps
        if "data_fraction" in record
    ]
    if choice is None or not busy:
        return
    text = drop_contradicted(choice, timing(busy).median / run.inputs.training.plan.batch)
    if text:
        run.log.write("event", step=run.state.step, event="choice dropped", reason=text)
        console.print(f"device     {text}")


# What the time of --minutes contains, as printed at the start.
TIME_INCLUDES = (
    "in all: reading and caching the data, training, evaluation and saving; the number of steps is"
    " corrected during the run, so that it ends then"
)


def _describe(inputs: RunInputs) -> None:
    shape, train = inputs.shape, inputs.config.train
    counts = ", ".join(f"{len(split.samples):,} {name}" for name, split in inputs.splits.items())
    console.print(
        f"data       {', '.join(inputs.config.data.source)}: {counts} images"
        f" of {shape.image_size} px"
    )
    small = {
        name: len(split.samples)
        for name, split in inputs.splits.items()
        if name != "train" and too_few_to_judge(name, len(split.samples))
    }
    if small:
        label = " and ".join(f"{count} {name}" for name, count in small.items())
        console.print(f"note       {too_few_to_judge(f'{label} images', min(small.values()))}")
    console.print(f"model      {inputs.describe_model()}")
    epochs = train.steps / inputs.training.plan.steps_per_epoch
    captions_per_image = inputs.training.captions_per_image
    captions = (
        f" with {captions_per_image} captions each" if captions_per_image > 1 else " and captions"
    )
    console.print(
        f"training   {plural(train.steps, 'step')} of {train.batch_size} images{captions}"
        f" ({epochs:.1f} epochs), {inputs.config.optim.optimizer}"
    )


def _write_run_files(spec: RunSpec, inputs: RunInputs, folder: Path, minutes: float | None) -> None:
    inputs.model.tokenizer.save(folder)
    environment = {
        "m1clip": __version__,
        "command": sys.argv,
        "data": _fingerprint(inputs),
        "minutes": minutes,
    }
    write_json(
        folder / "environment.json", {**environment, "facts": dataclasses.asdict(inputs.facts)}
    )
    write_splits(folder, inputs.source)
    # Last: a folder with a config is a complete run.
    write_text(folder / "config.toml", spec.to_toml())


def _check_same_data(inputs: RunInputs, folder: Path) -> None:
    path = folder / "environment.json"
    restart = f"start a new run with --config {folder / 'config.toml'}"
    try:
        recorded = parse_json(read_small(path))["data"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{path}: missing or damaged, so whether the training data is still the same cannot be"
            f" checked; restore the file, or {restart}"
        ) from None
    if recorded != _fingerprint(inputs):
        raise UserError(
            f"{folder}: the training data has changed since the run started, so it cannot be"
            f" continued exactly; restore the data, or {restart}"
        )


def _fingerprint(inputs: RunInputs) -> str:
    return inputs.source.fingerprint(inputs.splits["train"].samples)


# Settings of training and of the optimizer that both stages of fine-tuning use. The others, such as
# the duration and the learning rates, are for the second stage: those of the first are the
# recipe's.
BOTH_STAGES = {
    *("batch_size", "memory", "device", "precision", "threads", "report_to", "loss"),
    *("optimizer", "wd", "grad_clip"),
}


def train(
    data: str | Sequence[str] | None = None,
    minutes: float | None = None,
    *,
    out: str | Path | None = None,
    config: str | Path | None = None,
    preset: str | None = None,
    on_log: Sink | None = None,
    **options: Any,
) -> Run:
    """Train in a new run folder: `out`, or runs/NAME.

    `options` are those of `m1clip train`, such as batch_size=64.

    `config` is a TOML file, `preset` the name of a built-in one; options override it. `on_log` is
    called with each record of run.jsonl, such as {"kind": "step", "step": 10, "loss": 2.3, ...}; an
    exception in it stops the run.
    """
    began = time_use.begin()
    options |= {
        name: value for name, value in (("data", data), ("minutes", minutes)) if value is not None
    }
    settings, source = decide_recipe(Settings(options, config, preset))
    transfer = settings.config.transfer
    if transfer.recipe == "finetune" and transfer.init is None:
        if out is not None and not launched():
            process.check_unused(Path(out))  # fail before the first stage, which takes minutes
        console.print(describe_first_stage(settings))
        folder = None if out is None else Path(f"{out}-frozen")
        first = train_config(first_stage(settings), folder, on_log=on_log, source=source)
        console.print(f"stage 2    training the towers too, starting from {first.path}")
        settings = second_stage(settings, first.path)
    used_seconds = time.perf_counter() - began  # of the time of both stages
    return train_config(settings, out, preset, on_log, used_seconds, source)


def plan(
    data: str | Sequence[str] | None = None,
    minutes: float | None = None,
    *,
    config: str | Path | None = None,
    preset: str | None = None,
    **options: Any,
) -> RunSpec:
    """Decide the run that `train` would make with the same arguments, and train nothing.

    Reads, measures and caches what `train` does before its first step, and prints the decisions
    with their reasons. `RunSpec.config` has all settings, `RunSpec.chosen_by` who chose them. Of
    the two stages of --recipe finetune, this is the first: the second one depends on its result.
    """
    options |= {
        name: value for name, value in (("data", data), ("minutes", minutes)) if value is not None
    }
    settings, source = decide_recipe(Settings(options, config, preset))
    if settings.config.transfer.recipe == "finetune" and settings.config.transfer.init is None:
        console.print(describe_first_stage(settings))
        console.print("stage 2    trains the towers too; it is decided after stage 1")
        settings = first_stage(settings)
    minutes = settings.config.train.minutes
    ranks = connect_same(settings.config.train.device)
    budget = None if minutes is None else TimeBudget(60 * minutes)
    workbench = Workbench(ranks, budget, source=source)
    spec = workbench.resolve(settings)
    _describe(workbench.inputs(spec))
    return spec


def decide_recipe(settings: Settings) -> tuple[Settings, Source | None]:
    """The settings with a recipe, and the data if it was opened to choose one.

    What is trained of a model to start from is decided later, when the model is read.
    """
    opened: list[Source] = []

    def dataset() -> Dataset:
        config = settings.config
        with console.progress("reading the data"):
            size = tower_image_size(base_of(config.transfer.image_tower))
            opened.append(open_data(config.data, size, config.seed))
        return Dataset(images=len(opened[0].samples("train")), streamed=opened[0].streamed)

    decided = with_recipe(settings, dataset, installed)
    check_transfer(decided.config.transfer)
    return decided, opened[0] if opened else None


def first_stage(settings: Settings) -> Settings:
    """Fine-tuning's first stage: the duration and learning rate of --recipe frozen, the rest as
    given.
    """
    options = {name: value for name, value in settings.flat.items() if is_for_first_stage(name)}
    return Settings(options | {"recipe": "frozen"})


def is_for_first_stage(name: str) -> bool:
    """Whether a setting applies to the first stage of fine-tuning: data, heads, towers,
    hardware.
    """
    if name in (*FINETUNE_OPTIONS, *INIT_OPTIONS, "mirror"):  # towers are frozen in this stage
        return False
    return NAMES[name][0] not in ("optim", "train") or name in BOTH_STAGES


def describe_first_stage(settings: Settings) -> str:
    """One line about fine-tuning's first stage, and the given settings that it does not use."""
    config = first_stage(settings).config
    length = f"{config.train.epochs:g} epochs, {config.optim.optimizer}, lr {config.optim.lr:g}"
    unused = [name for name in sorted(settings.specified) if not is_for_first_stage(name)]
    options = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
    note = f" ({options}: for stage 2)" if unused else ""
    return f"stage 1    training heads on frozen towers: {length}{note}"


def second_stage(settings: Settings, init: Path) -> Settings:
    """Fine-tuning's second stage, which starts from the run of the first."""
    options = {name: value for name, value in settings.flat.items() if name not in TOWER_OPTIONS}
    return Settings(options | {"recipe": "finetune", "init": str(init)})
