"""What every tokenizer can do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to ids and back. One tokenizer serves all splits and is saved with the model."""

    pad_id: int
    sot_id: int
    eot_id: int

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no start or end mark, not cut."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text behind the ids; start, end and padding are left out."""

    def __call__(self, texts: Sequence[str], context_length: int) -> np.ndarray:
        """(n, context_length) int32: start, text cut to fit, end, padding. The end mark is always there."""

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a model folder."""


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
