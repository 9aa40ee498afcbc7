"""Choose the device and precision of a run: by the steps of the model itself, timed in alternation."""

from __future__ import annotations

import dataclasses
import functools
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
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.errors import UserError, first_line
from m1clip.formatting import ceil_div, plural
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
from m1clip.hardware.timing import Load
from m1clip.model.clip import CLIP, count_parameters
from m1clip.training.compose import TrainStep, compose_step
from m1clip.training.memory import random_batch
from m1clip.training.parity import PAIRS, TOLERANCE, fill_zeros, gradient, relative_difference
from m1clip.training.step import make_parts
from m1clip.training.transfer import ModelInit

if TYPE_CHECKING:
    pass

MEASURED_SECONDS = 30.0  # for measuring all candidates
MINUTES_FRACTION = 0.05  # of --minutes, at most
BYTES_PER_NUMBER = 4  # of a float32
MAX_MEMORY_FRACTION = 0.5  # of all memory that measuring may need
PROBE_BATCH = 64  # a larger batch takes longer and changes no decision


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
        if self.is_default and not all(
            c.rejected or c is chosen_candidate or _clearly_slower(c, chosen_candidate)
            for c in self.candidates
        ):
            words.append("the default of this hardware")
        for other in self.candidates:
            if other.rejected:
                words.append(f"{other.name} rejected: {other.rejected}")
            elif other is not chosen_candidate and chosen_candidate.seconds and other.seconds:
                ratio = statistics.median(other.seconds) / statistics.median(
                    chosen_candidate.seconds
                )
                if _clearly_slower(other, chosen_candidate):
                    words.append(f"{ratio:.1f}x as fast as {other.name}")
                else:
                    measured = f"{other.name} measured {1 / ratio:.1f}x as fast"
                    words.append(f"{measured}, but not in nearly all rounds")
        how = (
            " in an earlier run"
            if self.cached
            else ""
            if self.kept_at
            else " beside other programs: not kept"
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
    limit = _measuring_seconds(config)
    begin = time.perf_counter()
    if _needed_bytes(model_init, len(options)) > MAX_MEMORY_FRACTION * facts.memory_bytes:
        return Measured((Candidate(*default),))
    map_large_blocks()
    samples = random_batch(model_init.config, PAIRS, text_tokens)
    reference = _reference_gradient(config, model_init, facts, samples, batch)
    spent = time.perf_counter() - begin
    if spent * (1 + len(options)) > limit:
        return Measured((Candidate(*default),))
    # All rounds fit in the time, if all candidates were as slow as the CPU in fp32.
    affordable = int(limit / ((choices.ROUNDS + 1) * len(options)) / max(spent / PAIRS, 1e-9))
    batch = max(min(batch, PAIRS), min(batch, affordable))
    work = random_batch(model_init.config, batch, text_tokens, config.data.captions_per_step or 1)
    trial = _Trial(config, model_init, facts, batch)
    for option in options:
        trial.check_gradient(option, samples, reference)
    trial.warm_up(work)  # after all gradients: candidates of one device train the same model
    others = trial.time(default, work, limit - (time.perf_counter() - begin), load)
    trial.free()
    return Measured(tuple(trial.results[option] for option in options), batch, others)


def _measuring_seconds(config: Config) -> float:
    """The time for all candidates."""
    if config.train.minutes is None:
        return MEASURED_SECONDS
    return min(MEASURED_SECONDS, MINUTES_FRACTION * 60 * config.train.minutes)


def _needed_bytes(model_init: ModelInit, options: int) -> int:
    """Weights and gradients once per device, the optimizer's moments once per candidate."""
    return count_parameters(model_init.config) * BYTES_PER_NUMBER * (2 + 2 * options)


def _reference_gradient(
    config: Config, model_init: ModelInit, facts: MachineInfo, samples: Batch, batch: int
) -> torch.Tensor:
    """The gradient of the CPU in fp32, which the others are compared with."""
    cpu = Device("cpu", facts)
    step = _step(config, model_init, _model(config, model_init, cpu), cpu, "fp32", batch)
    return _gradient(step, samples)


class _Trial:
    """The training steps of all candidates; those of one device share a model."""

    def __init__(
        self, config: Config, model_init: ModelInit, facts: MachineInfo, batch: int
    ) -> None:
        self.config = config
        self.model_init = model_init
        self.facts = facts
        self.batch = batch
        self.devices: dict[Kind, Device] = {}
        self.models: dict[Kind, CLIP] = {}
        self.steps: dict[Option, TrainStep] = {}  # of the candidates that are not rejected
        self.results: dict[Option, Candidate] = {}

    def check_gradient(self, option: Option, samples: Batch, reference: torch.Tensor) -> None:
        """Reject a candidate whose gradient differs from the reference, or that cannot run."""
        try:
            step = self._make_step(option)
            difference = relative_difference(_gradient(step, samples), reference)
        except RuntimeError as error:  # also out of memory
            self.results[option] = _failed_candidate(option, error)
            return
        rejection = ""
        if difference > TOLERANCE[option[1]]:
            rejection = f"gradients {difference:.0%} different from the CPU's"
        else:
            self.steps[option] = step
        self.results[option] = Candidate(*option, (), difference, rejection)

    def _make_step(self, option: Option) -> TrainStep:
        kind, precision = option
        device = self.devices.setdefault(kind, Device(kind, self.facts))
        if kind not in self.models:
            self.models[kind] = _model(self.config, self.model_init, device)
        model = self.models[kind]
        return _step(self.config, self.model_init, model, device, precision, self.batch)

    def warm_up(self, work: Batch) -> None:
        """Run the first step of each candidate; one that fails is rejected."""
        for option, step in list(self.steps.items()):
            try:
                step.run(work, 0)
            except RuntimeError as error:
                self.results[option] = _failed_candidate(option, error)
                del self.steps[option]

    def time(self, default: Option, work: Batch, seconds: float, load: Load) -> float | None:
        """Time the candidates in alternation, if there are several; returns the load of others."""
        if len(self.steps) < 2:
            return None
        reference = default if default in self.steps else next(iter(self.steps))
        calls = {
            option: functools.partial(_timed_step, step, work)
            for option, step in self.steps.items()
        }
        keep_freed_memory()  # as in a run after its first step: all block sizes were allocated once
        rounds = time_rounds(calls, reference, seconds, load)
        for option, step_seconds in rounds.seconds.items():
            result = self.results[option]
            self.results[option] = dataclasses.replace(result, seconds=tuple(step_seconds))
        return rounds.others

    def free(self) -> None:
        """Free the memory of all steps before the run builds its own, and forget their peak."""
        self.steps.clear()
        self.models.clear()
        return_freed_memory()
        for device in self.devices.values():
            device.reset_peak()


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
