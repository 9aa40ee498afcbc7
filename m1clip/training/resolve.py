"""Decide a run: from what the user wrote, the data and the machine to a RunSpec.

`resolve` is the only place where a run is decided. It is a pure function: what must be measured or
read enters as functions (`Measurements`), so the same answers give the same spec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from m1clip import console
from m1clip.config import NAMES, Config, TransferConfig, read_recipe
from m1clip.data.augment import Augmentation
from m1clip.data.loader import BatchPlan, pairs_stay_together
from m1clip.data.prepare import choose_augmentation, is_synthetic
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.hardware.device import HYBRIDS, choose_device, rules
from m1clip.hardware.machine_info import MachineInfo
from m1clip.losses.registry import LOSSES
from m1clip.model.presets import CLIPConfig, model_config
from m1clip.model.pretrained.packages import install_hint, tower_parts
from m1clip.optimizers import OPTIMIZERS
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
from m1clip.training.duration import EVALUATIONS
from m1clip.training.head_trial import HeadTrial
from m1clip.training.measure import Choice
from m1clip.training.memory import power_of_two
from m1clip.training.schedule import warmup_steps
from m1clip.training.spec import DecidedConfig, Origin, RunSpec, Settings, setting
from m1clip.training.tower_choice import AUTO, BASE_TEXT, base_of, choose_towers, cores_worth
from m1clip.training.transfer import BOTH, Trainable
from m1clip.training.tuning import ModelSize, Tuning, choose_tuning

TEXT_CONTRAST = 0.5  # docs/recipe.md
# What runs from random weights that see each image often have, where their loss takes targets.
SOFT_TARGETS = {"cutmix", "label_smoothing"}
MAX_CAPTIONS_PER_IMAGE = 5  # per image and step, by default; docs/recipe.md
MAX_AUTO_BATCH = 1024  # larger batches would need another learning rate
MIN_STEPS_PER_EPOCH = 8  # so that a small dataset is not one batch
CARD_STEPS_PER_EPOCH = 32  # with fewer updates, the recipe's epochs are not enough
CARD_MEMORY_FRACTION = 0.5  # the rest is for evaluations and other programs
SMALL_BATCH = 8  # with fewer negatives the loss is a weak signal
# These three are rules of thumb: the recipes were measured on one dataset of 6,000 images
# (docs/finetune.md).
LONG_MINUTES = 10  # enough to fine-tune the towers after the heads
ENOUGH_TO_FINETUNE = 2_000  # images; with fewer, trainable towers may overfit
PRETRAINED_BELOW_IMAGES = 1_000_000  # below this, pretrained towers are used if they are installed
# Options of fine-tuning, and of pretrained towers with new heads.
TOWER_FINETUNING = ("unfreeze_image", "unfreeze_text", "lora")
FINETUNE_OPTIONS = ("wise_ft", *TOWER_FINETUNING)
INIT_OPTIONS = ("wise_ft", "general_data")  # of a trained model, also where its towers are frozen
TOWER_OPTIONS = ("image_tower", "text_tower")
# Options of a model trained from random weights; the other ones of a model apply to pretrained
# towers too.
SCRATCH_OPTIONS = (
    *("model", "patch_size", "vision_width", "vision_layers", "text_width", "text_layers", "stem"),
    *("members", "tokenizer"),
)


@dataclass(frozen=True)
class Dataset:
    """What a run's decisions need to know of its data."""

    images: int  # of the training split, as listed; some may be unreadable
    streamed: bool = False
    median_captions: int = 1  # per image
    fewest_captions: int = 1  # of any image
    mentions_sides: bool = False  # whether many captions mention left and right


@dataclass(frozen=True)
class InitialModel:
    """What a run's decisions need to know of the model that it starts from."""

    shape: CLIPConfig
    trainable: Trainable = BOTH
    is_pretrained: bool = False  # has weights, of the towers at least
    new_heads: bool = False
    char_tokens: bool = False  # whether a token is a character


class MemoryModel(Protocol):
    """Predicts the memory of a step."""

    def peak(self, batch: int, checkpointing: bool) -> float:
        """Bytes of a step."""
        ...

    def largest(self, limit: float, max_batch: int, checkpointing: bool) -> int:
        """The largest power of two that fits; 0 if none does."""
        ...


class MemoryFacts(NamedTuple):
    limit: float  # bytes that a run may use
    steps: MemoryModel


class Length(NamedTuple):
    """Number of steps, and the number of evaluations unless configured."""

    steps: int
    evaluations: int = EVALUATIONS


class TuningFacts(NamedTuple):
    """What decides how to adapt a trained model, beside the images and the time."""

    memory: float  # bytes that a run may use
    flops_per_second: float
    size: ModelSize


