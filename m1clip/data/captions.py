"""Captions, tokenised once and kept as flat arrays that any worker can share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m1clip.data.cache import FeatureTable
from m1clip.text.base import Tokenizer

BUCKET = 4  # text lengths are rounded up to a multiple of this, so that shapes stay few


@dataclass(frozen=True)
class CaptionTable:
    """`tokens[first[i] : first[i + 1]]` are the captions of image i; equal captions share a `key`."""

    tokens: np.ndarray  # (captions, context) int32
    lengths: np.ndarray  # (captions,) up to and with the end mark
    keys: np.ndarray  # (captions,) int64
    first: np.ndarray  # (images + 1,)
    pad_id: int  # what stands after the end mark
    classes: bool = False  # made from class names: equal first captions are one class
    features: FeatureTable | None = None  # of a frozen text tower, one row per caption

    @property
    def owner(self) -> np.ndarray:
        """(captions,) the image that each caption describes."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @property
    def labels(self) -> np.ndarray | None:
        """(images,) the class of each image, numbered from 0; None where captions are not made from classes."""
        return np.unique(self.keys[self.first[:-1]], return_inverse=True)[1] if self.classes else None

    def pick(self, images: np.ndarray, draws: np.ndarray, several: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Up to `several` different captions of each image from 64-bit draws: (rows of `images`, captions)."""
        counts = (self.first[1:] - self.first[:-1])[images]
        taken = np.minimum(counts, several)
        rows = np.repeat(np.arange(len(images)), taken)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(taken) - taken, taken)
        # A run of neighbours from a random start: no caption twice, and each as often as any other.
        start = (draws % counts.astype(np.uint64)).astype(np.int64)
        return rows, self.first[images][rows] + (start[rows] + place) % counts[rows]

    def rows(self, captions: np.ndarray) -> np.ndarray:
        """(n, length) tokens, cut after the longest caption."""
        return self.tokens[captions, : rounded(int(self.lengths[captions].max()), self.tokens.shape[1])]


def drop_tokens(
    tokens: np.ndarray, lengths: np.ndarray, gone: np.ndarray, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Captions without the tokens that `gone` (n, context) names, closed up; the marks and one token always stay."""
    place = np.arange(tokens.shape[1])
    inner = (place > 0) & (place < lengths[:, None] - 1)
    gone = gone & inner
    empty = (gone.sum(axis=1) == inner.sum(axis=1)) & inner.any(axis=1)
    gone[empty, 1] = False
    order = np.argsort(gone, axis=1, kind="stable")
    closed, left = np.take_along_axis(tokens, order, axis=1), lengths - gone.sum(axis=1, dtype=lengths.dtype)
    # A tower of others reads every token that is no padding, also behind the end mark.
    closed[(place >= left[:, None]) & gone.any(axis=1, keepdims=True)] = pad_id
    return closed, left


def rounded(length: int, context: int) -> int:
    """A text length rounded up to a whole bucket, at most the context."""
    return min(-(-length // BUCKET) * BUCKET, context)


def caption_keys(captions: Sequence[str]) -> np.ndarray:
    """(n,) int64: equal captions have equal keys, whatever their case and outer spaces."""
    number: dict[str, int] = {}
    return np.array([number.setdefault(caption.strip().lower(), len(number)) for caption in captions], np.int64)


def tokenise(captions: Sequence[tuple[str, ...]], tokenizer: Tokenizer, context_length: int) -> CaptionTable:
    """Tokenise every caption of every image."""
    flat = [caption for group in captions for caption in group]
    first = np.concatenate([[0], np.cumsum([len(group) for group in captions])]).astype(np.int64)
    tokens = tokenizer.tokenize(flat, context_length)
    lengths = (tokens == tokenizer.eot_id).argmax(axis=1) + 1
    return CaptionTable(tokens, lengths.astype(np.int32), caption_keys(flat), first, tokenizer.pad_id)
