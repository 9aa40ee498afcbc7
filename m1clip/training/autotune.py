"""Resolve `auto` settings: device and precision by measurement, batch sizes by predicted memory."""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m1clip import __version__
from m1clip.config import Config
from m1clip.data.cache import user_cache
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.errors import UserError, first_line
from m1clip.formatting import amount, plural
from m1clip.hardware.device import Device, Kind, Precision, available, choose_device, choose_precision, rules, threads
from m1clip.hardware.facts import Facts
from m1clip.hardware.memory import map_large_blocks, return_freed_memory
from m1clip.hardware.timing import timing
from m1clip.io import read_small, write_json
from m1clip.training.memory import MemoryEstimate, power_of_two, process_bytes, random_batch
from m1clip.training.parity import PAIRS, TOLERANCE, fill_zeros, gradient, relative_difference
from m1clip.training.step import TrainStep
from m1clip.training.transfer import Start

MAX_SECONDS = 30.0  # for measuring all candidates
MINUTES_FRACTION = 0.05  # of --minutes, at most
MIN_STEPS, MAX_STEPS = 2, 5  # timed steps of a candidate
PROBE_BATCH = 64  # a larger batch takes longer and changes no decision
SAFE = 0.8  # fraction of free memory to use without --memory; the rest is for other programs
MAX_AUTO_BATCH = 1024  # larger batches would need another learning rate
MIN_STEPS_PER_EPOCH = 8  # so that a small dataset is not one batch
DEFAULT_BATCH = 64
HEADS_BATCH = 512  # with new heads on pretrained towers
TOWERS_BATCH = 128  # to fine-tune pretrained towers
SMALL_BATCH = 8  # with fewer negatives the loss is a weak signal


@dataclass(frozen=True)
class Candidate:
    """A device and precision: its step time, or why it was rejected."""

    device: Kind
    precision: Precision
    # CPU time over all threads if every candidate is the CPU: other programs do not affect it.
    step_seconds: float = 0.0
    gradient_difference: float | None = None
    rejected: str = ""


@dataclass(frozen=True)
class Choice:
    """The choice and the measurements behind it (none if there was nothing to choose)."""

    device: Kind
    precision: Precision
    candidates: tuple[Candidate, ...] = ()
    batch: int = 0
    cached: bool = False

    @property
    def why(self) -> str:
        """The reason, shown after the device name; empty if nothing was measured."""
        mine = next((c for c in self.candidates if (c.device, c.precision) == (self.device, self.precision)), None)
        if mine is None or len(self.candidates) == 1:
            return ""
        words = []
        for other in self.candidates:
            name = f"{other.device} {other.precision}"
            if other.rejected:
                words.append(f"{name} rejected: {other.rejected}")
            elif other is not mine:
                words.append(f"{other.step_seconds / mine.step_seconds:.1f}x as fast as {name}")
        return f"{', '.join(words)}; measured with batch {self.batch}{' in an earlier run' if self.cached else ''}"


def candidates(device: str, precision: str, facts: Facts) -> list[tuple[Kind, Precision]]:
    """The candidates to measure, unless the user or the device rules have already decided."""
    found: list[tuple[Kind, Precision]] = []
    for kind in available(facts):
        if device not in ("auto", kind) or (device == "auto" and kind == "mlx"):
            continue
        rule = rules(kind, facts)
        usual: list[Precision] = {"yes": ["bf16"], "no": ["fp32"], "measure": ["fp32", "bf16"]}[rule.bf16]  # type: ignore[assignment]
        named = [p for p in rule.precisions if p == precision]
        found += [(kind, p) for p in (usual if precision == "auto" else named)]
    return found


