"""Tokenizers by name: characters, CLIP's BPE, WordPiece and Hugging Face's fast tokenizers.

And loading them.
"""

from __future__ import annotations

import hashlib
import json
import string
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer, Lowercase, Replace
from tokenizers.normalizers import Sequence as AllOf
from tokenizers.pre_tokenizers import BertPreTokenizer, Split
from tokenizers.processors import BertProcessing

from m1clip.errors import UserError
from m1clip.io import read_small
from m1clip.schema import format_version
from m1clip.text.base import TOKENIZER_FILE, TOKENIZER_FORMAT, Tokenizer
from m1clip.text.bpe import BASE_COUNT, END, FULL_SOT_ID, START, BpeTokenizer, with_ends

LETTERS = string.ascii_lowercase + " ,."
SPECIAL_COUNT = 4  # pad, start, EOT, unknown
MAX_TOKENIZER_BYTES = 2**26  # the largest multilingual vocabularies take 35 MB
HINT = "restore the model folder from a backup, or retrain"

# Truncation is a setting of the library's object, which must not change while it is used.
_rust_lock = threading.Lock()


def lowercase(text: str) -> str:
    """Lowercase each character alone.

    Python and JavaScript lowercase a capital sigma by its place in the word, Rust does not.
    """
    return text.replace("Σ", "σ").lower()


class CharTokenizer(Tokenizer):
    """Lowercased characters of a fixed alphabet; any other character is the unknown id."""

    pad_id, sot_id, eot_id, unk_id = range(SPECIAL_COUNT)

    def __init__(self, alphabet: str) -> None:
        """Take the characters in this order; ids start after the four special ones."""
        if not alphabet:
            raise ValueError("the alphabet is empty")
        if len(set(alphabet)) != len(alphabet):
            raise ValueError("the alphabet contains a character twice")
        # Text is lowercased before the look-up, so a capital could never be found.
        if capitals := [c for c in alphabet if c.lower() != c]:
            raise ValueError(f"the alphabet contains {capitals[0]!r}, which is not lower case")
        self.alphabet = alphabet
        self.vocab_size = SPECIAL_COUNT + len(alphabet)
        self._id_of = {c: i for i, c in enumerate(alphabet, SPECIAL_COUNT)}

    @classmethod
    def from_captions(cls, captions: Iterable[str]) -> CharTokenizer:
        """Letters, space, comma and full stop, then any other characters of the captions."""
        others = {c for caption in captions for c in lowercase(caption)} - set(LETTERS)
        return cls(LETTERS + "".join(sorted(others)))

    def encode_batch(self, texts: Iterable[str]) -> Iterable[list[int]]:
        """One id per character of the lowercased text."""
        return ([self._id_of.get(c, self.unk_id) for c in lowercase(text)] for text in texts)

    def library(self) -> RustTokenizer:
        """One token per character, as a WordPiece of single characters.

        Not a WordLevel, which transformers.js does not have.
        """
        ids = {
            "<pad>": self.pad_id,
            START: self.sot_id,
            END: self.eot_id,
            "<unk>": self.unk_id,
            **self._id_of,
        }
        rust = RustTokenizer(WordPiece(ids, unk_token="<unk>"))
        rust.normalizer = AllOf([Replace("Σ", "σ"), Lowercase()])
        rust.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
        rust.post_processor = with_ends(self.sot_id, self.eot_id)
        return rust

    def record(self) -> dict[str, Any]:
        return {"kind": "char", "alphabet": self.alphabet}


