"""Measurements before a run: the fastest device and precision, the memory limit, the steps that fit
in a time.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from m1clip import __version__, console
from m1clip.config import Config
from m1clip.data.image_cache import RAM_FRACTION
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch, batches
from m1clip.errors import UserError, first_line
from m1clip.formatting import amount, ceil_div, clock, plural
from m1clip.hardware import choices
from m1clip.hardware.choices import Rounds, time_rounds
from m1clip.hardware.device import (
    Device,
    Kind,
    Precision,
    available,
    choose_device,
    choose_precision,
    default_precision,
    hybrids_of,
    rules,
)
from m1clip.hardware.machine_info import MachineInfo
from m1clip.hardware.memory import keep_freed_memory, map_large_blocks, return_freed_memory
from m1clip.hardware.timing import Load, timing
from m1clip.model.clip import CLIP, count_parameters
from m1clip.training.compose import TrainStep, compose_step
from m1clip.training.duration import (
    EVALUATIONS,
    MAX_EVALUATION_FRACTION,
    MIN_TRAINING_FRACTION,
    Costs,
    Segment,
    StepPlan,
    TimeBudget,
    planned_steps,
)
from m1clip.training.memory import MemoryEstimate, process_bytes, random_batch
from m1clip.training.parity import PAIRS, TOLERANCE, fill_zeros, gradient, relative_difference
from m1clip.training.step import make_parts
from m1clip.training.transfer import WISE_FT_GRID, ModelInit
from m1clip.training.validation import encode

if TYPE_CHECKING:
    from m1clip.training.inputs import RunInputs

MEASURED_SECONDS = 30.0  # for measuring all candidates
MINUTES_FRACTION = 0.05  # of --minutes, at most
WARMUP_STEPS, TIMED_STEPS = 2, 5  # of a calibration
CALIBRATION_FRACTION = 0.05  # of the time, at most, unless two steps take longer
FIRST_STEP_FRACTION = 0.15  # of the time: a first step that takes longer is the only one
FEW_STEPS = 10  # a shorter run learns little
SAMPLE_IMAGES = 64  # of the validation split, to time an evaluation
WARMUP_IMAGES = 16  # encoded before them: the first pass takes twice as long
BYTES_PER_NUMBER = 4  # of a float32
MAX_MEMORY_FRACTION = 0.5  # of all memory that measuring may need
PROBE_BATCH = 64  # a larger batch takes longer and changes no decision
BYTES_PER_PIXEL = 3  # of a decoded image: RGB
MAX_UNSHARDED = 0.9  # of a GPU's memory; a step that needs more is sharded
SAFE = 0.8  # fraction of free memory to use without --memory; the rest is for other programs


@dataclass(frozen=True)
class Candidate:
    """A device and precision: seconds of a step in each round, or why it was rejected."""

    device: Kind
    precision: Precision
    seconds: tuple[float, ...] = ()
    gradient_difference: float | None = None
    rejected: str = ""

    @property
    def name(self) -> str:
        return f"{self.device} {self.precision}"


@dataclass(frozen=True)
class Choice:
    """The choice and the measurements behind it (none if there was nothing to choose)."""

    device: Kind
    precision: Precision
    candidates: tuple[Candidate, ...] = ()
    batch: int = 0  # images of a timed step
    is_default: bool = (
        True  # of this hardware; another candidate must be clearly faster to be chosen
    )
    kept_at: str = ""  # the file that keeps the choice, "" if it is not kept
    cached: bool = False

    @property
    def why(self) -> str:
        """The reason, shown after the device name; empty if nothing was measured."""
        chosen_candidate = next(
            (
                c
                for c in self.candidates
                if (c.device, c.precision) == (self.device, self.precision)
            ),
            None,
        )
        if chosen_candidate is None or len(self.candidates) == 1:
            return ""
        words = []
        for other in self.candidates:
            if other.rejected:
                words.append(f"{other.name} rejected: {other.rejected}")
            elif other is not chosen_candidate and chosen_candidate.seconds and other.seconds:
                ratio = statistics.median(other.seconds) / statistics.median(
                    chosen_candidate.seconds
                )
                words.append(f"{ratio:.1f}x as fast as {other.name}")
        if self.is_default and not all(
            c.rejected or c is chosen_candidate or _clearly_slower(c, chosen_candidate)
            for c in self.candidates
        ):
            words.append(
                "the default of this hardware, as no other was faster in nearly all rounds"
            )
        how = (
            " in an earlier run"
            if self.cached
            else ""
            if self.kept_at
            else " beside other programs, so not kept"
        )
        return f"{', '.join(words)}; measured with batch {self.batch}{how}"


def _clearly_slower(other: Candidate, chosen: Candidate) -> bool:
    return bool(other.seconds and chosen.seconds) and statistics.median(
        other.seconds
    ) > statistics.median(chosen.seconds)


Option = tuple[Kind, Precision]


@dataclass(frozen=True)
class Measured:
    """The candidates with their rounds, the batch size that was affordable, and the load of other
    programs.
    """

    candidates: tuple[Candidate, ...]
    batch: int = 0
    others: float | None = None


def candidates(device: str, precision: str, facts: MachineInfo) -> list[Option]:
    """The candidates to measure, unless the user or the device rules have already decided."""
    options: list[Option] = []
    kinds = available(facts)
    hybrids = [kind for kind in hybrids_of(kinds) if kind == device]  # only if asked for
    for kind in (*kinds, *hybrids):
        if device not in ("auto", kind) or (device == "auto" and kind == "mlx"):
            continue
        rule = rules(kind, facts)
        usual: list[Precision] = {"yes": ["bf16"], "no": ["fp32"], "measure": ["fp32", "bf16"]}[
            rule.bf16
        ]  # type: ignore[assignment]
        named = [p for p in rule.precisions if p == precision]
        options += [(kind, p) for p in (usual if precision == "auto" else named)]
    return options


def default_option(options: list[Option], facts: MachineInfo) -> Option:
    """The documented default: the device that is usually the fastest, in its default precision."""
    kind = options[0][0]
    usual = (kind, default_precision(kind, facts))
    return usual if usual in options else options[0]


def choose(
    config: Config,
    model_init: ModelInit,
    facts: MachineInfo,
    text_tokens: int,
    folder: Path | None = None,
) -> Choice:
    """The device and precision for this model.

    Measured for at most half a minute, or as kept from an earlier run.
    """
    options = candidates(config.train.device, config.train.precision, facts)
    if len(options) == 1:
        return Choice(*options[0])
    # Half of the run's batch: fp32 needs twice the memory of bf16, and measuring should not need
    # more than the run.
    batch = min(ceil_div(config.train.batch_size_or(2 * PROBE_BATCH), 2), PROBE_BATCH)
    path = (
        folder or choices.folder()
    ) / f"{_key(config, model_init, facts, batch, text_tokens, options)}.json"
    cached = _read(path, options)
    if cached is not None:
        return cached
    default = default_option(options, facts)
    with console.progress("measuring devices and precisions"):
        measured = measure(config, model_init, facts, options, text_tokens, batch)
    rounds = {(c.device, c.precision): c.seconds for c in measured.candidates if not c.rejected}
    if not rounds:
        reasons = "; ".join(f"{c.name}: {c.rejected}" for c in measured.candidates)
        raise UserError(f"no device passed its test: {reasons}")
    best = choices.fastest(rounds, default if default in rounds else next(iter(rounds)))
    is_kept = Rounds(rounds, measured.others).reliable and all(rounds.values())
    choice = Choice(
        *best,
        measured.candidates,
        measured.batch,
        is_default=best == default,
        kept_at=str(path) if is_kept else "",
    )
    if is_kept:
        names = {f"{kind} {precision}": seconds for (kind, precision), seconds in rounds.items()}
        subject = f"training step of {config.model.name}, {plural(measured.batch, 'image')}"
        result = choices.describe(names, f"{choice.device} {choice.precision}")
        choices.save(path, subject, result, {"choice": dataclasses.asdict(choice)})
    return choice


def measure(
    config: Config,
    model_init: ModelInit,
    facts: MachineInfo,
    options: list[Option],
    text_tokens: int,
    batch: int,
) -> Measured:
    """Check the gradients of each candidate, then time the steps of all in alternation.

    Only the default, without a time, if that would take too long or need too much memory.
    """
    load = Load()
    default = default_option(options, facts)
    minutes = config.train.minutes
    limit = (
        MEASURED_SECONDS
        if minutes is None
        else min(MEASURED_SECONDS, MINUTES_FRACTION * 60 * minutes)
    )
    begin = time.perf_counter()
    # Weights and gradients once per device, the optimizer's moments once per candidate.
    needed = count_parameters(model_init.config) * BYTES_PER_NUMBER * (2 + 2 * len(options))
    if needed > MAX_MEMORY_FRACTION * facts.memory_bytes:
        return Measured((Candidate(*default),))
    map_large_blocks()
    samples = random_batch(model_init.config, PAIRS, text_tokens)
    cpu = Device("cpu", facts)
    reference = _gradient(
        _step(config, model_init, _model(config, model_init, cpu), cpu, "fp32", batch), samples
    )
    spent = time.perf_counter() - begin
    if spent * (1 + len(options)) > limit:
        return Measured((Candidate(*default),))
    # All rounds fit in the time, if all candidates were as slow as the CPU in fp32.
    affordable = int(limit / ((choices.ROUNDS + 1) * len(options)) / max(spent / PAIRS, 1e-9))
    batch = max(min(batch, PAIRS), min(batch, affordable))
    work = random_batch(model_init.config, batch, text_tokens, config.data.captions_per_step or 1)
    devices: dict[Kind, Device] = {kind: Device(kind, facts) for kind, _ in options}
    models: dict[Kind, CLIP] = {}
    steps: dict[Option, TrainStep] = {}
    results: dict[Option, Candidate] = {}
    for option in options:
        kind, precision = option
        try:
            if kind not in models:
                models[kind] = _model(config, model_init, devices[kind])
            step = _step(config, model_init, models[kind], devices[kind], precision, batch)
            difference = relative_difference(_gradient(step, samples), reference)
            rejection = (
                f"gradients {difference:.0%} different from the CPU's"
                if difference > TOLERANCE[precision]
                else ""
            )
            results[option] = Candidate(*option, (), difference, rejection)
            if not rejection:
                steps[option] = step
        except RuntimeError as error:  # also out of memory
            results[option] = _failed_candidate(option, error)
    # After all gradients: candidates of one device train the same model.
    for option, step in list(steps.items()):
        try:
            step.run(work, 0)
        except RuntimeError as error:
            results[option] = _failed_candidate(option, error)
            del steps[option]
    rounds = Rounds[Option]({})
    if len(steps) > 1:
        reference_option = default if default in steps else next(iter(steps))
        calls = {
            option: functools.partial(_timed_step, step, work) for option, step in steps.items()
        }
        keep_freed_memory()  # as in a run after its first step: all block sizes were allocated once
        rounds = time_rounds(calls, reference_option, limit - (time.perf_counter() - begin), load)
        results |= {
            option: dataclasses.replace(results[option], seconds=tuple(seconds))
            for option, seconds in rounds.seconds.items()
        }
    steps.clear()  # free their memory before the run builds its own
    models.clear()
    return_freed_memory()
    for device in devices.values():
        device.reset_peak()  # the run reports its own peak
    return Measured(tuple(results[option] for option in options), batch, rounds.others)


def _failed_candidate(option: Option, error: RuntimeError) -> Candidate:
    is_memory = isinstance(error, torch.OutOfMemoryError)
    return Candidate(
        *option, rejected="does not fit in its memory" if is_memory else first_line(error)
    )


def _timed_step(step: TrainStep, work: Batch) -> None:
    step.run(work, 1)
    step.parts.device.synchronize()


def _model(config: Config, model_init: ModelInit, device: Device) -> CLIP:
    torch.manual_seed(config.seed)
    model = fill_zeros(model_init.build()).to_devices(device.torch, device.text_torch)
    model.set_activation_checkpointing(config.model.grad_checkpointing)
    return model


def _step(
    config: Config,
    model_init: ModelInit,
    model: CLIP,
    device: Device,
    precision: Precision,
    batch: int,
) -> TrainStep:
    eager = config.with_values(compile=False, batch_size=config.train.batch_size_or(batch))
    preprocess = Preprocess(image_size=model_init.config.image_size)
    parts = make_parts(model, eager, device, precision, preprocess)
    # Cached blocks would fragment the heap before the run starts.
    return compose_step(parts, reuse_memory=False)


def _gradient(step: TrainStep, samples: Batch) -> torch.Tensor:
    _, gradients = gradient(step.for_check(step.model), samples)
    step.optimizer.zero_grad()
    step.model.train()
    return gradients


def _key(
    config: Config,
    model_init: ModelInit,
    facts: MachineInfo,
    batch: int,
    text_tokens: int,
    options: list[Option],
) -> str:
    """Cache key of machine, model and versions.

    A change in any of them causes a new measurement.
    """
    values = (
        dataclasses.asdict(facts),
        model_init.config.to_dict(),
        model_init.trainable,
        (batch, text_tokens, config.data.captions_per_step, config.train.micro_batch),
        options,
        (config.optim.optimizer, config.model.grad_checkpointing, torch.get_num_threads()),
        (
            __version__,
            [field.name for kind in (Candidate, Choice) for field in dataclasses.fields(kind)],
        ),
    )
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]


def _read(path: Path, options: list[Option]) -> Choice | None:
    values = (choices.read(path) or {}).get("choice")
    if not isinstance(values, dict):
        return None
    try:
        measured = tuple(
            Candidate(**{**item, "seconds": tuple(map(float, item["seconds"]))})
            for item in values["candidates"]
        )
        choice = Choice(**{**values, "candidates": measured, "kept_at": str(path), "cached": True})
    except (ValueError, KeyError, TypeError):
        return None
    return choice if (choice.device, choice.precision) in options else None


def drop_contradicted(choice: dict[str, Any], seconds_per_image: float) -> str:
    """Drop a kept choice if the run itself shows that a rejected candidate is faster.

    Returns what to report.
    """
    kept_at, batch = choice.get("kept_at"), choice.get("batch")
    if not kept_at or not batch:
        return ""
    chosen = (choice["device"], choice["precision"])
    others = {
        f"{other['device']} {other['precision']}": statistics.median(other["seconds"]) / batch
        for other in choice["candidates"]
        if other["seconds"] and (other["device"], other["precision"]) != chosen
    }
    faster = [
        name
        for name, seconds in others.items()
        if choices.is_contradicted(seconds_per_image, [seconds])
    ]
    if not faster:
        return ""
    choices.remove(Path(kept_at))
    return (
        f"the steps of this run were slower than those that were measured with {faster[0]}; the"
        f" kept choice of {' '.join(chosen)} is dropped, and the next run measures again"
    )


def fastest(config: Config, model_init: ModelInit, facts: MachineInfo, text_tokens: int) -> Choice:
    """`choose`, or UserError for a precision that the device lacks."""
    if not candidates(config.train.device, config.train.precision, facts):
        choose_precision(config.train.precision, choose_device(config.train.device, facts), facts)
    return choose(config, model_init, facts, text_tokens)


def estimate_memory(
    config: Config,
    model_init: ModelInit,
    facts: MachineInfo,
    device: Device,
    text_tokens: int,
    images: int = 0,
) -> MemoryEstimate:
    """The memory of a run's step, and of `images` if they are cached in main memory."""
    precision = choose_precision(config.train.precision, device.name, facts)
    data_bytes = images * model_init.config.image_size**2 * BYTES_PER_PIXEL
    in_memory = device.kind == "cpu" and model_init.trainable.image
    if not in_memory or data_bytes > RAM_FRACTION * facts.memory_bytes:
        data_bytes = 0  # on the device or on disk
    return MemoryEstimate(config, model_init, facts, device, precision, text_tokens, data_bytes)


