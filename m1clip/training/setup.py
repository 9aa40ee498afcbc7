"""Everything that is decided before the first step: device, precision, data, tokenizer, model, attention."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from m1clip.config import Config, DataConfig, TransferConfig
from m1clip.data.augment import Augmentation
from m1clip.data.cache import DecodePlan, cache_folder, data_folders
from m1clip.data.images import Preprocess
from m1clip.data.loader import BatchPlan, TrainingSet
from m1clip.data.prepare import (
    CROP_MARGIN,
    Split,
    augmentation_of,
    is_synthetic,
    load_split,
    look_first,
    open_data,
    with_classes,
)
from m1clip.data.types import Source, identities
from m1clip.errors import UserError
from m1clip.evaluation.retrieval import retrieval
from m1clip.evaluation.statistics import selection_metric
from m1clip.evaluation.zeroshot import zero_shot
from m1clip.hardware.device import Device, Precision, check_compile, choose_device, choose_precision, threads
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.measure import DTYPES, bf16_speedup
from m1clip.hardware.precision import autocast
from m1clip.inference.encoder import Model, encode_split, load
from m1clip.inference.feature_cache import Maker, Side, feature_captions, feature_images, token_captions
from m1clip.model.clip import CLIP, build_clip, count_parameters
from m1clip.model.folder import SavedModel, read_model
from m1clip.model.heads import Head
from m1clip.model.lora import ALL, unfreeze
from m1clip.model.presets import (
    AttentionKind,
    CLIPConfig,
    HeadConfig,
    PretrainedImageConfig,
    PretrainedTextConfig,
    TextTowerConfig,
    VisionTowerConfig,
    clip_config,
    model_config,
)
from m1clip.model.pretrained import (
    OWN_IMAGE,
    OWN_TEXT,
    installed,
    load_image_tower,
    load_text_tower,
    remedy,
    weights_hash,
)
from m1clip.model.weights import Tensors, assign_weights
from m1clip.runlog import MEAN_RECALL, SELECTION, TOP1
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import CharTokenizer, load_tokenizer, make_tokenizer
from m1clip.training.autotune import USUAL_BATCH, choose_attention, open_training_data, usual_captions, with_batch
from m1clip.training.autotune import fitted as auto_fitted
from m1clip.training.teacher import Teacher

LORA_ALPHA = 16.0
HEAD_WIDTH, HEAD_DROPOUT = 512, 0.3  # of the hidden layer of a head
TOWER_SIZE, TOWER_CONTEXT, TOWER_EMBED = 224, 64, 256  # defaults on pretrained towers
BYTES_PER_PARAMETER = 12  # weight, gradient and one moment of the optimizer in float32
TEXT_CONTRAST = 0.2  # docs/recipe.md


@dataclass(frozen=True)
class Job:
    """A run with every question answered; the loop takes it from here."""

    config: Config  # resolved, but for minutes and epochs
    facts: Facts
    device: Device
    precision: Precision
    shape: CLIPConfig
    tokenizer: Tokenizer
    preprocess: Preprocess
    source: Source
    training: TrainingSet
    splits: dict[str, Split]
    choices: dict[str, Any]  # what was measured in order to decide
    autocast: Callable[[], AbstractContextManager[object]]
    teacher: Teacher | None = dataclasses.field(kw_only=True, default=None)  # a second target, where asked for

    def build_model(self) -> CLIP:
        """A new model from the seed, on the device."""
        torch.manual_seed(self.config.seed)
        model = build_clip(self.shape).to(self.device.torch)
        model.set_attention(*_attention_kinds(self.config))  # type: ignore[arg-type]
        model.set_activation_checkpointing(self.config.model.grad_checkpointing)
        return model

    def polish(self, folder: Path, say: Callable[[str], None], write: Callable[..., Any]) -> None:
        """What remains to be done with the best model when training is over; fine-tuning has something here."""

    def also_measured(self, model: CLIP, say: Callable[[str], None]) -> dict[str, Any]:
        """What is measured at each evaluation beside the validation split, for the log; nothing from random weights."""
        return {}

    def describe_model(self) -> str:
        """The model in one line, for a person."""
        config = self.config.model
        return (
            f"{config.name}: {count_parameters(self.shape):,} parameters, {self.tokenizer.vocab_size:,} tokens, "
            f"attention {config.attention_image} (image) {config.attention_text} (text)"
        )


def _attention_kinds(config: Config) -> tuple[str, str]:
    return config.model.attention_image, config.model.attention_text


def _check_fits(shape: CLIPConfig, facts: Facts) -> None:
    """Before the data is read: a model that no batch size or recomputation can make fit this machine."""
    count = count_parameters(shape)
    memory = max(facts.memory_bytes, torch.cuda.mem_get_info()[1] if facts.cuda else 0)
    if count * BYTES_PER_PARAMETER > memory:
        raise UserError(
            f"a model of {count / 1e9:,.1f} billion parameters needs {count * BYTES_PER_PARAMETER / 1e9:,.0f} GB to "
            f"train, this machine has {memory / 1e9:,.0f} GB: choose a smaller --model"
        )


def prepare_scratch(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], saved: Any = None,
    start: tuple[CLIPConfig, Tokenizer] | None = None,
) -> Job:  # fmt: skip
    """Answer every question of a run. `saved` is the folder of a tokenizer to use again on a resume.

    `start` has the shape and the tokenizer of a model to start from.
    """
    bias = config.train.loss == "sigmoid"
    draft = dataclasses.replace(start[0], logit_bias=bias) if start else clip_config(config.model, logit_bias=bias)
    facts = read_facts()
    _check_fits(draft, facts)
    plan = decode(facts)
    source = open_training_data(config, draft.image_size, plan)
    choose_device(config.train.device, facts)  # a device that is missing is said before the data is read

    preprocess = Preprocess(image_size=draft.image_size)
    lint = None
    if not is_synthetic(config.data):
        lint = look_first(source, draft.image_size, draft.context_length, say, plan.warn)
    captions = [caption for sample in source.samples("train") for caption in sample.captions]
    if start is not None:
        tokenizer, shape = start[1], draft
    else:
        tokenizer = load_tokenizer(saved) if saved else make_tokenizer(config.model.tokenizer, captions)
        shape = clip_config(config.model, tokenizer, logit_bias=bias)
    vision, _ = shape.own_towers

    letters = isinstance(tokenizer, CharTokenizer)  # they are no words, and none can be spared
    augmentation = augmentation_of(config.data, captions, vision.stem == "conv", whole_captions=letters)
    splits: dict[str, Split] = {}
    for split in ("train", "val", "test"):
        if split in source.splits():
            margin = CROP_MARGIN if split == "train" and augmentation.crop_min < 1 else 1.0
            splits[split] = load_split(
                source, split, config.data, tokenizer, shape.context_length, preprocess, margin, plan
            )
    caches = {name: split.cache for name, split in splits.items()}
    choices: dict[str, Any] = {"cache": caches, "lint": lint}
    if config.train.batch_size is None:
        config = with_batch(config, USUAL_BATCH["scratch"], len(splits["train"].samples))
    config, device, precision = auto_fitted(config, shape, tokenizer.eot_id, facts, splits["train"], say, choices)
    kinds = _measure_attention(config, device, precision, shape, splits["train"], choices)
    data = _resolved_data(config, augmentation, splits["train"], device)
    contrast = config.train.text_contrast
    if contrast is None:
        contrast = TEXT_CONTRAST if (data.captions_per_step or 1) > 1 else 0.0
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(model_config(config.model, shape), attention_image=kinds[0], attention_text=kinds[1]),
        data=data,
        train=dataclasses.replace(config.train, device=device.kind, precision=precision, text_contrast=contrast),
    )
    training = _training_set(config, shape, splits["train"], augmentation, device)
    context = autocast(device, precision)
    return Job(
        config, facts, device, precision, shape, tokenizer, preprocess, source, training, splits, choices, context
    )


def choose_hardware(config: Config, facts: Facts) -> tuple[Device, Precision, float | None]:
    """Device and precision, with the measured gain of bf16 where that decided."""
    device = Device(choose_device(config.train.device, facts), facts)
    torch.set_num_threads(threads(config.train.threads, facts))
    if config.model.compile:
        check_compile(device.kind)
    measure = config.train.precision == "auto" and device.rules.bf16 == "measure"
    speedup = bf16_speedup(device) if measure else None
    return device, choose_precision(config.train.precision, device.kind, facts, speedup), speedup


def _training_set(
    config: Config, shape: CLIPConfig, train: Split, augmentation: Augmentation, device: Device
) -> TrainingSet:
    """The batches of the run, from images that lie on the device where it has a memory of its own."""
    assert config.train.batch_size
    plan = BatchPlan.full(len(train.samples), config.train.batch_size, config.seed)
    full_length = device.rules.fixed_shapes or config.model.compile
    device_images = train.images.to_device(device.torch, device.free_bytes()) if device.rules.resident else None
    return TrainingSet(
        train.images,
        train.captions,
        plan,
        augmentation,
        device_images=device_images,
        full_length=full_length,
        identity=identities(train.samples),
        captions_per_image=config.data.captions_per_step or 1,
        patches=shape.image_tower.patches,
    )


def _measure_attention(
    config: Config, device: Device, precision: Precision, shape: CLIPConfig, train: Split, choices: dict[str, Any]
) -> tuple[AttentionKind, AttentionKind]:
    """Measure both implementations at the shapes of this run, unless the config already says which."""
    longest = min(-(-int(train.captions.lengths.max()) // 8) * 8, shape.context_length)
    vision, text = shape.own_towers
    asked = {
        "image": (config.model.attention_image, vision.heads, vision.tokens, vision.width, False),
        "text": (config.model.attention_text, text.heads, longest, text.width, True),
    }
    kinds: list[AttentionKind] = []
    for tower, (wish, heads, length, width, causal) in asked.items():
        kind, times = choose_attention(
            wish, device, DTYPES[precision], config.train.batch_size or 0, heads, length, width // heads, causal
        )
        choices[f"attention_{tower}"] = {"chosen": kind, **{name: str(value) for name, value in times.items()}}
        kinds.append(kind)
    return kinds[0], kinds[1]


def _resolved_data(config: Config, augmentation: Augmentation, train: Split, device: Device) -> DataConfig:
    """The settings of the data that depend on what is in it."""
    counts = np.diff(train.captions.first)
    several = usual_captions(config, train)
    if device.rules.fixed_shapes:
        several = min(several, int(counts.min()))  # an image with fewer would change the shape of its batch
    return dataclasses.replace(config.data, captions_per_step=several, **dataclasses.asdict(augmentation))


def device_line(device: Device, facts: Facts, precision: Precision, speedup: float | None) -> str:
    """What the run computes on, for a person."""
    name = facts.cuda if device.kind == "cuda" else facts.cpu
    reason = f" (bf16 measured {speedup:.1f}x fp32)" if speedup else ""
    cores = f", {torch.get_num_threads()} threads" if device.kind == "cpu" else ""
    return f"device     {device.kind}: {name}{cores}, {precision}{reason}"


TEST_VIEWS = 1


class Moving(NamedTuple):
    """Which towers are trained; the others stand still."""

    image: bool
    text: bool


def maker_of(
    model: CLIP, tokenizer: Tokenizer, preprocess: Preprocess, config: Config, source: Source, device: Device,
    precision: Precision, plan: DecodePlan,
) -> Maker:  # fmt: skip
    """What makes the features of a model's towers."""
    folders = data_folders(source)
    image, text = model.image_tower, model.text_tower
    return Maker(
        image=Side(image, image.width, (weights_hash(image.state_dict()), str(model.config.image_tower))),
        text=Side(text, text.width, (weights_hash(text.state_dict()), str(model.config.text_tower))),
        tokenizer=tokenizer, context_length=model.config.context_length, preprocess=preprocess,
        views=config.transfer.views, folder=cache_folder(config.data.cache_dir, folders), roots=folders,
        device=device.torch, precision=precision, autocast=autocast(device, precision), plan=plan,
    )  # fmt: skip


