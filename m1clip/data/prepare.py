"""From the config to splits for training and evaluation: images, captions, failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from m1clip import console
from m1clip.config import DataConfig
from m1clip.data.array_view import ArrayView
from m1clip.data.captions import CaptionTable, LazyCaptions, tokenize_captions
from m1clip.data.decoding import DecodeOptions, Images
from m1clip.data.failures import Failure
from m1clip.data.image_cache import cache_split, stream_images
from m1clip.data.images import BadImage, Preprocess, open_header
from m1clip.data.lint import EXAMPLES_LOGGED, FINDINGS_WARNED, QUICK, lint
from m1clip.data.sources import open_sources
from m1clip.data.sources.base import Options
from m1clip.data.sources.stream import StreamedSource
from m1clip.data.synthetic.drawing import MAX_SCENE_SIZE
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.data.types import Sample, Source
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.text.base import Tokenizer

if TYPE_CHECKING:
    from m1clip.data.augment import Augmentation

CROP_MARGIN = 1.15  # of the training size
MEASURED = 64  # images whose size is read
LEFT_RIGHT = re.compile(r"\b(left|right)\b", re.IGNORECASE)
LEFT_RIGHT_FRACTION = 0.2  # of the captions; usually it is about 1%


@dataclass(frozen=True)
class Split:
    """Images with their captions, in the same order."""

    images: Images
    captions: CaptionTable
    samples: Sequence[Sample]
    failures: tuple[Failure, ...] = ()  # images found unreadable before training
    cache: str = "ram"  # ram, disk or off
    image_features: ArrayView | None = None  # of a frozen image tower
    lazy_captions: LazyCaptions | None = None  # of streamed training images; `captions` is empty

    def subset_of_features(self, rows: np.ndarray) -> Split:
        """These images of a split whose image features are cached; their pixels cannot be read."""
        assert self.image_features is not None
        features = self.image_features.subset(rows)
        return replace(
            self,
            images=features,
            captions=self.captions.subset(rows),
            samples=[self.samples[row] for row in rows],
            failures=(),
            image_features=features,
        )


def is_synthetic(config: DataConfig) -> bool:
    """Whether all images are synthetic: their captions mention colors and sides, which augmentation
    must not change.
    """
    return all(name == "synthetic" for name in config.source)


def choose_augmentation(
    config: DataConfig,
    mentions_sides: bool = False,
    keep_patches: bool = False,
    keep_words: bool = False,
) -> Augmentation:
    """The augmentation of the config, or the default for this data.

    No dropout of patches or words if `keep_...`.
    """
    # Imports torch, which an evaluation in onnxruntime does not need.
    from m1clip.data.augment import Augmentation

    usual = Augmentation(0.6, 0.5, 0.2, 0.0 if keep_patches else 0.5, 0.0 if keep_words else 0.3)
    if is_synthetic(config):
        usual = Augmentation()
    elif mentions_sides:
        # A mirrored or shifted image would make its caption false.
        usual = replace(usual, crop_min=1.0, flip=0.0)
    options = {field.name: getattr(config, field.name) for field in fields(Augmentation)}
    return replace(usual, **{name: value for name, value in options.items() if value is not None})


def often_mention_sides(captions: Iterable[str]) -> bool:
    """Whether many captions mention left and right, which a mirrored or cropped image would make
    false.
    """
    mentions = [bool(LEFT_RIGHT.search(caption)) for caption in captions]
    return sum(mentions) > LEFT_RIGHT_FRACTION * len(mentions)


def open_data(config: DataConfig, image_size: int, seed: int) -> Source:
    """Open the configured source."""
    if is_synthetic(config):
        held_out = max(2, min(config.synthetic_images // 9, 1000))
        size = min(image_size, MAX_SCENE_SIZE)  # scaled up for a larger model
        return SyntheticSource(size, config.synthetic_images, held_out, held_out, seed=seed)
    # The split seed stays fixed, so that the validation images are the same for every training
    # seed.
    columns, stream = (config.image_column, config.caption_column), config.cache == "stream"
    options = Options(*columns, stream, config.cache_dir, config.captions)
    return open_sources(config.source, options=options)


def crop_margin(crop_min: float, image_size: int, samples: Sequence[Sample] = ()) -> float:
    """How much larger than the training size images are cached, so that crops are not upscaled.

    No larger than the files of `samples`, if given: training on enlarged images costs 3 points of
    recall (docs/recipe.md).
    """
    if crop_min == 1:
        return 1.0
    short_sides = []
    for number in range(0, len(samples), -(-len(samples) // MEASURED) or 1):
        image = samples[number].image
        with suppress(BadImage), open_header(image.read(), str(image)) as header:
            short_sides.append(min(header.size))
    return (
        min(CROP_MARGIN, max(1.0, median(short_sides) / image_size)) if short_sides else CROP_MARGIN
    )


def load_split(
    source: Source,
    split: str,
    config: DataConfig,
    tokenizer: Tokenizer,
    context_length: int,
    preprocess: Preprocess,
    margin: float,
    options: DecodeOptions,
) -> Split:
    """Cache the images of a split, `margin` larger than the model's images, and tokenize its
    captions.
    """
    side = round(preprocess.image_size * margin)
    images, samples, failures, cache = cache_split(
        source, split, side, preprocess.resize, config, options
    )
    if not len(images):
        total = len(source.samples(split))
        raise UserError(
            f"none of the {total:,} {split} images can be read; m1clip data lint shows why"
        )
    captions, others = (
        tokenize_captions([sample.captions for sample in group], tokenizer, context_length)
        for group in (samples, other_classes(source, samples))
    )
    return Split(images, with_classes(captions, source, others), samples, failures, cache)


def stream_split(
    source: StreamedSource,
    config: DataConfig,
    tokenizer: Tokenizer,
    context_length: int,
    preprocess: Preprocess,
    margin: float,
    options: DecodeOptions,
) -> Split:
    """The training images of streamed shards with their captions, which are read for each batch."""
    samples, side = source.parts["train"], round(preprocess.image_size * margin)
    images, failures = stream_images(
        samples.images(), side, preprocess.resize, config, options, source.threads
    )
    captions = LazyCaptions(samples.captions, tokenizer, context_length)
    return Split(
        images,
        tokenize_captions([], tokenizer, context_length),
        samples,
        failures,
        "off",
        None,
        captions,
    )


def other_classes(source: Source, samples: Sequence[Sample]) -> list[Sample]:
    """One sample of each class of the source that none of these samples has.

    None unless it has classes.
    """
    if not source.class_captions:
        return []
    own_keys = {_class_key(sample) for sample in samples}
    others = {
        _class_key(sample): sample for split in source.splits() for sample in source.samples(split)
    }
    return [others[key] for key in sorted(others.keys() - own_keys)]


def _class_key(sample: Sample) -> str:
    """Equal for samples of one class, as `caption_ids_of` compares captions."""
    return sample.captions[0].strip().lower()


def with_classes(captions: CaptionTable, source: Source, others: CaptionTable) -> CaptionTable:
    """The captions, with those of all other classes if the source makes them from class names."""
    if not source.class_captions:
        return captions
    return replace(captions, classes=True, other_classes=others if len(others.tokens) else None)


def quick_check(source: Source, context_length: int) -> dict[str, Any]:
    """The quick check before each run: prints the first findings, returns all warnings and problems
    for the log.
    """
    for note in source.notes:
        console.print(f"note       {note}")
    report = lint(source, QUICK, context_length=context_length)
    serious = [finding for finding in report.findings if finding.severity != "info"]
    for finding in serious[:FINDINGS_WARNED]:
        first = f"; first: {finding.examples[0]}" if finding.examples else ""
        console.warn(f"data: {finding.message}: {finding.count:,}{first}")
    if len(serious) > FINDINGS_WARNED:
        more = plural(len(serious) - FINDINGS_WARNED, "more finding")
        console.warn(f"data: {more}; m1clip data lint shows all")
    logged = [
        {**asdict(finding), "examples": finding.examples[:EXAMPLES_LOGGED]} for finding in serious
    ]
    return {"verdict": report.verdict, "checked": report.checked, "findings": logged}