def fits_one_gpu(
    config: Config, model_init: ModelInit, facts: MachineInfo, device: Device, rows: int
) -> bool:
    """Whether a step of so many images fits in the memory of a device without FSDP."""
    tokens = model_init.config.context_length
    estimate = estimate_memory(config, model_init, facts, device, tokens)
    peak = estimate.peak(rows, config.model.grad_checkpointing)
    return peak <= MAX_UNSHARDED * device.total_bytes()


def memory_limit(config: Config, device: Device, facts: MachineInfo) -> float:
    """Bytes that a run may use: --memory, or most of the free memory."""
    if config.train.memory:
        return amount(config.train.memory, "B", "--memory")
    used = process_bytes(facts) if device.kind == "cpu" else 0
    return SAFE * device.free_bytes() + used


@dataclass(frozen=True)
class Calibration:
    """Steps and evaluations that fit in a time, and the cost of what is not a step."""

    steps: int
    evaluations: int
    costs: Costs


def calibrate(inputs: RunInputs, budget: TimeBudget) -> Calibration:
    """The number of steps that fit in the time, from a few steps and a part of an evaluation of a
    temporary model.

    This is a first estimate: the run compares it with the clock and corrects it.
    """
    min_seconds = MIN_TRAINING_FRACTION * budget.seconds
    if budget.remaining < min_seconds:
        console.warn(
            f"preparing the data has taken {clock(budget.used)} of the {clock(budget.seconds)} of"
            f" --minutes: training for {min_seconds:.0f} s more; what is cached now is not prepared again"
            " in the next run"
        )
        budget.exclude(min_seconds - budget.remaining)
    train_step = inputs.make_step()
    step_seconds = _step_seconds(inputs, train_step, budget)
    evaluation_seconds = _evaluation_seconds(inputs, train_step) if "val" in inputs.splits else 0.0
    train_step.reset()
    del train_step  # it is part of a reference cycle
    gc.collect()
    inputs.device.release()
    costs = Costs(evaluation_seconds / step_seconds)
    costs.closing = closing_evaluations(inputs) * costs.evaluation
    train = inputs.config.train
    evaluations = train.evaluations or 0
    if not evaluations:
        affordable = (
            int(MAX_EVALUATION_FRACTION * budget.remaining / max(evaluation_seconds, 1e-9)) - 1
        )
        evaluations = max(1, min(EVALUATIONS, affordable))
    empty = StepPlan((Segment(0, 1),), train.eval_every, evaluations)
    steps = planned_steps(empty, 0, budget.remaining, step_seconds, costs)
    if steps < FEW_STEPS:
        console.warn(
            f"{budget.seconds / 60:g} minutes are only {plural(steps, 'step')} of"
            f" {step_seconds:.1f} s each, too few to learn much; use more --minutes, a smaller"
            " --batch-size or a smaller --model"
        )
    return Calibration(steps, evaluations, costs)


