"""Choose batch size, micro-batch and gradient checkpointing: by the recipe, the images and memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from m1clip import console
from m1clip.config import Config, read_recipe
from m1clip.data.loader import BatchPlan
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.training.decision import Dataset, Draft, InitialModel, Machine, MemoryModel
from m1clip.training.memory import power_of_two

MAX_CAPTIONS_PER_IMAGE = 5  # per image and step, by default; docs/recipe.md
MAX_AUTO_BATCH = 1024  # larger batches would need another learning rate
MIN_STEPS_PER_EPOCH = 8  # so that a small dataset is not one batch
CARD_STEPS_PER_EPOCH = 32  # with fewer updates, the recipe's epochs are not enough
CARD_MEMORY_FRACTION = 0.5  # the rest is for evaluations and other programs
SMALL_BATCH = 8  # with fewer negatives the loss is a weak signal


def decide_batch(draft: Draft, dataset: Dataset, model: InitialModel) -> None:
    """Captions per step, and the default batch size; `auto` stays until memory is known."""
    captions = draft.config.data.captions_per_step or max(
        1, min(dataset.median_captions, MAX_CAPTIONS_PER_IMAGE)
    )
    draft.decide("rule", captions_per_step=captions)
    if draft.config.train.batch_size is None:
        batch = default_batch(model, dataset.images)
        micro_batch = draft.config.train.micro_batch
        draft.decide(
            "rule", batch_size=batch, micro_batch=micro_batch if micro_batch < batch else 0
        )


def largest_batch(images: int) -> int:
    """The largest batch size for this many images: an epoch has several steps, unless the batch
    would be too small.
    """
    return min(images, max(SMALL_BATCH, power_of_two(images // MIN_STEPS_PER_EPOCH)))


def default_batch(model: InitialModel, images: int) -> int:
    """The batch size of the recipe, or a smaller one for few images."""
    if model.new_heads or (model.is_pretrained and not any(model.trainable)):
        recipe = read_recipe("frozen")
    elif model.is_pretrained:
        recipe = read_recipe("finetune", clip=model.shape.image_head.kind != "adapter")
    else:
        recipe = read_recipe("scratch")
    return min(recipe.batch_size, largest_batch(images))


def card_batch(images: int) -> int:
    """The largest batch size for a card: an epoch has enough steps, and the learning rate of the
    recipe still fits.
    """
    return min(MAX_AUTO_BATCH, power_of_two(images // CARD_STEPS_PER_EPOCH))


def grow_batch(
    draft: Draft, settings: Config, dataset: Dataset, model: InitialModel, machine: Machine
) -> None:
    """A larger default batch on a CUDA card, whose cores a small one leaves idle.

    Only for random weights.

    The recipes of pretrained models have their own batch sizes, and few images keep a small one.
    """
    train = draft.config.train
    batch = train.batch_size_or(0)
    max_batch = card_batch(dataset.images)
    from_random_weights = not model.is_pretrained and not model.new_heads
    is_chosen = settings.train.batch_size is not None or train.micro_batch or train.memory
    if is_chosen or train.device != "cuda" or not from_random_weights or max_batch <= batch:
        return
    limit, steps = machine.measure.memory(draft.config)
    checkpointing = draft.config.model.grad_checkpointing
    largest = steps.largest(CARD_MEMORY_FRACTION * limit, max_batch, checkpointing)
    if largest > batch:
        draft.decide("rule", batch_size=largest)
        console.print(
            f"batch      {largest} images on this card, with at least {CARD_STEPS_PER_EPOCH} steps per"
            f" epoch (--batch-size {batch} is that of smaller devices)"
        )


@dataclass(frozen=True)
class Fit:
    batch_size: int
    micro_batch: int
    grad_checkpointing: bool

    def __str__(self) -> str:
        how = [f"in micro-batches of {self.micro_batch}"] if self.micro_batch else []
        how += ["with gradient checkpointing"] if self.grad_checkpointing else []
        return " ".join([f"batch {self.batch_size} fits", *how])


def decide_memory(
    draft: Draft, dataset: Dataset, machine: Machine, measured: dict[str, Any]
) -> None:
    """Batch, micro-batch and gradient checkpointing that fit in memory, if one of them is to be
    chosen.
    """
    train = draft.config.train
    if train.batch_size_or(0) and not train.memory:
        return
    limit, steps = machine.measure.memory(draft.config)
    images = 0 if dataset.streamed else dataset.images
    fit = fit_memory(draft.config, max(2, min(MAX_AUTO_BATCH, largest_batch(images))), limit, steps)
    if fit is None:
        where = f"--memory {train.memory}" if train.memory else "memory of this machine"
        raise UserError(
            f"{where}: {draft.config.model.name} needs at least {steps.peak(2, True) / 1e9:.1f} GB,"
            f" more than the limit of {limit / 1e9:.1f} GB; use a smaller --model"
        )
    console.print(f"memory     {fit}, within {limit / 1e9:.1f} GB")
    measured["memory"] = dataclasses.asdict(fit)
    draft.decide("measurement", **measured["memory"])


def fit_memory(config: Config, max_batch: int, limit: float, steps: MemoryModel) -> Fit | None:
    """What fits: the configured settings, else with gradient checkpointing, else in micro-batches,
    else with both.
    """
    batch = config.train.batch_size_or(0)
    micro_batch = config.train.micro_batch
    configured = config.model.grad_checkpointing
    if not batch:
        batch = steps.largest(limit, max_batch, configured)
        if batch:
            return Fit(batch, micro_batch if micro_batch <= batch else 0, configured)
        batch = 2
    for checkpointing in (configured, True):
        if steps.peak(micro_batch or batch, checkpointing) <= limit:
            return Fit(batch, micro_batch, checkpointing)
    for checkpointing in (configured, True):
        micro_batch = steps.largest(limit, batch, checkpointing)
        if micro_batch:
            return Fit(batch, micro_batch, checkpointing)
    return None


def limit_batch(draft: Draft, settings: Config, images: int) -> None:
    """Unless the user gave the batch size, it is small enough for the readable images."""
    if images < 2:
        raise UserError(
            f"only {plural(images, 'training image')} can be read, and contrastive training needs"
            " at least 2; m1clip data lint shows why"
        )
    batch = draft.config.train.batch_size_or(0)
    if not settings.train.batch_size_or(0):
        batch = min(batch, largest_batch(images))
    draft.decide("rule", batch_size=batch, micro_batch=min(draft.config.train.micro_batch, batch))
    BatchPlan(images, batch, draft.config.seed)  # raises if the images do not fill a batch
