"""3: models with a character tokenizer can be exported everywhere that takes a tokenizer.json."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import tiny_model
from tokenizers import Tokenizer as RustTokenizer

import m1clip
from m1clip import console
from m1clip.errors import UserError
from m1clip.export.layouts import convert
from m1clip.model.folder import read_model
from m1clip.text.tokenizers import CharTokenizer

CAPTIONS = ["two red balls", "Ein Käse, 7 Öfen.", "ΣΟΦΟΣ σοφος ΟΔΟΣ\n", "日本"]
CONTEXT = 16  # of the tiny model
STRINGS = [
    *CAPTIONS,
    "",
    " ",
    "\t\r\n",
    "UNKNOWN 漢字 🙂 e\u0301 \u200d",
    "<pad> <unk> [UNK] <|endoftext|> ##a",
    "İstanbul ǅ ẞ",
    "x" * 200,
    "a " * 99,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    tiny_model("char", CAPTIONS, vision_layers=1, text_layers=1).save(path)
    return path


def assert_same_ids(exported: RustTokenizer, ours: CharTokenizer, texts: list[str]) -> None:
    exported.enable_padding(length=CONTEXT, pad_id=ours.pad_id)
    ids = [row.ids for row in exported.encode_batch(texts)]
    assert ids == ours.tokenize(texts, CONTEXT).tolist()


@pytest.mark.parametrize(
    ("to", "file"), [("transformers.js", "tokenizer.json"), ("immich", "textual/tokenizer.json")]
)
def test_exported_folder_has_the_same_ids_and_vectors(
    to: str, file: str, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnx", reason="needs the extra `export`")
    out = tmp_path / "out"
    with console.quiet():
        convert(read_model(folder), to, out)  # type: ignore[arg-type]
    exported = RustTokenizer.from_file(str(out / file))
    ours = read_model(folder).tokenizer
    assert isinstance(ours, CharTokenizer)
    assert_same_ids(exported, ours, STRINGS)
    # transformers.js has no model of the type WordLevel.
    assert json.loads((out / file).read_text())["model"]["type"] == "WordPiece"
    expected = m1clip.load(folder, precision="fp32").encode_text(STRINGS)
    actual = m1clip.load(out).encode_text(STRINGS)[:, : expected.shape[1]]
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3


def test_row_that_a_program_truncated_without_an_end_is_ended() -> None:
    from m1clip.export.onnx import with_eot

    rows = torch.tensor([[1, 5, 6, 7], [1, 5, 2, 0]])
    assert with_eot(rows, eot_id=2).tolist() == [[1, 5, 6, 2], [1, 5, 2, 0]]


def test_core_ml_folder_has_the_same_ids(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("coremltools")
    out = tmp_path / "out"
    with console.quiet():
        convert(read_model(folder), "coreml", out)
    exported = RustTokenizer.from_file(str(out / "tokenizer.json"))
    exported.enable_truncation(CONTEXT)
    ours = read_model(folder).tokenizer
    assert isinstance(ours, CharTokenizer)
    assert_same_ids(exported, ours, STRINGS)


@pytest.mark.parametrize("to", ["hf", "openclip"])
def test_programs_with_a_tokenizer_of_their_own_are_an_error(
    to: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"no character tokenizer.*transformers\.js, immich"):
        convert(read_model(folder), to, tmp_path / "out")  # type: ignore[arg-type]


@given(st.lists(st.text(max_size=30), max_size=4))
def test_library_has_the_same_ids_for_any_text(texts: list[str]) -> None:
    ours = CharTokenizer.from_captions(CAPTIONS)
    exported = ours.library()
    exported.enable_truncation(CONTEXT)
    assert_same_ids(exported, ours, texts)
