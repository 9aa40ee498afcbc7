"""Resolve all settings before the first step, for every recipe: model, data, device, memory, attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m1clip.config import Config, TransferConfig
from m1clip.data.augment import Augmentation
from m1clip.data.cache import DecodePlan
from m1clip.data.captions import tokenize_captions
from m1clip.data.images import Preprocess
from m1clip.data.loader import BatchPlan, TrainingSet
from m1clip.data.prepare import CROP_MARGIN, Split, is_synthetic, open_data, quick_check
from m1clip.data.types import Source, sample_ids_of
from m1clip.errors import UserError
from m1clip.evaluation.analysis import even_indices
from m1clip.hardware.device import Device, Precision, autocast, choose_device
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.memory import keep_freed_memory
from m1clip.inference.encoder import Model
from m1clip.model.clip import CLIP, count_parameters
from m1clip.model.folder import read_model
from m1clip.model.presets import CLIPConfig, HeadConfig, clip_config, model_config
from m1clip.model.pretrained import OWN_IMAGE, OWN_TEXT, installed, load_image_tower, load_text_tower, remedy
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import load_tokenizer, make_tokenizer
from m1clip.training.autotune import (
    choose_attention,
    choose_batch,
    choose_hardware,
    default_captions,
    largest_batch,
    open_training_data,
)
from m1clip.training.transfer import (
    Retention,
    Start,
    Teacher,
    Trainable,
    augmentation_for,
    finish_transfer,
    load_features,
    load_teacher,
    measure_retention,
    open_feature_cache,
    standardize_heads,
)

HEAD_WIDTH, HEAD_DROPOUT = 512, 0.3  # of the hidden layer of a head
TOWER_SIZE, TOWER_CONTEXT, TOWER_EMBED = 224, 64, 256  # defaults on pretrained towers
BYTES_PER_PARAMETER = 12  # weight, gradient and one moment of the optimizer in float32
TEXT_CONTRAST = 0.2  # docs/recipe.md
SAMPLED_CAPTIONS = 20_000  # to find the longest caption
# These three are rules of thumb: the recipes were measured on one dataset of 6,000 images (docs/finetune.md).
LONG_MINUTES = 10  # enough to fine-tune the towers after the heads
ENOUGH_TO_FINETUNE = 2_000  # images; with fewer, trainable towers may overfit
FEW_IMAGES = 100_000  # below this, pretrained towers are used if they are installed
FINETUNE_OPTIONS = ("wise_ft", "retention_data", "lora_rank", "unfreeze_image", "unfreeze_text")


@dataclass(frozen=True)
class Setup:
    """A run with every setting resolved."""

    config: Config  # resolved, except for minutes and epochs
    facts: Facts
    device: Device
    precision: Precision
    start: Start
    tokenizer: Tokenizer
    preprocess: Preprocess
    source: Source
    training: TrainingSet
    splits: dict[str, Split]
    choices: dict[str, Any]  # the measurements behind the decisions
    autocast: Callable[[], AbstractContextManager[object]]
    teacher: Teacher | None = None
    retention: Retention | None = None

    @property
    def shape(self) -> CLIPConfig:
        """The model's config."""
        return self.start.config

    def build_model(self) -> CLIP:
        """The initialized model on the device."""
        return _build(self.config, self.start, self.splits["train"], self.device)

    def describe_model(self) -> str:
        """The model in one line."""
        model, start = self.build_model(), self.start
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in model.parameters())
        if not start.weights:
            name = f"{self.config.model.name}: {total:,} parameters, {self.tokenizer.vocab_size:,} tokens"
        elif start.new_heads:
            towers = zip((self.shape.image_tower, self.shape.text_tower), start.trainable, strict=True)
            names = [f"{getattr(tower, 'name', tower.kind)}{'' if on else ' (frozen)'}" for tower, on in towers]
            head = self.shape.image_head.kind
            name = f"{' and '.join(names)}, {head} heads to {self.shape.embed_dim}: {trained:,} of {total:,} trained"
        else:
            name = f"from {self.config.transfer.init}: {trained:,} of {total:,} parameters trained"
        attention = self.config.model.attention
        return name if attention == "auto" else f"{name}, attention {attention}"

    def evaluate_retention(self, model: CLIP, say: Callable[[str], None]) -> dict[str, Any]:
        """Evaluate on the retention data, in addition to the validation split."""
        if self.retention is None:
            return {}
        return self.retention.evaluate(Model(model, self.tokenizer, self.preprocess), say)

    def finish(self, folder: Path, say: Callable[[str], None], write: Callable[..., Any]) -> None:
        """Finish fine-tuning with the best model: WiSE-FT and the forgetting report."""
        if self.config.transfer.init is not None:
            finish_transfer(
                self.config,
                self.start,
                self.retention,
                self.splits.get("val"),
                folder,
                self.device,
                self.precision,
                say,
                write,
            )


