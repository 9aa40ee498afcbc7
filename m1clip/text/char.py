"""One id a character: the smallest vocabulary, for small models and small sets."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from m1clip.text.rows import check_texts, to_rows, write_record

PRIOR_ART_ALPHABET = string.ascii_lowercase + " ,."
UNKNOWN_MARK = "\N{REPLACEMENT CHARACTER}"
SPECIAL_COUNT = 4  # pad, start, end, unknown


class CharTokenizer:
    """Lower-cased characters of a fixed alphabet; any other character is the unknown id."""

    pad_id: int = 0
    sot_id: int = 1
    eot_id: int = 2
    unk_id: int = 3

    def __init__(self, alphabet: str) -> None:
        """Take the characters in this order; ids start after the four specials."""
        if not alphabet:
            raise ValueError("the alphabet is empty")
        if len(set(alphabet)) != len(alphabet):
            raise ValueError("the alphabet holds a character twice")
        # Text is lower-cased before the look-up, so a capital could never be found.
        if capitals := [c for c in alphabet if c.lower() != c]:
            raise ValueError(f"the alphabet holds {capitals[0]!r}, which is not lower case")
        self.alphabet = alphabet
        self._id_of = {c: i for i, c in enumerate(alphabet, SPECIAL_COUNT)}

    @classmethod
    def from_captions(cls, captions: Iterable[str]) -> CharTokenizer:
        """The sorted set of lower-cased characters in the captions."""
        return cls("".join(sorted({c for caption in captions for c in caption.lower()})))

    @property
    def vocab_size(self) -> int:
        """Number of ids, the four specials included."""
        return SPECIAL_COUNT + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """One id a character of the lower-cased text: no start or end mark, not cut."""
        find = self._id_of.get
        return [find(c, self.unk_id) for c in text.lower()]

    def decode(self, ids: Iterable[int]) -> str:
        """The characters up to the end mark; an unknown one is U+FFFD. Start and padding are left out."""
        chars = []
        for token in map(int, ids):
            if token == self.eot_id:
                break
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"id {token} is outside the vocabulary of {self.vocab_size}")
            if token == self.unk_id:
                chars.append(UNKNOWN_MARK)
            elif token >= SPECIAL_COUNT:
                chars.append(self.alphabet[token - SPECIAL_COUNT])
        return "".join(chars)

    def __call__(self, texts: Sequence[str], context_length: int) -> np.ndarray:
        """(n, context_length) int32: start, text cut to fit, end, padding. The end mark is always there."""
        check_texts(texts, context_length)
        token_lists = [self.encode(text) for text in texts]
        return to_rows(
            token_lists, context_length, pad_id=self.pad_id, sot_id=self.sot_id, eot_id=self.eot_id
        )

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a model folder."""
        write_record(folder, "char", alphabet=self.alphabet)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CharTokenizer) and other.alphabet == self.alphabet

    def __hash__(self) -> int:
        return hash(self.alphabet)

    def __repr__(self) -> str:
        return f"CharTokenizer({self.alphabet!r})"
