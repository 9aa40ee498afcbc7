"""The data of a run: reading it, what decisions need to know of it, and its training set."""

from __future__ import annotations

import numpy as np

from m1clip import console
from m1clip.config import Config
from m1clip.data.captions import tokenize_captions
from m1clip.data.loader import BatchPlan, TrainingSet
from m1clip.data.prepare import Split, is_synthetic, often_mention_sides, open_data
from m1clip.data.sources.stream import ShardSamples
from m1clip.data.types import Source, sample_ids_of
from m1clip.errors import UserError
from m1clip.evaluation.split_analyses import even_indices
from m1clip.formatting import ceil_div
from m1clip.hardware.device import Device
from m1clip.text.base import Tokenizer
from m1clip.training.decision import Dataset
from m1clip.training.spec import DecidedConfig, augmentation_of

TINY_SET = 100  # images; fewer cause a warning
SAMPLED_CAPTIONS = 20_000  # to find the longest caption


def read_data(config: Config, image_size: int) -> Source:
    """Open the data of a run, with progress."""
    with console.progress("reading the data"):
        return open_data(config.data, image_size, config.seed)


def check_training_data(source: Source, config: Config) -> None:
    """Raise UserError if the images cannot fill a batch; warn if they are very few."""
    images = len(source.samples("train"))
    if images < 2:
        names = ", ".join(config.data.source)
        raise UserError(
            f"{names}: {images} training images found; contrastive training needs at least 2"
        )
    BatchPlan(images, config.train.batch_size_or(2), config.seed)
    if images < TINY_SET and (config.transfer.init or config.transfer.recipe != "scratch"):
        console.warn(
            f"only {images} training images: expect a small gain over the pretrained model or none,"
            " and wide intervals"
        )
    elif images < TINY_SET:
        console.warn(
            f"only {images} training images: the run will show that everything works, but the model"
            " will overfit; expect scores near chance on other images, and use at least a few"
            " hundred images"
        )


def dataset_facts(source: Source, config: Config) -> Dataset:
    """What a run's decisions need to know of its data."""
    samples = source.sampled("train")
    captions = [caption for sample in samples for caption in sample.captions]
    return Dataset(
        images=len(source.samples("train")),
        streamed=source.streamed,
        median_captions=int(np.median([len(sample.captions) for sample in samples])),
        fewest_captions=source.fewest_captions("train"),
        mentions_sides=not is_synthetic(config.data) and often_mention_sides(captions),
    )


def make_training_set(
    config: DecidedConfig, train: Split, device: Device, patches: int
) -> TrainingSet:
    cached_features = train.image_features is not None
    device_images = None
    if device.capabilities.on_device and not cached_features:
        device_images = train.images.to_device(device.torch, device.free_bytes())
    blocks = train.samples.blocks() if isinstance(train.samples, ShardSamples) else None
    return TrainingSet(
        None if cached_features else train.images,
        train.lazy_captions or train.captions,
        BatchPlan(len(train.samples), config.train.batch_size, config.seed, blocks=blocks),
        augmentation_of(config.data),
        image_features=train.image_features,
        device_images=device_images,
        full_length=device.capabilities.fixed_shapes or config.model.compile,
        identity=sample_ids_of(train.samples) if blocks is None else None,
        captions_per_image=config.data.captions_per_step,
        patches=patches,
        mild_after=config.data.mild_after,
    )


def longest_caption(source: Source, tokenizer: Tokenizer, context_length: int) -> int:
    """Tokens of the longest training caption, rounded up to a multiple of 8."""
    captions = [caption for sample in source.sampled("train") for caption in sample.captions]
    sample = [captions[index] for index in even_indices(len(captions), SAMPLED_CAPTIONS)]
    longest = int(tokenize_captions([tuple(sample)], tokenizer, context_length).lengths.max())
    return min(ceil_div(longest, 8) * 8, context_length)
