"""Text to ids and back: tokenizers by name, and the one saved in a model folder."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from m1clip.errors import UserError
from m1clip.files import read_small
from m1clip.text.base import Tokenizer
from m1clip.text.bpe import BASE_COUNT, FULL_SOT_ID, BpeTokenizer
from m1clip.text.char import PRIOR_ART_ALPHABET, CharTokenizer
from m1clip.text.fast import FastTokenizer
from m1clip.text.rows import FILE_NAME, VERSION
from m1clip.text.wordpiece import WordPieceTokenizer

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
            f"{path}: unknown tokenizer kind {str(record.get('kind'))[:40]!r} "
            f"(known: {', '.join(SAVED)}); {COPY_AGAIN}"
        )
    return record


def _alphabet_of(record: dict[str, Any]) -> str:
    alphabet = record.get("alphabet")
    if not isinstance(alphabet, str):
        raise ValueError("'alphabet' is not a string")
    alphabet.encode("utf-8")  # half a surrogate pair is a ValueError: it could never be saved again
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
