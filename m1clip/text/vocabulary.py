"""CLIP's vocabulary beyond encoding: another one for the same model, and the files that Hugging Face reads."""

from __future__ import annotations

import json

from m1clip.text.bpe import FULL_EOT_ID, FULL_SOT_ID, BpeTokenizer, _merges, _piece_ids

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
