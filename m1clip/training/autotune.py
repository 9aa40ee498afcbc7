"""Resolve `auto` settings: device, precision and attention by measurement, batch sizes by predicted memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from m1clip import __version__
from m1clip.config import Config
from m1clip.data.cache import DecodePlan, user_cache
from m1clip.data.images import Preprocess
from m1clip.data.loader import BatchPlan
from m1clip.data.prepare import open_data
from m1clip.data.types import Source
from m1clip.errors import UserError
from m1clip.formatting import amount, plural
from m1clip.hardware.device import (
    DTYPES,
    Device,
    Kind,
    Precision,
    autocast,
    available,
    check_compile,
    choose_device,
    choose_precision,
    rules,
    threads,
)
from m1clip.hardware.facts import Facts
from m1clip.hardware.memory import map_large_blocks, return_freed_memory
from m1clip.hardware.timing import BUSY, Load, alternate, timing
from m1clip.io import read_small, write_json
from m1clip.model.clip import CLIP
from m1clip.model.layers import AttentionKind, attention
from m1clip.training.memory import (
    Forecast,
    Parts,
    forecast,
    predicted_peak,
    stand_in,
    tensor_limit,
    tracer,
    warm_process,
)
from m1clip.training.parity import PAIRS, TOLERANCE, few, gradient, relative_difference
from m1clip.training.step import TrainStep
from m1clip.training.transfer import Start

MOST_SECONDS = 30.0
MINUTES_FRACTION = 0.05  # of --minutes, at most
LEAST_STEPS, MOST_STEPS = 2, 5
CLEAR = 1.5  # speedup that cannot be explained by other programs
PROBE_BATCH = 64  # a larger batch takes longer and changes no decision


@dataclass(frozen=True)
class Tried:
    """One device and precision: its step time, or why it was rejected."""

    device: Kind
    precision: Precision
    step_seconds: float | None
    gradient_difference: float | None
    out: str = ""
    processor_seconds: float | None = None  # CPU time of a step, over all threads
    others: float | None = None  # fraction of CPU time used by other programs during the measurement


def paces(tried: Sequence[Tried]) -> tuple[dict[Tried, float], bool]:
    """The time by which the accepted candidates are compared, and whether the machine was busy.

    Wall time; on a busy machine, if only the CPU is tried, its CPU time: candidates are measured one after another,
    so other programs may affect only some of them.
    """
    good = [t for t in tried if t.step_seconds is not None]
    busy = any(t.others is not None and t.others > BUSY for t in good)
    if busy and all(t.device == "cpu" and t.processor_seconds for t in good):
        return {t: t.processor_seconds or 0.0 for t in good}, True
    return {t: t.step_seconds or 0.0 for t in good}, busy


@dataclass(frozen=True)
class Choice:
    """The choice and the measurements behind it (none if there was nothing to choose)."""

    device: Kind
    precision: Precision
    tried: tuple[Tried, ...] = ()
    batch: int = 0
    cached: bool = False

    @property
    def why(self) -> str:
        """The reason, shown after the device name; empty if nothing was measured."""
        pace, busy = paces(self.tried)
        mine = next((t for t in pace if (t.device, t.precision) == (self.device, self.precision)), None)
        others = [t for t in self.tried if t is not mine]
        if mine is None or not others:
            return ""
        words = []
        for t in others:
            one = f"{t.device} {t.precision}"
            words.append(f"{pace[t] / pace[mine]:.1f}x as fast as {one}" if t in pace else f"{one} rejected: {t.out}")
        when = " in an earlier run" if self.cached else " while other programs ran" if busy else ""
        return f"{', '.join(words)}; measured with batch {self.batch}{when}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the run log and the cache."""
        return {**dataclasses.asdict(self), "tried": [dataclasses.asdict(t) for t in self.tried]}


def candidates(device: str, precision: str, facts: Facts) -> list[tuple[Kind, Precision]]:
    """The candidates to measure, unless the user or the device rules have already decided."""
    found: list[tuple[Kind, Precision]] = []
    for kind in available(facts):
        if device not in ("auto", kind):
            continue
        rule = rules(kind, facts)
        usual: list[Precision] = {"yes": ["bf16"], "no": ["fp32"], "measure": ["fp32", "bf16"]}[rule.bf16]  # type: ignore[assignment]
        named = [p for p in rule.precisions if p == precision]
        found += [(kind, p) for p in (usual if precision == "auto" else named)]
    return found


