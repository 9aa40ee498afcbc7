from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1clip.text.tokenizers import PRIOR_ART_ALPHABET, CharTokenizer

PRIOR_ART = CharTokenizer(alphabet=PRIOR_ART_ALPHABET)
ANY_TEXT = st.text(max_size=60)


def test_prior_art_alphabet_has_33_ids() -> None:
    assert PRIOR_ART.vocab_size == 33
    assert PRIOR_ART_ALPHABET == "abcdefghijklmnopqrstuvwxyz ,."
    assert PRIOR_ART.tokenize(["a B."], 8).tolist() == [[1, 4, 30, 5, 32, 2, 0, 0]]


def test_from_captions_is_the_sorted_set_of_lower_cased_characters() -> None:
    tokenizer = CharTokenizer.from_captions(["Dog!", "a god"])
    assert tokenizer.alphabet == " !adgo"
    assert tokenizer == CharTokenizer.from_captions(["a god", "Dog!"])


@given(st.text(alphabet=PRIOR_ART_ALPHABET + PRIOR_ART_ALPHABET.upper()))
def test_text_within_the_alphabet_comes_back_lower_cased(text: str) -> None:
    assert PRIOR_ART.decode(PRIOR_ART.encode(text)) == text.lower()


@given(st.lists(st.text(min_size=1), min_size=1))
def test_training_captions_come_back(captions: list[str]) -> None:
    tokenizer = CharTokenizer.from_captions(captions)
    for caption in captions:
        assert tokenizer.unk_id not in tokenizer.encode(caption)
        assert tokenizer.decode(tokenizer.encode(caption)) == caption.lower()


@given(ANY_TEXT)
def test_an_unknown_character_is_one_unk_and_decodes_to_the_replacement_mark(text: str) -> None:
    known = set(PRIOR_ART_ALPHABET)
    expected = "".join(c if c in known else "\ufffd" for c in text.lower())
    assert PRIOR_ART.decode(PRIOR_ART.encode(text)) == expected


@given(st.lists(ANY_TEXT, max_size=5), st.integers(2, 40))
def test_rows_have_one_end_mark_then_padding(texts: list[str], context_length: int) -> None:
    rows = PRIOR_ART.tokenize(texts, context_length)
    assert rows.shape == (len(texts), context_length)
    assert rows.dtype == np.int32
    for text, row in zip(texts, rows, strict=True):
        count = min(len(text.lower()), context_length - 2)
        assert row.tolist().count(PRIOR_ART.eot_id) == 1
        assert row[0] == PRIOR_ART.sot_id
        assert row[count + 1] == PRIOR_ART.eot_id
        assert (row[count + 2 :] == PRIOR_ART.pad_id).all()
        assert PRIOR_ART.decode(row) == PRIOR_ART.decode(PRIOR_ART.encode(text)[:count])


def test_a_row_needs_room_for_both_marks() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        PRIOR_ART.tokenize(["a"], 1)
    assert PRIOR_ART.tokenize(["a dog"], 2).tolist() == [[1, 2]]


def test_one_string_is_not_a_list_of_letters() -> None:
    with pytest.raises(TypeError, match="list of strings"):
        PRIOR_ART.tokenize("a dog", 8)


@pytest.mark.parametrize("alphabet", ["", "aa", "aB"])
def test_an_alphabet_that_cannot_work_is_refused(alphabet: str) -> None:
    with pytest.raises(ValueError, match="the alphabet"):
        CharTokenizer(alphabet)


@pytest.mark.parametrize("token", [-1, 33])
def test_decode_refuses_an_id_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        PRIOR_ART.decode([token])


def test_it_travels_to_a_worker_process() -> None:
    assert pickle.loads(pickle.dumps(PRIOR_ART)) == PRIOR_ART
