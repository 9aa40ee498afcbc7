"""What every tokenizer can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

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