def choose(
    config: Config,
    start: Start,
    facts: Facts,
    text_tokens: int,
    folder: Path | None = None,
    measure: Callable[..., Tried] | None = None,
) -> Choice:
    """The fastest device and precision for this model; measured for at most half a minute, or read from the cache."""
    options = candidates(config.train.device, config.train.precision, facts)
    if len(options) == 1:
        return Choice(*options[0])
    # Half of the run's batch: fp32 needs twice the memory of bf16, and measuring should not need more than the run.
    batch = min(-(-(config.train.batch_size or 0) // 2) or PROBE_BATCH, PROBE_BATCH)
    path = (folder or user_cache()) / "choices" / f"{_key(config, start, facts, batch, text_tokens, options)}.json"
    kept = _read(path, options)
    if kept is not None:
        return kept
    if measure is not None:
        tried = [measure(config, start, facts, kind, precision) for kind, precision in options]
    else:
        minutes = config.train.minutes
        most = MOST_SECONDS if minutes is None else min(MOST_SECONDS, MINUTES_FRACTION * 60 * minutes)
        found = _measured(config, start, facts, options, text_tokens, batch, most)
        if found is None:
            return Choice(*options[0])
        tried, batch = found
    pace, busy = paces(tried)
    if not pace:
        raise UserError(f"no device passed its test: {'; '.join(f'{t.device} {t.precision}: {t.out}' for t in tried)}")
    best = min(pace, key=lambda t: pace[t])
    choice = Choice(best.device, best.precision, tuple(tried), batch)
    clear = all(seconds >= CLEAR * pace[best] for t, seconds in pace.items() if t is not best)
    if clear or not busy:  # otherwise use it for this run only; the next one measures again
        with contextlib.suppress(OSError):  # the cache folder is not writable: measure again next time
            write_json(path, choice.to_dict())
    return choice


def affordable(batch: int, pair_seconds: float, options: int, seconds: float = MOST_SECONDS) -> int:
    """A batch size that allows three steps of each option in the time, if all were as slow as the CPU in fp32."""
    most = int(seconds / (3 * options) / max(pair_seconds, 1e-9))
    return max(min(batch, PAIRS), min(batch, most))


def _measured(
    config: Config,
    start: Start,
    facts: Facts,
    options: list[tuple[Kind, Precision]],
    text_tokens: int,
    batch: int,
    most: float,
) -> tuple[list[Tried], int] | None:
    """Check the gradients of all candidates, then time their steps, so that peak memory is that of a step.

    None if the gradients alone would take more than `most` seconds.
    """
    begin = time.monotonic()
    map_large_blocks()
    several = config.data.captions_per_step or 1
    torch.manual_seed(config.seed)
    samples = stand_in(start.config, PAIRS, text_tokens, several)
    truth = _reference(config, start, facts, samples)
    spent = time.monotonic() - begin
    if spent * (1 + len(options)) > most:
        return None
    batch = affordable(batch, spent / PAIRS, len(options), most)
    checked = [check_gradient(config, start, facts, kind, precision, samples, truth) for kind, precision in options]
    del truth
    return_freed_memory()
    work = stand_in(start.config, batch, text_tokens, several)
    tried = []
    for index, candidate in enumerate(checked):
        share = (most - (time.monotonic() - begin)) / (len(checked) - index)
        tried.append(candidate if candidate.out else time_step(config, start, facts, candidate, work, share))
    return tried, batch


def check_gradient(
    config: Config, start: Start, facts: Facts, kind: Kind, precision: Precision, samples: Any, truth: torch.Tensor
) -> Tried:
    """The candidate with its gradient error; rejected if the error is too large."""
    device = Device(kind, facts)

    def apart() -> float:
        model = _model(config, start, device, precision)
        here = gradient(
            model, few(samples), Preprocess(image_size=start.config.image_size), autocast(device, precision)
        )
        del model
        return relative_difference(here, truth)

    found = _within_reason(device, precision, lambda: Tried(kind, precision, None, apart()))
    if found.gradient_difference is not None and found.gradient_difference > TOLERANCE[precision]:
        return dataclasses.replace(found, out=f"gradients {found.gradient_difference:.0%} different from the CPU's")
    return found


def time_step(config: Config, start: Start, facts: Facts, candidate: Tried, work: Any, seconds: float) -> Tried:
    """Time the training step of a candidate, as many times as fit in `seconds`."""
    kind, precision = candidate.device, candidate.precision
    device = Device(kind, facts)
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, compile=False))
    if not plain.train.batch_size:
        plain = dataclasses.replace(plain, train=dataclasses.replace(plain.train, batch_size=len(work)))

    def timed() -> Tried:
        model = _model(config, start, device, precision)
        preprocess = Preprocess(image_size=start.config.image_size)
        update = TrainStep(model, plain, device, precision, preprocess)
        update.keeps_memory = False  # cached blocks would fragment the heap before the run starts
        load = Load()
        taken, used = _timed(update, work, device, seconds)
        return dataclasses.replace(candidate, step_seconds=taken, processor_seconds=used, others=load.others())

    return _within_reason(device, precision, timed)