@dataclass(frozen=True)
class Measurements:
    """What is read or measured for a run.

    Each function gets the settings that are decided so far.
    """

    initial_model: Callable[[Config], InitialModel]
    fastest: Callable[[Config], Choice]  # device and precision
    memory: Callable[[Config], MemoryFacts]
    # Whether so many rows of a batch train without FSDP.
    fits_one_gpu: Callable[[Config, int], bool]
    readable_images: Callable[[Config], int]  # of the training split
    steps_in_time: Callable[[Config], Length]  # of --minutes
    # How heads on cached features are trained, with the learning rate of the user, if there is one.
    heads: Callable[[Config, float | None], HeadTrial] | None = None
    # Of the model to start from; None where there is never one.
    tuning: Callable[[Config], TuningFacts] | None = None


@dataclass(frozen=True)
class Machine:
    """The machine as far as decisions need it."""

    facts: MachineInfo
    measure: Measurements
    ranks: int = 1
    is_installed: Callable[[str], bool] = lambda tower: False  # a pretrained tower
    has_gpu: Callable[[str], bool] = lambda kind: True  # a build of MLX may have none
    # Raises UserError if torch.compile cannot work.
    check_compile: Callable[[str], None] = lambda kind: None


class Draft:
    """The settings while they are decided, and who chose them."""

    def __init__(self, settings: Settings) -> None:
        self.config = settings.config
        self.chosen_by: dict[str, Origin] = dict(settings.chosen_by)

    def decide(self, origin: Origin, **values: Any) -> None:
        """Set values; one that stays the same keeps its origin.

        The settings may be those of a decided run: of one that is resumed on another device, or
        repeated by its config.toml. Then each decision must come to the value that is there, so
        that it stays and keeps its origin: a decision looks at the setting before it looks at
        anything else.
        """
        changed = [name for name, value in values.items() if setting(self.config, name) != value]
        self.chosen_by |= dict.fromkeys(changed, origin)
        self.config = self.config.with_values(**values)


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
    _decide_batch(draft, dataset, model)
    _decide_device(draft, machine, measured)
    _grow_batch(draft, settings.config, dataset, model, machine)
    _decide_memory(draft, dataset, machine, measured)
    open_until_length = (*Strength._fields, "mild_after", "members", "embed_dim")
    undecided = {name for name in open_until_length if setting(draft.config, name) is None}
    _decide_data(draft, dataset, model, machine.facts)
    if draft.config.data.crop_min == 1:  # a part of the image would make its caption false
        undecided -= SOFT_TARGETS
    _decide_mirror(draft, model)
    _decide_shape(draft, model)
    images = machine.measure.readable_images(draft.config)
    _limit_batch(draft, settings.config, images)
    _decide_heads(draft, model, machine, measured)
    _decide_fsdp(draft, machine)
    obstacle = cutmix_obstacle(draft.config, model, machine.ranks)
    if obstacle is not None and settings.config.data.cutmix:
        raise UserError(f"--cutmix does not work with {obstacle}: remove one of them")
    if obstacle is not None:
        undecided -= SOFT_TARGETS
    _decide_length(draft, images, machine, undecided)
    _decide_strength(draft, images, model, undecided)
    if "mild_after" in undecided:
        _decide_mild_end(draft, model)
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


def with_recipe(
    settings: Settings,
    dataset: Callable[[], Dataset],
    is_installed: Callable[[str], bool],
    tuning: Callable[[Config], TuningFacts] | None = None,
) -> Settings:
    """The settings with a recipe in place of `auto`; its values are below those of the user.

    Without `tuning`, what is trained of a model to start from stays undecided.
    """
    transfer = settings.config.transfer
    if transfer.recipe != "auto":
        return settings
    if transfer.init is not None:
        return settings if tuning is None else _with_tuning(settings, dataset, tuning)
    recipe, reason = choose_recipe(settings, dataset, is_installed)
    others = " or ".join(name for name in ("frozen", "finetune", "scratch") if name != recipe)
    console.print(f"recipe     {recipe}: {reason} (to choose otherwise: --recipe {others})")
    decided = settings.with_values(recipe=recipe)
    decided.chosen_by["recipe"] = "rule"
    return decided


def _with_tuning(
    settings: Settings, dataset: Callable[[], Dataset], tuning: Callable[[Config], TuningFacts]
) -> Settings:
    """The settings with what is trained of a model to start from, by its options or by the rule."""
    option = next((name for name in FINETUNE_OPTIONS if name in settings.specified), None)
    if option is not None:
        chosen = settings.with_values(recipe="finetune")
        chosen.chosen_by["recipe"] = "rule"
        return chosen
    data = dataset()
    config = settings.config
    if data.streamed:  # features of all images cannot be cached
        choice = Tuning("finetune", "all blocks of both towers", "the shards are streamed", {})
    else:
        # Without its patience, which the user's --eval-every 0 would contradict.
        finetuned = settings.with_values(recipe="finetune", patience=0).config
        optimizer = OPTIMIZERS[finetuned.optim.optimizer]
        choice = choose_tuning(
            data.images, config.train.minutes, *tuning(config), optimizer.trained_bytes
        )
    other = "--recipe finetune" if choice.recipe == "frozen" else "--recipe frozen"
    console.print(
        f"recipe     {choice.recipe}, {choice.trained_part}: {choice.reason} (to choose otherwise:"
        f" {other}, --lora or --unfreeze-image and --unfreeze-text)"
    )
    decided = settings.with_values(recipe=choice.recipe, **choice.settings)
    decided.chosen_by.update(dict.fromkeys(("recipe", *choice.settings), "rule"))
    return decided


