"""The splits of a data set as features: what is known is found, what is new is computed, what is broken is named."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from m1clip.data.cache import DecodePlan, Failure, FeatureTable, LiveImages, judge
from m1clip.data.captions import CaptionTable, tokenise
from m1clip.data.features import Computed, FeatureStore, name_of
from m1clip.data.images import Preprocess
from m1clip.data.types import Sample
from m1clip.errors import UserError
from m1clip.inference.encoder import Context, Tower, caption_features, image_features
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import fingerprint


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

    def image_store(self) -> FeatureStore:
        """Keyed by the tower's weights, the preprocessing and the arithmetic."""
        seen = f"{sorted(self.preprocess.to_dict().items())}|{self.precision}"
        return FeatureStore(self.folder, f"image-{_key(*self.image.key, seen)}", self.image.width)

    def text_store(self) -> FeatureStore:
        """Keyed by the tower's weights, the tokenizer, the length and the arithmetic."""
        told = f"{fingerprint(self.tokenizer)}|{self.context_length}|{self.precision}"
        return FeatureStore(self.folder, f"text-{_key(*self.text.key, told)}", self.text.width)


def feature_images(
    maker: Maker, samples: Sequence[Sample], split: str, max_bad: float
) -> tuple[LiveImages, FeatureTable, list[Sample], tuple[Failure, ...]]:
    """(images, their features, the samples that could be read, what could not)."""
    store = maker.image_store()
    bad: dict[int, str] = {}
    at = np.stack([_view_rows(maker, store, samples, split, view, bad) for view in range(maker.views)], axis=1)
    good = np.flatnonzero((at >= 0).all(axis=1))
    failures = judge(bad, [sample.image for sample in samples], split, len(samples), max_bad, maker.plan.warn)
    if not len(good):
        raise UserError(f"none of the {len(samples):,} {split} images can be read; m1clip data lint says why")
    kept = [samples[place] for place in good.tolist()]
    side, resize = maker.preprocess.image_size, maker.preprocess.resize
    live = LiveImages([sample.image for sample in kept], side, resize)
    return live, FeatureTable(store.mapped(), at[good]), kept, failures


def _view_rows(
    maker: Maker, store: FeatureStore, samples: Sequence[Sample], split: str, view: int, bad: dict[int, str]
) -> np.ndarray:
    """(images,) the row of one view of each, computed where it is not there yet; -1 where that was not possible."""
    names = [name_of(_inside(sample.image.stamp(), maker.roots), str(view)) for sample in samples]

    def compute(wanted: list[int]) -> Computed:
        broken: dict[int, str] = {}
        refs = [samples[place].image for place in wanted]
        with maker.plan.progress(f"computing features of {split} images") as show:
            arguments = (maker.preprocess, view, maker.device, maker.autocast, broken, show)
            for places, rows in image_features(maker.image.tower, refs, *arguments):
                yield [wanted[place] for place in places], rows
        bad.update({wanted[place]: reason for place, reason in broken.items()})

    store.fill(names, compute, _waiting(maker, store))
    return store.rows(names)


def feature_captions(maker: Maker, samples: Sequence[Sample], split: str) -> CaptionTable:
    """The captions of the samples with their features."""
    table = token_captions(maker, samples)
    names = [name_of(caption) for sample in samples for caption in sample.captions]
    store, pad_id = maker.text_store(), maker.tokenizer.pad_id

    def captions(wanted: list[int]) -> Computed:
        rows = table.tokens[wanted]
        # Up to the end mark, or the last word where a tokenizer writes none.
        lengths = np.maximum(table.lengths[wanted], (rows != pad_id).sum(axis=1))
        with maker.plan.progress(f"computing features of {split} captions") as show:
            arguments = (maker.device, maker.autocast, show)
            for places, made in caption_features(maker.text.tower, rows, lengths, *arguments):
                yield [wanted[place] for place in places], made

    store.fill(names, captions, _waiting(maker, store))
    return replace(table, features=FeatureTable(store.mapped(), store.rows(names)))


def token_captions(maker: Maker, samples: Sequence[Sample]) -> CaptionTable:
    """The captions of the samples as tokens, for a tower that reads them anew each time."""
    return tokenise([sample.captions for sample in samples], maker.tokenizer, maker.context_length)


def _inside(stamp: str, roots: Sequence[str]) -> str:
    """A path counts from the folder of the data, so that the data may be moved (as in data/cache.py)."""
    whole = os.path.normpath(os.path.join(os.getcwd(), stamp))
    for root in roots:
        folder = os.path.join(os.path.abspath(root), "")
        if whole.startswith(folder):
            return whole[len(folder) :]
    return stamp


def _key(*words: str) -> str:
    return hashlib.sha256("\x1f".join(words).encode()).hexdigest()[:24]


def _waiting(maker: Maker, store: FeatureStore) -> Callable[[], None]:
    return lambda: maker.plan.warn(f"{store.path}: another process is adding features; waiting for it")