def _within_reason(device: Device, precision: Precision, work: Callable[[], Tried]) -> Tried:
    """The result, or why the device failed; then release its memory and reset its peak."""
    try:
        return work()
    except torch.OutOfMemoryError:
        return Tried(device.kind, precision, None, None, "does not fit in its memory")
    except RuntimeError as error:
        return Tried(device.kind, precision, None, None, str(error).strip().splitlines()[0][:120])
    finally:
        return_freed_memory()
        device.reset_peak()  # the run reports its own peak


def _timed(update: TrainStep, samples: Any, device: Device, seconds: float) -> tuple[float, float]:
    """Wall seconds and CPU seconds of a step."""
    begin, taken, used = time.monotonic(), [], []
    for number in range(1 + MOST_STEPS):
        start, before = time.perf_counter(), time.process_time()
        update(samples, number + 1)
        device.synchronize()
        taken.append(time.perf_counter() - start)
        used.append(time.process_time() - before)
        # The first step is cold; it counts only if there is no time for another.
        if len(taken) > LEAST_STEPS and time.monotonic() - begin + taken[-1] > seconds:
            break
        if time.monotonic() - begin > seconds:
            break
    # On a busy machine the lower quartile is a better estimate than the median.
    return timing(taken[1:] or taken).low, timing(used[1:] or used).low


def _model(config: Config, start: Start, device: Device, precision: Precision) -> CLIP:
    torch.manual_seed(config.seed)
    attention: AttentionKind = "sdpa" if device.kind != "cpu" or precision == "fp32" else "bmm"
    # CLIP's initialization: with zero-initialized residual branches the gradient would be mostly rounding error.
    changes = {
        name: dataclasses.replace(tower, init="clip")
        for name in ("image_tower", "text_tower")
        if hasattr(tower := getattr(start.config, name), "init")
    }
    shape = dataclasses.replace(start.config, **changes)
    model = dataclasses.replace(start, config=shape).build().to(device.torch).eval()
    model.set_attention(attention)
    model.set_activation_checkpointing(config.model.grad_checkpointing)
    return model


def _reference(config: Config, start: Start, facts: Facts, samples: Any) -> torch.Tensor:
    """The reference gradient: the CPU's in fp32."""
    host = _model(config, start, Device("cpu", facts), "fp32")
    return gradient(host, few(samples), Preprocess(image_size=start.config.image_size), contextlib.nullcontext)


def _key(
    config: Config, start: Start, facts: Facts, batch: int, text_tokens: int, options: list[tuple[Kind, Precision]]
) -> str:
    """Cache key of machine, model and versions; a change in any of them causes a new measurement."""
    values = {
        "format": 2,  # format 1 did not account for other programs
        "facts": facts.to_dict(),
        "shape": start.config.to_dict(),
        "trainable": start.trainable,
        "batch": batch,
        "tokens": text_tokens,
        "options": options,
        "optim": config.optim.optimizer,
        "recompute": config.model.grad_checkpointing,
        "chunk": config.train.micro_batch,
        "several": config.data.captions_per_step,
        "threads": torch.get_num_threads(),
        "m1clip": __version__,
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]


