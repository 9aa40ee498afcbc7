"""From the config's words to splits that can be trained on and evaluated: pictures, captions, what was skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from m1clip.config import DataConfig
from m1clip.data.augment import Augmentation
from m1clip.data.captions import CaptionTable, tokenise
from m1clip.data.pair import ImageRef, Pair, Source
from m1clip.data.preprocess import Preprocess
from m1clip.data.sources import Options, open_sources
from m1clip.data.store import ArrayPictures, LivePictures, Pictures, Progress, decode_all
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.errors import UserError
from m1clip.text.base import Tokenizer

CROP_MARGIN = 1.15  # decoded this much larger than the training size, so that a crop is not blown up
RAM_LIMIT_SHARE = 0.3  # of the machine's memory, for decoded pictures


@dataclass(frozen=True)
class Split:
    """Pictures with their captions, in the same order."""

    pictures: Pictures
    captions: CaptionTable
    pairs: Sequence[Pair]


@dataclass(frozen=True)
class DecodePlan:
    """How pictures are decoded: by how many processes, started how, shown to whom."""

    workers: int
    start_method: str
    memory_bytes: int
    progress: Callable[[str], Progress]
    warn: Callable[[str], None]


def is_synthetic(config: DataConfig) -> bool:
    """All pictures are drawn: then left and right, colours and sizes are words and must not be varied."""
    return all(name == "synthetic" for name in config.source)


def augmentation_of(config: DataConfig) -> Augmentation:
    """What the config says, or what suits the kind of data."""
    crop, flip, colour = (1.0, 0.0, 0.0) if is_synthetic(config) else (0.6, 0.5, 0.2)
    return Augmentation(
        crop_min=crop if config.crop_min is None else config.crop_min,
        flip=flip if config.flip is None else config.flip,
        colour=colour if config.colour is None else config.colour,
    )


def open_data(config: DataConfig, image_size: int, seed: int) -> Source:
    """The source that the config names."""
    if is_synthetic(config):
        counts = (config.train_count, config.val_count, config.test_count)
        return SyntheticSource(image_size, *counts, seed=seed, captions_per_image=config.captions_per_image)
    # The split seed stays fixed, so that the validation pictures are the same for every training seed.
    return open_sources(config.source, options=Options(config.image_column, config.caption_column))


def load_split(
    source: Source, split: str, config: DataConfig, tokenizer: Tokenizer, context_length: int, preprocess: Preprocess,
    margin: float, plan: DecodePlan,
) -> Split:  # fmt: skip
    """Decode (or prepare to decode) the pictures of a split and tokenise its captions."""
    pairs = list(source.pairs(split))
    side = round(preprocess.image_size * margin)
    refs = [pair.image for pair in pairs]
    if _keep_in_memory(config, len(refs) * side * side * 3, plan.memory_bytes):
        array, bad = decode_all(
            refs, side, preprocess.resize, plan.workers, plan.start_method, plan.progress(split)
        )
        _judge(bad, refs, split, config.max_bad, plan.warn)
        if bad:
            keep = [i for i in range(len(pairs)) if i not in bad]
            array, pairs = array[keep], [pairs[i] for i in keep]
        pictures: Pictures = ArrayPictures(array)
    else:
        pictures = LivePictures(refs, side, preprocess.resize)
    return Split(pictures, tokenise([pair.captions for pair in pairs], tokenizer, context_length), pairs)


def _keep_in_memory(config: DataConfig, needed: int, memory: int) -> bool:
    if config.cache == "auto":
        return needed < RAM_LIMIT_SHARE * memory
    return config.cache == "ram"


def _judge(
    bad: dict[int, str], refs: Sequence[ImageRef], split: str, limit: float, warn: Callable[[str], None]
) -> None:
    if not bad:
        return
    for index in sorted(bad):
        warn(f"skipped {refs[index]}: {bad[index]}")
    share = len(bad) / len(refs)
    if share > limit:
        first = min(bad)
        raise UserError(
            f"{len(bad)} of {len(refs)} pictures of the {split} split cannot be read ({share:.0%}, allowed "
            f"{limit:.0%}); the first is {refs[first]}: {bad[first]}; mend them, or raise --data.max-bad"
        )