def look_at(config: Config, source: Source, maker: Maker, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The quick check of the data that stands before each run; drawn images need none."""
    if is_synthetic(config.data):
        return None
    size, context = maker.preprocess.image_size, maker.context_length
    return look_first(source, size, context, say, maker.plan.warn)


def augmentation_for(config: Config, source: Source, model: CLIP, tokenizer: Tokenizer, moving: Moving) -> Augmentation:
    """What the sides that move see varied: in towers of ours as in any run, in others words only where asked for."""
    captions = [caption for sample in source.samples("train") for caption in sample.captions]
    image, text = model.config.image_tower, model.config.text_tower
    whole_images = image.kind != "vit" or image.stem == "conv"
    whole_captions = text.kind != "transformer" or isinstance(tokenizer, CharTokenizer)
    found = augmentation_of(config.data, captions, whole_images, whole_captions)
    patches = found.patch_dropout if image.patches else 0.0  # a tower of others knows of no patches
    words = found.word_dropout if moving.text else 0.0
    if not moving.image:
        return Augmentation(word_dropout=words)
    return dataclasses.replace(found, patch_dropout=patches, word_dropout=words)


def side_split(maker: Maker, config: Config, source: Source, split: str, moving: Moving, margin: float = 1.0) -> Split:
    """A split with features on the sides that stand still."""
    if moving.image:
        found = load_split(
            source, split, config.data, maker.tokenizer, maker.context_length, maker.preprocess, margin, maker.plan
        )
        if moving.text:
            return found
        return dataclasses.replace(found, captions=with_classes(feature_captions(maker, found.samples, split), source))
    wanted = maker if split == "train" else dataclasses.replace(maker, views=TEST_VIEWS)
    images, features, kept, failures = feature_images(wanted, source.samples(split), split, config.data.max_bad)
    captions = token_captions(maker, kept) if moving.text else feature_captions(maker, kept, split)
    return Split(images, with_classes(captions, source), kept, failures, "features", features)


def side_splits(
    maker: Maker, config: Config, source: Source, moving: Moving, augmentation: Augmentation
) -> dict[str, Split]:
    """All splits of the data."""
    margin = CROP_MARGIN if augmentation.crop_min < 1 else 1.0
    return {
        split: side_split(maker, config, source, split, moving, margin if split == "train" else 1.0)
        for split in ("train", "val", "test")
        if split in source.splits()
    }


def training_set(
    config: Config, train: Split, augmentation: Augmentation, patches: int, full_length: bool
) -> TrainingSet:
    """The batches of the run."""
    assert config.train.batch_size
    plan = BatchPlan.full(len(train.samples), config.train.batch_size, config.seed)
    return TrainingSet(
        None if train.image_features is not None else train.images,
        train.captions,
        plan,
        augmentation,
        image_features=train.image_features,
        full_length=full_length,
        identity=identities(train.samples),
        captions_per_image=config.data.captions_per_step or 1,
        patches=patches,
    )


def with_teacher(job: Job, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan]) -> Job:
    """The job with what the teacher makes of its training images and captions."""
    transfer, train = job.config.transfer, job.splits["train"]
    bundle = load(Path(transfer.teacher or ""), job.device.kind, activation=job.config.model.activation)
    model, width = bundle.clip, bundle.clip.config.embed_dim
    folders = data_folders(job.source)
    # The same weights make other vectors with another activation, or fewer heads.
    key = (weights_hash(model.state_dict()), json.dumps(model.config.to_dict(), sort_keys=True), "unit vectors")
    maker = Maker(
        image=Side(model.encode_image, width, key), text=Side(model.encode_text, width, key),
        tokenizer=bundle.tokenizer, context_length=model.config.context_length, preprocess=bundle.preprocess, views=1,
        folder=cache_folder(job.config.data.cache_dir, folders), roots=folders, device=job.device.torch,
        precision=job.precision, autocast=job.autocast, plan=decode(job.facts),
    )  # fmt: skip
    _, images, kept, _ = feature_images(maker, train.samples, "train", 0.0)
    if len(kept) != len(train.samples):
        raise UserError(f"{transfer.teacher}: cannot read {len(train.samples) - len(kept)} of the training images")
    captions = feature_captions(maker, train.samples, "train")
    _, first = np.unique(train.captions.keys, return_index=True)  # keys are 0, 1, 2, ...
    scale = float(model.scale().detach())
    say(f"teacher    {transfer.teacher}: {transfer.teacher_weight:g} of the loss, temperature {1 / scale:.3f}")
    texts = captions.features
    assert texts is not None
    teacher = Teacher(images.array, images.rows[:, 0], texts.array, texts.rows[first], scale, transfer.teacher_weight)
    return dataclasses.replace(job, teacher=teacher)


BATCH = 128  # images encoded at once
MOST_IMAGES = 1000  # of class folders: they are decoded at each evaluation
Context = Callable[[], AbstractContextManager[object]]
J = TypeVar("J", bound=Job)


class Meter(Protocol):
    """One number of a model on the base set, between 0 and 1."""

    @property
    def name(self) -> str:
        """What the number is, in a person's words."""

    def __call__(self, bundle: Model) -> float:
        """Measure a model."""


@dataclass(frozen=True)
class RecallMeter:
    """The figure that chooses the best model, on a split."""

    split: Split
    autocast: Context

    @property
    def metric(self) -> str:
        """Its name in the log."""
        return TOP1 if self.split.captions.classes else MEAN_RECALL

    @property
    def name(self) -> str:
        """Its label."""
        return SELECTION[self.metric]

    def __call__(self, bundle: Model) -> float:
        """Features of the split first; sides that stand still bring theirs."""
        found = encode_split(bundle.clip, self.split, bundle.preprocess, BATCH, self.autocast)
        return selection_metric(retrieval(*found)).value


@dataclass(frozen=True)
class ClassMeter:
    """Zero-shot top-1 over a folder of class folders, or an even sample of it."""

    folder: Path
    autocast: Context
    name: str = "zero-shot top-1"

    def __call__(self, bundle: Model) -> float:
        """The names of the folders are the classes."""
        training = bundle.clip.training
        with self.autocast():
            scores = zero_shot(bundle, self.folder, limit=MOST_IMAGES).scores
        bundle.clip.train(training)
        return scores["zero_shot/top1"].value


@dataclass(frozen=True)
class Base:
    """The base set of a run, and what the model made of it before the first step."""

    where: str
    meter: Meter
    tokenizer: Tokenizer
    preprocess: Preprocess
    before: float

    def now(self, model: CLIP) -> float:
        """What it makes of it now."""
        return self.meter(Model(model, self.tokenizer, self.preprocess))

    def figures(self, model: CLIP, say: Callable[[str], None]) -> dict[str, Any]:
        """For the line of an evaluation in the run log, and said."""
        now = self.now(model)
        say(f"base        {self.meter.name} on {self.where}: {now:.1%} ({self.before:.1%} before)")
        return {"retention": now, "retention_before": self.before, "retention_metric": self.meter.name}


def with_base(job: J, load: Callable[[Source, str, DataConfig], Split]) -> J:
    """The job with its base set, if it has one, measured before the first step.

    Zero-shot where it is a folder of class folders, else recall on its test split, or what it has instead;
    `load(source, split, settings)` reads a split as the run's model sees it.
    """
    config = job.config
    if not config.transfer.retention_data:
        return job
    data = dataclasses.replace(config.data, source=config.transfer.retention_data)
    source = open_data(data, job.preprocess.image_size, config.seed)
    meter: Meter
    if source.class_captions:
        meter = ClassMeter(Path(config.transfer.retention_data[0]), job.autocast)
    else:
        split = next(name for name in ("test", "val", "train") if name in source.splits())
        meter = RecallMeter(load(source, split, data), job.autocast)
    before = meter(Model(job.build_model(), job.tokenizer, job.preprocess))
    where = ", ".join(config.transfer.retention_data)
    base = Base(where, meter, job.tokenizer, job.preprocess, before)
    return dataclasses.replace(cast(Any, job), base=base)  # every job that starts from a model has this field


GRID = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the new weights that `--wise-ft search` tries


def mixed(old: dict[str, Tensor], new: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """WiSE-FT: each weight on the line from the old (0) to the new (1)."""
    return {
        name: old[name].to(tensor).lerp(tensor, share) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }


def mix(
    job: Job, start: dict[str, Tensor], base: Base | None, folder: Path, say: Callable[[str], None],
    write: Callable[..., Any],
) -> None:  # fmt: skip
    """Mix old and new weights as asked, keep what is best on validation, and tell what was forgotten."""
    best, wish = load(folder, device=job.device.kind), job.config.transfer.wise_ft
    new = {name: tensor.clone() for name, tensor in best.clip.state_dict().items()}
    tried = GRID if wish == "search" else (1.0,) if wish == "off" else (float(wish),)
    meter = RecallMeter(job.splits["val"], job.autocast) if "val" in job.splits else None
    found: list[tuple[float, float]] = []
    for share in tried:
        best.clip.load_state_dict(mixed(start, new, share))
        own = meter(best) if meter is not None and wish != "off" else 0.0
        found.append((own, share))
        if wish != "off":
            write("wise", share=share, **({f"val_{meter.metric}": own} if meter is not None else {}))
    own, share = max(found)
    best.clip.load_state_dict(mixed(start, new, share))
    if wish != "off":
        parts = f"{share:.2f} of the new weights, {1 - share:.2f} of the old"
        score = f": validation {meter.name} {100 * own:.1f}%" if meter is not None else ""
        say(f"wise       {parts}{score}")
        best.save(folder / "best")
    if base is not None:
        after = base.meter(best)
        write("forgetting", before=base.before, after=after, metric=base.meter.name)
        say(f"forgetting {base.meter.name} on {base.where}: {base.before:.1%} before, {after:.1%} after")


SAMPLE = 50_000  # rows from which mean and deviation are taken


@dataclass(frozen=True)
class TowerJob(Job):
    """A run on features, on data, or on one of each."""

    towers: CLIP = dataclasses.field(kw_only=True)  # the weights it starts from; never trained in place
    moving: Moving = dataclasses.field(kw_only=True)
    fresh: bool = dataclasses.field(kw_only=True)  # new heads, and all of a tower that moves is trained
    base: Base | None = dataclasses.field(kw_only=True, default=None)

    def build_model(self) -> CLIP:
        """The towers with new heads from the seed, or with the heads it starts from; what is to stand still does."""
        torch.manual_seed(self.config.seed)
        model = build_clip(self.towers.config).to(self.device.torch)
        towers = (self.towers.image_tower, self.towers.text_tower)
        model.image_tower, model.text_tower = (
            copy.deepcopy(tower) if moves else tower.requires_grad_(False)
            for tower, moves in zip(towers, self.moving, strict=True)
        )
        if self.fresh:
            self._standardise(model)
        else:
            model.load_state_dict(self.towers.state_dict())
            for head in (model.image_head, model.text_head):
                cast(Head, head).spare_dead_channels()
        self._let_go(model)
        model.set_attention(self.config.model.attention_image, self.config.model.attention_text)  # type: ignore[arg-type]
        model.set_activation_checkpointing(self.config.model.grad_checkpointing)
        return model

    def _standardise(self, model: CLIP) -> None:
        """Tell new heads the mean and deviation of the training features; a tower of ours ends in a norm already."""
        train = self.splits["train"]
        images, captions = train.image_features, train.captions.features
        if images is not None:
            cast(Head, model.image_head).standardize(*moments(images.array, images.rows[:, 0]))
        if captions is not None:
            cast(Head, model.text_head).standardize(*moments(captions.array, captions.rows))

    def _let_go(self, model: CLIP) -> None:
        transfer = self.config.transfer
        rank = 0 if self.fresh else transfer.lora_rank
        counts = (ALL, ALL) if self.fresh else (transfer.unfreeze_image, transfer.unfreeze_text)
        names = ("--unfreeze-image", "--unfreeze-text")
        towers = (model.image_tower, model.text_tower)
        for tower, moves, count, name in zip(towers, self.moving, counts, names, strict=True):
            if moves:
                unfreeze(tower, count, name, rank, LORA_ALPHA)

    def polish(self, folder: Path, say: Callable[[str], None], write: Callable[..., Any]) -> None:
        """Mix old and new weights where it was asked for."""
        if not self.fresh:
            mix(self, self.towers.state_dict(), self.base, folder, say, write)

    def also_measured(self, model: CLIP, say: Callable[[str], None]) -> dict[str, Any]:
        """The base set, where there is one."""
        return {} if self.base is None else self.base.figures(model, say)

    def describe_model(self) -> str:
        """The towers, what of them stands still, and the heads."""
        shape, model = self.towers.config, self.build_model()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        still = sum(p.numel() for p in model.parameters()) - trained
        towers = [getattr(tower, "name", tower.kind) for tower in (shape.image_tower, shape.text_tower)]
        names = " and ".join(
            f"{name}{'' if moves else ', frozen'}" for name, moves in zip(towers, self.moving, strict=True)
        )
        if not any(self.moving):
            names = f"{towers[0]} and {towers[1]}, frozen"
        return (
            f"{names} ({still:,} parameters stand still), {shape.image_head.kind} heads to {shape.embed_dim} "
            f"({trained:,} to train)"
        )


def moments(table: np.ndarray, at: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature over the rows `at`, or an even sample of many."""
    chosen = at[:: max(1, len(at) // SAMPLE)]
    rows = torch.from_numpy(table[np.sort(chosen)].astype(np.float32))
    return rows.mean(dim=0), rows.std(dim=0, correction=0)


def prepare_frozen(config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan]) -> TowerJob:
    """Answer every question of a frozen run; this is where the towers work, once for each image and caption."""
    transfer = config.transfer
    moving = Moving(transfer.image_tower == OWN_IMAGE, transfer.text_tower == OWN_TEXT)
    if all(moving):
        raise UserError("--image-tower vit --text-tower text: nothing is pretrained; that is --recipe scratch")
    source = open_training_data(config, config.model.image_size or TOWER_SIZE, decode(read_facts()))
    captions = (caption for sample in source.samples("train") for caption in sample.captions)
    started = pretrained_towers(config, captions)
    return prepare_towers(config, say, decode, source, started, moving, fresh=True)


class Started(NamedTuple):
    """A model on towers, its tokenizer, and what its images must be."""

    model: CLIP
    tokenizer: Tokenizer
    preprocess: Preprocess


def prepare_towers(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], source: Any, started: Started,
    moving: Moving, fresh: bool,
) -> TowerJob:  # fmt: skip
    """The run on these towers, from features on the sides that stand still."""
    facts = read_facts()
    device, precision, speedup = choose_hardware(config, facts)
    say(device_line(device, facts, precision, speedup))
    towers = started.model.to(device.torch).eval()
    maker = maker_of(towers, started.tokenizer, started.preprocess, config, source, device, precision, decode(facts))
    lint = look_at(config, source, maker, say)
    augmentation = augmentation_for(config, source, towers, started.tokenizer, moving)
    splits = side_splits(maker, config, source, moving, augmentation)
    seen: dict[str, Any] = {"captions_per_step": usual_captions(config, splits["train"])}
    if any(moving):
        seen |= dataclasses.asdict(augmentation)
    usual = USUAL_BATCH["frozen" if fresh else "unfreeze"]
    config = with_batch(config, usual, len(splits["train"].samples))
    vision, text = towers.config.image_tower, towers.config.text_tower
    kinds: dict[str, Any] = {}
    if vision.kind == "vit" and moving.image:
        asked = (vision.heads, vision.tokens, vision.width // vision.heads, False)
        kinds["attention_image"] = choose_attention(
            config.model.attention_image, device, DTYPES[precision], config.train.batch_size or 0, *asked
        )[0]
    if text.kind == "transformer" and moving.text:
        asked = (text.heads, text.tokens, text.width // text.heads, True)
        kinds["attention_text"] = choose_attention(
            config.model.attention_text, device, DTYPES[precision], config.train.batch_size or 0, *asked
        )[0]
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(model_config(config.model, towers.config), **kinds),
        data=dataclasses.replace(config.data, **seen),
        train=dataclasses.replace(config.train, device=device.kind, precision=precision),
    )
    patches = vision.patches
    full_length = device.rules.fixed_shapes or config.model.compile
    choices: dict[str, Any] = {"bf16_speedup": speedup, "features": str(maker.folder), "lint": lint}
    return TowerJob(
        config=config, facts=facts, device=device, precision=precision, shape=towers.config,
        tokenizer=started.tokenizer, preprocess=started.preprocess, source=source, splits=splits, choices=choices,
        training=training_set(config, splits["train"], augmentation, patches, full_length), autocast=maker.autocast,
        towers=towers, moving=moving, fresh=fresh,
    )  # fmt: skip


def pretrained_towers(config: Config, captions: Iterable[str]) -> Started:
    """A model with its makers' weights in the towers and new heads; a tower of ours starts from the seed."""
    transfer = config.transfer
    image_tower, image_weights, preprocess = _image_side(config)
    text_tower, text_weights, tokenizer = _text_side(config, captions)
    head = HeadConfig(kind=transfer.head, hidden=HEAD_WIDTH, dropout=HEAD_DROPOUT)
    shape = CLIPConfig(
        image_tower=image_tower, text_tower=text_tower, image_head=head, text_head=head,
        embed_dim=config.model.embed_dim or TOWER_EMBED, logit_bias=config.train.loss == "sigmoid",
    )  # fmt: skip
    torch.manual_seed(config.seed)
    model = build_clip(shape)
    if image_weights is not None:
        assign_weights(model.image_tower, image_weights, transfer.image_tower)
    if text_weights is not None:
        assign_weights(model.text_tower, text_weights, transfer.text_tower)
    return Started(model, tokenizer, preprocess)


def _image_side(config: Config) -> tuple[VisionTowerConfig | PretrainedImageConfig, Tensors | None, Preprocess]:
    """(config, weights, preprocessing) of the image tower; weights are None where they start from the seed."""
    transfer = config.transfer
    if transfer.image_tower == OWN_IMAGE:
        shape = clip_config(config.model)
        return shape.image_tower, None, Preprocess(image_size=shape.image_size)
    return load_image_tower(transfer.image_tower, config.model.image_size or TOWER_SIZE, transfer.download)


def _text_side(
    config: Config, captions: Iterable[str]
) -> tuple[TextTowerConfig | PretrainedTextConfig, Tensors | None, Tokenizer]:
    """(config, weights, tokenizer) of the text tower; weights are None where they start from the seed."""
    transfer = config.transfer
    context = config.model.context_length or TOWER_CONTEXT
    if transfer.text_tower == OWN_TEXT:
        tokenizer = make_tokenizer(config.model.tokenizer, list(captions))
        shape = clip_config(config.model, tokenizer)
        return dataclasses.replace(shape.text_tower, context_length=context), None, tokenizer
    return load_text_tower(transfer.text_tower, context, transfer.download)


def prepare_unfrozen(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], parts: SavedModel
) -> TowerJob:
    """Answer every question of such a run; a tower that still stands still is read from its features."""
    transfer = config.transfer
    if config.model.image_size not in (None, parts.preprocess.image_size):
        raise UserError(f"{transfer.init}: a model on towers keeps its image size, {parts.preprocess.image_size}")
    model = parts.build()
    if config.train.loss == "sigmoid" and model.logit_bias is None:
        raise UserError(
            f"{transfer.init}: has no bias for --loss sigmoid; choose multi, or train it with sigmoid first"
        )
    moving = Moving(transfer.unfreeze_image != 0, transfer.unfreeze_text != 0)
    source = open_training_data(config, parts.preprocess.image_size, decode(read_facts()))
    started = Started(model, parts.tokenizer, parts.preprocess)
    job = prepare_towers(config, say, decode, source, started, moving, fresh=False)

    def load_base(other: Source, split: str, data: DataConfig) -> Split:
        asked = dataclasses.replace(job.config, data=data)
        plan = decode(job.facts)
        maker = maker_of(*started, asked, other, job.device, job.precision, plan)
        return side_split(maker, asked, other, split, moving)

    return with_base(job, load_base)


@dataclass(frozen=True)
class InitJob(Job):
    """A run that starts from weights."""

    start: dict[str, Tensor] = dataclasses.field(kw_only=True)
    base: Base | None = dataclasses.field(kw_only=True, default=None)  # what must not be forgotten

    def build_model(self) -> CLIP:
        """The model with the weights it starts from; what is to stand still does."""
        model = super().build_model()
        weights = {name: t.to(self.device.torch) for name, t in self.start.items()}
        assign_weights(model, weights, self.config.transfer.init or "")
        transfer = self.config.transfer
        lora = (transfer.lora_rank, LORA_ALPHA)
        unfreeze(model.image_tower, transfer.unfreeze_image, "--unfreeze-image", *lora)
        unfreeze(model.text_tower, transfer.unfreeze_text, "--unfreeze-text", *lora)
        return model

    def describe_model(self) -> str:
        """Where it starts, and how much of it moves."""
        model = self.build_model()
        moving = sum(p.numel() for p in model.parameters() if p.requires_grad)
        whole = sum(p.numel() for p in model.parameters())
        return f"from {self.config.transfer.init}: {moving:,} of {whole:,} parameters to train"

    def polish(self, folder: Path, say: Callable[[str], None], write: Callable[..., Any]) -> None:
        """Mix old and new weights as asked, and say what was kept of what the model could do before."""
        mix(self, self.start, self.base, folder, say, write)

    def also_measured(self, model: CLIP, say: Callable[[str], None]) -> dict[str, Any]:
        """The base set, where there is one."""
        return {} if self.base is None else self.base.figures(model, say)


def prepare_init(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], saved: Any = None
) -> Job:
    """Answer every question of a run that starts from a model; `saved` as in setup.prepare."""
    init, config = Path(config.transfer.init or ""), _gently(config)
    parts = read_model(init, config.model.activation)
    if parts.config.image_head.kind != "projection":
        return prepare_unfrozen(config, say, decode, parts)
    if parts.preprocess.resize == "squash":
        raise UserError(f"{init}: squashes images, which training from --init does not do")
    parts = parts.resized(config.model.image_size)
    job = prepare_scratch(config, say, decode, start=(parts.config, parts.tokenizer))
    weights = parts.weights
    preprocess = dataclasses.replace(parts.preprocess, image_size=job.shape.image_size, resize=job.preprocess.resize)
    values = {item.name: getattr(job, item.name) for item in dataclasses.fields(Job)}
    made = InitJob(**{**values, "preprocess": preprocess}, start=weights)

    def load_base(source: Source, split: str, data: DataConfig) -> Split:
        context = job.shape.context_length
        return load_split(source, split, data, job.tokenizer, context, preprocess, 1.0, decode(job.facts))

    return with_base(made, load_base)


def _gently(config: Config) -> Config:
    """What helps random weights against learning by heart would only disturb trained ones: off unless asked for."""
    data, train = config.data, config.train
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, word_dropout=data.word_dropout or 0.0, patch_dropout=data.patch_dropout or 0.0),
        train=dataclasses.replace(train, text_contrast=train.text_contrast or 0.0),
    )


