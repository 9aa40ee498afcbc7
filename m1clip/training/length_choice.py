"""Choose the number of steps, and what follows from it: members, augmentation, label smoothing."""

from __future__ import annotations

import dataclasses

from m1clip import console
from m1clip.config import read_recipe
from m1clip.data.augment import Augmentation
from m1clip.data.prepare import is_synthetic
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.training.budget import (
    MEMBER_MODEL,
    MILD,
    MILD_PART,
    Strength,
    augmentation_strength,
    best_members,
    max_epochs,
    steps_of_epochs,
)
from m1clip.training.decision import Draft, InitialModel, Length, Machine
from m1clip.training.schedule import warmup_steps
from m1clip.training.spec import Origin, setting


def decide_length(draft: Draft, images: int, machine: Machine, undecided: set[str]) -> None:
    """Convert the duration to steps, and decide the number of evaluations.

    `undecided` are settings of the augmentation and the model that follow from the length.
    """
    train = draft.config.train
    origin: Origin = "rule"
    if train.steps is not None:
        length = Length(train.steps)
    elif train.minutes is not None:
        origin = "measurement"
        length = machine.measure.steps_in_time(draft.config)
        if {"members", "embed_dim"} <= undecided and _decide_members(draft, length, images):
            length = machine.measure.steps_in_time(draft.config)
        length = _limit_length(draft, length, images, undecided)
    else:
        if draft.chosen_by.get("epochs") not in ("user", "preset"):
            origin = "recipe"  # nobody asked for a duration
        length = _steps_of_epochs(train.epochs, images // train.batch_size_or(1))
    # Raises if the run would never leave warmup.
    warmup_steps(draft.config.optim.warmup, length.steps)
    if train.eval_every is None and train.evaluations is None:
        measured = train.minutes is not None
        draft.decide("measurement" if measured else "rule", evaluations=length.evaluations)
    draft.decide(origin, steps=length.steps, minutes=None, epochs=None)
    for name in ("minutes", "epochs"):
        draft.chosen_by.pop(name, None)


def _decide_members(draft: Draft, length: Length, images: int) -> bool:
    """Train several models side by side where one would see each image too often to gain; whether
    there are.
    """
    config = draft.config
    from_random_weights = config.transfer.recipe == "scratch" and config.transfer.init is None
    measured = config.model.name == MEMBER_MODEL and not is_synthetic(config.data)
    supported = config.train.device != "mlx" and config.train.fsdp != "on"
    has_limit = config.train.max_epochs is not None
    if has_limit or not (from_random_weights and measured and supported):
        return False
    steps_per_epoch = images // config.train.batch_size_or(1)
    count = best_members(length.steps, steps_per_epoch)
    if count == 1:
        return False
    epochs = length.steps / steps_per_epoch
    draft.decide("rule", members=count, embed_dim=count * (config.model.embed_dim or 0))
    console.print(
        f"model      {count} models side by side, because one would see each image {epochs:.0f}"
        f" times (to choose otherwise: --members 1)"
    )
    return True


def _limit_length(draft: Draft, length: Length, images: int, undecided: set[str]) -> Length:
    """No more steps than help: the rest of the time of --minutes is given back."""
    train = draft.config.train
    steps_per_epoch = images // train.batch_size_or(1)
    if train.max_epochs is None:
        if is_synthetic(draft.config.data):
            return length  # not measured
        can_mix = "cutmix" in undecided or bool(draft.config.data.cutmix)
        limit = max_epochs(draft.config.transfer.recipe, steps_per_epoch, can_mix)
        draft.decide("rule", max_epochs=limit)
    limit = draft.config.train.max_epochs or 0.0
    max_steps = steps_of_epochs(limit, steps_per_epoch)
    is_rule = draft.chosen_by.get("max_epochs") == "rule"
    affordable = f"{train.minutes:g} minutes are enough for"
    if length.steps <= max_steps:
        if not is_rule and length.steps < max_steps:
            console.print(
                f"budget     {affordable} {length.steps} of {plural(max_steps, 'step')} at the"
                " current speed; the clock corrects the number"
            )
        return length
    affordable += f" {length.steps / steps_per_epoch:.0f} epochs of {plural(images, 'image')}"
    if is_rule:
        reason = f"more than {limit:g} do not help"
        hint = "--max-epochs, or --epochs"
    else:
        reason = f"the limit is {limit:g}"
        hint = "--max-epochs"
    console.print(
        f"budget     {affordable}; {reason}, so the run will end early (to choose otherwise: {hint})"
    )
    return Length(max_steps, length.evaluations)


def decide_strength(draft: Draft, images: int, model: InitialModel, undecided: set[str]) -> None:
    """Stronger regularization for a run from random weights that sees each image often.

    Only what neither the user nor the data decided: an augmentation that is off (synthetic images,
    captions that mention sides) stays off.
    """
    train = draft.config.train
    usual = Strength(*(setting(draft.config, name) for name in Strength._fields))
    if model.is_pretrained or train.steps is None:
        return
    epochs = train.steps / (images // train.batch_size_or(1))
    stronger = augmentation_strength(epochs)
    changes = {
        name: getattr(stronger, name)
        for name in Strength._fields
        if name in undecided
        and getattr(usual, name) == getattr(MILD, name) != getattr(stronger, name)
    }
    if changes:
        draft.decide("rule", **changes)
        shown = ", ".join(
            f"--{name.replace('_', '-')} {value:g}" for name, value in changes.items()
        )
        console.print(f"augment    {shown}, because each image is seen {epochs:.0f} times")


def decide_mild_end(draft: Draft, model: InitialModel) -> None:
    """The step from which a run from random weights is augmented less.

    A number of steps, not a fraction: it stays where it is if the clock of --minutes changes the
    steps of a run.
    """
    config = draft.config
    augmentation = Augmentation(
        **{item.name: setting(config, item.name) for item in dataclasses.fields(Augmentation)}
    )
    applies = not model.is_pretrained and augmentation != augmentation.milder()
    steps = config.train.steps or 0
    draft.decide("rule", mild_after=round((1 - MILD_PART) * steps) if applies else 0)


def _steps_of_epochs(epochs: float | None, steps_per_epoch: int) -> Length:
    if epochs is None:  # of settings made in Python, to which no recipe adds its own
        epochs = read_recipe("scratch").settings["train"]["epochs"]
    steps = round(epochs * steps_per_epoch)
    if steps < 1:
        raise UserError(
            f"--epochs {epochs:g} is less than one step of this data: use a larger number, or"
            " --steps"
        )
    return Length(steps)