def prepare(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], saved: Path | None = None
) -> Setup:
    """Resolve every setting of a run, for any recipe. `saved` is the folder of a resumed run."""
    if config.transfer.recipe == "finetune":
        raise UserError("--recipe finetune consists of two runs: use m1clip.train")
    facts = read_facts()
    choose_device(config.train.device, facts)  # report a missing device before reading the data
    plan = decode(facts)
    recipe = "init" if config.transfer.init is not None else config.transfer.recipe
    if recipe == "init":
        start, tokenizer, preprocess = _from_model(config)
        size = preprocess.image_size
    elif recipe == "frozen" and config.transfer.image_tower != OWN_IMAGE:
        size = config.model.image_size or TOWER_SIZE
    else:
        size = clip_config(config.model).image_size
    if recipe == "scratch":
        _check_memory(clip_config(config.model), facts)
    source = open_training_data(config, size, plan)
    samples = source.samples("train")
    captions = [caption for sample in samples for caption in sample.captions]
    if recipe == "frozen":
        start, tokenizer, preprocess = _from_towers(config, captions, saved)
    elif recipe == "scratch":
        tokenizer = load_tokenizer(saved) if saved else make_tokenizer(config.model.tokenizer, captions)
        start = Start(clip_config(config.model, tokenizer, logit_bias=config.train.loss == "sigmoid"))
        preprocess = Preprocess(image_size=size)
    shape = start.config
    lint = None
    if not is_synthetic(config.data):
        lint = quick_check(source, shape.context_length, say, plan.warn)

    per_step = default_captions(config, [len(sample.captions) for sample in samples])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, captions_per_step=per_step))
    tokens = _longest(captions, tokenizer, shape.context_length)
    choices: dict[str, Any] = {"lint": lint}
    open_batch = not config.train.batch_size
    config = choose_batch(config, start, len(samples))
    config, device, precision = choose_hardware(config, start, facts, tokens, len(samples), say, choices)

    if device.kind == "cpu" and not all(start.trainable):
        keep_freed_memory()  # every batch of features needs the same blocks
    cache = open_feature_cache(start, tokenizer, preprocess, config, source, device, precision, plan)
    augmentation = augmentation_for(config, captions, start, tokenizer)
    margins = {"train": CROP_MARGIN if augmentation.crop_min < 1 else 1.0, "val": 1.0, "test": 1.0}
    splits = {
        name: load_features(cache, config, source, name, start, margin)
        for name, margin in margins.items()
        if name in source.splits()
    }
    choices["cache"] = {name: split.cache for name, split in splits.items()}
    if not all(start.trainable):
        choices["features"] = str(cache.folder)
    del cache

    train = splits["train"]
    batch = config.train.batch_size or 0
    if open_batch:
        batch = min(batch, largest_batch(len(train.samples)))  # some images may be unreadable
    if device.rules.fixed_shapes:  # images with fewer captions would change the batch shape
        fewest = min(len(sample.captions) for sample in train.samples)
        per_step = min(per_step, fewest)
    contrast = config.train.text_contrast
    if contrast is None:
        contrast = TEXT_CONTRAST if per_step > 1 and not start.weights else 0.0
    attention = config.model.attention
    if attention == "auto":
        attention, seconds = choose_attention(start, device, precision, batch, tokens)
        choices["attention"] = {"chosen": attention, **seconds}
    settings: dict[str, Any] = {"batch_size": batch, "micro_batch": min(config.train.micro_batch, batch)}
    settings |= {"device": device.kind, "precision": precision, "text_contrast": contrast}
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(model_config(config.model, shape), attention=attention),
        data=dataclasses.replace(config.data, captions_per_step=per_step, **dataclasses.asdict(augmentation)),
        train=dataclasses.replace(config.train, **settings),
    )
    teacher, retention = None, None
    if config.transfer.teacher is not None:
        teacher = load_teacher(config, source, train, device, precision, plan)
        say(f"teacher    {config.transfer.teacher}: half of the loss, temperature {1 / teacher.scale:.3f}")
    if config.transfer.retention_data:
        before = Model(_build(config, start, train, device), tokenizer, preprocess)
        retention = measure_retention(config, start, before, device, precision, plan)
    return Setup(
        config=config,
        facts=facts,
        device=device,
        precision=precision,
        start=start,
        tokenizer=tokenizer,
        preprocess=preprocess,
        source=source,
        training=_training_set(config, train, augmentation, device, shape.image_tower.patches),
        splits=splits,
        choices=choices,
        autocast=autocast(device, precision),
        teacher=teacher,
        retention=retention,
    )


