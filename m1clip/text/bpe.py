"""CLIP's byte-level BPE of 49,408 ids, and the same cut down to the pieces a set of captions uses.

Ids are those of open_clip's `SimpleTokenizer`. The merges (clip_bpe_merges.txt.gz) come from OpenAI CLIP,
MIT License, Copyright (c) 2021 OpenAI; the notice stands beside them in clip_bpe_merges.LICENSE.txt.
"""

from __future__ import annotations

import gzip
import html
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path

import ftfy
import numpy as np
from tokenizers import Regex
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InTurn

from m1clip.text.base import Tokenizer, check_texts, to_rows, write_record

BASE_COUNT = 512  # 256 bytes, and the same 256 as the last byte of a word
FULL_SOT_ID = 49_406  # also the number of pieces
FULL_EOT_ID = 49_407
END_OF_WORD = "</w>"
CHUNK = 4_096  # texts in Rust's hands at once: bounds the memory for a large set

# open_clip's pattern without its two special marks, and with what its IGNORECASE does to lower-cased text
# written out: long s is an s, and U+0345 (its capital is a letter) falls through all classes and is dropped.
# The marks are left out because a caption that holds "<end_of_text>" would put the end mark inside a row, and
# the model would pool there: here it is read as the letters it is.
WORD_PATTERN = "'[sſ]|'t|'re|'ve|'m|'ll|'d|\\p{L}+|\\p{N}|[^\\s\\p{L}\\p{N}\u0345]+"


def clean_text(text: str) -> str:
    """The text as CLIP reads it: repaired, HTML entities resolved, whitespace collapsed, lower case."""
    # Nothing in printable ASCII without an entity is for ftfy to repair, and that is nearly every caption.
    if not (text.isascii() and text.isprintable() and "&" not in text):
        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


