"""The splits of a data set as features: what is known is found, what is new is computed, what is broken is named."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from m1clip.data.bad import judge
from m1clip.data.captions import CaptionTable, tokenise
from m1clip.data.keep import DecodePlan
from m1clip.data.pair import Pair
from m1clip.data.preprocess import Preprocess
from m1clip.data.store import Failure, LivePictures
from m1clip.errors import UserError
from m1clip.features.compute import Context, Tower, caption_features, picture_features
from m1clip.features.store import Computed, FeatureStore, name_of
from m1clip.features.tables import FeatureCaptions, FeaturePictures
from m1clip.text import Tokenizer, fingerprint


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


def feature_pictures(
    maker: Maker, pairs: Sequence[Pair], split: str, max_bad: float
) -> tuple[FeaturePictures, list[Pair], tuple[Failure, ...]]:
    """(pictures with features, the pairs that could be read, what could not)."""
    store = maker.image_store()
    bad: dict[int, str] = {}
    at = np.stack([_view_rows(maker, store, pairs, split, view, bad) for view in range(maker.views)], axis=1)
    good = np.flatnonzero((at >= 0).all(axis=1))
    failures = judge(bad, [pair.image for pair in pairs], split, len(pairs), max_bad, maker.plan.warn)
    if not len(good):
        raise UserError(f"none of the {len(pairs):,} {split} pictures can be read; m1clip data lint says why")
    kept = [pairs[place] for place in good.tolist()]
    side, resize = maker.preprocess.image_size, maker.preprocess.resize
    live = LivePictures([pair.image for pair in kept], side, resize)
    return FeaturePictures(live, store.mapped(), at[good]), kept, failures


def _view_rows(
    maker: Maker, store: FeatureStore, pairs: Sequence[Pair], split: str, view: int, bad: dict[int, str]
) -> np.ndarray:
    """(pictures,) the row of one view of each, computed where it is not there yet; -1 where that was not possible."""
    names = [name_of(_inside(pair.image.stamp(), maker.roots), str(view)) for pair in pairs]

    def compute(wanted: list[int]) -> Computed:
        broken: dict[int, str] = {}
        refs = [pairs[place].image for place in wanted]
        with maker.plan.progress(f"computing features of {split} images") as show:
            arguments = (maker.preprocess, view, maker.device, maker.autocast, broken, show)
            for places, rows in picture_features(maker.image.tower, refs, *arguments):
                yield [wanted[place] for place in places], rows
        bad.update({wanted[place]: reason for place, reason in broken.items()})

    store.fill(names, compute, _waiting(maker, store))
    return store.rows(names)


def feature_captions(maker: Maker, pairs: Sequence[Pair], split: str) -> FeatureCaptions:
    """The captions of the pairs with their features."""
    table = token_captions(maker, pairs)
    names = [name_of(caption) for pair in pairs for caption in pair.captions]
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
    return FeatureCaptions(
        table.tokens,
        table.lengths,
        table.keys,
        table.first,
        pad_id,
        table=store.mapped(),
        at=store.rows(names),
    )


def token_captions(maker: Maker, pairs: Sequence[Pair]) -> CaptionTable:
    """The captions of the pairs as tokens, for a tower that reads them anew each time."""
    return tokenise([pair.captions for pair in pairs], maker.tokenizer, maker.context_length)


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
