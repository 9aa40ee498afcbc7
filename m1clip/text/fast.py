"""Any tokenizer that Hugging Face keeps as one tokenizer.json: the one that came with a text tower."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from m1clip.text.rows import check_texts, write_record


class FastTokenizer:
    """Its own normaliser, pieces and marks; `pad_id` fills the rows."""

    def __init__(self, text: str, pad_id: int) -> None:
        """Take the text of a tokenizer.json; ValueError where it puts no mark at both ends."""
        try:
            self._rust = RustTokenizer.from_str(text)
            self._rust.no_padding()
            self._rust.no_truncation()
            marks = self._rust.encode("").ids
            self._rust.encode(
                "a word, and 7 more"
            )  # what is wrong with the pieces shows itself here, not in training
            self._size = max(self._rust.get_vocab(with_added_tokens=True).values()) + 1
        except BaseException as error:
            # The library raises a bare Exception, and where it panics a BaseException that no `except Exception` sees.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"not a tokenizer.json of Hugging Face ({str(error)[:80]})") from None
        self.text = text
        if len(marks) < 2:
            raise ValueError("this tokenizer puts no mark before and after a text")
        self.sot_id, self.eot_id = marks[0], marks[-1]
        # Where the padding is the end mark (CLIP) any other id does: nothing after the end mark has an effect there.
        self.pad_id = 0 if pad_id == self.eot_id else pad_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, added ones included."""
        return self._size

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no start or end mark, not cut."""
        return list(self._rust.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text behind the ids, without marks and padding."""
        return str(
            self._rust.decode([i for i in map(int, ids) if i != self.pad_id], skip_special_tokens=True)
        )

    def __call__(self, texts: Sequence[str], context_length: int) -> np.ndarray:
        """(n, context_length) int32: start, text cut to fit, end, padding."""
        check_texts(texts, context_length)
        rows = np.full((len(texts), context_length), self.pad_id, np.int32)
        self._rust.enable_truncation(context_length)
        for row, found in zip(rows, self._rust.encode_batch(list(texts)), strict=True):
            row[: len(found.ids)] = found.ids
        self._rust.no_truncation()
        return rows

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a model folder."""
        write_record(folder, "fast", tokenizer=json.loads(self.text), pad_id=self.pad_id)

    def __reduce__(self) -> tuple[type[FastTokenizer], tuple[str, int]]:
        return FastTokenizer, (self.text, self.pad_id)
