"""Small tokenizers like SigLIP's (a SentencePiece unigram model) and SigLIP 2's (Gemma's BPE), for both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CORPUS = [
    "a photo of a cat",
    "two dogs running on the beach at sunset",
    "naive cafe and facade with a red car in front of the old house",
    "a group of people who stand around a table with food and drinks",
    "the quick brown fox jumps over the lazy dog 0 1 2 3 4 5 6 7 8 9",
]
SPACE = "\u2581"


def write_sentencepiece(folder: Path, vocab_size: int = 120) -> None:
    """spiece.model as T5 and SigLIP have it: <pad> 0, </s> 1, <unk> 2.

    Needs the library sentencepiece.
    """
    import sentencepiece

    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(CORPUS * 20) + "\n", encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "spiece"),
        vocab_size=vocab_size,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    )
    corpus.unlink()
    (folder / "spiece.vocab").unlink()


def gemma_json() -> str:
    """tokenizer.json as Gemma has it: BPE with bytes for unknown characters.

    <pad> 0, <eos> 1, <bos> 2.
    """
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    letters = [SPACE, *sorted({letter for text in CORPUS for letter in text if letter != " "})]
    merges = [("t", "h"), ("th", "e"), (SPACE, "a"), ("o", "n"), ("d", "o"), ("i", "n"), ("a", "t")]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces += [one + other for one, other in merges]
    record: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, token in enumerate(special)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<eos>", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<eos>": {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}},
        },
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: number for number, piece in enumerate(dict.fromkeys(pieces))},
            "merges": [list(pair) for pair in merges],
        },
    }
    return json.dumps(record)


def write_gemma(folder: Path, tokenizer_class: str = "Siglip2Tokenizer") -> None:
    """tokenizer.json and its config, by default as in the repositories of SigLIP 2, whose class lowercases."""
    (folder / "tokenizer.json").write_text(gemma_json(), encoding="utf-8")
    config = {
        "tokenizer_class": tokenizer_class,
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
        "model_max_length": 64,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
