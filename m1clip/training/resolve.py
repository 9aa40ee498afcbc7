"""Decide a run: from what the user wrote, the data and the machine to a RunSpec.

`resolve` is the only place where a run is decided. It is a pure function: what must be measured or
read enters as functions (`Measurements`), so the same answers give the same spec. Recipe, batch and
length have modules of their own (`recipe_choice`, `batch_choice`, `length_choice`), which know what
`decision` defines.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from m1clip import console
from m1clip.config import NAMES, Config
from m1clip.data.augment import Augmentation
from m1clip.data.loader import pairs_stay_together
from m1clip.data.prepare import choose_augmentation
from m1clip.errors import UserError
from m1clip.formatting import ceil_div, plural
from m1clip.hardware.device import HYBRIDS, choose_device, rules
from m1clip.hardware.machine_info import MachineInfo
from m1clip.losses.registry import LOSSES
from m1clip.model.presets import model_config
from m1clip.optimizers import OPTIMIZERS
from m1clip.training.batch_choice import decide_batch, decide_memory, grow_batch, limit_batch
from m1clip.training.budget import Strength
from m1clip.training.decision import Dataset, Draft, InitialModel, Machine
from m1clip.training.length_choice import decide_length, decide_mild_end, decide_strength
from m1clip.training.recipe_choice import check_transfer, with_recipe
from m1clip.training.spec import DecidedConfig, Origin, RunSpec, Settings, setting
from m1clip.training.tower_choice import AUTO, choose_towers, cores_worth

TEXT_CONTRAST = 0.5  # docs/recipe.md
# What runs from random weights that see each image often have, where their loss takes targets.
SOFT_TARGETS = {"cutmix", "label_smoothing"}


def resolve(settings: Settings, dataset: Dataset, machine: Machine) -> RunSpec:
    """Decide every value of a run, or raise UserError; prints what will happen and why."""
    settings = with_recipe(settings, lambda: dataset, machine.is_installed, machine.measure.tuning)
    check_transfer(settings.config.transfer)
    draft = Draft(settings)
    measured: dict[str, Any] = {}
    _decide_recipe(draft)
    _decide_towers(draft, dataset, machine)
    _decide_optimizer(draft)
    model = machine.measure.initial_model(draft.config)
    _check_model(draft.config, model, dataset)
    _decide_loss(draft, model)
    decide_batch(draft, dataset, model)
    _decide_device(draft, machine, measured)
    grow_batch(draft, settings.config, dataset, model, machine)
    decide_memory(draft, dataset, machine, measured)
    open_until_length = (*Strength._fields, "mild_after", "members", "embed_dim")
    undecided = {name for name in open_until_length if setting(draft.config, name) is None}
    _decide_data(draft, dataset, model, machine.facts)
    _decide_mirror(draft, model)
    _decide_shape(draft, model)
    images = machine.measure.readable_images(draft.config)
    limit_batch(draft, settings.config, images)
    _decide_heads(draft, model, machine, measured)
    _decide_fsdp(draft, machine)
    obstacle = cutmix_obstacle(draft.config, model, machine.ranks)
    if obstacle is not None and settings.config.data.cutmix:
        raise UserError(f"--cutmix does not work with {obstacle}: remove one of them")
    # With complete images, a part of the image would make its caption false.
    if obstacle is not None or draft.config.data.crop_min == 1:
        undecided -= SOFT_TARGETS
    decide_length(draft, images, machine, undecided)
    decide_strength(draft, images, model, undecided)
    if "mild_after" in undecided:
        decide_mild_end(draft, model)
    if settings.changed_run is not None:
        console.print(describe_changes(settings.changed_run, draft))
    return RunSpec(DecidedConfig.of(draft.config), draft.chosen_by, measured)


def describe_changes(run: Config, draft: Draft) -> str:
    """One line about what is different from a run whose config.toml is used with other options."""
    changes = []
    for name in NAMES:
        before = setting(run, name)
        now = setting(draft.config, name)
        if now != before:
            changes.append(f"{name} {before} -> {now} ({draft.chosen_by.get(name, 'default')})")
    return f"changed    {', '.join(changes) or 'nothing'}"


def _decide_recipe(draft: Draft) -> None:
    """Without a trained model, fine-tuning has a first stage."""
    transfer = draft.config.transfer
    if transfer.init is not None:
        return
    if transfer.recipe == "finetune":
        raise UserError(
            "--recipe finetune has two stages, each with its own settings: use m1clip.train"
        )


def _decide_towers(draft: Draft, dataset: Dataset, machine: Machine) -> None:
    """The pretrained towers of new heads."""
    config = draft.config
    transfer = config.transfer
    requested = (transfer.image_tower, transfer.text_tower)
    if transfer.recipe != "frozen" or transfer.init is not None or AUTO not in requested:
        return
    speed = cores_worth(config.train.device, machine.facts, config.train.threads)
    image, text, reason = choose_towers(
        requested,
        dataset.images,
        dataset.median_captions,
        config.train.minutes,
        speed,
        machine.is_installed,
    )
    draft.decide("rule", image_tower=image, text_tower=text)
    console.print(
        f"towers     {image} and {text}: {reason} (to choose otherwise: --image-tower, --text-tower)"
    )


def _decide_optimizer(draft: Draft) -> None:
    """Adapt the learning rate and the weight decay of the recipe, which are AdamW's, to another
    optimizer.

    Values of a user or a preset stay, and so do those that were decided here before.
    """
    name = draft.config.optim.optimizer
    factors = {"lr": OPTIMIZERS[name].lr_factor, "wd": OPTIMIZERS[name].wd_factor}
    values = {
        key: setting(draft.config, key) * factor
        for key, factor in factors.items()
        if factor != 1 and draft.chosen_by.get(key, "recipe") == "recipe"
    }
    if values:
        draft.decide("rule", **values)
        shown = ", ".join(f"--{key} {value:g}" for key, value in values.items())
        console.print(f"optimizer  {name}: {shown} by default")


def _check_model(config: Config, model: InitialModel, dataset: Dataset) -> None:
    if dataset.streamed and not (all(model.trainable) and config.transfer.teacher is None):
        raise UserError(
            f"{', '.join(config.data.source)}: shards that are streamed train both towers; --recipe"
            " frozen and --teacher cache features of all images: use --recipe scratch, --init with"
            " a trained model, or smaller local shards"
        )


def _decide_loss(draft: Draft, model: InitialModel) -> None:
    """A model with a logit bias, such as SigLIP, was trained with the sigmoid loss, and continues
    with it.
    """
    if "loss" in draft.chosen_by or not (model.is_pretrained and model.shape.logit_bias):
        return
    loss = next(name for name, loss in LOSSES.items() if loss.needs_bias)
    draft.decide("rule", loss=loss)
    console.print(f"loss       {loss}: the model has its bias (to choose otherwise: --loss)")


def _decide_device(draft: Draft, machine: Machine, measured: dict[str, Any]) -> None:
    choice = machine.measure.fastest(draft.config)
    origin: Origin = "rule"
    if choice.candidates:
        origin = "measurement"
        measured["hardware"] = dataclasses.asdict(choice)
    draft.decide(origin, device=choice.device, precision=choice.precision)
    console.print(describe_device(draft.config, machine, choice.why))
    if draft.config.model.compile:
        machine.check_compile(choice.device)


def describe_device(config: Config, machine: Machine, why: str = "") -> str:
    """One line about the device, the precision and why they were chosen."""
    kind = config.train.device
    facts = machine.facts
    name = facts.cuda if kind.startswith("cuda") else facts.cpu
    more = ""
    if kind == "cuda+cpu":
        name = f"images on {facts.cuda}, texts on {facts.cpu}"
    elif kind in HYBRIDS:
        name = f"images on {kind.partition('+')[0]}, texts on cpu, {facts.cpu}"
    elif kind == "cpu":
        more = f", {plural(config.train.threads or facts.performance_cores, 'thread')}"
    elif kind == "mlx":
        more = f", mlx {facts.mlx}"
        more += "" if machine.has_gpu(kind) else " without a GPU: its build for the CPU, for tests"
    if machine.ranks > 1:
        more += f", on each of {machine.ranks} ranks"
    return f"device     {kind}: {name}{more}, {config.train.precision}" + (
        f" ({why})" if why else ""
    )


def _decide_data(draft: Draft, dataset: Dataset, model: InitialModel, facts: MachineInfo) -> None:
    """Augmentation, captions per step as the device needs them, and the loss between captions."""
    augmentation = augmentation_for(draft.config, dataset.mentions_sides, model)
    draft.decide("rule", **dataclasses.asdict(augmentation))
    captions = draft.config.data.captions_per_step or 1
    device = choose_device(draft.config.train.device, facts)
    if rules(device, facts).fixed_shapes:  # images with fewer captions would change the batch shape
        captions = min(captions, dataset.fewest_captions)
    contrast = draft.config.train.text_contrast
    if contrast is None:
        contrast = TEXT_CONTRAST if captions > 1 and not model.is_pretrained else 0.0
    draft.decide(
        "rule",
        captions_per_step=captions,
        text_contrast=contrast,
        # Until the number of steps is known.
        label_smoothing=draft.config.train.label_smoothing or 0.0,
        mild_after=draft.config.data.mild_after or 0,
    )
    loss = draft.config.train.loss
    if draft.config.train.label_smoothing and not LOSSES[loss].takes_targets:
        raise UserError(f"--label-smoothing does not work with --loss {loss}: remove one of them")


def augmentation_for(config: Config, mentions_sides: bool, model: InitialModel) -> Augmentation:
    """Augmentation for the trainable towers: strong for our own towers trained from scratch, else
    mild.
    """
    image = model.shape.image_tower
    has_patches = bool(image.patches)  # third-party towers do not support patch dropout
    keep_patches = model.is_pretrained or not has_patches or getattr(image, "stem", "") == "conv"
    keep_words = (
        model.is_pretrained or model.shape.text_tower.kind != "transformer" or model.char_tokens
    )
    usual = choose_augmentation(config.data, mentions_sides, keep_patches, keep_words)
    word_dropout = usual.word_dropout if model.trainable.text else 0.0
    if not model.trainable.image:
        return Augmentation(word_dropout=word_dropout)
    patch_dropout = usual.patch_dropout if has_patches else 0.0
    return dataclasses.replace(usual, patch_dropout=patch_dropout, word_dropout=word_dropout)


def cutmix_obstacle(config: Config, model: InitialModel, ranks: int) -> str | None:
    """What keeps a run from CutMix; None if it can have it."""
    loss = config.train.loss
    obstacles = {
        "a frozen image tower": not model.trainable.image,
        f"--loss {loss}": not LOSSES[loss].takes_targets,
        "--teacher": config.transfer.teacher is not None,
        "--device mlx": config.train.device == "mlx",
        f"{ranks} ranks and an odd number of images on one of them": not pairs_stay_together(
            config.train.batch_size_or(0), ranks
        ),
    }
    return next((name for name, applies in obstacles.items() if applies), None)


def _decide_mirror(draft: Draft, model: InitialModel) -> None:
    """Whether images are encoded with their mirror images: not unless training flips images.

    By default where the model has them already, and for pretrained towers that are fine-tuned
    under new heads (docs/lab-finetune.md).
    """
    requested = draft.config.model.mirror
    fine_tuned = model.is_pretrained and model.shape.image_head.kind == "adapter"
    mirror = model.shape.mirror or fine_tuned if requested is None else requested
    if requested and not model.trainable.image:
        raise UserError("--mirror does not work with a frozen image tower: remove it")
    if requested is None and not (model.trainable.image and draft.config.data.flip):
        mirror = False
    draft.decide("rule", mirror=mirror)


def _decide_shape(draft: Draft, model: InitialModel) -> None:
    """Write the sizes of the model into the settings."""
    shape = dataclasses.replace(model.shape, mirror=bool(draft.config.model.mirror))
    values = dataclasses.asdict(model_config(draft.config.model, shape))
    values["model"] = values.pop("name")
    draft.decide("rule", **values)


def _decide_heads(
    draft: Draft, model: InitialModel, machine: Machine, measured: dict[str, Any]
) -> None:
    """The learning rate of heads on cached features, and where a trained model is adapted."""
    transfer = draft.config.transfer
    if any(model.trainable) or machine.measure.heads is None:
        return
    is_lr_open = draft.chosen_by.get("lr", "recipe") == "recipe"
    is_adapter_open = transfer.init is not None and transfer.adapter == "auto"
    is_start_open = transfer.init is None and transfer.heads == "auto"
    if not (is_lr_open or is_adapter_open or is_start_open):
        return
    trial = machine.measure.heads(draft.config, None if is_lr_open else draft.config.optim.lr)
    console.print(f"heads      {trial.chosen}: {trial.reason}")
    measured["heads"] = trial._asdict() | {"chosen": str(trial.chosen)}
    origin: Origin = "measurement" if trial.ranks else "rule"
    if is_lr_open:
        draft.decide(origin, lr=trial.chosen.lr)
        draft.chosen_by["lr"] = origin  # also if it stays: a resumed run does not try again
    if trial.chosen.adapter is not None:
        draft.decide(origin, adapter=trial.chosen.adapter)
    if trial.chosen.start is not None:
        draft.decide(origin, heads=trial.chosen.start)


def _decide_fsdp(draft: Draft, machine: Machine) -> None:
    """Whether to shard weights among the ranks: on or off.

    UserError if that is requested, but not possible.
    """
    config = draft.config
    batch = config.train.batch_size_or(0)
    if machine.ranks > batch:
        raise UserError(
            f"--batch-size {batch} is less than one image for each of {machine.ranks} ranks"
        )
    requested = config.train.fsdp
    device = config.train.device
    excluded = {
        f"--device {device}": device not in ("cpu", "cuda"),  # FSDP2 has its own collectives
        "--compile": config.model.compile,
        "--precision fp16": config.train.precision == "fp16",
        f"--lora {config.transfer.lora}": config.transfer.lora > 0,
        f"--members {config.model.members}": (config.model.members or 1) > 1,
    }
    unsupported = next((name for name, is_excluded in excluded.items() if is_excluded), None)
    if machine.ranks > 1 and requested == "on" and unsupported:
        raise UserError(f"--fsdp on does not support {unsupported}: remove one of them")
    if requested != "auto":
        return
    shard = False
    if machine.ranks > 1 and config.train.device == "cuda" and not unsupported:
        rows = config.train.micro_batch or ceil_div(batch, machine.ranks)
        shard = not machine.measure.fits_one_gpu(config, rows)
    draft.decide("measurement" if shard else "rule", fsdp="on" if shard else "off")