# These three are judgement: the recipes were measured on one set, of 6,000 images (docs/finetune.md).
LONG_MINUTES = 10  # enough for letting the towers go
ENOUGH_TO_MOVE = 2_000  # images; with fewer, towers that move may learn them by heart
FEW_IMAGES = 100_000  # below this pretrained towers are taken, where they are installed
FINETUNE_OPTIONS = ("wise_ft", "retention_data", "lora_rank", "unfreeze_image", "unfreeze_text")


def prepare(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], saved: Any = None
) -> Job:
    """Answer every question of a run, whichever recipe it follows; `saved` as in setup.prepare."""
    job: Job
    if config.transfer.recipe == "finetune":
        raise UserError("--recipe finetune is two runs: m1clip.training.run makes them")
    if config.transfer.recipe == "frozen":
        job = prepare_frozen(config, say, decode)
    elif config.transfer.init is not None:
        job = prepare_init(config, say, decode, saved)
    else:
        job = prepare_scratch(config, say, decode, saved)
    return with_teacher(job, say, decode) if config.transfer.teacher else job


def run_name(config: Config) -> str:
    """What the folder of a run is called, if the person does not say."""
    if config.transfer.init is not None:
        return "finetune"
    return config.model.name if config.transfer.recipe == "scratch" else config.transfer.recipe