def _training_set(
    config: Config, train: Split, augmentation: Augmentation, device: Device, patches: int
) -> TrainingSet:
    cached_features = train.image_features is not None
    resident = device.rules.resident and not cached_features
    return TrainingSet(
        None if cached_features else train.images,
        train.captions,
        BatchPlan.full(len(train.samples), config.train.batch_size or 0, config.seed),
        augmentation,
        image_features=train.image_features,
        device_images=train.images.to_device(device.torch, device.free_bytes()) if resident else None,
        full_length=device.rules.fixed_shapes or config.model.compile,
        identity=sample_ids_of(train.samples),
        captions_per_image=config.data.captions_per_step or 1,
        patches=patches,
    )


def _build(config: Config, start: Start, train: Split, device: Device) -> CLIP:
    torch.manual_seed(config.seed)
    model = start.build()
    if start.new_heads:
        standardize_heads(model, train)
    model = model.to(device.torch)
    model.set_attention(config.model.attention)  # type: ignore[arg-type]
    model.set_activation_checkpointing(config.model.grad_checkpointing)
    return model


def _from_model(config: Config) -> tuple[Start, Tokenizer, Preprocess]:
    """Start from a complete model."""
    transfer = config.transfer
    saved = read_model(Path(transfer.init or ""))
    if saved.config.image_head.kind != "projection" and config.model.image_size not in (None, saved.config.image_size):
        raise UserError(
            f"{transfer.init}: the image size of a model with pretrained towers is fixed, {saved.config.image_size}"
        )
    saved = saved.resized(config.model.image_size)
    if config.train.loss == "sigmoid" and not saved.config.logit_bias:
        raise UserError(
            f"{transfer.init}: has no logit bias for --loss sigmoid; use --loss multi, or a model trained with sigmoid"
        )
    preprocess = saved.preprocess
    if preprocess.resize != "squash":
        preprocess = dataclasses.replace(preprocess, resize=Preprocess(image_size=1).resize)
    start = Start(
        saved.config,
        saved.weights,
        Trainable(transfer.unfreeze_image != 0, transfer.unfreeze_text != 0),
        (transfer.unfreeze_image, transfer.unfreeze_text),
        transfer.lora_rank,
    )
    return start, saved.tokenizer, preprocess


