"""Resolve all settings before the first step, for every recipe: model, data, device, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from m1clip.config import Config, TransferConfig
from m1clip.data.augment import Augmentation
from m1clip.data.captions import tokenize_captions
from m1clip.data.decoding import DecodeOptions
from m1clip.data.images import Preprocess
from m1clip.data.loader import BatchPlan, TrainingSet
from m1clip.data.prepare import Split, crop_margin, is_synthetic, open_data, quick_check
from m1clip.data.sources.stream import STREAM_BYTES, ShardSamples
from m1clip.data.types import Source, sample_ids_of
from m1clip.errors import UserError
from m1clip.evaluation.analysis import even_indices
from m1clip.hardware.device import Device, Precision, autocast, check_compile, choose_device
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.memory import keep_freed_memory
from m1clip.inference.model import Model
from m1clip.inference.torch_encoder import TorchEncoder
from m1clip.losses.registry import DEFAULT_LOSS, LOSSES
from m1clip.model.clip import CLIP, count_parameters
from m1clip.model.folder import read_model
from m1clip.model.presets import CLIPConfig, HeadConfig, clip_config, model_config
from m1clip.model.pretrained.packages import installed, remedy
from m1clip.model.pretrained.registry import load_image_tower, load_text_tower, tower_image_size
from m1clip.model.weights import check_finite
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import load_tokenizer, make_tokenizer
from m1clip.training.autotune import choose_hardware, default_batch, fit_memory, largest_batch
from m1clip.training.distributed import Ranks
from m1clip.training.memory import MemoryEstimate
from m1clip.training.step import TrainStep, step_class
from m1clip.training.transfer import (
    Start,
    Teacher,
    Trainable,
    augmentation_for,
    fit_heads,
    fit_stem,
    load_features,
    load_teacher,
    open_feature_cache,
)

HEAD_WIDTH, HEAD_DROPOUT = 512, 0.5  # of the hidden layer of a head
TOWER_CONTEXT, TOWER_EMBED = 64, 256  # defaults on pretrained towers
BYTES_PER_PARAMETER = 12  # weight, gradient and one moment of the optimizer in float32
MAX_UNSHARDED = 0.9  # of a GPU's memory; a step that needs more is sharded
TEXT_CONTRAST = 0.5  # docs/recipe.md
MAX_CAPTIONS = 5  # per image and step, by default; docs/recipe.md
TINY_SET = 100  # images; fewer cause a warning
SAMPLED_CAPTIONS = 20_000  # to find the longest caption
# These three are rules of thumb: the recipes were measured on one dataset of 6,000 images (docs/finetune.md).
LONG_MINUTES = 10  # enough to fine-tune the towers after the heads
ENOUGH_TO_FINETUNE = 2_000  # images; with fewer, trainable towers may overfit
FEW_IMAGES = 1_000_000  # below this, pretrained towers are used if they are installed
# Options of fine-tuning, and of pretrained towers with new heads.
FINETUNE_OPTIONS = ("wise_ft", "unfreeze_image", "unfreeze_text")
TOWER_OPTIONS = ("image_tower", "text_tower", "download")
# Options of a model trained from random weights; the other ones of a model apply to pretrained towers too.
SCRATCH_OPTIONS = (
    *("model", "patch_size", "vision_width", "vision_layers", "text_width", "text_layers", "stem"),
    "tokenizer",
)


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
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def shape(self) -> CLIPConfig:
        return self.start.config

    @property
    def shards(self) -> bool:
        """Whether weights are divided among the ranks."""
        return self.config.train.fsdp == "on" and self.ranks.size > 1

    def build_model(self) -> CLIP:
        """The initialized model on the device, or on the CPU if only a part of it will be on the device."""
        torch.manual_seed(self.config.seed)
        model = self.start.build()
        model = model if self.shards else model.to(self.device.torch)
        model.set_activation_checkpointing(self.config.model.grad_checkpointing)
        return model

    def make_step(self) -> TrainStep:
        settings = (self.config, self.device, self.precision, self.preprocess, self.teacher)
        model = self.build_model()
        self.ranks.share(list(model.state_dict().values()))  # other machines may round differently
        return step_class(self.device)(model, *settings, self.ranks)

    def complete_model(self, train_step: TrainStep) -> CLIP:
        """The model with all its weights: a copy if they are divided among the ranks, which must all call this."""
        if train_step.shards is None:
            return train_step.model
        model = self.start.build(load_weights=False)
        model.load_state_dict(train_step.shards.complete(train_step.model.state_dict(), on_all_ranks=True))
        return model.to(self.device.torch).train()

    def divided(self, ranks: Ranks) -> Setup:
        """The setup of one rank, which trains on its rows of each batch."""
        if ranks.size > self.training.plan.batch:
            ranks.refuse(
                f"--batch-size {self.training.plan.batch} is less than one image for each of {ranks.size} ranks"
            )
        if ranks.size > 1 and self.device.kind in ("mps", "mlx"):
            kind = self.device.kind
            ranks.refuse(f"{kind}: torch.distributed cannot exchange its tensors; use one process, or --device cpu")
        plan = dataclasses.replace(self.training.plan, part=(ranks.rank, ranks.size))
        config = self.config
        if ranks.size > 1:
            config = config.changed(fsdp=ranks.first(lambda: self._sharding(ranks.size)))
        training = dataclasses.replace(self.training, plan=plan)
        return dataclasses.replace(self, config=config, training=training, ranks=ranks)

    def _sharding(self, ranks: int) -> str:
        """Whether to divide weights among the ranks: on or off; UserError if that is asked for, but not possible."""
        config, asked = self.config, self.config.train.fsdp
        excluded = {"--compile": config.model.compile, "--precision fp16": self.precision == "fp16"}
        unsupported = next((name for name, given in excluded.items() if given), None)
        if asked == "on" and unsupported:
            raise UserError(f"--fsdp on does not support {unsupported}: remove one of them")
        if asked != "auto":
            return asked
        if self.device.kind != "cuda" or unsupported:
            return "off"
        estimate = MemoryEstimate(
            config, self.start, self.facts, self.device, self.precision, self.shape.context_length
        )
        rows = config.train.micro_batch or -(-self.training.plan.batch // ranks)
        peak = estimate.peak(rows, config.model.grad_checkpointing)
        return "on" if peak > MAX_UNSHARDED * self.device.total_bytes() else "off"

    def describe_model(self) -> str:
        model, start = self.build_model(), self.start
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in model.parameters())
        if not start.weights:
            return f"{self.config.model.name}: {total:,} parameters, {self.tokenizer.vocab_size:,} tokens"
        if not start.new_heads:
            return f"from {self.config.transfer.init}: {trained:,} of {total:,} parameters trained"
        towers = f"{self.config.transfer.image_tower} (frozen) and {self.config.transfer.text_tower} (frozen)"
        return f"{towers}, adapter heads to {self.shape.embed_dim}: {trained:,} of {total:,} trained"

    def bundle(self, model: CLIP) -> Model:
        """The model with what it needs to encode images and texts, in the precision of the run."""
        return Model(TorchEncoder(model, self.tokenizer, self.preprocess, self.precision))


def prepare(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodeOptions], saved: Path | None = None
) -> Setup:
    """Resolve every setting of a run, for any recipe. `saved` is the folder of a resumed run."""
    if config.transfer.recipe == "auto" or (config.transfer.recipe == "finetune" and config.transfer.init is None):
        raise UserError(f"--recipe {config.transfer.recipe} is resolved before a run: use m1clip.train")
    facts, choices, asked_batch = read_facts(), dict[str, Any](), config.train.batch_size_or(0)
    choose_device(config.train.device, facts)  # report a missing device before reading the data
    plan = decode(facts)
    source, start, tokenizer, preprocess = _open(config, facts, plan, saved)
    _check_supported(config, start, source)
    samples, images = source.sampled("train"), len(source.samples("train"))
    if not is_synthetic(config.data):
        choices["lint"] = quick_check(source, start.config.context_length, say, plan.warn)
    captions = [caption for sample in samples for caption in sample.captions]
    tokens = _longest(captions, tokenizer, start.config.context_length)

    config = _with_batch(config, start, [len(sample.captions) for sample in samples], images)
    device, precision = choose_hardware(config, start, facts, tokens, say, choices)
    if config.model.compile:
        check_compile(device.kind)
    fit = fit_memory(config, start, device, precision, facts, tokens, 0 if source.streamed else images)
    if fit is not None:
        say(f"memory     {fit[0]}, within {fit[1] / 1e9:.1f} GB")
        choices["memory"] = dataclasses.asdict(fit[0])
        config = config.changed(**choices["memory"])

    augmentation = augmentation_for(config, captions, start, tokenizer)
    if device.kind == "cpu" and not all(start.trainable):
        keep_freed_memory()  # every batch of features needs the same blocks
    cache = open_feature_cache(start, tokenizer, preprocess, config, source, device, precision, plan)
    own_files = start.config.image_tower.kind == "vit" and not is_synthetic(config.data)  # else not measured
    margin = crop_margin(augmentation.crop_min, preprocess.image_size, samples if own_files else ())
    margins = {"train": margin, "val": 1.0, "test": 1.0}
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
    if start.new_heads:
        with plan.progress("fitting the heads"):
            start = dataclasses.replace(start, weights={**start.weights, **fit_heads(start.config, train)})
    elif not start.weights:
        with plan.progress("fitting the stem"):
            start = dataclasses.replace(start, stem_filters=fit_stem(start.config, train, preprocess))
    batch = config.train.batch_size_or(0)
    if not asked_batch:
        batch = min(batch, largest_batch(len(train.samples)))  # some images may be unreadable
    config = config.changed(batch_size=batch, micro_batch=min(config.train.micro_batch, batch))
    config = _resolved(config, start, source, device, precision, augmentation)
    teacher = None
    if config.transfer.teacher is not None:
        teacher = load_teacher(config, source, train, device, precision, plan)
        say(f"teacher    {config.transfer.teacher}: half of the loss, temperature {1 / teacher.scale:.3f}")
    return Setup(
        config=config,
        facts=facts,
        device=device,
        precision=precision,
        start=start,
        tokenizer=tokenizer,
        preprocess=preprocess,
        source=source,
        training=_training_set(config, train, augmentation, device, start.config.image_tower.patches),
        splits=splits,
        choices=choices,
        autocast=autocast(device, precision),
        teacher=teacher,
    )


def _check_supported(config: Config, start: Start, source: Source) -> None:
    """Refuse what MLX or streamed shards cannot do, before any image is read."""
    if config.train.device == "mlx":
        from m1clip.training.mlx_step import check_supported

        check_supported(config, start)
    if source.streamed and not (all(start.trainable) and config.transfer.teacher is None):
        raise UserError(
            f"{source.name}: shards that are streamed train both towers; --recipe frozen and --teacher cache features "
            f"of all images: use --recipe scratch, --init with a trained model, or local shards below "
            f"{STREAM_BYTES // 10**9} GB"
        )


def _open(
    config: Config, facts: Facts, plan: DecodeOptions, saved: Path | None
) -> tuple[Source, Start, Tokenizer, Preprocess]:
    """The data and the initial model; what can be checked without the data is checked first."""
    if config.transfer.init is not None:
        start, tokenizer, preprocess = _from_model(config)
        return open_training_data(config, preprocess.image_size, plan), start, tokenizer, preprocess
    if config.transfer.recipe != "frozen":
        _check_memory(clip_config(config.model), facts)
    size = _image_size(config)
    source = open_training_data(config, size, plan)
    if config.transfer.recipe == "frozen":
        return source, *_from_towers(config)
    captions = [caption for sample in source.sampled("train") for caption in sample.captions]
    kind = "bpe" if source.streamed and config.model.tokenizer == "clip-bpe-pruned" else config.model.tokenizer
    tokenizer = load_tokenizer(saved) if saved else make_tokenizer(kind, captions)
    needs_bias = LOSSES[config.train.loss].needs_bias
    start = Start(clip_config(config.model, tokenizer, logit_bias=needs_bias))
    # A caption describes the edges of an image too. Models with CLIP's patch layer crop as CLIP does.
    resize: Literal["shortest", "squash"] = "squash" if start.config.own_towers[0].stem == "conv" else "shortest"
    return source, start, tokenizer, Preprocess(image_size=size, resize=resize)


def _image_size(config: Config) -> int:
    if config.transfer.recipe == "frozen":
        return config.model.image_size or tower_image_size(config.transfer.image_tower)
    return clip_config(config.model).image_size


def open_training_data(config: Config, image_size: int, plan: DecodeOptions) -> Source:
    """Open the data of a run; UserError if the images cannot fill a batch."""
    with plan.progress("reading the data") as show:
        source = open_data(config.data, image_size, config.seed, show)
        images, names = len(source.samples("train")), ", ".join(config.data.source)
    if images < 2:
        raise UserError(f"{names}: {images} training images found; contrastive training needs at least 2")
    BatchPlan(images, config.train.batch_size_or(2), config.seed)
    if images < TINY_SET:
        plan.warn(
            f"only {images} training images: the run will show that everything works, but the model will "
            f"overfit; expect scores near chance on other images, and use at least a few hundred images"
        )
    return source


def _with_batch(config: Config, start: Start, caption_counts: list[int], images: int) -> Config:
    """The default captions per step and batch size, where none are given; `auto` stays until memory is known."""
    captions = config.data.captions_per_step or max(1, min(int(np.median(caption_counts)), MAX_CAPTIONS))
    config = config.changed(captions_per_step=captions)
    if config.train.batch_size is not None:
        return config
    batch = default_batch(start, images)
    return config.changed(
        batch_size=batch, micro_batch=config.train.micro_batch if config.train.micro_batch < batch else 0
    )


def _resolved(
    config: Config, start: Start, source: Source, device: Device, precision: Precision, augmentation: Augmentation
) -> Config:
    """The settings that depend on the device and on the readable images; all of them are written to config.toml."""
    captions = config.data.captions_per_step or 1
    if device.rules.fixed_shapes:  # images with fewer captions would change the batch shape
        captions = min(captions, source.fewest_captions("train"))
    contrast = config.train.text_contrast
    if contrast is None:
        contrast = TEXT_CONTRAST if captions > 1 and not start.weights else 0.0
    config = dataclasses.replace(config, model=model_config(config.model, start.config))
    return config.changed(
        captions_per_step=captions,
        device=device.kind,
        precision=precision,
        text_contrast=contrast,
        **dataclasses.asdict(augmentation),
    )


def _training_set(
    config: Config, train: Split, augmentation: Augmentation, device: Device, patches: int
) -> TrainingSet:
    cached_features = train.image_features is not None
    resident = device.rules.resident and not cached_features
    blocks = train.samples.blocks() if isinstance(train.samples, ShardSamples) else None
    return TrainingSet(
        None if cached_features else train.images,
        train.lazy_captions or train.captions,
        BatchPlan(len(train.samples), config.train.batch_size_or(0), config.seed, blocks=blocks),
        augmentation,
        image_features=train.image_features,
        device_images=train.images.to_device(device.torch, device.free_bytes()) if resident else None,
        full_length=device.rules.fixed_shapes or config.model.compile,
        identity=sample_ids_of(train.samples) if blocks is None else None,
        captions_per_image=config.data.captions_per_step or 1,
        patches=patches,
    )


def _from_model(config: Config) -> tuple[Start, Tokenizer, Preprocess]:
    transfer = config.transfer
    saved = read_model(Path(transfer.init or ""))
    check_finite(saved.weights, saved.where)
    if saved.config.image_head.kind != "projection" and config.model.image_size not in (None, saved.config.image_size):
        raise UserError(
            f"{transfer.init}: the image size of a model with pretrained towers is fixed, {saved.config.image_size}"
        )
    saved = saved.resized(config.model.image_size)
    loss = config.train.loss
    if LOSSES[loss].needs_bias and not saved.config.logit_bias:
        raise UserError(
            f"{transfer.init}: has no logit bias for --loss {loss}; "
            f"use --loss {DEFAULT_LOSS}, or a model trained with {loss}"
        )
    preprocess = saved.preprocess
    if preprocess.resize != "squash":
        preprocess = dataclasses.replace(preprocess, resize=Preprocess(image_size=1).resize)
    start = Start(
        saved.config,
        saved.weights,
        Trainable(transfer.unfreeze_image != 0, transfer.unfreeze_text != 0),
        (transfer.unfreeze_image, transfer.unfreeze_text),
    )
    return start, saved.tokenizer, preprocess


def _from_towers(config: Config) -> tuple[Start, Tokenizer, Preprocess]:
    transfer, context = config.transfer, config.model.context_length or TOWER_CONTEXT
    image_tower, image, preprocess = load_image_tower(transfer.image_tower, _image_size(config), transfer.download)
    text_tower, text, tokenizer = load_text_tower(transfer.text_tower, context, transfer.download)
    weights = {f"image_tower.{name}": value for name, value in image.items()}
    weights |= {f"text_tower.{name}": value for name, value in text.items()}
    head = HeadConfig(kind="adapter", hidden=HEAD_WIDTH, dropout=HEAD_DROPOUT)
    shape = CLIPConfig(
        image_tower=image_tower,
        text_tower=text_tower,
        image_head=head,
        text_head=head,
        embed_dim=config.model.embed_dim or TOWER_EMBED,
        logit_bias=LOSSES[config.train.loss].needs_bias,
    )
    return Start(shape, weights, Trainable(False, False), new_heads=True), tokenizer, preprocess


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


def check_transfer(transfer: TransferConfig) -> None:
    default, tuned = TransferConfig(), transfer.init is not None
    recipe = "--init" if tuned else f"--recipe {transfer.recipe}"
    rules = [
        (FINETUNE_OPTIONS, tuned or transfer.recipe == "finetune", "--init or --recipe finetune"),
        (TOWER_OPTIONS, not tuned and transfer.recipe != "scratch", "--recipe frozen or finetune"),
    ]
    for names, allowed, where in rules:
        for name in names:
            if not allowed and getattr(transfer, name) != getattr(default, name):
                raise UserError(f"--{name.replace('_', '-')} works with {where}, not with {recipe}")


def choose_recipe(config: Config, given: Collection[str]) -> tuple[str, str]:
    """(recipe, reason): by the options in `given`, else by the data, the installed towers and the time.

    `given` are the flat names of the settings that the user chose.
    """
    for recipe, names, reason in (
        ("finetune", FINETUNE_OPTIONS, "is for towers that are trained"),
        ("frozen", TOWER_OPTIONS, "is for pretrained towers"),
        ("scratch", SCRATCH_OPTIONS, "is for a model trained from random weights"),
    ):
        if option := next((name for name in names if name in given), None):
            return recipe, f"--{option.replace('_', '-')} {reason}"
    if is_synthetic(config.data):
        return "scratch", "random weights, because pretrained towers were trained on photographs"
    source = open_data(config.data, tower_image_size(config.transfer.image_tower), config.seed)
    images = len(source.samples("train"))
    if source.streamed:
        return "scratch", "random weights, because the shards are streamed"
    if images >= FEW_IMAGES:
        return "scratch", f"random weights, because {images:,} images are enough"
    if not (installed(config.transfer.image_tower) and installed(config.transfer.text_tower)):
        fix = remedy(config.transfer.image_tower)
        return "scratch", f"random weights; {fix} would give about twice the recall on photographs"
    minutes = config.train.minutes or 0
    if minutes >= LONG_MINUTES and images >= ENOUGH_TO_FINETUNE:
        return "finetune", f"pretrained towers, also trained: {minutes:g} minutes and {images:,} images are enough"
    return "frozen", f"pretrained towers, because {images:,} images are too few to train from random weights"
