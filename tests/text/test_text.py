from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from m1clip.errors import UserError
from m1clip.text.base import Tokenizer
from m1clip.text.bpe import BpeTokenizer
from m1clip.text.tokenizers import CharTokenizer, fingerprint, load_tokenizer, make_tokenizer

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
    assert make_tokenizer("char", CAPTIONS, alphabet="abc ,.") == TOKENIZERS[0]
    assert make_tokenizer("bpe", CAPTIONS) == TOKENIZERS[2]
    assert make_tokenizer("bpe-cut", iter(CAPTIONS)) == TOKENIZERS[3]


@pytest.mark.parametrize(
    ("kind", "captions", "alphabet", "message"),
    [
        ("bpe_cut", CAPTIONS, None, "did you mean 'bpe-cut'"),
        ("words", CAPTIONS, None, "choose one of char, bpe, bpe-cut"),
        ("bpe", CAPTIONS, "abc", "leave the alphabet out"),
        ("char", CAPTIONS, "aa", "twice"),
        ("char", CAPTIONS, "aB", "'B', which is not lower case"),
        ("char", ["", ""], None, "give captions with text"),
    ],
)
def test_make_tokenizer_refuses(kind: str, captions: list[str], alphabet: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_tokenizer(kind, captions, alphabet)


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
    ({"kind": "bpe-cut", "version": 1, "kept": [600, 600]}, "rising"),
    ({"kind": "bpe-cut", "version": 1, "kept": [601, 600]}, "rising"),
    ({"kind": "bpe-cut", "version": 1, "kept": [511]}, "rising"),
    ({"kind": "bpe-cut", "version": 1, "kept": [49_406]}, "rising"),
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
