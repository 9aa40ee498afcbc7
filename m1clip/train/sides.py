"""The two sides of a run on towers: one that stands still is read from its features, one that moves sees the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from m1clip.config import Config
from m1clip.data.augment import Augmentation
from m1clip.data.cache_place import cache_folder
from m1clip.data.keep import DecodePlan, data_folders
from m1clip.data.loader import BatchPlan
from m1clip.data.pair import Source, identities
from m1clip.data.prepare import (
    CROP_MARGIN,
    Split,
    augmentation_of,
    is_synthetic,
    load_split,
    look_first,
    with_classes,
)
from m1clip.data.preprocess import Preprocess
from m1clip.features.split import Maker, Side, feature_captions, feature_pictures, token_captions
from m1clip.features.tables import FeatureSet
from m1clip.hardware.device import Device, Precision
from m1clip.model.pretrained.build import own_shape
from m1clip.model.pretrained.clip import TowerClip, width_of
from m1clip.model.pretrained.load import weights_hash
from m1clip.text import CharTokenizer, Tokenizer
from m1clip.train.precision import autocast

TEST_VIEWS = 1


class Moving(NamedTuple):
    """Which towers are trained; the others stand still."""

    image: bool
    text: bool


def maker_of(
    model: TowerClip, tokenizer: Tokenizer, preprocess: Preprocess, config: Config, source: Source, device: Device,
    precision: Precision, plan: DecodePlan,
) -> Maker:  # fmt: skip
    """What makes the features of a model's towers."""
    roots, beside = data_folders(source)
    read_at = getattr(model.image, "also", model.shape.image_config)
    return Maker(
        image=Side(model.image, width_of(model.image), (weights_hash(model.image.state_dict()), str(read_at))),
        text=Side(model.text, width_of(model.text), (weights_hash(model.text.state_dict()), model.shape.text_config)),
        tokenizer=tokenizer, context_length=model.shape.context_length, preprocess=preprocess,
        views=config.transfer.views, folder=cache_folder(config.data.cache_dir, beside), roots=roots,
        device=device.torch, precision=precision, autocast=autocast(device, precision), plan=plan,
    )  # fmt: skip


def look_at(
    config: Config, source: Source, maker: Maker, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """The quick check of the data that stands before each run; drawn pictures need none."""
    if is_synthetic(config.data):
        return None
    size, context = maker.preprocess.image_size, maker.context_length
    return look_first(source, size, context, say, maker.plan.warn)


def augmentation_for(
    config: Config, source: Source, model: TowerClip, tokenizer: Tokenizer, moving: Moving
) -> Augmentation:
    """What the sides that move see varied: in towers of ours as in any run, in others words only where asked for."""
    captions = [caption for pair in source.pairs("train") for caption in pair.captions]
    image, text = own_shape(model.shape.image_config), own_shape(model.shape.text_config)
    whole_pictures = image is None or image.stem == "conv"
    whole_captions = text is None or isinstance(tokenizer, CharTokenizer)
    found = augmentation_of(config.data, captions, whole_pictures, whole_captions)
    patches = found.patch_dropout if image is not None else 0.0  # a tower of others knows of no patches
    words = found.word_dropout if moving.text else 0.0
    if not moving.image:
        return Augmentation(word_dropout=words)
    return dataclasses.replace(found, patch_dropout=patches, word_dropout=words)


def side_split(
    maker: Maker, config: Config, source: Source, split: str, moving: Moving, margin: float = 1.0
) -> Split:
    """A split with features on the sides that stand still."""
    if moving.image:
        found = load_split(
            source,
            split,
            config.data,
            maker.tokenizer,
            maker.context_length,
            maker.preprocess,
            margin,
            maker.plan,
        )
        if moving.text:
            return found
        return dataclasses.replace(
            found, captions=with_classes(feature_captions(maker, found.pairs, split), source)
        )
    wanted = maker if split == "train" else dataclasses.replace(maker, views=TEST_VIEWS)
    pictures, kept, failures = feature_pictures(wanted, source.pairs(split), split, config.data.max_bad)
    captions = token_captions(maker, kept) if moving.text else feature_captions(maker, kept, split)
    return Split(pictures, with_classes(captions, source), kept, failures, "features")


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
) -> FeatureSet:
    """The batches of the run."""
    assert config.train.batch
    plan = BatchPlan.full(len(train.pairs), config.train.batch, config.seed)
    several = config.data.captions_per_step or 1
    identity = identities(train.pairs)
    return FeatureSet(
        train.pictures, train.captions, plan, augmentation, full_length, identity, several, patches
    )