def _read(path: Path, options: list[tuple[Kind, Precision]]) -> Choice | None:
    try:
        values = json.loads(read_small(path))
        tried = tuple(Tried(**item) for item in values["tried"])
        chosen, batch = (values["device"], values["precision"]), int(values["batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Choice(*chosen, tried, batch, cached=True) if chosen in options else None


SAFE = 0.8  # fraction of free memory to use without --memory; the rest is for other programs
MOST_AUTO = 1024  # samples; larger batches would need another learning rate
MIN_STEPS = 8  # per epoch, so that a small dataset is not one batch
LEAST_CHUNK = 2
DEFAULT_BATCH = 64
HEADS_BATCH = 512  # with new heads on pretrained towers
TOWERS_BATCH = 128  # to fine-tune pretrained towers
SMALL_BATCH = 8  # with fewer negatives the loss is a weak signal
TINY_SET = 100  # images; fewer cause a warning


def open_training_data(config: Config, image_size: int, plan: DecodePlan) -> Source:
    """Open the data of a run; UserError if the images cannot fill a batch."""
    with plan.progress("reading the data"):
        source = open_data(config.data, image_size, config.seed)
        images, names = len(source.samples("train")), ", ".join(config.data.source)
    if not images:
        raise UserError(f"{names}: no training samples found")
    if images == 1:
        raise UserError(f"{names}: only one training image; contrastive training needs at least 2")
    BatchPlan.full(images, config.train.batch_size or 2, config.seed)
    if images < TINY_SET:
        plan.warn(
            f"only {images} training images: the run will show that everything works, but the model will "
            f"overfit; expect scores near chance on other images, and use at least a few hundred images"
        )
    return source


def largest_batch(images: int) -> int:
    """The largest batch size for this many images: an epoch has several steps, unless the batch would be too small."""
    return min(images, max(SMALL_BATCH, power_of_two(images // MIN_STEPS)))


def choose_batch(config: Config, start: Start, images: int) -> Config:
    """The config with its recipe's default batch size, if none was given; `choose_hardware` resolves `auto`."""
    if config.train.batch_size is not None:
        return config
    default = HEADS_BATCH if start.new_heads else DEFAULT_BATCH
    if not start.new_heads and start.config.image_head.kind != "projection":
        default = TOWERS_BATCH
    batch = min(default, largest_batch(images))
    micro_batch = config.train.micro_batch if config.train.micro_batch < batch else 0
    train = dataclasses.replace(config.train, batch_size=batch, micro_batch=micro_batch)
    return dataclasses.replace(config, train=train)


@dataclass(frozen=True)
class Fit:
    """A batch size, micro-batch and checkpointing that fit in memory, and why."""

    batch: int
    chunk: int
    recompute: bool
    why: str


def fit_memory(
    config: Config, start: Start, device: Device, precision: Precision, facts: Facts, text_tokens: int, images: int
) -> Fit | None:
    """Find settings that fit in memory; None if the batch size is given and there is no limit."""
    train = config.train
    if train.batch_size and not train.memory:
        return None
    process = warm_process(facts) if device.kind == "cpu" else 0
    limit = amount(train.memory, "B", "--memory") if train.memory else SAFE * device.free_bytes() + process
    cached = device.kind == "cpu" and start.trainable.image
    data = images * start.config.image_size**2 * 3 if cached else 0

    first: list[Forecast] = []

    def line(recompute: bool) -> Forecast:
        wanted = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, grad_checkpointing=recompute),
            train=dataclasses.replace(train, batch_size=2, micro_batch=0),
        )
        trace = tracer(wanted, start, device.kind, precision, facts, text_tokens)
        first.append(forecast(trace, first[0] if first else None))  # the second one has the same logits and optimizer
        return first[-1]

    room = tensor_limit(limit, device.kind, process, data)
    most = max(2, min(MOST_AUTO, largest_batch(images)))
    fit = decide(train.batch_size or 0, train.micro_batch, config.model.grad_checkpointing, most, room, line)
    if fit is None:
        smallest = predicted_peak(_at(line(True), LEAST_CHUNK), device.kind, process, data)
        raise UserError(
            f"--memory {train.memory or 'of this machine'}: {config.model.name} needs at least "
            f"{sum(smallest.values()) / 1e9:.1f} GB of {limit / 1e9:.1f} GB; use a smaller --model"
        )
    return dataclasses.replace(fit, why=f"{fit.why}, within {limit / 1e9:.1f} GB")


def decide(
    batch: int, chunk: int, recompute: bool, most: int, room: float, line: Callable[[bool], Forecast]
) -> Fit | None:
    """Pure function: `line(recompute)` predicts bytes by batch size; a batch of 0 is to be chosen."""
    kept = line(recompute)
    if not batch:
        largest = power_of_two(kept.largest(room, most))
        if largest >= 2:
            return Fit(largest, chunk if chunk <= largest else 0, recompute, f"batch {largest} fits")
        batch = 2
    part = chunk or batch
    if kept.total(part) <= room:
        return Fit(batch, chunk, recompute, f"batch {batch} fits" + (f" in micro-batches of {chunk}" if chunk else ""))
    frugal = line(True)
    if not chunk and frugal.total(batch) <= room:
        return Fit(batch, 0, True, f"batch {batch} fits with gradient checkpointing")
    # Both cost about one extra forward pass; micro-batches can save more than gradient checkpointing.
    for again, forecast_of in ((recompute, kept), (True, frugal)):
        largest = power_of_two(forecast_of.largest(room, batch))
        if largest >= LEAST_CHUNK:
            words = " and gradient checkpointing" if again and not recompute else ""
            return Fit(batch, min(largest, batch), again, f"batch {batch} fits in micro-batches of {largest}{words}")
    return None


def power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def _at(line: Forecast, batch: int) -> Parts:
    return {"tensors": int(line.total(batch))}


MAX_CAPTIONS = 5  # per image and step, by default; docs/recipe.md


def default_captions(config: Config, counts: list[int]) -> int:
    """Captions per image and step: what most images have, unless configured."""
    return config.data.captions_per_step or max(1, min(int(np.median(counts)), MAX_CAPTIONS))


def choose_hardware(
    config: Config,
    start: Start,
    facts: Facts,
    text_tokens: int,
    images: int,
    say: Callable[[str], None],
    choices: dict[str, Any],
) -> tuple[Config, Device, Precision]:
    """Choose device and precision by measurement and a batch size that fits; prints and records the reasons."""
    torch.set_num_threads(threads(config.train.threads, facts))
    auto = "auto" in (config.train.device, config.train.precision)
    found = choose(config, start, facts, text_tokens) if auto else None
    if found is not None:
        kind, precision = found.device, found.precision
        choices["hardware"] = found.to_dict()
    else:
        kind = choose_device(config.train.device, facts)
        precision = choose_precision(config.train.precision, kind, facts, None)
    device = Device(kind, facts)
    if config.model.compile:
        check_compile(kind)
    say(hardware_line(device, facts, precision, found.why if found else ""))
    fit = fit_memory(config, start, device, precision, facts, text_tokens, images)
    if fit is not None:
        choices["memory"] = dataclasses.asdict(fit)
        say(f"memory     {fit.why}")
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, grad_checkpointing=fit.recompute),
            train=dataclasses.replace(config.train, batch_size=fit.batch, micro_batch=fit.chunk),
        )
    return config, device, precision


def hardware_line(device: Device, facts: Facts, precision: Precision, why: str) -> str:
    """The line that reports device and precision."""
    name = facts.cuda if device.kind == "cuda" else facts.cpu
    cores = f", {plural(torch.get_num_threads(), 'thread')}" if device.kind == "cpu" else ""
    return f"device     {device.kind}: {name}{cores}, {precision}{f' ({why})' if why else ''}"


KINDS: tuple[AttentionKind, ...] = ("bmm", "sdpa")


@functools.cache
def attention_seconds(
    device: Device, precision: Precision, shape: tuple[int, int, int, int], causal: bool
) -> dict[AttentionKind, float]:
    """Seconds of the forward and backward pass of each implementation, timed in alternation."""
    dtype = DTYPES[precision]
    q, k, v = (torch.randn(shape, device=device.torch, dtype=dtype, requires_grad=True) for _ in range(3))
    cotangent = torch.randn(shape, device=device.torch, dtype=dtype)

    def step(kind: AttentionKind) -> None:
        torch.autograd.grad((attention(q, k, v, causal, kind) * cotangent).sum(), (q, k, v))

    calls = {kind: functools.partial(step, kind) for kind in KINDS}
    times = alternate(calls, device.synchronize, rounds=25, warmup=2, seconds=1.0)
    # On a busy machine the lower quartile is a better estimate than the median.
    return {kind: times[kind].low for kind in KINDS}


def choose_attention(
    start: Start, device: Device, precision: Precision, batch: int, text_tokens: int
) -> tuple[Literal["auto", "bmm", "sdpa"], dict[AttentionKind, float]]:
    """The faster implementation for our own trainable towers, and the measured seconds behind it.

    `auto` if neither tower is one of them.
    """
    image, text = start.config.image_tower, start.config.text_tower
    towers: list[tuple[Any, int, bool]] = []
    if start.trainable.image and image.kind == "vit":
        towers.append((image, image.tokens, False))
    if start.trainable.text and text.kind == "transformer":
        towers.append((text, text_tokens, True))
    if not towers:
        return "auto", {}
    if device.rules.attention == "sdpa":
        return "sdpa", {}
    seconds = dict.fromkeys(KINDS, 0.0)
    for tower, length, causal in towers:
        shape = (min(batch, PROBE_BATCH), tower.heads, length, tower.width // tower.heads)
        for kind, value in attention_seconds(device, precision, shape, causal).items():
            seconds[kind] += tower.layers * value
    return min(KINDS, key=lambda kind: seconds[kind]), seconds