class FastTokenizer(Tokenizer):
    """Hugging Face's tokenizer.json, with its own normalizer and special tokens.

    `pad_id` fills the rows.
    """

    def __init__(self, text: str, pad_id: int) -> None:
        """Take the text of a tokenizer.json.

        ValueError where it adds no token at the end of a text.
        """
        with _library_errors():
            self._rust = RustTokenizer.from_str(text)
            self._rust.no_padding()
            self._rust.no_truncation()
            special = self._rust.encode("").ids
            # Fail here, not in training, on a broken vocabulary.
            example = self._rust.encode("a word, and 7 more").ids
            self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values()) + 1
        if not special or example[-1] != special[-1]:
            raise ValueError("this tokenizer adds no token at the end of a text")
        # the same where there is only one
        self.sot_id = special[0]
        self.eot_id = special[-1]
        # Where the padding is the EOT token (CLIP) any other id works: nothing after EOT has an
        # effect there.
        self.pad_id = 0 if pad_id == self.eot_id else pad_id

    def encode_batch(self, texts: Iterable[str]) -> Iterable[list[int]]:
        with _rust_lock:
            return [
                encoding.ids
                for encoding in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
            ]

    def tokenize(self, texts: Sequence[str], context_length: int) -> np.ndarray:
        """With the library's own special tokens, of which there may be more than two."""
        rows = np.full((len(texts), context_length), self.pad_id, np.int32)
        with _rust_lock:
            self._rust.enable_truncation(context_length)
            encoded = self._rust.encode_batch_fast(list(texts))
            self._rust.no_truncation()
        for row, encoding in zip(rows, encoded, strict=True):
            row[: len(encoding.ids)] = encoding.ids
        return rows

    def library(self) -> RustTokenizer:
        return RustTokenizer.from_str(self._rust.to_str())

    def record(self) -> dict[str, Any]:
        return {"kind": "fast", "tokenizer": json.loads(self._rust.to_str()), "pad_id": self.pad_id}


def wordpiece_tokenizer(vocabulary: Sequence[str]) -> FastTokenizer:
    """BERT's uncased tokenizer; the id of a token is its index in the vocabulary."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    rust = RustTokenizer(WordPiece(ids, unk_token="[UNK]"))
    rust.normalizer = BertNormalizer(lowercase=True)
    rust.pre_tokenizer = BertPreTokenizer()
    # Not as special tokens of the library, which would also find them in a text.
    rust.post_processor = BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return FastTokenizer(rust.to_str(), ids["[PAD]"])


PROBE_TEXTS = (
    "A dog's ball, on the GRASS!",
    "caf\u00e9 na\u00efve",
    "\u732b 3.5",
    "  two\tspaces ",
    "",
)


def same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers give the same ids: the same vocabulary, and the same ids of a sample."""
    if first is second:
        return True
    vocabularies = [tokenizer.library().get_vocab() for tokenizer in (first, second)]
    if vocabularies[0] != vocabularies[1] or first.pad_id != second.pad_id:
        return False
    length = max(map(len, PROBE_TEXTS)) + 2
    ids = [tokenizer.tokenize(list(PROBE_TEXTS), length) for tokenizer in (first, second)]
    return bool(np.array_equal(ids[0], ids[1]))


_LOWER: dict[str, Any] = {"type": "Lowercase"}
_UNDERSCORE: dict[str, Any] = {"type": "Replace", "pattern": {"String": "_"}, "content": " "}
_NO_PUNCTUATION: dict[str, Any] = {
    "type": "Replace",
    "pattern": {"Regex": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"},
    "content": "",
}
_ONE_SPACE: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
    {"type": "Strip", "strip_left": True, "strip_right": True},
]
# How a library cleans a text before the tokenizer, as normalizers of a tokenizer.json.
CLEANINGS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "siglip": [_LOWER, _NO_PUNCTUATION, *_ONE_SPACE],
    "siglip2": [_LOWER],
    # The names of open_clip.
    "canonicalize": [_UNDERSCORE, _NO_PUNCTUATION, _LOWER, *_ONE_SPACE],
    "lower": [*_ONE_SPACE, _LOWER],
    "whitespace": _ONE_SPACE,
    "whitespace_underscore": [_UNDERSCORE, *_ONE_SPACE],
}


def token_id(text: str, token: str) -> int | None:
    """The id of a token in a tokenizer.json; ValueError if it is none."""
    with _library_errors():
        number: int | None = RustTokenizer.from_str(text).token_to_id(token)
        return number


