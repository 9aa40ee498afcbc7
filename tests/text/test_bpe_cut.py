from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m1clip.text.bpe import BASE_COUNT, BpeTokenizer, _merged_from, clean_text

FULL = BpeTokenizer()
CAPTIONS = ["A brown dog runs.", "Two dogs' image_index aren't here!", "café & croissants \U0001f950", "!!!"]
CUT = FULL.cut_to(CAPTIONS)
FLICKR = Path(__file__).parents[2] / ".." / "shared" / "data" / "flickr8k-112"


def pieces(tokenizer: BpeTokenizer, text: str) -> list[int]:
    """The text's pieces as ids of the full vocabulary."""
    return [tokenizer._full_id(token) for token in tokenizer.encode(text)]


def without_spaces(text: str) -> str:
    return "".join(text.split()).replace("\u0345", "")


def test_vocabulary_is_padding_bytes_used_pieces_and_two_marks() -> None:
    used = {piece for caption in CAPTIONS for piece in FULL.encode(caption) if piece >= BASE_COUNT}
    assert CUT.kept == tuple(sorted(used))
    assert CUT.vocab_size == 1 + 512 + len(used) + 2
    assert (CUT.pad_id, CUT.sot_id, CUT.eot_id) == (0, CUT.vocab_size - 2, CUT.vocab_size - 1)


def test_training_captions_keep_their_pieces() -> None:
    for caption in CAPTIONS:
        assert pieces(CUT, caption) == FULL.encode(caption)


@settings(deadline=None)  # the first example reads the merges
@given(st.lists(st.text(max_size=30), max_size=5), st.text(max_size=40))
def test_any_captions_keep_their_pieces_and_any_text_is_spelled(captions: list[str], other: str) -> None:
    cut = FULL.cut_to(captions)
    for caption in captions:
        assert pieces(cut, caption) == FULL.encode(caption)
    ids = cut.encode(other)
    assert all(0 < token < cut.sot_id for token in ids)
    assert without_spaces(cut.decode(ids)) == without_spaces(clean_text(other))
    # The words are the full tokenizer's too: the same spaces.
    assert cut.decode(ids) == FULL.decode(FULL.encode(other))


def test_a_lost_piece_falls_back_to_its_own_parts() -> None:
    bare = BpeTokenizer(kept=[])
    assert bare.decode(bare.encode("zebra")) == "zebra"
    assert len(bare.encode("zebra")) == len("zebra")
    (whole,) = FULL.encode("dogs")
    left_and_right = _merged_from()[whole - BASE_COUNT]
    halves = BpeTokenizer(kept=[part for part in left_and_right if part >= BASE_COUNT])
    assert pieces(halves, "dogs") == list(left_and_right)


def test_all_ids_are_in_use_and_compact() -> None:
    decoded = [CUT.decode([token]) for token in range(CUT.vocab_size)]
    assert decoded[CUT.pad_id] == decoded[CUT.sot_id] == decoded[CUT.eot_id] == ""
    assert [CUT._full_id(token) for token in range(1, CUT.sot_id)] == [*range(BASE_COUNT), *(CUT.kept or ())]


def test_cutting_twice_is_cutting_once() -> None:
    assert CUT.cut_to(CAPTIONS[:1]) == FULL.cut_to(CAPTIONS[:1])
    assert FULL.cut_to([]).vocab_size == 515


@pytest.mark.parametrize("piece", [0, 511, 49_406, -1])
def test_only_merged_pieces_can_be_kept(piece: int) -> None:
    with pytest.raises(ValueError, match="between 512 and 49405"):
        BpeTokenizer(kept=[piece])


@pytest.mark.skipif(not FLICKR.is_dir(), reason="no shared/data/flickr8k-112 beside the repository")
def test_flickr8k_captions_keep_their_pieces() -> None:
    with (FLICKR / "captions.jsonl").open(encoding="utf-8") as lines:
        captions = [caption for line in islice(lines, 400) for caption in json.loads(line)["captions"]]
    assert len(captions) == 2_000
    cut = FULL.cut_to(captions)
    assert cut.vocab_size < 4_000
    for caption in captions:
        assert pieces(cut, caption) == FULL.encode(caption)
