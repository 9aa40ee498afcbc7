"""What every tokenizer has in common."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer
    from torch import Tensor

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FORMAT = 1
# Text lengths are rounded up to a multiple of this, to limit the number of shapes.
LENGTH_MULTIPLE = 4


class Tokenizer(ABC):
    """Text to token ids. One tokenizer serves all splits and is saved with the model."""

    pad_id: int
    sot_id: int
    eot_id: int
    vocab_size: int  # special tokens included
    context_length: int = 77  # of `tokenizer(texts)`; a loaded model sets its own
    arrays: bool = (
        False  # whether `tokenizer(texts)` gives a numpy array, as models in onnxruntime take it
    )

    @abstractmethod
    def encode_batch(self, texts: Iterable[str]) -> Iterable[list[int]]:
        """Ids of each text, without start and EOT tokens, not truncated.

        Never contains special ids.
        """

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """What tokenizer.json needs to restore this tokenizer: its kind, and values for JSON."""

    @abstractmethod
    def library(self) -> RustTokenizer:
        """The same for the `tokenizers` library, start and EOT tokens included.

        See `BpeTokenizer.library`.
        """

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without start and EOT tokens, not truncated."""
        return next(iter(self.encode_batch([text])))

    def tokenize(self, texts: Sequence[str], context_length: int) -> np.ndarray:
        """(n, context_length) int32: start, truncated text, EOT (always present), padding."""
        if isinstance(texts, str):  # would be treated as a list of characters
            raise TypeError("texts must be a list of strings, not one string")
        if context_length < 2:
            raise ValueError(
                f"context_length must be at least 2 (start and EOT token), not {context_length}"
            )
        rows = np.full((len(texts), context_length), self.pad_id, dtype=np.int32)
        rows[:, 0] = self.sot_id
        for row, ids in zip(rows, self.encode_batch(texts), strict=True):
            count = min(len(ids), context_length - 2)
            row[1 : count + 1] = ids[:count]
            row[count + 1] = self.eot_id
        return rows

    def __call__(self, texts: str | Sequence[str]) -> Tensor | np.ndarray:
        """(n, context_length) int64 token ids of one text or many, as the model expects them."""
        tokens = self.tokenize(
            [texts] if isinstance(texts, str) else texts, self.context_length
        ).astype(np.int64)
        if self.arrays:
            return tokens
        import torch

        return torch.from_numpy(tokens)

    def lengths(self, tokens: np.ndarray) -> np.ndarray:
        """(n,) tokens of each row up to the EOT token or the last that is not padding."""
        eot = (tokens == self.eot_id).argmax(axis=1) + 1
        return np.maximum(eot, (tokens != self.pad_id).sum(axis=1))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a model folder."""
        # ASCII only, so that no editor or locale can change a character of the alphabet.
        text = json.dumps({"format": TOKENIZER_FORMAT, **self.record()}, ensure_ascii=True)
        (Path(folder) / TOKENIZER_FILE).write_text(text + "\n", encoding="ascii")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and other.record() == self.record()

    def __hash__(self) -> int:
        return hash((type(self), self.vocab_size))


def rounded(length: int, context: int) -> int:
    """A text length rounded up to a multiple of LENGTH_MULTIPLE, at most the context."""
    return min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, context)


def by_length(
    tokens: np.ndarray, lengths: np.ndarray, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows, their tokens as int64) in batches of `size`, sorted by length to reduce padding."""
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield (
            rows,
            tokens[rows, : rounded(int(lengths[rows].max()), tokens.shape[1])].astype(np.int64),
        )
