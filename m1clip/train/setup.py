"""Everything that is decided before the first step: device, precision, data, tokenizer, model, attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m1clip.config import Config, DataConfig
from m1clip.data.augment import Augmentation
from m1clip.data.loader import BatchPlan, TrainingSet
from m1clip.data.pair import Source, identities
from m1clip.data.prepare import (
    CROP_MARGIN,
    DecodePlan,
    Split,
    augmentation_of,
    is_synthetic,
    load_split,
    look_first,
)
from m1clip.data.preprocess import Preprocess
from m1clip.data.resident import resident
from m1clip.errors import UserError
from m1clip.hardware.compiler import check_compile
from m1clip.hardware.device import Device, Precision, choose_device, choose_precision, threads
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.measure import DTYPES, bf16_speedup
from m1clip.model.attention import AttentionKind
from m1clip.model.build import resolved, shape_of
from m1clip.model.choose import choose_attention
from m1clip.model.clip import Clip, count_parameters
from m1clip.model.shape import ClipShape
from m1clip.text import CharTokenizer, load_tokenizer, make_tokenizer
from m1clip.text.base import Tokenizer
from m1clip.train.auto import fitted, usual_captions
from m1clip.train.fit import USUAL_BATCH, open_training_data, with_batch
from m1clip.train.precision import autocast
from m1clip.train.teacher import Teacher

BYTES_PER_PARAMETER = 12  # weight, gradient and one moment of the optimizer in float32
TEXT_CONTRAST = 0.2  # docs/recipe.md


@dataclass(frozen=True)
class Job:
    """A run with every question answered; the loop takes it from here."""

    config: Config  # resolved, but for minutes and epochs
    facts: Facts
    device: Device
    precision: Precision
    shape: ClipShape
    tokenizer: Tokenizer
    preprocess: Preprocess
    source: Source
    training: TrainingSet
    splits: dict[str, Split]
    choices: dict[str, Any]  # what was measured in order to decide
    autocast: Callable[[], AbstractContextManager[object]]
    teacher: Teacher | None = dataclasses.field(
        kw_only=True, default=None
    )  # a second target, where asked for

    def build_model(self) -> Clip:
        """A new model from the seed, on the device."""
        torch.manual_seed(self.config.seed)
        model = Clip(self.shape, self.tokenizer.eot_id).to(self.device.torch)
        model.set_attention(*_attention_kinds(self.config))  # type: ignore[arg-type]
        model.set_recompute(self.config.model.recompute)
        return model

    def polish(self, folder: Path, say: Callable[[str], None], write: Callable[..., Any]) -> None:
        """What remains to be done with the best model when training is over; fine-tuning has something here."""

    def also_measured(self, model: Clip, say: Callable[[str], None]) -> dict[str, Any]:
        """What is measured at each evaluation beside the validation split, for the log; nothing from random weights."""
        return {}

    def describe_model(self) -> str:
        """The model in one line, for a person."""
        config = self.config.model
        return (
            f"{config.preset}: {count_parameters(self.shape):,} parameters, {self.tokenizer.vocab_size:,} tokens, "
            f"attention {config.attention_image} (image) {config.attention_text} (text)"
        )


def _attention_kinds(config: Config) -> tuple[str, str]:
    return config.model.attention_image, config.model.attention_text


def _check_fits(shape: ClipShape, facts: Facts) -> None:
    """Before the data is read: a model that no batch size or recomputation can make fit this machine."""
    count = count_parameters(shape)
    memory = max(facts.memory_bytes, torch.cuda.mem_get_info()[1] if facts.cuda else 0)
    if count * BYTES_PER_PARAMETER > memory:
        raise UserError(
            f"a model of {count / 1e9:,.1f} billion parameters needs {count * BYTES_PER_PARAMETER / 1e9:,.0f} GB to "
            f"train, this machine has {memory / 1e9:,.0f} GB: choose a smaller --model"
        )


def prepare(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], saved: Any = None
) -> Job:
    """Answer every question of a run. `saved` is the folder of a tokenizer to use again on a resume."""
    bias = config.train.objective == "sigmoid"
    draft = shape_of(config.model, logit_bias=bias)
    facts = read_facts()
    _check_fits(draft, facts)
    plan = decode(facts)
    source = open_training_data(config, draft.image_size, plan)
    choose_device(config.train.device, facts)  # a device that is missing is said before the data is read

    preprocess = Preprocess(image_size=draft.image_size)
    lint = None
    if not is_synthetic(config.data):
        lint = look_first(source, draft.image_size, draft.context_length, say, plan.warn)
    captions = [caption for pair in source.pairs("train") for caption in pair.captions]
    tokenizer = (
        load_tokenizer(saved)
        if saved
        else make_tokenizer(config.text.tokenizer, captions, config.text.alphabet)
    )
    shape = shape_of(config.model, tokenizer.vocab_size, bias)

    letters = isinstance(tokenizer, CharTokenizer)  # they are no words, and none can be spared
    augmentation = augmentation_of(config.data, captions, shape.stem == "conv", whole_captions=letters)
    splits: dict[str, Split] = {}
    for split in ("train", "val", "test"):
        if split in source.splits():
            margin = CROP_MARGIN if split == "train" and augmentation.crop_min < 1 else 1.0
            splits[split] = load_split(
                source, split, config.data, tokenizer, shape.context_length, preprocess, margin, plan
            )
    caches = {name: split.cache for name, split in splits.items()}
    choices: dict[str, Any] = {"cache": caches, "lint": lint}
    if config.train.batch is None:
        config = with_batch(config, USUAL_BATCH["scratch"], len(splits["train"].pairs))
    config, device, precision = fitted(config, shape, tokenizer.eot_id, facts, splits["train"], say, choices)
    kinds = _measure_attention(config, device, precision, shape, splits["train"], choices)
    data = _resolved_data(config, augmentation, splits["train"], device)
    contrast = config.train.text_contrast
    if contrast is None:
        contrast = TEXT_CONTRAST if (data.captions_per_step or 1) > 1 else 0.0
    config = dataclasses.replace(
        config,
        model=resolved(config.model, shape, *kinds),
        data=data,
        train=dataclasses.replace(
            config.train, device=device.kind, precision=precision, text_contrast=contrast
        ),
    )
    training = _training_set(config, shape, splits["train"], augmentation, device)
    context = autocast(device, precision)
    return Job(
        config,
        facts,
        device,
        precision,
        shape,
        tokenizer,
        preprocess,
        source,
        training,
        splits,
        choices,
        context,
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
    config: Config, shape: ClipShape, train: Split, augmentation: Augmentation, device: Device
) -> TrainingSet:
    """The batches of the run, from pictures that lie on the device where it has a memory of its own."""
    assert config.train.batch
    plan = BatchPlan.full(len(train.pairs), config.train.batch, config.seed)
    full_length = device.rules.fixed_shapes or config.model.compile
    several = config.data.captions_per_step or 1
    identity = identities(train.pairs)
    pictures = train.pictures
    if device.rules.resident:
        pictures = resident(pictures, device.torch, device.free_bytes())
    return TrainingSet(
        pictures, train.captions, plan, augmentation, full_length, identity, several, shape.grid**2
    )


def _measure_attention(
    config: Config,
    device: Device,
    precision: Precision,
    shape: ClipShape,
    train: Split,
    choices: dict[str, Any],
) -> tuple[AttentionKind, AttentionKind]:
    """Measure both implementations at the shapes of this run, unless the config already says which."""
    longest = min(-(-int(train.captions.lengths.max()) // 8) * 8, shape.context_length)
    asked = {
        "image": (
            config.model.attention_image,
            shape.vision_heads,
            shape.image_tokens,
            shape.vision_width,
            False,
        ),
        "text": (config.model.attention_text, shape.text_heads, longest, shape.text_width, True),
    }
    kinds: list[AttentionKind] = []
    for tower, (wish, heads, length, width, causal) in asked.items():
        kind, times = choose_attention(
            wish, device, DTYPES[precision], config.train.batch or 0, heads, length, width // heads, causal
        )
        choices[f"attention_{tower}"] = {
            "chosen": kind,
            **{name: str(value) for name, value in times.items()},
        }
        kinds.append(kind)
    return kinds[0], kinds[1]


def _resolved_data(config: Config, augmentation: Augmentation, train: Split, device: Device) -> DataConfig:
    """The settings of the data that depend on what is in it."""
    counts = np.diff(train.captions.first)
    several = usual_captions(config, train)
    if device.rules.fixed_shapes:
        several = min(several, int(counts.min()))  # a picture with fewer would change the shape of its batch
    return dataclasses.replace(config.data, captions_per_step=several, **dataclasses.asdict(augmentation))


def device_line(device: Device, facts: Facts, precision: Precision, speedup: float | None) -> str:
    """What the run computes on, for a person."""
    name = facts.cuda if device.kind == "cuda" else facts.cpu
    reason = f" (bf16 measured {speedup:.1f}x fp32)" if speedup else ""
    cores = f", {torch.get_num_threads()} threads" if device.kind == "cpu" else ""
    return f"device     {device.kind}: {name}{cores}, {precision}{reason}"
