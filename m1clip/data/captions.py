"""Captions, tokenized once into flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from m1clip.data.array_view import ArrayView
from m1clip.text.base import Tokenizer

MAX_LAZY_CAPTIONS = 256  # captions of an image


@dataclass(frozen=True)
class CaptionTable:
    """`tokens[first[i] : first[i + 1]]` are the captions of image i; equal captions share an id."""

    tokens: np.ndarray  # (captions, context) int32
    lengths: np.ndarray  # (captions,) including the EOT token
    caption_ids: np.ndarray  # (captions,) int64
    first: np.ndarray  # (images + 1,)
    pad_id: int
    classes: bool = False  # made from class names: equal first captions are one class
    features: ArrayView | None = None  # of a frozen text tower, one row per caption
    numbers: np.ndarray | None = None  # (captions,) by which word dropout is drawn; None: the rows
    other_classes: CaptionTable | None = (
        None  # of the classes without an image here, which are candidates too
    )

    def of(self, images: np.ndarray) -> tuple[CaptionTable, np.ndarray]:
        """A table with the captions of some images, and the numbers of these images in it."""
        return self, images

    def subset(self, images: np.ndarray) -> CaptionTable:
        """The captions of these images, in this order."""
        counts = np.diff(self.first)[images]
        rows = np.concatenate([np.arange(self.first[i], self.first[i + 1]) for i in images])
        return replace(
            self,
            tokens=self.tokens[rows],
            lengths=self.lengths[rows],
            caption_ids=self.caption_ids[rows],
            first=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            features=None if self.features is None else self.features.subset(rows),
            numbers=rows if self.numbers is None else self.numbers[rows],
        )

    @property
    def image_index(self) -> np.ndarray:
        """(captions,) the image that each caption describes."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @property
    def labels(self) -> np.ndarray | None:
        """(images,) the class of each image, numbered from 0.

        None if captions are not made from classes.
        """
        return (
            np.unique(self.caption_ids[self.first[:-1]], return_inverse=True)[1]
            if self.classes
            else None
        )

    def pick(
        self, images: np.ndarray, draws: np.ndarray, count: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Up to `count` different captions of each image from 64-bit draws: (rows of `images`,
        captions).
        """
        counts = (self.first[1:] - self.first[:-1])[images]
        picked_counts = np.minimum(counts, count)
        rows = np.repeat(np.arange(len(images)), picked_counts)
        offset = np.arange(len(rows)) - np.repeat(
            np.cumsum(picked_counts) - picked_counts, picked_counts
        )
        # Consecutive captions from a random start: no duplicates, and all are equally likely.
        start = (draws % counts.astype(np.uint64)).astype(np.int64)
        return rows, self.first[images][rows] + (start[rows] + offset) % counts[rows]


@dataclass(frozen=True)
class LazyCaptions:
    """Captions that are read and tokenized for each batch.

    `read` returns the captions of an image.
    """

    read: Callable[[int], tuple[str, ...]]
    tokenizer: Tokenizer
    context_length: int

    def of(self, images: np.ndarray) -> tuple[CaptionTable, np.ndarray]:
        """A table of the captions of some images.

        Numbers and ids do not depend on the other images of the batch.
        """
        texts = [self.read(image)[:MAX_LAZY_CAPTIONS] for image in images.tolist()]
        table = tokenize_captions(texts, self.tokenizer, self.context_length)
        keys = [
            blake2b(text.strip().lower().encode(), digest_size=8).digest()
            for group in texts
            for text in group
        ]
        numbers = np.concatenate(
            [
                image * MAX_LAZY_CAPTIONS + np.arange(len(g))
                for image, g in zip(images, texts, strict=True)
            ]
        )
        ids = np.frombuffer(b"".join(keys), "<i8")
        return replace(table, caption_ids=ids, numbers=numbers), np.arange(len(images))


def drop_tokens(
    tokens: np.ndarray, lengths: np.ndarray, dropped: np.ndarray, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Captions without the tokens where `dropped` (n, context) is true.

    BOS, EOT and at least one token stay.
    """
    positions = np.arange(tokens.shape[1])
    inner = (positions > 0) & (positions < lengths[:, None] - 1)
    dropped = dropped & inner
    empty = (dropped.sum(axis=1) == inner.sum(axis=1)) & inner.any(axis=1)
    dropped[empty, 1] = False
    order = np.argsort(dropped, axis=1, kind="stable")
    remaining, remaining_lengths = (
        np.take_along_axis(tokens, order, axis=1),
        lengths - dropped.sum(axis=1, dtype=lengths.dtype),
    )
    # Third-party towers read every token that is not padding, even after the EOT token.
    remaining[(positions >= remaining_lengths[:, None]) & dropped.any(axis=1, keepdims=True)] = (
        pad_id
    )
    return remaining, remaining_lengths


def caption_ids_of(captions: Sequence[str]) -> np.ndarray:
    """(n,) int64: captions that differ only in case and outer spaces have equal ids."""
    number: dict[str, int] = {}
    return np.array(
        [number.setdefault(caption.strip().lower(), len(number)) for caption in captions], np.int64
    )


def tokenize_captions(
    captions: Sequence[tuple[str, ...]], tokenizer: Tokenizer, context_length: int
) -> CaptionTable:
    flat = [caption for group in captions for caption in group]
    first = np.concatenate([[0], np.cumsum([len(group) for group in captions])]).astype(np.int64)
    tokens = tokenizer.tokenize(flat, context_length)
    lengths = (tokens == tokenizer.eot_id).argmax(axis=1) + 1
    return CaptionTable(
        tokens, lengths.astype(np.int32), caption_ids_of(flat), first, tokenizer.pad_id
    )
