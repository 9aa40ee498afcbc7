"""BERT's lower-cased WordPiece: the tokenizer of the MiniLM text tower, built from its list of pieces alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import WordPiece as Joined
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from m1clip.text.rows import check_texts, to_rows, write_record

PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


class WordPieceTokenizer:
    """Ids are those of the pieces' places in the list."""

    def __init__(self, pieces: Sequence[str]) -> None:
        """Take the pieces in the order of their ids; the four marks must be among them."""
        self.pieces = tuple(pieces)
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        missing = [mark for mark in (PAD, UNKNOWN, START, END) if mark not in ids]
        if missing or len(ids) != len(self.pieces):
            raise ValueError(
                f"the list of pieces {'lacks ' + missing[0] if missing else 'names a piece twice'}"
            )
        self.pad_id, self.sot_id, self.eot_id = ids[PAD], ids[START], ids[END]
        self._rust = RustTokenizer(WordPiece(ids, unk_token=UNKNOWN))
        self._rust.normalizer = BertNormalizer(lowercase=True)
        self._rust.pre_tokenizer = BertPreTokenizer()
        self._rust.decoder = Joined()

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone. The marks are read as the letters they are, so that no text can hold one."""
        return self._plain(self._rust.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text up to the end mark; start and padding are left out."""
        kept = []
        for token in map(int, ids):
            if token == self.eot_id:
                break
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"id {token} is outside the vocabulary of {self.vocab_size}")
            if token not in (self.sot_id, self.pad_id):
                kept.append(token)
        return str(self._rust.decode(kept))

    def __call__(self, texts: Sequence[str], context_length: int) -> np.ndarray:
        """(n, context_length) int32: start, text cut to fit, end, padding."""
        check_texts(texts, context_length)
        found = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        marks = {"pad_id": self.pad_id, "sot_id": self.sot_id, "eot_id": self.eot_id}
        return to_rows([self._plain(one.ids) for one in found], context_length, **marks)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a model folder."""
        write_record(folder, "wordpiece", pieces=self.pieces)

    def _plain(self, ids: list[int]) -> list[int]:
        # "[sep]" in brackets is cut into its letters before it is looked up; this is for lists that hold such a piece.
        special = (self.pad_id, self.sot_id, self.eot_id)
        return [token for token in ids if token not in special]

    def __reduce__(self) -> tuple[type[WordPieceTokenizer], tuple[tuple[str, ...]]]:
        return WordPieceTokenizer, (self.pieces,)