def _from_towers(config: Config, captions: list[str], saved: Path | None) -> tuple[Start, Tokenizer, Preprocess]:
    """Start from pretrained towers with new heads; one of our own towers may be trained from scratch (LiT)."""
    transfer, context = config.transfer, config.model.context_length or TOWER_CONTEXT
    trainable = Trainable(transfer.image_tower == OWN_IMAGE, transfer.text_tower == OWN_TEXT)
    if all(trainable):
        raise UserError("--image-tower vit --text-tower text: neither tower is pretrained; use --recipe scratch")
    weights: dict[str, Any] = {}
    image_tower: Any
    text_tower: Any
    if trainable.image:
        image_tower = clip_config(config.model).image_tower
        preprocess = Preprocess(image_size=image_tower.image_size)
    else:
        size = config.model.image_size or TOWER_SIZE
        image_tower, found, preprocess = load_image_tower(transfer.image_tower, size, transfer.download)
        weights |= {f"image_tower.{name}": value for name, value in found.items()}
    if trainable.text:
        tokenizer = load_tokenizer(saved) if saved else make_tokenizer(config.model.tokenizer, captions)
        text_tower = dataclasses.replace(clip_config(config.model, tokenizer).text_tower, context_length=context)
    else:
        text_tower, found, tokenizer = load_text_tower(transfer.text_tower, context, transfer.download)
        weights |= {f"text_tower.{name}": value for name, value in found.items()}
    head = HeadConfig(kind="adapter", hidden=HEAD_WIDTH, dropout=HEAD_DROPOUT)
    shape = CLIPConfig(
        image_tower=image_tower,
        text_tower=text_tower,
        image_head=head,
        text_head=head,
        embed_dim=config.model.embed_dim or TOWER_EMBED,
        logit_bias=config.train.loss == "sigmoid",
    )
    return Start(shape, weights, trainable, new_heads=True), tokenizer, preprocess


def _check_memory(shape: CLIPConfig, facts: Facts) -> None:
    """Raise UserError, before reading the data, for a model that does not fit this machine at any batch size."""
    count = count_parameters(shape)
    memory = max(facts.memory_bytes, torch.cuda.mem_get_info()[1] if facts.cuda else 0)
    if count * BYTES_PER_PARAMETER > memory:
        raise UserError(
            f"a model of {count / 1e9:,.1f} billion parameters needs {count * BYTES_PER_PARAMETER / 1e9:,.0f} GB to "
            f"train, this machine has {memory / 1e9:,.0f} GB: choose a smaller --model"
        )


def _longest(captions: list[str], tokenizer: Tokenizer, context_length: int) -> int:
    """Tokens of the longest caption, rounded up to a multiple of 8."""
    sample = [captions[place] for place in even_indices(len(captions), SAMPLED_CAPTIONS)]
    longest = int(tokenize_captions([tuple(sample)], tokenizer, context_length).lengths.max())
    return min(-(-longest // 8) * 8, context_length)


def run_name(config: Config) -> str:
    """The default name of a run folder."""
    if config.transfer.init is not None:
        return "finetune"
    return config.model.name if config.transfer.recipe == "scratch" else config.transfer.recipe


def check_transfer(transfer: TransferConfig) -> None:
    """Raise UserError for options that do not apply to the recipe."""
    if transfer.init is not None or transfer.recipe == "finetune":
        return
    default = TransferConfig()
    for name in FINETUNE_OPTIONS:
        if getattr(transfer, name) != getattr(default, name):
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} works with --init or --recipe finetune, not with --recipe {transfer.recipe}")


def choose_recipe(config: Config) -> tuple[str, str]:
    """(recipe, reason): by the kind and size of the data, the installed packages, and the time budget."""
    if config.transfer.init is not None:
        return "scratch", f"fine-tuning {config.transfer.init}"
    if is_synthetic(config.data):
        return "scratch", "synthetic images differ from what the pretrained towers were trained on"
    images = len(open_data(config.data, config.model.image_size or TOWER_SIZE, config.seed).samples("train"))
    if images >= FEW_IMAGES:
        return "scratch", f"{images:,} images are enough to train from scratch"
    missing = [t for t in (config.transfer.image_tower, config.transfer.text_tower) if not installed(t)]
    if missing:
        return "scratch", f"{images:,} images are few, but {missing[0]} is not installed: {remedy(missing[0])}"
    reason = f"{images:,} images are too few to train from scratch, and the pretrained towers are installed"
    minutes = config.train.minutes or 0
    if minutes >= LONG_MINUTES and images >= ENOUGH_TO_FINETUNE:
        return "finetune", f"{reason}; {minutes:g} minutes are enough to fine-tune them after the heads"
    return "frozen", reason
