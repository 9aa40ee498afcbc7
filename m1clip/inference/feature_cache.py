"""Features of frozen towers: computed once, found again in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from m1clip.data.cache import (
    Computed,
    DecodePlan,
    Failure,
    FeatureTable,
    LiveImages,
    RowCache,
    check_failures,
    image_names,
    row_name,
)
from m1clip.data.captions import CaptionTable, tokenise
from m1clip.data.images import Preprocess
from m1clip.data.types import Sample
from m1clip.errors import UserError
from m1clip.inference.encoder import Context, Encoder, Tower
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import fingerprint


@dataclass(frozen=True)
class Side:
    """A frozen tower, the width of its features, and what identifies it."""

    tower: Tower
    width: int
    key: tuple[str, ...]  # hash of its weights, and settings that change its output


@dataclass(frozen=True)
class Maker:
    """Everything that features depend on, and where they are cached."""

    image: Side
    text: Side
    tokenizer: Tokenizer
    context_length: int
    preprocess: Preprocess
    views: int
    folder: Path
    roots: tuple[str, ...]
    device: torch.device
    precision: str
    autocast: Context
    plan: DecodePlan

    @property
    def encoder(self) -> Encoder:
        """What computes the features."""
        return Encoder(self.image.tower, self.text.tower, self.preprocess, self.device, self.autocast)

    def image_cache(self) -> RowCache:
        """Keyed by the tower's weights, the preprocessing and the precision."""
        seen = f"{sorted(self.preprocess.to_dict().items())}|{self.precision}"
        return RowCache(self.folder, f"image-{_key(*self.image.key, seen)}", (self.image.width,), np.float16)

    def text_cache(self) -> RowCache:
        """Keyed by the tower's weights, the tokenizer, the context length and the precision."""
        read = f"{fingerprint(self.tokenizer)}|{self.context_length}|{self.precision}"
        return RowCache(self.folder, f"text-{_key(*self.text.key, read)}", (self.text.width,), np.float16)


def feature_images(
    maker: Maker, samples: Sequence[Sample], split: str, max_bad: float
) -> tuple[LiveImages, FeatureTable, list[Sample], tuple[Failure, ...]]:
    """(images, their features in each view, the samples that can be read, the failures)."""
    cache, refs, bad = maker.image_cache(), [sample.image for sample in samples], dict[int, str]()

    def fill(view: int) -> np.ndarray:
        def compute(wanted: list[int]) -> Computed:
            failed: dict[int, str] = {}
            with maker.plan.progress(f"computing features of {split} images") as show:
                for items, rows in maker.encoder.files([refs[item] for item in wanted], failed, show, view):
                    yield [wanted[item] for item in items], rows.numpy()
            bad.update({wanted[item]: reason for item, reason in failed.items()})

        return cache.fill(image_names(samples, maker.roots, str(view)), compute, bad, maker.plan.warn)

    rows = np.stack([fill(view) for view in range(maker.views)], axis=1)  # (images, views)
    failures = check_failures(bad, refs, split, len(samples), max_bad, maker.plan.warn)
    good = np.flatnonzero((rows >= 0).all(axis=1)).tolist()
    if not good:
        raise UserError(f"none of the {len(samples):,} {split} images can be read; m1clip data lint says why")
    images = LiveImages([refs[item] for item in good], maker.preprocess.image_size, maker.preprocess.resize)
    return images, cache.table(FeatureTable, rows[good]), [samples[item] for item in good], failures


def feature_captions(maker: Maker, samples: Sequence[Sample], split: str) -> CaptionTable:
    """The captions of the samples with their features."""
    table = token_captions(maker, samples)
    names = [row_name(caption) for sample in samples for caption in sample.captions]

    def compute(wanted: list[int]) -> Computed:
        tokens, done = table.tokens[wanted], 0
        with maker.plan.progress(f"computing features of {split} captions") as show:
            show(0, len(wanted))
            for rows, vectors in maker.encoder.tokens(tokens, maker.tokenizer.lengths(tokens)):
                yield [wanted[row] for row in rows.tolist()], vectors.numpy()
                done += len(rows)
                show(done, len(wanted))

    cache = maker.text_cache()
    return replace(table, features=cache.table(FeatureTable, cache.fill(names, compute, {}, maker.plan.warn)))


def token_captions(maker: Maker, samples: Sequence[Sample]) -> CaptionTable:
    """The captions of the samples as tokens, for a text tower that is trained."""
    return tokenise([sample.captions for sample in samples], maker.tokenizer, maker.context_length)


def _key(*words: str) -> str:
    return hashlib.sha256("\x1f".join(words).encode()).hexdigest()[:24]
