"""CLIP's BPE: ids of open_clip, and the vocabulary cut to the captions."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m1clip.text.bpe import BASE_COUNT, BpeTokenizer, _merged_from, clean_text

FULL = BpeTokenizer()
FIXTURE = Path(__file__).parent / "fixtures" / "bpe_reference.json.gz"
DROPPED = "\u0345"  # open_clip's pattern has no class for it
MARKS = ["<start_of_text>", "<end_of_text>", "<|startoftext|>", "<|endoftext|>", "&lt;end_of_text&gt;", "!", "</w>"]
AWKWARD_TEXT = st.lists(st.text(max_size=12) | st.sampled_from(MARKS), max_size=6).map("".join)


@pytest.fixture(scope="module")
def reference() -> dict[str, list[dict[str, Any]]]:
    return json.loads(gzip.decompress(FIXTURE.read_bytes()))


def without_spaces(text: str) -> str:
    return "".join(text.split()).replace(DROPPED, "")


def test_ids_are_those_of_open_clip(reference: dict[str, list[dict[str, Any]]]) -> None:
    cases = reference["plain"]
    assert len(cases) >= 2_200
    assert max(len(case["text"]) for case in cases) >= 10_000
    different = [case["text"] for case in cases if FULL.encode(case["text"]) != case["ids"]]
    assert different == []


def test_rows_are_those_of_open_clip(reference: dict[str, list[dict[str, Any]]]) -> None:
    cases = reference["plain"]
    rows = FULL.tokenize([case["text"] for case in cases], 77)
    for case, row in zip(cases, rows, strict=True):
        expected = [49_406, *case["ids"][:75], 49_407]
        assert row.tolist() == expected + [0] * (77 - len(expected))


def test_a_special_mark_in_the_text_is_only_text(reference: dict[str, list[dict[str, Any]]]) -> None:
    assert len(reference["marked"]) >= 5
    for case in reference["marked"]:
        assert {49_406, 49_407} & set(case["ids"])
        assert FULL.encode(case["text"]) == case["ids_without_marks"]
        assert without_spaces(FULL.decode(FULL.encode(case["text"]))) == without_spaces(clean_text(case["text"]))


def test_vendored_merges_are_the_48_894_of_clip() -> None:
    merges = gzip.decompress((files("m1clip.text") / "clip_bpe_merges.txt.gz").read_bytes())
    assert merges.count(b"\n") == 48_894
    expected = "d308b7377a8ceaa9707a21614fe8c831b9196e197b7aeb69833359362907af02"
    assert hashlib.sha256(merges).hexdigest() == expected
    assert (FULL.vocab_size, FULL.pad_id, FULL.sot_id, FULL.eot_id) == (49_408, 0, 49_406, 49_407)


@given(st.text(alphabet=st.characters(max_codepoint=126), max_size=40))
def test_the_short_way_for_ascii_cleans_as_the_long_way(text: str) -> None:
    # A trailing non-ASCII word forces the long way.
    assert clean_text(text + " é").removesuffix("é").strip() == clean_text(text)


@settings(deadline=None)  # the first example reads the merges
@given(AWKWARD_TEXT)
def test_decode_gives_the_cleaned_text_up_to_whitespace(text: str) -> None:
    ids = FULL.encode(text)
    assert all(0 <= token < FULL.sot_id for token in ids)
    assert without_spaces(FULL.decode(ids)) == without_spaces(clean_text(text))


@pytest.mark.parametrize("tokenizer", [FULL, BpeTokenizer([]), BpeTokenizer([512, 1000, 49_405])])
@settings(deadline=None)
@given(texts=st.lists(AWKWARD_TEXT, max_size=4), context_length=st.integers(2, 30))
def test_rows_have_one_end_mark_then_padding(tokenizer: BpeTokenizer, texts: list[str], context_length: int) -> None:
    rows = tokenizer.tokenize(texts, context_length)
    assert rows.shape == (len(texts), context_length)
    assert rows.dtype == np.int32
    for text, row in zip(texts, rows.tolist(), strict=True):
        ids = tokenizer.encode(text)[: context_length - 2]
        assert row == [tokenizer.sot_id, *ids, tokenizer.eot_id] + [0] * (context_length - 2 - len(ids))
        assert row.count(tokenizer.eot_id) == row.count(tokenizer.sot_id) == 1
        assert tokenizer.decode(row) == tokenizer.decode(ids)


def test_a_row_needs_room_for_both_marks() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        FULL.tokenize(["a"], 1)
    assert FULL.tokenize(["a dog"], 2).tolist() == [[49_406, 49_407]]


def test_one_string_is_not_a_list_of_letters() -> None:
    with pytest.raises(TypeError, match="list of strings"):
        FULL.tokenize("a dog", 8)


@pytest.mark.parametrize("token", [-1, 49_408])
def test_decode_refuses_an_id_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        FULL.decode([token])


def test_it_travels_to_a_worker_process_without_its_tables() -> None:
    FULL.encode("a dog")
    packed = pickle.dumps(FULL)
    assert len(packed) < 200
    assert pickle.loads(packed) == FULL


CAPTIONS = ["A brown dog runs.", "Two dogs' owners aren't here!", "café & croissants \U0001f950", "!!!"]
CUT = FULL.cut_to(CAPTIONS)
FLICKR = Path(__file__).parents[2] / ".." / "shared" / "data" / "flickr8k-112"


def pieces(tokenizer: BpeTokenizer, text: str) -> list[int]:
    """The text's pieces as ids of the full vocabulary."""
    return [tokenizer._full_id(token) for token in tokenizer.encode(text)]


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
