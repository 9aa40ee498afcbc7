"""Text to ids and back: tokenizers by name, and the one saved in a model folder."""

from __future__ import annotations

import hashlib
import json
import string
import tempfile
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import WordPiece as Joined
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from m1clip.errors import UserError
from m1clip.io import read_small
from m1clip.text.base import FILE_NAME, VERSION, Tokenizer, check_texts, to_rows, write_record
from m1clip.text.bpe import BASE_COUNT, FULL_SOT_ID, BpeTokenizer

PRIOR_ART_ALPHABET = string.ascii_lowercase + " ,."
UNKNOWN_MARK = "\N{REPLACEMENT CHARACTER}"
SPECIAL_COUNT = 4  # pad, start, end, unknown


class CharTokenizer(Tokenizer):
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

    def tokenize(self, texts: Sequence[str], context_length: int) -> np.ndarray:
        """(n, context_length) int32: start, text cut to fit, end, padding. The end mark is always there."""
        check_texts(texts, context_length)
        token_lists = [self.encode(text) for text in texts]
        return to_rows(token_lists, context_length, pad_id=self.pad_id, sot_id=self.sot_id, eot_id=self.eot_id)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a model folder."""
        write_record(folder, "char", alphabet=self.alphabet)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CharTokenizer) and other.alphabet == self.alphabet

    def __hash__(self) -> int:
        return hash(self.alphabet)

    def __repr__(self) -> str:
        return f"CharTokenizer({self.alphabet!r})"


class FastTokenizer(Tokenizer):
    """Its own normaliser, pieces and marks; `pad_id` fills the rows."""

    def __init__(self, text: str, pad_id: int) -> None:
        """Take the text of a tokenizer.json; ValueError where it puts no mark at both ends."""
        try:
            self._rust = RustTokenizer.from_str(text)
            self._rust.no_padding()
            self._rust.no_truncation()
            marks = self._rust.encode("").ids
            self._rust.encode("a word, and 7 more")  # what is wrong with the pieces shows itself here, not in training
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
        return str(self._rust.decode([i for i in map(int, ids) if i != self.pad_id], skip_special_tokens=True))

    def tokenize(self, texts: Sequence[str], context_length: int) -> np.ndarray:
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


PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


class WordPieceTokenizer(Tokenizer):
    """Ids are those of the pieces' places in the list."""

    def __init__(self, pieces: Sequence[str]) -> None:
        """Take the pieces in the order of their ids; the four marks must be among them."""
        self.pieces = tuple(pieces)
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        missing = [mark for mark in (PAD, UNKNOWN, START, END) if mark not in ids]
        if missing or len(ids) != len(self.pieces):
            raise ValueError(f"the list of pieces {'lacks ' + missing[0] if missing else 'names a piece twice'}")
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

    def tokenize(self, texts: Sequence[str], context_length: int) -> np.ndarray:
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


__all__ = [
    "KINDS",
    "PRIOR_ART_ALPHABET",
    "BpeTokenizer",
    "CharTokenizer",
    "FastTokenizer",
    "Tokenizer",
    "WordPieceTokenizer",
    "fingerprint",
    "load_tokenizer",
    "make_tokenizer",
]

KINDS = ("char", "bpe", "bpe-cut")  # those that can be made from captions
SAVED = (*KINDS, "wordpiece", "fast")  # and those that come with a pretrained tower
MAX_BYTES = 2**26  # the largest multilingual vocabularies take 35 MB
COPY_AGAIN = "copy the model folder again, or train again"


def make_tokenizer(kind: str, captions: Iterable[str], alphabet: str | None = None) -> Tokenizer:
    """A tokenizer for these training captions; `alphabet` fixes the characters of kind "char"."""
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(KINDS)}"
        raise UserError(f"unknown tokenizer {kind!r}: {hint}")
    if kind == "char":
        try:
            return CharTokenizer.from_captions(captions) if alphabet is None else CharTokenizer(alphabet)
        except ValueError as error:
            remedy = "give captions with text" if alphabet is None else "give each lower-case character once"
            raise UserError(f"no character tokenizer: {error}; {remedy}") from error
    if alphabet is not None:
        raise UserError(f"tokenizer {kind!r} has no alphabet: leave the alphabet out, or choose 'char'")
    return BpeTokenizer() if kind == "bpe" else BpeTokenizer().cut_to(captions)


def fingerprint(tokenizer: Tokenizer) -> str:
    """What the tokenizer is, for the key of a cache: a hash of the file it is saved in."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return hashlib.sha256(read_small(Path(folder) / FILE_NAME, MAX_BYTES)).hexdigest()


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in a model folder; a file that cannot be trusted is a UserError."""
    path = Path(folder) / FILE_NAME
    record = _read_record(path)
    try:
        if record["kind"] == "char":
            return CharTokenizer(_alphabet_of(record))
        if record["kind"] == "wordpiece":
            return WordPieceTokenizer(_pieces_of(record))
        if record["kind"] == "fast":
            return FastTokenizer(json.dumps(record.get("tokenizer")), _pad_of(record))
        return BpeTokenizer() if record["kind"] == "bpe" else BpeTokenizer(_kept_of(record))
    except ValueError as error:
        raise UserError(f"{path}: broken tokenizer: {error}; {COPY_AGAIN}") from error


def _read_record(path: Path) -> dict[str, Any]:
    """The JSON object in the file, with a kind and a version this package knows."""
    try:
        record = json.loads(read_small(path, MAX_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is this a model folder?") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON; {COPY_AGAIN}") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}: not a tokenizer file; {COPY_AGAIN}")
    version = record.get("version")
    if type(version) is not int or version < 1:
        raise UserError(f"{path}: has no format version of m1clip; {COPY_AGAIN}")
    # The version is checked before the kind: a newer m1clip may have kinds of its own.
    if version > VERSION:
        raise UserError(
            f"{path}: written by a newer m1clip (format {version}, this one reads {VERSION}); upgrade m1clip"
        )
    if record.get("kind") not in SAVED:
        raise UserError(
            f"{path}: unknown tokenizer kind {str(record.get('kind'))[:40]!r} (known: {', '.join(SAVED)}); {COPY_AGAIN}"
        )
    return record


def _alphabet_of(record: dict[str, Any]) -> str:
    alphabet = record.get("alphabet")
    if not isinstance(alphabet, str):
        raise ValueError("'alphabet' is not a string")
    alphabet.encode("utf-8")  # half a surrogate sample is a ValueError: it could never be saved again
    return alphabet


def _pieces_of(record: dict[str, Any]) -> list[str]:
    pieces = record.get("pieces")
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
        raise ValueError("'pieces' is not a list of strings")
    "".join(pieces).encode("utf-8")  # as above
    return pieces


def _pad_of(record: dict[str, Any]) -> int:
    pad = record.get("pad_id", 0)
    if type(pad) is not int or not 0 <= pad < 2**31:
        raise ValueError("'pad_id' is not an id")
    return pad


def _kept_of(record: dict[str, Any]) -> list[int]:
    kept = record.get("kept")
    # Strictly rising ids: a doubled or moved one would shift the ids the model was trained with.
    if not isinstance(kept, list) or not all(type(piece) is int for piece in kept):
        raise ValueError("'kept' is not a list of piece ids")
    if any(a >= b for a, b in zip([BASE_COUNT - 1, *kept], [*kept, FULL_SOT_ID], strict=True)):
        raise ValueError("'kept' is not a rising list of merged pieces")
    return kept
