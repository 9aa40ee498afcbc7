"""What every tokenizer can do."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Tokenizer(ABC):
    """Text to ids and back. One tokenizer serves all splits and is saved with the model."""

    pad_id: int
    sot_id: int
    eot_id: int
    context_length: int = 77  # of `tokenizer(texts)`; a loaded model sets its own

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no start or EOT token, not truncated."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text up to the EOT token; start and padding are left out."""

    @abstractmethod
    def tokenize(self, texts: Sequence[str], context_length: int) -> np.ndarray:
        """(n, context_length) int32: start, text truncated to fit, EOT, padding. The EOT token is always there."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a model folder."""

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """(n, context_length) int64 token ids of one text or many, as the model takes them."""
        import torch

        return torch.from_numpy(self.tokenize([texts] if isinstance(texts, str) else texts, self.context_length)).long()

    def lengths(self, tokens: np.ndarray) -> np.ndarray:
        """(n,) tokens of each row up to the EOT token, or to the last that is not padding where that is later."""
        eot = (tokens == self.eot_id).argmax(axis=1) + 1
        return np.maximum(eot, (tokens != self.pad_id).sum(axis=1))


FILE_NAME = "tokenizer.json"
VERSION = 1


def check_texts(texts: Sequence[str], context_length: int) -> None:
    """Refuse a bare string (it would be read as its letters) and a row with no room for both marks."""
    if isinstance(texts, str):
        raise TypeError("texts must be a list of strings, not one string")
    if context_length < 2:
        raise ValueError(f"context_length must be at least 2 (start and end mark), not {context_length}")


def to_rows(
    token_lists: Sequence[list[int]], context_length: int, *, pad_id: int, sot_id: int, eot_id: int
) -> np.ndarray:
    """(n, context_length) int32: start, ids cut to fit, end, padding."""
    rows = np.full((len(token_lists), context_length), pad_id, dtype=np.int32)
    rows[:, 0] = sot_id
    for row, ids in zip(rows, token_lists, strict=True):
        count = min(len(ids), context_length - 2)
        row[1 : count + 1] = ids[:count]
        row[count + 1] = eot_id
    return rows


def write_record(folder: Path, kind: str, **fields: Any) -> None:
    """Write tokenizer.json: the kind, the version of the format, and what the kind needs."""
    record = {"kind": kind, "version": VERSION, **fields}
    # ASCII only, so that no editor or locale can change a character of the alphabet.
    (Path(folder) / FILE_NAME).write_text(json.dumps(record, ensure_ascii=True) + "\n", encoding="ascii")
