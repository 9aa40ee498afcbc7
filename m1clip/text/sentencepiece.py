"""A SentencePiece model (spiece.model) as a tokenizer.json of Hugging Face.

Its file is read without the library.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

# fields of a model
PIECES = 1
TRAINER = 2
NORMALIZER = 3
PIECE_TEXT = 1
PIECE_SCORE = 2
PIECE_TYPE = 3
MODEL_TYPE = 3
UNIGRAM = 1
CHARSMAP = 2  # of the normalizer
UNKNOWN = 2  # type of the piece for everything else
SPACE = "\u2581"


def sentencepiece_json(data: bytes) -> str:
    """The tokenizer.json of a unigram model, without tokens around a text.

    ValueError for anything else.
    """
    vocabulary: list[list[Any]] = []
    unknown = 0
    charsmap = b""
    model_type: bytes | int = UNIGRAM
    for field, value in _fields(data):
        if field == PIECES:
            piece = dict(_fields(_bytes(value)))
            if piece.get(PIECE_TYPE) == UNKNOWN:
                unknown = len(vocabulary)
            (score,) = struct.unpack("<f", _bytes(piece.get(PIECE_SCORE, bytes(4))))
            vocabulary.append([_bytes(piece.get(PIECE_TEXT, b"")).decode("utf-8"), score])
        elif field == TRAINER:
            model_type = dict(_fields(_bytes(value))).get(MODEL_TYPE, UNIGRAM)
        elif field == NORMALIZER:
            charsmap = _bytes(dict(_fields(_bytes(value))).get(CHARSMAP, b""))
    if not vocabulary:
        raise ValueError("not a SentencePiece model")
    if model_type != UNIGRAM:
        raise ValueError("not a unigram model of SentencePiece; save a tokenizer.json instead")
    steps: list[dict[str, Any]] = [
        {"type": "Strip", "strip_left": False, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE},
    ]
    if charsmap:
        encoded = base64.b64encode(charsmap).decode("ascii")
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": encoded})
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    record: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": vocabulary,
            "byte_fallback": False,
        },
    }
    return json.dumps(record)


def _bytes(value: bytes | int) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("not a SentencePiece model")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a protocol buffer message: number and value, which is a number or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field = key >> 3
        kind = key & 7
        if kind == 0:
            number, at = _varint(data, at)
            yield field, number
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, at = _varint(data, at)
        if length is None or at + length > len(data):
            raise ValueError("not a SentencePiece model")
        yield field, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits per byte, and where it ends."""
    number = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        number |= (byte & 127) << shift
        at = at + 1
        shift = shift + 7
        if byte < 128:
            return number, at
    raise ValueError("not a SentencePiece model")
