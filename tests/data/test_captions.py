"""The caption table: image of each caption, equal captions, random choice, token dropout."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m1clip.data import randomness as rnd
from m1clip.data.captions import (
    MAX_LAZY_CAPTIONS,
    CaptionTable,
    LazyCaptions,
    drop_tokens,
    tokenize_captions,
)
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


def test_choice_of_an_image_does_not_depend_on_the_others_of_its_batch() -> None:
    captions = table()
    images = np.array([2, 1, 0, 1, 2, 1])
    draws = rnd.bits(0, 0, np.arange(6), rnd.CAPTION)
    for count in (1, 2, 3):
        rows, chosen = captions.pick(images, draws, count)
        for index in range(6):
            one_row = slice(index, index + 1)
            alone = captions.pick(images[one_row], draws[one_row], count)[1]
            assert chosen[rows == index].tolist() == alone.tolist()


def test_subset_has_the_captions_of_its_images_in_its_order() -> None:
    captions = table()
    part = captions.subset(np.array([2, 0]))
    assert part.first.tolist() == [0, 2, 3]
    assert part.image_index.tolist() == [0, 0, 1]
    assert part.caption_ids.tolist() == [1, 3, 0]
    assert part.numbers is not None
    assert part.numbers.tolist() == [4, 5, 0], "word dropout is drawn as for the complete table"
    assert (part.tokens == captions.tokens[[4, 5, 0]]).all()
    assert part.lengths.tolist() == captions.lengths[[4, 5, 0]].tolist()
    again = part.subset(np.array([1]))
    assert again.numbers is not None
    assert again.numbers.tolist() == [0]


def test_labels_number_the_first_captions() -> None:
    """Images 0 and 3 are of one class, whatever their other captions are."""
    groups = [("a cat",), ("a dog", "a cat"), ("a bird",), ("A cat", "a pet")]
    tokenizer = make_tokenizer("char", [caption for group in groups for caption in group])
    captions = tokenize_captions(groups, tokenizer, 16)
    assert captions.labels is None
    labels = replace(captions, classes=True).labels
    assert labels is not None
    assert labels.tolist() == [0, 1, 2, 0]


def test_lazy_captions_have_numbers_and_ids_of_their_own() -> None:
    """Neither depends on the other images of the batch; a caption has one id wherever it is."""
    tokenizer = make_tokenizer("char", [caption for group in GROUPS for caption in group])
    lazy = LazyCaptions(lambda image: GROUPS[image], tokenizer, 32)
    complete, images = lazy.of(np.array([2, 1]))
    assert images.tolist() == [0, 1]
    assert complete.numbers is not None
    assert complete.numbers.tolist() == [
        *range(2 * MAX_LAZY_CAPTIONS, 2 * MAX_LAZY_CAPTIONS + 2),
        *range(MAX_LAZY_CAPTIONS, MAX_LAZY_CAPTIONS + 3),
    ]
    dog, longer, *others = complete.caption_ids.tolist()
    assert others[0] == others[2] == dog, "case and outer spaces do not count"
    assert len({dog, longer, others[1]}) == 3
    alone, _ = lazy.of(np.array([1]))
    assert alone.caption_ids.tolist() == others


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
    shortened, new_lengths = drop_tokens(tokens, lengths, gone, pad)
    for row, inner, length, which in zip(shortened, words, new_lengths, gone, strict=True):
        remaining = [
            token for token, out in zip(inner, which[1 : len(inner) + 1], strict=True) if not out
        ]
        remaining = remaining or inner[:1]  # one word always stays
        assert row[:length].tolist() == [start, *remaining, end]
        assert (row[length:] == pad).all()
    assert (tokens == np.array(rows)).all(), "the table itself is unchanged"