def choose(config: Config, start: Start, facts: Facts, text_tokens: int, folder: Path | None = None) -> Choice:
    """The fastest device and precision for this model; measured for at most half a minute, or read from the cache."""
    options = candidates(config.train.device, config.train.precision, facts)
    if len(options) == 1:
        return Choice(*options[0])
    # Half of the run's batch: fp32 needs twice the memory of bf16, and measuring should not need more than the run.
    batch = min(-(-(config.train.batch_size or 0) // 2) or PROBE_BATCH, PROBE_BATCH)
    path = (folder or user_cache()) / "choices" / f"{_key(config, start, facts, batch, text_tokens, options)}.json"
    cached = _read(path, options)
    if cached is not None:
        return cached
    measured, batch = measure(config, start, facts, options, text_tokens, batch)
    good = [candidate for candidate in measured if not candidate.rejected]
    if not good:
        reasons = "; ".join(f"{c.device} {c.precision}: {c.rejected}" for c in measured)
        raise UserError(f"no device passed its test: {reasons}")
    best = min(good, key=lambda candidate: candidate.step_seconds)
    choice = Choice(best.device, best.precision, tuple(measured), batch)
    if best.step_seconds:
        with contextlib.suppress(OSError):  # the cache folder is not writable: measure again next time
            write_json(path, dataclasses.asdict(choice))
    return choice


def measure(
    config: Config, start: Start, facts: Facts, options: list[tuple[Kind, Precision]], text_tokens: int, batch: int
) -> tuple[list[Candidate], int]:
    """Check the gradients of each candidate, then time its steps; also the batch size that was affordable.

    Only the first candidate, without a time, if the gradients alone would take too long.
    """
    minutes = config.train.minutes
    limit = MAX_SECONDS if minutes is None else min(MAX_SECONDS, MINUTES_FRACTION * 60 * minutes)
    begin = time.monotonic()
    map_large_blocks()
    torch.manual_seed(config.seed)
    samples = random_batch(start.config, PAIRS, text_tokens)
    cpu = Device("cpu", facts)
    reference = _gradient(_step(config, start, cpu, "fp32", batch), samples)
    spent = time.monotonic() - begin
    if spent * (1 + len(options)) > limit:
        return [Candidate(*options[0])], 0
    # Allows three steps of each option in the time, if all were as slow as the CPU in fp32.
    batch = max(min(batch, PAIRS), min(batch, int(limit / (3 * len(options)) / max(spent / PAIRS, 1e-9))))
    work = random_batch(start.config, batch, text_tokens, config.data.captions_per_step or 1)
    only_cpu = all(kind == "cpu" for kind, _ in options)
    found = []
    for index, (kind, precision) in enumerate(options):
        device = Device(kind, facts)
        seconds = (limit - (time.monotonic() - begin)) / (len(options) - index)
        try:
            step = _step(config, start, device, precision, batch)
            difference = relative_difference(_gradient(step, samples), reference)
            rejected, taken = "", 0.0
            if difference > TOLERANCE[precision]:
                rejected = f"gradients {difference:.0%} different from the CPU's"
            else:
                taken = time_step(step, work, seconds, only_cpu)
            found.append(Candidate(kind, precision, taken, difference, rejected))
        except torch.OutOfMemoryError:
            found.append(Candidate(kind, precision, rejected="does not fit in its memory"))
        except RuntimeError as error:
            found.append(Candidate(kind, precision, rejected=first_line(error)))
        finally:
            step = None  # type: ignore[assignment]  # free its memory before the next candidate
            return_freed_memory()
            device.reset_peak()  # the run reports its own peak
    return found, batch


def time_step(step: TrainStep, work: Batch, seconds: float, cpu_time: bool) -> float:
    """Seconds of a training step (of CPU time on request), measured as many times as fit in `seconds`."""
    clock = time.process_time if cpu_time else time.perf_counter
    begin, taken = time.monotonic(), []
    for number in range(1 + MAX_STEPS):
        before, used = time.monotonic(), clock()
        step(work, number + 1)
        step.device.synchronize()
        taken.append(clock() - used)
        now = time.monotonic()
        # The first step is cold; it counts only if there is no time for another.
        if now - begin > seconds or (len(taken) > MIN_STEPS and 2 * now - begin - before > seconds):
            break
    # On a busy machine the lower quartile is a better estimate than the median.
    return timing(taken[1:] or taken).low


def _step(config: Config, start: Start, device: Device, precision: Precision, batch: int) -> TrainStep:
    eager = config.changed(compile=False, batch_size=config.train.batch_size or batch)
    torch.manual_seed(config.seed)
    model = fill_zeros(start.build()).to(device.torch)
    model.set_activation_checkpointing(config.model.grad_checkpointing)
    step = TrainStep(model, eager, device, precision, Preprocess(image_size=start.config.image_size))
    step.keeps_memory = False  # cached blocks would fragment the heap before the run starts
    return step


def _gradient(step: TrainStep, samples: Batch) -> torch.Tensor:
    _, found = gradient(step.for_check(step.model), samples)
    step.optimizer.zero_grad()
    step.model.train()
    return found


def _key(
    config: Config, start: Start, facts: Facts, batch: int, text_tokens: int, options: list[tuple[Kind, Precision]]
) -> str:
    """Cache key of machine, model and versions; a change in any of them causes a new measurement."""
    values = (
        dataclasses.asdict(facts),
        start.config.to_dict(),
        start.trainable,
        (batch, text_tokens, config.data.captions_per_step, config.train.micro_batch),
        options,
        (config.optim.optimizer, config.model.grad_checkpointing, torch.get_num_threads()),
        (__version__, [field.name for field in dataclasses.fields(Candidate)]),
    )
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]


def _read(path: Path, options: list[tuple[Kind, Precision]]) -> Choice | None:
    try:
        values = json.loads(read_small(path))
        measured = tuple(Candidate(**item) for item in values["candidates"])
        chosen, batch = (values["device"], values["precision"]), int(values["batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Choice(*chosen, measured, batch, cached=True) if chosen in options else None


def choose_hardware(
    config: Config, start: Start, facts: Facts, text_tokens: int, say: Callable[[str], None], choices: dict[str, Any]
) -> tuple[Device, Precision]:
    """Choose device and precision, by measurement where they are `auto`; prints and records the reasons."""
    torch.set_num_threads(threads(config.train.threads, facts))
    if not candidates(config.train.device, config.train.precision, facts):
        choose_precision(config.train.precision, choose_device(config.train.device, facts), facts, None)  # raises
    found = choose(config, start, facts, text_tokens)
    if found.candidates:
        choices["hardware"] = dataclasses.asdict(found)
    device = Device(found.device, facts)
    name = facts.cuda if device.kind == "cuda" else facts.cpu
    cores = f", {plural(torch.get_num_threads(), 'thread')}" if device.kind == "cpu" else ""
    if device.kind == "mlx":
        cores = f", mlx {facts.mlx}" + ("" if device.has_gpu else " without a GPU: its build for the CPU, for tests")
    why = f" ({found.why})" if found.why else ""
    say(f"device     {device.kind}: {name}{cores}, {found.precision}{why}")
    return device, found.precision


def largest_batch(images: int) -> int:
    """The largest batch size for this many images: an epoch has several steps, unless the batch would be too small."""
    return min(images, max(SMALL_BATCH, power_of_two(images // MIN_STEPS_PER_EPOCH)))


def default_batch(start: Start, images: int) -> int:
    batch = HEADS_BATCH if start.new_heads else DEFAULT_BATCH
    if not start.new_heads and start.config.image_head.kind != "projection":
        batch = TOWERS_BATCH
    return min(batch, largest_batch(images))


@dataclass(frozen=True)
class Fit:
    batch_size: int
    micro_batch: int
    grad_checkpointing: bool

    def __str__(self) -> str:
        how = [f"in micro-batches of {self.micro_batch}"] if self.micro_batch else []
        how += ["with gradient checkpointing"] if self.grad_checkpointing else []
        return " ".join([f"batch {self.batch_size} fits", *how])


def fit_memory(
    config: Config, start: Start, device: Device, precision: Precision, facts: Facts, text_tokens: int, images: int
) -> tuple[Fit, float] | None:
    """Settings that fit in memory, and the limit; None if the batch size is given and there is no limit."""
    train, on_cpu = config.train, device.kind == "cpu"
    if train.batch_size and not train.memory:
        return None
    used = process_bytes(facts) if on_cpu else 0
    limit = amount(train.memory, "B", "--memory") if train.memory else SAFE * device.free_bytes() + used
    data = images * start.config.image_size**2 * 3 if on_cpu and start.trainable.image else 0
    estimate = MemoryEstimate(config, start, facts, device, precision, text_tokens, data)
    fit = decide(config, max(2, min(MAX_AUTO_BATCH, largest_batch(images))), limit, estimate)
    if fit is None:
        where = f"--memory {train.memory}" if train.memory else "memory of this machine"
        raise UserError(
            f"{where}: {config.model.name} needs at least {estimate.peak(2, True) / 1e9:.1f} GB, "
            f"more than the limit of {limit / 1e9:.1f} GB; use a smaller --model"
        )
    return fit, limit


def decide(config: Config, most: int, limit: float, estimate: MemoryEstimate) -> Fit | None:
    """What fits: the configured settings, else with gradient checkpointing, else in micro-batches, else with both."""
    batch, micro, configured = config.train.batch_size, config.train.micro_batch, config.model.grad_checkpointing
    if not batch:
        batch = estimate.largest(limit, most, configured)
        if batch:
            return Fit(batch, micro if micro <= batch else 0, configured)
        batch = 2
    for checkpointing in (configured, True):
        if estimate.peak(micro or batch, checkpointing) <= limit:
            return Fit(batch, micro, checkpointing)
    for checkpointing in (configured, True):
        micro = estimate.largest(limit, batch, checkpointing)
        if micro:
            return Fit(batch, micro, checkpointing)
    return None
