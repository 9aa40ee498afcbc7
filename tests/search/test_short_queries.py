"""Vectors of queries of one or two words."""

from pathlib import Path

import numpy as np
import pytest
from photos import make_photos, save_model

import m1clip
from m1clip.search.index import update_index
from m1clip.search.short_queries import (
    EVERYDAY_WORDS,
    everyday_vectors,
    is_short,
    reference_vectors,
    short_vectors,
)


def encode(texts: list[str]) -> np.ndarray:
    """A direction that all texts share, and one of their own."""
    rows = []
    for text in texts:
        own = np.zeros(8)
        own[0] = 1.0
        own[1 + sum(map(ord, text.removeprefix("a "))) % 7] = 1.0
        rows.append(own / np.sqrt(2))
    return np.array(rows, np.float32)


@pytest.mark.parametrize("text", ["dog", "red dog", "a dog", "the red dog", "Hund"])
def test_one_or_two_words_are_short(text: str) -> None:
    assert is_short(text)


@pytest.mark.parametrize("text", ["a dog on a beach", "two red dogs", "", "a"])
def test_sentences_are_not_short(text: str) -> None:
    assert not is_short(text)


def test_what_all_words_share_counts_less() -> None:
    (vector,) = short_vectors(encode, ["dog"], everyday_vectors(encode))
    (plain,) = encode(["dog"])
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    assert 0 < vector[0] < 0.8 * plain[0]
    assert vector.argmax() == plain[1:].argmax() + 1
    assert len(EVERYDAY_WORDS) == len(set(EVERYDAY_WORDS))


def test_article_makes_no_difference() -> None:
    everyday = everyday_vectors(encode)
    assert np.array_equal(*(short_vectors(encode, [text], everyday) for text in ("dog", "a dog")))


def test_scores_of_short_queries_are_compared_with_short_queries() -> None:
    everyday = everyday_vectors(encode)
    assert reference_vectors(everyday, short=False) is everyday
    short = short_vectors(encode, EVERYDAY_WORDS, everyday)
    assert np.allclose(reference_vectors(everyday, short=True), short)


def test_search_uses_them_and_leaves_sentences_as_they_are(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 6)
    update_index(photos, save_model(tmp_path / "model"))
    index = m1clip.Index(photos)
    sentence, word = index._encoder.query_vectors(["a dog on a beach", "dog"])
    plain = np.asarray(index.model.encode_text("a dog on a beach"))[0]
    assert np.allclose(sentence, plain, atol=1e-5)
    everyday = everyday_vectors(index.encode_texts)
    expected = short_vectors(index.encode_texts, ["dog"], everyday)[0]
    assert np.allclose(word, expected, atol=1e-5)
    assert not np.allclose(word, np.asarray(index.model.encode_text("dog"))[0], atol=1e-3)
