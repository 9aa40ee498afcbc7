"""The splits of a data set as features: what is known is found, what is new is computed, what is broken is named."""

from __future__ import annotations

import hashlib
import itertools
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

BATCHES_PER_WRITE = 16  # of captions


@dataclass(frozen=True)
class Side:
    """One tower of a maker: what it computes, how wide that is, and the words that tell it from any other tower."""

    tower: Tower
    width: int
    key: tuple[str, ...]  # its weights, and how it is read


@dataclass(frozen=True)
class Maker:
    """Everything that features depend on, and where they are kept."""

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

    def image_store(self) -> RowCache:
        """Keyed by the tower's weights, the preprocessing and the arithmetic."""
        seen = f"{sorted(self.preprocess.to_dict().items())}|{self.precision}"
        return RowCache(self.folder, f"image-{_key(*self.image.key, seen)}", (self.image.width,), np.float16)

    def text_store(self) -> RowCache:
        """Keyed by the tower's weights, the tokenizer, the length and the arithmetic."""
        told = f"{fingerprint(self.tokenizer)}|{self.context_length}|{self.precision}"
        return RowCache(self.folder, f"text-{_key(*self.text.key, told)}", (self.text.width,), np.float16)


def feature_images(
    maker: Maker, samples: Sequence[Sample], split: str, max_bad: float
) -> tuple[LiveImages, FeatureTable, list[Sample], tuple[Failure, ...]]:
    """(images, their features, the samples that could be read, what could not)."""
    store = maker.image_store()
    bad: dict[int, str] = {}
    at = np.stack([_view_rows(maker, store, samples, split, view, bad) for view in range(maker.views)], axis=1)
    good = np.flatnonzero((at >= 0).all(axis=1))
    failures = check_failures(bad, [sample.image for sample in samples], split, len(samples), max_bad, maker.plan.warn)
    if not len(good):
        raise UserError(f"none of the {len(samples):,} {split} images can be read; m1clip data lint says why")
    kept = [samples[place] for place in good.tolist()]
    side, resize = maker.preprocess.image_size, maker.preprocess.resize
    live = LiveImages([sample.image for sample in kept], side, resize)
    return live, store.table(FeatureTable, at[good]), kept, failures


def _view_rows(
    maker: Maker, store: RowCache, samples: Sequence[Sample], split: str, view: int, bad: dict[int, str]
) -> np.ndarray:
    """(images,) the row of one view of each, computed where it is not there yet; -1 where that was not possible."""
    names = image_names(samples, maker.roots, str(view))

    def compute(wanted: list[int]) -> Computed:
        broken: dict[int, str] = {}
        refs = [samples[place].image for place in wanted]
        with maker.plan.progress(f"computing features of {split} images") as show:
            for places, rows in maker.encoder.files(refs, broken, show, view):
                yield [wanted[place] for place in places], rows.numpy()
        bad.update({wanted[place]: reason for place, reason in broken.items()})

    return store.fill(names, compute, bad, maker.plan.warn)


def feature_captions(maker: Maker, samples: Sequence[Sample], split: str) -> CaptionTable:
    """The captions of the samples with their features."""
    table = token_captions(maker, samples)
    names = [row_name(caption) for sample in samples for caption in sample.captions]
    store = maker.text_store()

    def captions(wanted: list[int]) -> Computed:
        tokens, done = table.tokens[wanted], 0
        parts = maker.encoder.tokens(tokens, maker.tokenizer.lengths(tokens))
        with maker.plan.progress(f"computing features of {split} captions") as show:
            show(0, len(wanted))
            while group := list(itertools.islice(parts, BATCHES_PER_WRITE)):
                places = np.concatenate([rows for rows, _ in group]).tolist()
                yield [wanted[place] for place in places], torch.cat([vectors for _, vectors in group]).numpy()
                done += len(places)
                show(done, len(wanted))

    return replace(table, features=store.table(FeatureTable, store.fill(names, captions, {}, maker.plan.warn)))


def token_captions(maker: Maker, samples: Sequence[Sample]) -> CaptionTable:
    """The captions of the samples as tokens, for a tower that reads them anew each time."""
    return tokenise([sample.captions for sample in samples], maker.tokenizer, maker.context_length)


def _key(*words: str) -> str:
    return hashlib.sha256("\x1f".join(words).encode()).hexdigest()[:24]