def with_cleaning(text: str, cleaning: str, eos: str | None = None) -> str:
    """A tokenizer.json that first cleans a text, and ends it with the token `eos` if given.

    A file that begins with the same cleaning keeps it. ValueError if it is no tokenizer.json, or
    has no such token.
    """
    steps = CLEANINGS[cleaning]
    number = None if eos is None else token_id(text, eos)
    if eos is not None and number is None:
        raise ValueError(f"has no token {eos!r} for the end of a text")
    with _library_errors():
        # The library fills in what an older file lacks.
        record = json.loads(RustTokenizer.from_str(text).to_str())
    old = record["normalizer"]
    old_steps = [] if old is None else [old]
    if old is not None and old["type"] == "Sequence":
        old_steps = old["normalizers"]
    if steps and old_steps[: len(steps)] != steps:
        record["normalizer"] = {"type": "Sequence", "normalizers": [*steps, *old_steps]}
    if eos is not None:
        end = {"SpecialToken": {"id": eos, "type_id": 0}}
        text_a, text_b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        record["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [text_a, end],
            "pair": [text_a, end, text_b, end],
            "special_tokens": {eos: {"id": eos, "ids": [number], "tokens": [eos]}},
        }
    return json.dumps(record)


@contextmanager
def _library_errors() -> Iterator[None]:
    """Raise ValueError for what the library raises: a bare Exception or a panic."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"not a tokenizer.json of Hugging Face ({str(error)[:80]})") from None


def make_tokenizer(kind: str, captions: Iterable[str]) -> Tokenizer:
    """A tokenizer of one of the kinds in the config, for these training captions."""
    if kind == "char":
        try:
            return CharTokenizer.from_captions(captions)
        except (
            ValueError
        ) as error:  # lowercasing can give a character that is not lower case, such as "İ"
            raise UserError(
                f"no character tokenizer: {error}; use --tokenizer clip-bpe-pruned"
            ) from error
    return BpeTokenizer() if kind == "bpe" else BpeTokenizer().prune_to(captions)


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of the tokenizer, for the key of a cache."""
    return hashlib.sha256(json.dumps(tokenizer.record(), sort_keys=True).encode()).hexdigest()


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in a model folder; a damaged file is a UserError."""
    path = Path(folder) / TOKENIZER_FILE
    try:
        record = json.loads(read_small(path, MAX_TOKENIZER_BYTES))
        version = format_version(record)
        # Checked before the rest: a newer m1clip may have kinds of its own.
        if version > TOKENIZER_FORMAT:
            raise UserError(
                f"{path}: written by a newer m1clip (format {version}, "
                f"this one reads {TOKENIZER_FORMAT}); upgrade m1clip"
            )
        return from_record(record)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); is this a model folder?"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: not a valid tokenizer ({type(error).__name__}: {error}); {HINT}"
        ) from error


def from_record(record: dict[str, Any]) -> Tokenizer:
    """A tokenizer from a file of unknown origin.

    ValueError where a value is not what it should be.
    """
    match record:
        case {"kind": "char", "alphabet": str(alphabet)}:
            # Raises ValueError for a lone surrogate, which could not be saved again.
            alphabet.encode("utf-8")
            return CharTokenizer(alphabet)
        case {"kind": "fast", "tokenizer": dict(tokenizer), "pad_id": int(pad)} if 0 <= pad < 2**31:
            return FastTokenizer(json.dumps(tokenizer), pad)
        case {"kind": "bpe"}:
            return BpeTokenizer()
        case {"kind": "clip-bpe-pruned", "kept": list(kept_ids)} if all(
            type(token) is int for token in kept_ids
        ):
            # Strictly increasing ids: a duplicate would shift the ids that the model was trained
            # with.
            if any(
                a >= b
                for a, b in zip([BASE_COUNT - 1, *kept_ids], [*kept_ids, FULL_SOT_ID], strict=True)
            ):
                raise ValueError("'kept' is not an increasing list of merged tokens")
            return BpeTokenizer(kept_ids)
    raise ValueError(
        f"kind {record.get('kind')!a:.40} is unknown, or its values are missing or of the wrong"
        " type"
    )