def choose_recipe(
    settings: Settings, dataset: Callable[[], Dataset], is_installed: Callable[[str], bool]
) -> tuple[str, str]:
    """(recipe, reason): by the options that the user gave, else by the data, the installed towers
    and the time.
    """
    config = settings.config
    for recipe, names, reason in (
        ("finetune", FINETUNE_OPTIONS, "is for towers that are trained"),
        ("frozen", TOWER_OPTIONS, "is for pretrained towers"),
        ("scratch", SCRATCH_OPTIONS, "is for a model trained from random weights"),
    ):
        if option := next((name for name in names if name in settings.specified), None):
            return recipe, f"--{option.replace('_', '-')} {reason}"
    if is_synthetic(config.data):
        return "scratch", "random weights, because pretrained towers were trained on photographs"
    data = dataset()
    if data.streamed:
        return "scratch", "random weights, because the shards are streamed"
    if data.images >= PRETRAINED_BELOW_IMAGES:
        return "scratch", f"random weights, because {data.images:,} images are enough"
    towers = (base_of(config.transfer.image_tower), base_of(config.transfer.text_tower, BASE_TEXT))
    if not all(map(is_installed, towers)):
        fix = install_hint(towers[0])
        return "scratch", f"random weights; {fix} would give about twice the recall on photographs"
    minutes = config.train.minutes or 0
    if minutes >= LONG_MINUTES and data.images >= ENOUGH_TO_FINETUNE:
        enough = f"{minutes:g} minutes and {data.images:,} images are enough"
        return "finetune", f"pretrained towers, also trained: {enough}"
    return (
        "frozen",
        (
            f"pretrained towers, because {data.images:,} images are too few to train from random"
            " weights"
        ),
    )


def check_transfer(transfer: TransferConfig) -> None:
    """Reject options that do not apply to the recipe."""
    default = TransferConfig()
    tuned = transfer.init is not None
    recipe = "--init" if tuned else f"--recipe {transfer.recipe}"
    if transfer.recipe == "frozen":
        recipe = "--recipe frozen"
    trains_towers = transfer.recipe == "finetune" or (tuned and transfer.recipe == "auto")
    applicable = [
        (TOWER_FINETUNING, trains_towers, "--init or --recipe finetune"),
        (INIT_OPTIONS, trains_towers or tuned, "--init or --recipe finetune"),
        (TOWER_OPTIONS, not tuned and transfer.recipe != "scratch", "--recipe frozen or finetune"),
    ]
    for names, allowed, where in applicable:
        for name in names:
            if not allowed and getattr(transfer, name) != getattr(default, name):
                raise UserError(f"--{name.replace('_', '-')} works with {where}, not with {recipe}")
    image_parts = tower_parts(base_of(transfer.image_tower))
    has_no_matrices = not tuned and all(part.startswith("efficientnet") for part in image_parts)
    # Said before the first stage, which takes minutes.
    if transfer.lora and has_no_matrices and transfer.unfreeze_image != 0:
        raise UserError(
            f"--lora {transfer.lora}: {base_of(transfer.image_tower)} has no linear layers, which"
            " LoRA needs; freeze it with --unfreeze-image 0"
        )


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


def _decide_batch(draft: Draft, dataset: Dataset, model: InitialModel) -> None:
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


def _grow_batch(
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


@dataclass(frozen=True)
class Fit:
    batch_size: int
    micro_batch: int
    grad_checkpointing: bool

    def __str__(self) -> str:
        how = [f"in micro-batches of {self.micro_batch}"] if self.micro_batch else []
        how += ["with gradient checkpointing"] if self.grad_checkpointing else []
        return " ".join([f"batch {self.batch_size} fits", *how])


def _decide_memory(
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
    """Whether images are encoded with their mirror images: not unless training flips images."""
    requested = draft.config.model.mirror
    mirror = model.shape.mirror if requested is None else requested
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


def _limit_batch(draft: Draft, settings: Config, images: int) -> None:
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
        rows = config.train.micro_batch or -(-batch // machine.ranks)
        shard = not machine.measure.fits_one_gpu(config, rows)
    draft.decide("measurement" if shard else "rule", fsdp="on" if shard else "off")


def _decide_length(draft: Draft, images: int, machine: Machine, undecided: set[str]) -> None:
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


def _decide_strength(draft: Draft, images: int, model: InitialModel, undecided: set[str]) -> None:
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


def _decide_mild_end(draft: Draft, model: InitialModel) -> None:
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
