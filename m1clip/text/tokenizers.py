"""Tokenizers by name: characters, CLIP's BPE, WordPiece and Hugging Face's fast tokenizers; and loading them."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from m1clip.errors import UserError
from m1clip.io import read_small
from m1clip.text.base import FILE_NAME, VERSION, Tokenizer
from m1clip.text.bpe import BASE_COUNT, FULL_SOT_ID, BpeTokenizer

LETTERS = string.ascii_lowercase + " ,."
UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
SPECIAL_COUNT = 4  # pad, start, EOT, unknown
PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
KINDS = ("char", "bpe", "bpe-cut")  # can be built from captions
SAVED = (*KINDS, "wordpiece", "fast")  # plus those of pretrained towers
MAX_BYTES = 2**26  # the largest multilingual vocabularies take 35 MB
REMEDY = "restore the model folder from a backup, or retrain"


class CharTokenizer(Tokenizer):
    """Lower-cased characters of a fixed alphabet; any other character is the unknown id."""

    pad_id, sot_id, eot_id, unk_id = range(SPECIAL_COUNT)

    def __init__(self, alphabet: str) -> None:
        """Take the characters in this order; ids start after the four special ones."""
        if not alphabet:
            raise ValueError("the alphabet is empty")
        if len(set(alphabet)) != len(alphabet):
            raise ValueError("the alphabet contains a character twice")
        # Text is lower-cased before the look-up, so a capital could never be found.
        if capitals := [c for c in alphabet if c.lower() != c]:
            raise ValueError(f"the alphabet contains {capitals[0]!r}, which is not lower case")
        self.alphabet = alphabet
        self.vocab_size = SPECIAL_COUNT + len(alphabet)
        self._id_of = {c: i for i, c in enumerate(alphabet, SPECIAL_COUNT)}

    @classmethod
    def from_captions(cls, captions: Iterable[str]) -> CharTokenizer:
        """a to z, space, comma and full stop, then any other lower-cased characters of the captions, sorted."""
        others = {c for caption in captions for c in caption.lower()} - set(LETTERS)
        return cls(LETTERS + "".join(sorted(others)))

    def encode_batch(self, texts: Iterable[str]) -> Iterable[list[int]]:
        """One id per character of the lower-cased text."""
        return ([self._id_of.get(c, self.unk_id) for c in text.lower()] for text in texts)

    def decode_ids(self, ids: list[int]) -> str:
        """An unknown character is U+FFFD."""
        return "".join(UNKNOWN_CHARACTER if i == self.unk_id else self.alphabet[i - SPECIAL_COUNT] for i in ids)

    def record(self) -> dict[str, Any]:
        """The alphabet."""
        return {"kind": "char", "alphabet": self.alphabet}


class WordPieceTokenizer(Tokenizer):
    """BERT's uncased tokenizer; the id of a token is its place in the vocabulary."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        """Take the tokens in the order of their ids; the four special ones must be among them."""
        self.vocabulary, self.vocab_size = tuple(vocabulary), len(vocabulary)
        ids = {token: i for i, token in enumerate(self.vocabulary)}
        missing = [token for token in (PAD, UNKNOWN, START, END) if token not in ids]
        if missing or len(ids) != len(self.vocabulary):
            raise ValueError(f"the vocabulary {'lacks ' + missing[0] if missing else 'contains a token twice'}")
        self.pad_id, self.sot_id, self.eot_id = ids[PAD], ids[START], ids[END]
        self._rust = RustTokenizer(WordPiece(ids, unk_token=UNKNOWN))
        self._rust.normalizer = BertNormalizer(lowercase=True)
        self._rust.pre_tokenizer = BertPreTokenizer()
        self._rust.decoder = WordPieceDecoder()

    def encode_batch(self, texts: Iterable[str]) -> Iterable[list[int]]:
        """ "[SEP]" in a text is split into its letters before the look-up; the filter is for odd vocabularies."""
        special = (self.pad_id, self.sot_id, self.eot_id)
        for found in self._rust.encode_batch_fast(list(texts), add_special_tokens=False):
            yield [token for token in found.ids if token not in special]

    def decode_ids(self, ids: list[int]) -> str:
        """Words with their parts joined."""
        return str(self._rust.decode(ids))

    def record(self) -> dict[str, Any]:
        """The vocabulary."""
        return {"kind": "wordpiece", "vocabulary": self.vocabulary}

    def __reduce__(self) -> tuple[type[WordPieceTokenizer], tuple[tuple[str, ...]]]:
        return WordPieceTokenizer, (self.vocabulary,)


