"""CLIP's byte-level BPE of 49,408 ids, and a version pruned to the tokens of some captions.

Ids are those of open_clip's `SimpleTokenizer`. The merges (clip_bpe_merges.txt.gz) are the first
48,894 of OpenAI CLIP, MIT License, Copyright (c) 2021 OpenAI; see clip_bpe_merges.LICENSE.txt.
"""

from __future__ import annotations

import gzip
import html
import json
from collections.abc import Iterable, Iterator
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from itertools import islice
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Lowercase, Replace
from tokenizers.normalizers import Sequence as AllOf
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InTurn
from tokenizers.processors import TemplateProcessing

from m1clip.text.base import Tokenizer

BASE_COUNT = 512  # 256 bytes, and the same 256 as the last byte of a word
FULL_SOT_ID = 49_406  # also the number of other tokens
FULL_EOT_ID = 49_407
END_OF_WORD = "</w>"
START = "<|startoftext|>"
END = "<|endoftext|>"
ENCODED_CHUNK = 4_096  # texts per call: bounds the memory for a large set

# open_clip's pattern, with what its IGNORECASE does to lowercased text written out: long s is an
# s, and U+0345 (its capital is a letter) is in no class and is dropped. Its two special tokens are
# not matched: a caption that contains "<end_of_text>" would put an EOT token inside a row, and the
# model would pool there.
WORD_PATTERN = "'[sſ]|'t|'re|'ve|'m|'ll|'d|\\p{L}+|\\p{N}|[^\\s\\p{L}\\p{N}\u0345]+"


def clean_text(text: str) -> str:
    """CLIP's text cleaning: fix encoding, resolve HTML entities, collapse whitespace, lowercase."""
    # ftfy changes nothing in printable ASCII without an entity, which nearly every caption is.
    if not (text.isascii() and text.isprintable() and "&" not in text):
        import ftfy  # takes 30 ms

        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


@cache
def _merges() -> list[tuple[str, str]]:
    """The vendored merges in order of rank; merge i makes token BASE_COUNT + i."""
    compressed = (files("m1clip.text") / "clip_bpe_merges.txt.gz").read_bytes()
    pairs = (
        line.partition(" ") for line in gzip.decompress(compressed).decode("utf-8").splitlines()
    )
    return [(first, right) for first, _, right in pairs]


@cache
def _token_ids() -> dict[str, int]:
    """Id of each token as it is written in the merges."""
    # GPT-2's letters for the 256 bytes: a printable byte is written as itself, the others as
    # letters from U+0100 on.
    codes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)]
    letters = [chr(code) for code in codes]
    tokens = letters + [letter + END_OF_WORD for letter in letters] + [a + b for a, b in _merges()]
    return {token: i for i, token in enumerate(tokens)}


