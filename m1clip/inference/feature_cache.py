"""Cached features of frozen towers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from m1clip import console
from m1clip.data.array_view import ArrayView
from m1clip.data.cache import Computed, RowCache, RowWriter, image_keys, row_key
from m1clip.data.captions import CaptionTable, tokenize_captions
from m1clip.data.decode_pool import FEWEST_ITEMS
from m1clip.data.decoding import DecodeOptions, LazyImages, gpu_decoder_for
from m1clip.data.failures import Failure, check_failures
from m1clip.data.images import Preprocess
from m1clip.data.types import Sample
from m1clip.errors import UserError
from m1clip.hardware.device import Precision
from m1clip.inference.batches import Tower, TowerRunner
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import fingerprint


@dataclass(frozen=True)
class FrozenTower:
    """A frozen tower, the width of its features, and what identifies it."""

    tower: Tower
    width: int
    key: tuple[str, ...]  # hash of its weights, and settings that change its output


@dataclass(frozen=True)
class FeatureCache:
    """Features of the images and captions of a dataset; what is not cached yet is computed."""

    image: FrozenTower
    text: FrozenTower
    tokenizer: Tokenizer
    context_length: int
    preprocess: Preprocess
    folder: Path
    roots: tuple[str, ...]
    device: torch.device
    precision: Precision
    decoding: DecodeOptions

    @property
    def towers(self) -> TowerRunner:
        """What computes the features."""
        return TowerRunner(
            self.image.tower, self.text.tower, self.preprocess, self.device, self.precision
        )

    def images(
        self, samples: Sequence[Sample], split: str, max_unreadable: float
    ) -> tuple[LazyImages, ArrayView, list[Sample], tuple[Failure, ...]]:
        """(images, their features, the samples that can be read, the failures)."""
        inputs = f"{sorted(self.preprocess.to_dict().items())}|{self.precision}"
        refs = [sample.image for sample in samples]
        gpu = None
        if len(refs) >= FEWEST_ITEMS:
            gpu = gpu_decoder_for(refs, self.decoding, self.preprocess.image_size)
        cache = self._cache("image", self.image, f"{inputs}|nvjpeg" if gpu else inputs)

        def compute(missing: list[int], failed: dict[int, str], writer: RowWriter) -> Computed:
            chosen = [refs[item] for item in missing]
            with console.progress(f"computing features of {split} images"):
                for items, vectors in self.towers.files(chosen, failed, gpu):
                    writer.write(items, vectors.numpy())
                    yield items

        rows, bad = cache.fill(image_keys(samples, self.roots), compute)
        failures = check_failures(bad, refs, split, len(samples), max_unreadable)
        readable = np.flatnonzero(rows >= 0).tolist()
        if not readable:
            raise UserError(
                f"none of the {len(samples):,} {split} images can be read; m1clip data lint"
                " shows why"
            )
        images = LazyImages(
            [refs[item] for item in readable], self.preprocess.image_size, self.preprocess.resize
        )
        return images, cache.view(rows[readable]), [samples[item] for item in readable], failures

    def captions(self, samples: Sequence[Sample], split: str) -> CaptionTable:
        """The captions of the samples with their features."""
        table = self.tokens(samples)
        names = [row_key(caption) for sample in samples for caption in sample.captions]
        cache = self._cache(
            "text",
            self.text,
            f"{fingerprint(self.tokenizer)}|{self.context_length}|{self.precision}",
        )

        def compute(missing: list[int], failed: dict[int, str], writer: RowWriter) -> Computed:
            tokens = table.tokens[missing]
            done = 0
            with console.progress(f"computing features of {split} captions") as refresh:
                refresh(0, len(missing))
                for rows, vectors in self.towers.tokens(tokens, self.tokenizer.lengths(tokens)):
                    indices = rows.tolist()
                    writer.write(indices, vectors.numpy())
                    yield indices
                    done += len(rows)
                    refresh(done, len(missing))

        return replace(table, features=cache.view(cache.fill(names, compute)[0]))

    def tokens(self, samples: Sequence[Sample]) -> CaptionTable:
        """The captions of the samples as tokens, for a text tower that is trained."""
        return tokenize_captions(
            [sample.captions for sample in samples], self.tokenizer, self.context_length
        )

    def _cache(self, name: str, tower: FrozenTower, settings: str) -> RowCache:
        return RowCache(
            self.folder, name, "\x1f".join((*tower.key, settings)), (tower.width,), np.float16
        )