class FastTokenizer(Tokenizer):
    """Hugging Face's tokenizer.json, with its own normalizer and special tokens; `pad_id` fills the rows."""

    def __init__(self, text: str, pad_id: int) -> None:
        """Take the text of a tokenizer.json; ValueError where it adds no token at both ends."""
        try:
            self._rust = RustTokenizer.from_str(text)
            self._rust.no_padding()
            self._rust.no_truncation()
            special = self._rust.encode("").ids
            self._rust.encode("a word, and 7 more")  # fail here, not in training, on a broken vocabulary
            self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values()) + 1
        except BaseException as error:
            # The library raises a bare Exception, and where it panics a BaseException.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"not a tokenizer.json of Hugging Face ({str(error)[:80]})") from None
        self.text = text
        if len(special) < 2:
            raise ValueError("this tokenizer adds no token before and after a text")
        self.sot_id, self.eot_id = special[0], special[-1]
        # Where the padding is the EOT token (CLIP) any other id works: nothing after EOT has an effect there.
        self.pad_id = 0 if pad_id == self.eot_id else pad_id

    def encode_batch(self, texts: Iterable[str]) -> Iterable[list[int]]:
        """By the library."""
        return (found.ids for found in self._rust.encode_batch(list(texts), add_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        """The text without special tokens and padding, as the library joins it."""
        return str(self._rust.decode([i for i in map(int, ids) if i != self.pad_id], skip_special_tokens=True))

    def decode_ids(self, ids: list[int]) -> str:
        """By the library."""
        return str(self._rust.decode(ids, skip_special_tokens=True))

    def tokenize(self, texts: Sequence[str], context_length: int) -> np.ndarray:
        """With the library's own special tokens, of which there may be more than two."""
        rows = np.full((len(texts), context_length), self.pad_id, np.int32)
        self._rust.enable_truncation(context_length)
        for row, found in zip(rows, self._rust.encode_batch(list(texts)), strict=True):
            row[: len(found.ids)] = found.ids
        self._rust.no_truncation()
        return rows

    def record(self) -> dict[str, Any]:
        """The library's own file."""
        return {"kind": "fast", "tokenizer": json.loads(self.text), "pad_id": self.pad_id}

    def __reduce__(self) -> tuple[type[FastTokenizer], tuple[str, int]]:
        return FastTokenizer, (self.text, self.pad_id)


def make_tokenizer(kind: str, captions: Iterable[str]) -> Tokenizer:
    """A tokenizer for these training captions."""
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(KINDS)}"
        raise UserError(f"unknown tokenizer {kind!r}: {hint}")
    if kind == "char":
        try:
            return CharTokenizer.from_captions(captions)
        except ValueError as error:  # lower-casing can give a character that is not lower case, such as "İ"
            raise UserError(f"no character tokenizer: {error}; use --tokenizer bpe-cut") from error
    return BpeTokenizer() if kind == "bpe" else BpeTokenizer().cut_to(captions)


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of the tokenizer, for the key of a cache."""
    return hashlib.sha256(json.dumps(tokenizer.record(), sort_keys=True).encode()).hexdigest()


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in a model folder; a damaged file is a UserError."""
    path = Path(folder) / FILE_NAME
    try:
        record = json.loads(read_small(path, MAX_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is this a model folder?") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON; {REMEDY}") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}: not a tokenizer file; {REMEDY}")
    version, kind = record.get("version"), record.get("kind")
    if type(version) is not int or version < 1:
        raise UserError(f"{path}: has no format version of m1clip; {REMEDY}")
    # The version is checked before the kind: a newer m1clip may have kinds of its own.
    if version > VERSION:
        raise UserError(
            f"{path}: written by a newer m1clip (format {version}, this one reads {VERSION}); upgrade m1clip"
        )
    if kind not in SAVED:
        raise UserError(f"{path}: unknown tokenizer kind {str(kind)[:40]!r} (known: {', '.join(SAVED)}); {REMEDY}")
    try:
        return _from_record(record)
    except ValueError as error:
        raise UserError(f"{path}: broken tokenizer: {error}; {REMEDY}") from error


def _from_record(record: dict[str, Any]) -> Tokenizer:
    """A tokenizer from a file of unknown origin; ValueError where a value is not what it should be."""
    kind = record["kind"]
    if kind == "char":
        alphabet = record.get("alphabet")
        if not isinstance(alphabet, str):
            raise ValueError("'alphabet' is not a string")
        alphabet.encode("utf-8")  # raises ValueError for a lone surrogate, which could not be saved again
        return CharTokenizer(alphabet)
    if kind == "wordpiece":
        vocabulary = record.get("vocabulary")
        if not isinstance(vocabulary, list) or not all(isinstance(token, str) for token in vocabulary):
            raise ValueError("'vocabulary' is not a list of strings")
        "".join(vocabulary).encode("utf-8")  # as above
        return WordPieceTokenizer(vocabulary)
    if kind == "fast":
        pad = record.get("pad_id", 0)
        if type(pad) is not int or not 0 <= pad < 2**31:
            raise ValueError("'pad_id' is not an id")
        return FastTokenizer(json.dumps(record.get("tokenizer")), pad)
    if kind == "bpe":
        return BpeTokenizer()
    kept = record.get("kept")
    # Strictly increasing ids: a duplicate would shift the ids that the model was trained with.
    if not isinstance(kept, list) or not all(type(token) is int for token in kept):
        raise ValueError("'kept' is not a list of token ids")
    if any(a >= b for a, b in zip([BASE_COUNT - 1, *kept], [*kept, FULL_SOT_ID], strict=True)):
        raise ValueError("'kept' is not an increasing list of merged tokens")
    return BpeTokenizer(kept)