@cache
def _rust_tokenizer() -> RustTokenizer:
    """The complete tokenizer in Rust, built once per process."""
    model = BPE(
        vocab=_token_ids(),
        merges=_merges(),
        continuing_subword_prefix="",
        end_of_word_suffix=END_OF_WORD,
    )
    rust = RustTokenizer(model)
    split = Split(Regex(WORD_PATTERN), "removed", invert=True)
    rust.pre_tokenizer = InTurn([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    return rust


def with_ends(start: int, end: int) -> TemplateProcessing:
    """Start and EOT token around a text.

    Not special tokens of the library, which would also find them in a text.
    """
    return TemplateProcessing(
        single=[START, "$A", END], special_tokens=[(START, start), (END, end)]
    )


@cache
def _merged_from() -> list[tuple[int, int]]:
    """The ids of the two parts of each merged token; they are always below the id of the token."""
    id_of = _token_ids()
    return [(id_of[first], id_of[right]) for first, right in _merges()]


class BpeTokenizer(Tokenizer):
    """CLIP's tokenizer: all 49,408 ids, or 512 byte tokens and the merged ones in `kept_ids`.

    Pruned: id 0 is the padding, then the tokens in CLIP's order, then start and EOT.
    """

    def __init__(self, kept_ids: Iterable[int] | None = None) -> None:
        """Take all tokens, or the merged ones with these ids of the full vocabulary."""
        self.kept_ids: tuple[int, ...] | None = (
            None if kept_ids is None else tuple(sorted(set(kept_ids)))
        )
        if self.kept_ids and not BASE_COUNT <= self.kept_ids[0] <= self.kept_ids[-1] < FULL_SOT_ID:
            raise ValueError(f"kept tokens must be between {BASE_COUNT} and {FULL_SOT_ID - 1}")
        # In the full vocabulary, as in CLIP, the padding shares its id with the token "!".
        self.pad_id = 0
        self.sot_id = FULL_SOT_ID if self.kept_ids is None else 1 + BASE_COUNT + len(self.kept_ids)
        self.eot_id = self.sot_id + 1
        self.vocab_size = self.eot_id + 1

    def prune_to(self, captions: Iterable[str]) -> BpeTokenizer:
        """A tokenizer with only the tokens of these captions; texts are split as before.

        The ids change. Other text can be encoded too: a removed token falls back to the parts it
        was merged from.
        """
        used: set[int] = set()
        for ids in self.encode_batch(captions):
            used.update(ids)
        return BpeTokenizer(token for token in map(self._full_id, used) if token >= BASE_COUNT)

    def encode_batch(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Ids of each text alone, some thousand texts at a time."""
        rust = _rust_tokenizer()
        parts = self.parts
        cleaned = map(clean_text, texts)
        while chunk := list(islice(cleaned, ENCODED_CHUNK)):
            for encoding in rust.encode_batch_fast(chunk, add_special_tokens=False):
                yield (
                    encoding.ids
                    if parts is None
                    else [part for token in encoding.ids for part in parts[token]]
                )

    def library(self) -> RustTokenizer:
        """CLIP's full vocabulary, of which `parts` makes this one.

        The library has no ftfy and no HTML entities.
        """
        record = json.loads(_rust_tokenizer().to_str())
        # In the vocabulary, where programs look their ids up, but not special: a text that contains
        # them stays text.
        record["model"]["vocab"] |= {START: FULL_SOT_ID, END: FULL_EOT_ID}
        rust = RustTokenizer.from_str(json.dumps(record))
        quotes = [
            Replace(curly, straight) for curly, straight in zip("“”‘’", "\"\"''", strict=True)
        ]
        rust.normalizer = AllOf([NFC(), *quotes, Lowercase()])
        rust.post_processor = with_ends(FULL_SOT_ID, FULL_EOT_ID)
        return rust

    def record(self) -> dict[str, Any]:
        """A cut vocabulary lists its merged tokens."""
        return (
            {"kind": "bpe"}
            if self.kept_ids is None
            else {"kind": "clip-bpe-pruned", "kept": self.kept_ids}
        )

    def _full_id(self, token: int) -> int:
        """The token's id in the full vocabulary."""
        if self.kept_ids is None:
            return token
        return token - 1 if token <= BASE_COUNT else self.kept_ids[token - 1 - BASE_COUNT]

    @cached_property
    def parts(self) -> list[list[int]] | None:
        """For each token of the full vocabulary, the ids here that spell it: itself, or its parts.

        None if not pruned.
        """
        return None if self.kept_ids is None else _parts(self.kept_ids)

    def __reduce__(self) -> tuple[type[BpeTokenizer], tuple[tuple[int, ...] | None]]:
        # Workers rebuild the tables, which are larger than their inputs.
        return BpeTokenizer, (self.kept_ids,)


@lru_cache(maxsize=4)  # a run makes the same tokenizer more than once
def _parts(kept_ids: tuple[int, ...]) -> list[list[int]]:
    """For each token of the full vocabulary, the ids that spell it with only `kept_ids`."""
    own_id = {token: i for i, token in enumerate(kept_ids, 1 + BASE_COUNT)}
    parts = [[1 + token] for token in range(BASE_COUNT)]
    for token, (first, right) in enumerate(_merged_from(), BASE_COUNT):
        parts.append([own_id[token]] if token in own_id else parts[first] + parts[right])
    return parts


def row_sources(old: BpeTokenizer, new: BpeTokenizer) -> list[list[int]]:
    """For each id of `new`, the ids of `old` whose mean initializes it: its token or parts.

    Text whose tokens are in both is then read as before; a token that `old` lacks starts as the
    mean of its parts.
    """
    tokens = range(FULL_SOT_ID) if new.kept_ids is None else [*range(BASE_COUNT), *new.kept_ids]
    parts = [[token] if old.parts is None else old.parts[token] for token in tokens]
    padding = [] if new.kept_ids is None else [[old.pad_id]]
    return [*padding, *parts, [old.sot_id], [old.eot_id]]


def hugging_face_files(context_length: int) -> dict[str, str]:
    """The files of a CLIPTokenizer with CLIP's full vocabulary, by name."""
    vocabulary = {**_token_ids(), START: FULL_SOT_ID, END: FULL_EOT_ID}
    merges = ["#version: 0.2", *(f"{first} {right}" for first, right in _merges())]
    special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": context_length, **special}
    return {
        "vocab.json": json.dumps(vocabulary, ensure_ascii=False),
        "merges.txt": "\n".join(merges) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2) + "\n",
    }