def closing_evaluations(inputs: RunInputs) -> float:
    """What follows the last step, in evaluations of the validation split: the test split, and
    WiSE-FT's choice.
    """
    if "val" not in inputs.splits:
        return 0.0
    test = (
        len(inputs.splits["test"].samples)
        if "test" in inputs.splits
        else len(inputs.splits["val"].samples)
    )
    wise_ft = {"off": 0, "search": len(WISE_FT_GRID)}.get(inputs.config.transfer.wise_ft, 1)
    return test / max(len(inputs.splits["val"].samples), 1) + wise_ft


def _step_seconds(inputs: RunInputs, train_step: TrainStep, budget: TimeBudget) -> float:
    """Median seconds of a few steps, after some that warm up.

    Within a small part of the time if two steps are.
    """
    # The first step of a model takes two to three times as long: everything else is estimated in
    # steps, and would be estimated too low. A compiled model recompiles for each shape.
    compiles = inputs.config.model.compile
    min_steps = WARMUP_STEPS + 1 if compiles else 2
    remaining = budget.remaining
    limit = CALIBRATION_FRACTION * remaining
    begin = time.perf_counter()
    step_times: list[float] = []
    for step, batch in enumerate(
        batches(inputs.training, 0, WARMUP_STEPS + TIMED_STEPS, 0, "fork", pin=False)
    ):
        start = time.perf_counter()
        is_enough = step >= min_steps and start + step_times[-1] - begin > limit
        is_slow = step == 1 and step_times[0] > FIRST_STEP_FRACTION * remaining
        if any(inputs.ranks.all_reduce_max(is_enough or (is_slow and not compiles))):
            break
        train_step.run(batch, step)
        inputs.device.synchronize()
        step_times.append(time.perf_counter() - start)
    return timing(step_times[WARMUP_STEPS:] or step_times[-1:]).median


def _evaluation_seconds(inputs: RunInputs, train_step: TrainStep) -> float:
    images = len(inputs.splits["val"].samples)
    sample = min(images, SAMPLE_IMAGES)
    encode(inputs, inputs.complete_model(train_step), "val", min(images, WARMUP_IMAGES))
    start = time.perf_counter()
    encode(inputs, inputs.complete_model(train_step), "val", sample)
    return (time.perf_counter() - start) * images / sample