@cache
def _byte_order() -> list[int]:
    """The byte behind each of the first 256 ids: printable Latin-1 first, then the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [byte for byte in range(256) if byte not in set(printable)]


@cache
def _merges() -> list[tuple[str, str]]:
    """The vendored merges in order of rank; merge i makes piece BASE_COUNT + i."""
    packed = (files("m1clip.text") / "clip_bpe_merges.txt.gz").read_bytes()
    pairs = (line.partition(" ") for line in gzip.decompress(packed).decode("utf-8").splitlines())
    return [(left, right) for left, _, right in pairs]


@cache
def _piece_ids() -> dict[str, int]:
    """Id of each piece as it is written in the merges."""
    # GPT-2's stand-ins: a printable byte is written as itself, the others as the letters from U+0100 on.
    printable_count = 188
    letters = [chr(byte) for byte in _byte_order()[:printable_count]]
    letters += [chr(0x100 + i) for i in range(256 - printable_count)]
    pieces = letters + [letter + END_OF_WORD for letter in letters] + [a + b for a, b in _merges()]
    return {piece: i for i, piece in enumerate(pieces)}


@cache
def _rust_tokenizer() -> RustTokenizer:
    """The whole tokenizer in Rust, built once a process."""
    model = BPE(vocab=_piece_ids(), merges=_merges(), continuing_subword_prefix="", end_of_word_suffix=END_OF_WORD)
    rust = RustTokenizer(model)
    split = Split(Regex(WORD_PATTERN), "removed", invert=True)
    rust.pre_tokenizer = InTurn([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    return rust


@cache
def _merged_from() -> list[tuple[int, int]]:
    """The ids of the two parts of each merged piece; a part's id is always below the whole's."""
    id_of = _piece_ids()
    return [(id_of[left], id_of[right]) for left, right in _merges()]


@cache
def _piece_bytes() -> list[bytes]:
    """The bytes of each piece; one that ends a word ends in a space."""
    single = [bytes([byte]) for byte in _byte_order()]
    pieces = single + [byte + b" " for byte in single]
    for left, right in _merged_from():
        pieces.append(pieces[left] + pieces[right])
    return pieces


class BpeTokenizer(Tokenizer):
    """CLIP's tokenizer: all 49,408 ids, or only the merged pieces in `kept` beside the 512 byte pieces.

    Cut: id 0 is the padding, then come the pieces in CLIP's order, then start and end.
    """

    def __init__(self, kept: Iterable[int] | None = None) -> None:
        """Take all pieces, or the merged ones with these ids of the full vocabulary."""
        self.kept: tuple[int, ...] | None = None if kept is None else tuple(sorted(set(kept)))
        if self.kept and not BASE_COUNT <= self.kept[0] <= self.kept[-1] < FULL_SOT_ID:
            raise ValueError(f"kept pieces must lie between {BASE_COUNT} and {FULL_SOT_ID - 1}")
        # In the full vocabulary, as in CLIP, the padding shares its id with the piece "!".
        self.pad_id: int = 0
        self.sot_id: int = FULL_SOT_ID if self.kept is None else 1 + BASE_COUNT + len(self.kept)
        self.eot_id: int = self.sot_id + 1
        self._parts: list[list[int]] | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included."""
        return self.eot_id + 1

    def cut_to(self, captions: Iterable[str]) -> BpeTokenizer:
        """The same tokenizer with only the pieces these captions use; they are read as before.

        Any other text is read too: a piece that is gone falls back to the parts it was merged from.
        """
        used: set[int] = set()
        for ids in self._encode_all(captions):
            used.update(ids)
        return BpeTokenizer(piece for piece in map(self._full_id, used) if piece >= BASE_COUNT)

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no start or end mark, not cut. Never a special id, whatever the text."""
        return next(self._encode_all([text]))

    def decode(self, ids: Iterable[int]) -> str:
        """The text up to the end mark, one space after each word; start and padding are left out."""
        pieces = _piece_bytes()
        found = []
        for token in map(int, ids):
            if token == self.eot_id:
                break
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"id {token} is outside the vocabulary of {self.vocab_size}")
            if token != self.sot_id and (self.kept is None or token != self.pad_id):
                found.append(pieces[self._full_id(token)])
        return b"".join(found).decode("utf-8", errors="replace").strip()

    def tokenize(self, texts: Sequence[str], context_length: int) -> np.ndarray:
        """(n, context_length) int32: start, text cut to fit, end, padding. The end mark is always there."""
        check_texts(texts, context_length)
        return to_rows(
            list(self._encode_all(texts)), context_length, pad_id=self.pad_id, sot_id=self.sot_id, eot_id=self.eot_id
        )

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a model folder; a cut one lists its merged pieces."""
        if self.kept is None:
            write_record(folder, "bpe")
        else:
            write_record(folder, "bpe-cut", kept=self.kept)

    def pieces(self) -> list[int]:
        """The pieces in the order of their ids, by their number in the full vocabulary; no special marks."""
        return list(range(FULL_SOT_ID)) if self.kept is None else [*range(BASE_COUNT), *self.kept]

    def parts_of(self, piece: int) -> list[int]:
        """The ids here of a piece of the full vocabulary: one, or those it is read as where it was cut away."""
        return [piece] if self.kept is None else self._kept_parts()[piece]

    def _encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]:
        rust = _rust_tokenizer()
        cleaned = map(clean_text, texts)
        while chunk := list(islice(cleaned, CHUNK)):
            for encoding in rust.encode_batch_fast(chunk, add_special_tokens=False):
                if self.kept is None:
                    yield encoding.ids
                else:
                    parts = self._kept_parts()
                    yield [part for piece in encoding.ids for part in parts[piece]]

    def _full_id(self, token: int) -> int:
        """The piece's id in the full vocabulary."""
        if self.kept is None:
            return token
        return token - 1 if token <= BASE_COUNT else self.kept[token - 1 - BASE_COUNT]

    def _kept_parts(self) -> list[list[int]]:
        """For each piece of the full vocabulary, the ids here that spell it: itself, or its parts."""
        if self._parts is None:
            own_id = {piece: i for i, piece in enumerate(self.kept or (), 1 + BASE_COUNT)}
            parts = [[1 + piece] for piece in range(BASE_COUNT)]
            for piece, (left, right) in enumerate(_merged_from(), BASE_COUNT):
                parts.append([own_id[piece]] if piece in own_id else parts[left] + parts[right])
            self._parts = parts
        return self._parts

    def __reduce__(self) -> tuple[type[BpeTokenizer], tuple[tuple[int, ...] | None]]:
        # A worker process rebuilds the tables: they are larger than what they are made from.
        return BpeTokenizer, (self.kept,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BpeTokenizer) and other.kept == self.kept

    def __hash__(self) -> int:
        return hash(self.kept)

    def __repr__(self) -> str:
        return f"BpeTokenizer(vocab_size={self.vocab_size})"


START, END = "<|startoftext|>", "<|endoftext|>"


def row_sources(old: BpeTokenizer, new: BpeTokenizer) -> list[list[int]]:
    """For each id of `new` the ids of `old` whose mean it becomes: one where `old` has the piece, else its parts.

    Text whose pieces are in both is then read as before; a piece that `old` lacks starts as the mean of its parts.
    """
    pieces = [old.parts_of(piece) for piece in new.pieces()]
    padding = [] if new.kept is None else [[old.pad_id]]
    return [*padding, *pieces, [old.sot_id], [old.eot_id]]


def hugging_face_files(context_length: int) -> dict[str, str]:
    """The files of a CLIPTokenizer with CLIP's full vocabulary, by name."""
    vocabulary = {**_piece_ids(), START: FULL_SOT_ID, END: FULL_EOT_ID}
    merges = ["#version: 0.2", *(f"{left} {right}" for left, right in _merges())]
    special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": context_length, **special}
    return {
        "vocab.json": json.dumps(vocabulary, ensure_ascii=False),
        "merges.txt": "\n".join(merges) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2) + "\n",
    }
