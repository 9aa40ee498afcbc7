"""The caption table: image of each caption, equal captions, random choice, token dropout."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m1clip.data import randomness as rnd
from m1clip.data.captions import CaptionTable, drop_tokens, tokenize_captions
from m1clip.text.tokenizers import make_tokenizer

GROUPS = [("a cat",), ("a dog", "the dog", "A Dog "), ("a dog", "a much longer caption")]


def table(context: int = 32) -> CaptionTable:
    tokenizer = make_tokenizer("char", [caption for group in GROUPS for caption in group])
    return tokenize_captions(GROUPS, tokenizer, context)


def test_table_has_image_id_and_length_of_each_caption() -> None:
    assert table().image_index.tolist() == [0, 1, 1, 1, 2, 2]
    assert table().first.tolist() == [0, 1, 4, 6]
    assert table().caption_ids.tolist() == [0, 1, 2, 1, 1, 3], "case and outer spaces do not count"
    assert table().lengths.tolist() == [len(c) + 2 for g in GROUPS for c in g], (
        "with BOS and EOT tokens"
    )


def test_picked_caption_belongs_to_its_image_and_choice_is_even() -> None:
    captions = table()
    images = np.tile(np.arange(3), 3000)
    draws = rnd.bits(0, 0, np.arange(9000), rnd.CAPTION)
    rows, chosen = captions.pick(images, draws)
    assert (rows == np.arange(9000)).all()
    assert (captions.image_index[chosen] == images).all()
    assert (chosen == captions.pick(images, draws)[1]).all()
    counts = np.bincount(chosen, minlength=6)
    expected = np.array([3000, 1000, 1000, 1000, 1500, 1500])
    assert (np.abs(counts - expected) < 4 * np.sqrt(expected)).all()


def test_picked_captions_of_an_image_are_distinct() -> None:
    captions = table()
    images = np.tile(np.arange(3), 2000)
    rows, chosen = captions.pick(images, rnd.bits(0, 0, np.arange(6000), rnd.CAPTION), count=2)
    assert np.bincount(rows).tolist() == [1, 2, 2] * 2000
    assert (captions.image_index[chosen] == images[rows]).all()
    assert len({*zip(rows.tolist(), chosen.tolist(), strict=True)}) == len(rows)
    # Of three captions two are taken: each in 2/3 of the cases.
    counts = np.bincount(chosen, minlength=6)
    assert counts[[0, 4, 5]].tolist() == [2000] * 3
    assert (np.abs(counts[1:4] - 4000 / 3) < 4 * np.sqrt(4000 / 3)).all()


@given(
    data=st.data(), words=st.lists(st.lists(st.integers(3, 99), max_size=6), min_size=1, max_size=5)
)
def test_dropped_tokens_leave_no_gap(data: st.DataObject, words: list[list[int]]) -> None:
    start, end, pad, context = 1, 2, 0, 8
    rows = [[start, *inner, end] + [pad] * (context - 2 - len(inner)) for inner in words]
    tokens, lengths = np.array(rows), np.array([len(inner) + 2 for inner in words], np.int32)
    flags = data.draw(
        st.lists(st.booleans(), min_size=len(rows) * context, max_size=len(rows) * context)
    )
    gone = np.array(flags).reshape(len(rows), context)
    found, new_lengths = drop_tokens(tokens, lengths, gone, pad)
    for row, inner, length, which in zip(found, words, new_lengths, gone, strict=True):
        kept = [
            token for token, out in zip(inner, which[1 : len(inner) + 1], strict=True) if not out
        ]
        kept = kept or inner[:1]  # one word always stays
        assert row[:length].tolist() == [start, *kept, end]
        assert (row[length:] == pad).all()
    assert (tokens == np.array(rows)).all(), "the table itself is unchanged"
