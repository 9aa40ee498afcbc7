"""--memory and --batch auto: the batch, chunk and recomputation that stay within a limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from m1clip.config import Config
from m1clip.data.loader import BatchPlan
from m1clip.data.pair import Source
from m1clip.data.prepare import DecodePlan, open_data
from m1clip.errors import UserError
from m1clip.hardware.device import Device, Precision
from m1clip.hardware.facts import Facts
from m1clip.model.shape import ClipShape
from m1clip.train.memory import Forecast, Parts, forecast, foretold_peak, tensor_limit, tracer, warm_process
from m1clip.units import amount

SAFE = 0.8  # of the memory that is free, where no limit is given: other programs want some too
MOST_AUTO = 1024  # pairs; more is a matter of taste, and of the learning rate
LEAST_STEPS = 8  # an epoch must have so many, so that a small set is not one batch
LEAST_CHUNK = 2
USUAL_BATCH = {"scratch": 64, "frozen": 512, "unfreeze": 128}
SMALL_BATCH = 8  # with fewer negatives a step teaches little
TINY_SET = 100  # images; a run on fewer warns


def open_training_data(config: Config, image_size: int, plan: DecodePlan) -> Source:
    """The data of a run; a batch that the images cannot fill is refused here, before any work."""
    with plan.progress("reading the data"):
        source = open_data(config.data, image_size, config.seed)
        images, names = len(source.pairs("train")), ", ".join(config.data.source)
    if not images:
        raise UserError(f"{names}: no training pairs found")
    if images == 1:
        raise UserError(f"{names}: one training image; training compares images, so it needs at least 2")
    BatchPlan.full(images, config.train.batch or 2, config.seed)
    if images < TINY_SET:
        plan.warn(
            f"{images} training images are very few: the run shows that everything works, but the model will "
            f"overfit them; expect scores near chance on other images, and bring a few hundred images or more"
        )
    return source


def largest_batch(images: int) -> int:
    """The largest batch for so many images: an epoch has several steps, unless the batch would be too small."""
    return min(images, max(SMALL_BATCH, power_of_two(images // LEAST_STEPS)))


def with_batch(config: Config, usual: int, images: int) -> Config:
    """The config with the usual batch of its recipe where the user named none, and no more than fits the images."""
    train = config.train
    batch = train.batch or min(usual, largest_batch(images))
    chunk = train.chunk if train.chunk < batch or train.batch else 0
    return dataclasses.replace(config, train=dataclasses.replace(train, batch=batch, chunk=chunk))


@dataclass(frozen=True)
class Fit:
    """What was decided, and why in a sentence."""

    batch: int
    chunk: int
    recompute: bool
    why: str


def fit_memory(
    config: Config, shape: ClipShape, device: Device, precision: Precision, facts: Facts, text_tokens: int,
    pictures: int,
) -> Fit | None:  # fmt: skip
    """The batch and means that fit; None where nothing was left open and no limit was given."""
    train = config.train
    if train.batch and not train.memory:
        return None
    process = warm_process(facts) if device.kind == "cpu" else 0
    limit = amount(train.memory, "B", "--memory") if train.memory else SAFE * device.free_bytes() + process
    data = pictures * shape.image_size**2 * 3 if device.kind == "cpu" else 0

    first: list[Forecast] = []

    def line(recompute: bool) -> Forecast:
        wanted = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, recompute=recompute),
            train=dataclasses.replace(train, batch=2, chunk=0),
        )
        trace = tracer(wanted, shape, device.kind, precision, facts, text_tokens)
        first.append(
            forecast(trace, first[0] if first else None)
        )  # the second one shares logits and optimizer
        return first[-1]

    room = tensor_limit(limit, device.kind, process, data)
    most = max(2, min(MOST_AUTO, largest_batch(pictures)))
    fit = decide(train.batch or 0, train.chunk, config.model.recompute, most, room, line)
    if fit is None:
        smallest = foretold_peak(_at(line(True), LEAST_CHUNK), device.kind, process, data)
        raise UserError(
            f"--memory {train.memory or 'of this machine'}: {config.model.preset} needs at least "
            f"{sum(smallest.values()) / 1e9:.1f} GB of {limit / 1e9:.1f} GB; take a smaller --model"
        )
    return dataclasses.replace(fit, why=f"{fit.why}, within {limit / 1e9:.1f} GB")


def decide(
    batch: int, chunk: int, recompute: bool, most: int, room: float, line: Callable[[bool], Forecast]
) -> Fit | None:
    """Pure: `line(recompute)` foretells bytes by batch. A batch of 0 is to be chosen, others are kept."""
    kept = line(recompute)
    if not batch:
        largest = power_of_two(kept.largest(room, most))
        if largest >= 2:
            return Fit(largest, chunk if chunk <= largest else 0, recompute, f"batch {largest} fits")
        batch = 2
    part = chunk or batch
    if kept.total(part) <= room:
        return Fit(
            batch, chunk, recompute, f"batch {batch} fits" + (f" in chunks of {chunk}" if chunk else "")
        )
    frugal = line(True)
    if not chunk and frugal.total(batch) <= room:
        return Fit(batch, 0, True, f"batch {batch} fits with recomputation")
    # Both cost about one more forward pass; chunks shrink further than recomputation does.
    for again, forecast_of in ((recompute, kept), (True, frugal)):
        largest = power_of_two(forecast_of.largest(room, batch))
        if largest >= LEAST_CHUNK:
            words = " and recomputation" if again and not recompute else ""
            return Fit(batch, min(largest, batch), again, f"batch {batch} fits in chunks of {largest}{words}")
    return None


def power_of_two(number: int) -> int:
    """The largest power of two up to a number; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def _at(line: Forecast, batch: int) -> Parts:
    return {"tensors": int(line.total(batch))}


def choice(fit: Fit | None) -> dict[str, Any] | None:
    """For the run's log."""
    return None if fit is None else dataclasses.asdict(fit)
