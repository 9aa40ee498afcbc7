"""CLIP's BPE: ids of open_clip, and the vocabulary cut to the captions."""

import gzip
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m1clip.text.bpe import BASE_COUNT, BpeTokenizer, _merged_from, _token_ids, clean_text

FULL = BpeTokenizer()
CAPTIONS = [
    "A brown dog runs.",
    "Two dogs' owners aren't here!",
    "café & croissants \U0001f950",
    "!!!",
]
CUT = FULL.prune_to(CAPTIONS)
SPECIAL = [
    "<start_of_text>",
    "<end_of_text>",
    "<|startoftext|>",
    "<|endoftext|>",
    "&lt;end_of_text&gt;",
    "!",
    "</w>",
]
AWKWARD_TEXT = st.lists(st.text(max_size=12) | st.sampled_from(SPECIAL), max_size=6).map("".join)


@pytest.fixture(scope="module")
def reference() -> dict[str, list[dict[str, Any]]]:
    packed = Path(__file__).parent / "fixtures" / "bpe_reference.json.gz"
    return json.loads(gzip.decompress(packed.read_bytes()))


def full_ids(tokenizer: BpeTokenizer, text: str) -> list[int]:
    """The tokens of a text as ids of the full vocabulary."""
    return [tokenizer._full_id(token) for token in tokenizer.encode(text)]


def test_ids_and_rows_match_open_clip(reference: dict[str, list[dict[str, Any]]]) -> None:
    cases = reference["plain"]
    assert len(cases) >= 2_200
    assert max(len(case["text"]) for case in cases) >= 10_000
    assert [case["text"] for case in cases if FULL.encode(case["text"]) != case["ids"]] == []
    for case, row in zip(cases, FULL.tokenize([case["text"] for case in cases], 77), strict=True):
        expected = [49_406, *case["ids"][:75], 49_407]
        assert row.tolist() == expected + [0] * (77 - len(expected))


def test_special_tokens_in_a_text_are_encoded_as_text(
    reference: dict[str, list[dict[str, Any]]],
) -> None:
    assert len(reference["marked"]) >= 5
    for case in reference["marked"]:
        assert {49_406, 49_407} & set(case["ids"])
        assert FULL.encode(case["text"]) == case["ids_without_marks"]


def test_vendored_merges_match_clip() -> None:
    merges = gzip.decompress((files("m1clip.text") / "clip_bpe_merges.txt.gz").read_bytes())
    assert merges.count(b"\n") == 48_894
    expected = "d308b7377a8ceaa9707a21614fe8c831b9196e197b7aeb69833359362907af02"
    assert hashlib.sha256(merges).hexdigest() == expected
    assert (FULL.vocab_size, FULL.pad_id, FULL.sot_id, FULL.eot_id) == (49_408, 0, 49_406, 49_407)


@given(st.text(alphabet=st.characters(max_codepoint=126), max_size=40))
def test_ascii_fast_path_matches_full_text_cleaning(text: str) -> None:
    # A trailing non-ASCII word forces the general path.
    assert clean_text(text + " é").removesuffix("é").strip() == clean_text(text)


@settings(max_examples=8)  # each builds tables of 49,408 tokens
@given(st.lists(AWKWARD_TEXT, max_size=5), AWKWARD_TEXT)
def test_cut_vocabulary_keeps_caption_tokens_and_encodes_any_text(
    texts: list[str], other: str
) -> None:
    cut = FULL.prune_to(texts)
    for text in texts:
        assert full_ids(cut, text) == FULL.encode(text)
    ids = cut.encode(other)
    assert all(0 < token < cut.sot_id for token in ids)
    letters = list(_token_ids())
    assert "".join(letters[token] for token in full_ids(cut, other)) == "".join(
        letters[t] for t in FULL.encode(other)
    )


def test_cut_vocabulary_id_layout() -> None:
    used = {token for caption in CAPTIONS for token in FULL.encode(caption) if token >= BASE_COUNT}
    assert CUT.kept_ids == tuple(sorted(used))
    assert (CUT.pad_id, CUT.sot_id, CUT.eot_id) == (0, CUT.vocab_size - 2, CUT.vocab_size - 1)
    assert [CUT._full_id(token) for token in range(1, CUT.sot_id)] == [
        *range(BASE_COUNT),
        *sorted(used),
    ]
    assert CUT.prune_to(CAPTIONS[:1]) == FULL.prune_to(CAPTIONS[:1])
    assert FULL.prune_to([]).vocab_size == 515


def test_removed_token_falls_back_to_its_parts() -> None:
    bare = BpeTokenizer(kept_ids=[])
    assert len(bare.encode("zebra")) == len("zebra")
    (token,) = FULL.encode("dogs")
    left_and_right = _merged_from()[token - BASE_COUNT]
    halves = BpeTokenizer(kept_ids=[part for part in left_and_right if part >= BASE_COUNT])
    assert full_ids(halves, "dogs") == list(left_and_right)
