"""Captions, tokenised once and kept as flat arrays that any worker can share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m1clip.text.base import Tokenizer

BUCKET = 8  # text lengths are rounded up to a multiple of this, so that shapes stay few


@dataclass(frozen=True)
class CaptionTable:
    """`tokens[first[i] : first[i + 1]]` are the captions of picture i; equal captions share a `key`."""

    tokens: np.ndarray  # (captions, context) int32
    lengths: np.ndarray  # (captions,) up to and with the end mark
    keys: np.ndarray  # (captions,) int64
    first: np.ndarray  # (pictures + 1,)

    @property
    def owner(self) -> np.ndarray:
        """(captions,) the picture that each caption describes."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def pick(self, pictures: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """One caption index for each picture, from 64-bit draws."""
        counts = (self.first[1:] - self.first[:-1])[pictures]
        return self.first[pictures] + (draws % counts.astype(np.uint64)).astype(np.int64)

    def rows(self, captions: np.ndarray, full_length: bool) -> np.ndarray:
        """(n, length) tokens, cut after the longest caption unless `full_length`."""
        width = self.tokens.shape[1]
        longest = width if full_length else int(self.lengths[captions].max())
        return self.tokens[captions, : min(-(-longest // BUCKET) * BUCKET, width)]


def tokenise(captions: Sequence[tuple[str, ...]], tokenizer: Tokenizer, context_length: int) -> CaptionTable:
    """Tokenise every caption of every picture."""
    flat = [caption for group in captions for caption in group]
    first = np.concatenate([[0], np.cumsum([len(group) for group in captions])]).astype(np.int64)
    number: dict[str, int] = {}
    keys = np.array([number.setdefault(caption.strip().lower(), len(number)) for caption in flat], np.int64)
    tokens = tokenizer(flat, context_length)
    lengths = (tokens == tokenizer.eot_id).argmax(axis=1) + 1
    return CaptionTable(tokens, lengths.astype(np.int32), keys, first)