def check_transfer(transfer: TransferConfig) -> None:
    """Refuse options that have no meaning in a recipe."""
    if transfer.init is not None or transfer.recipe == "finetune":
        return
    default = TransferConfig()
    for name in FINETUNE_OPTIONS:
        if getattr(transfer, name) != getattr(default, name):
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} goes with --init or --recipe finetune, not with --recipe {transfer.recipe}")


def choose_recipe(config: Config) -> tuple[Any, str]:
    """(recipe, reason): by the kind and size of the data, by what is installed, and by the time that was given."""
    if config.transfer.init is not None:
        return "scratch", f"starts from {config.transfer.init}, so it is a fine-tuning"
    if is_synthetic(config.data):
        return "scratch", "drawn images are unlike what the pretrained towers have seen"
    images = len(open_data(config.data, config.model.image_size or TOWER_SIZE, config.seed).samples("train"))
    if images >= FEW_IMAGES:
        return "scratch", f"{images:,} images are enough to learn from random weights"
    missing = [t for t in (config.transfer.image_tower, config.transfer.text_tower) if not installed(t)]
    if missing:
        return ("scratch", f"{images:,} images are few, but {missing[0]} is not installed: {remedy(missing[0])}")
    why = f"{images:,} images are too few for random weights, and the pretrained towers are installed"
    minutes = config.train.minutes or 0
    if minutes >= LONG_MINUTES and images >= ENOUGH_TO_MOVE:
        return "finetune", f"{why}; {minutes:g} minutes are enough to let them move after the heads"
    return "frozen", why
