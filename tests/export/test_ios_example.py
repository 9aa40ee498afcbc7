"""examples/ios agrees with what the Core ML export writes.

The tokenizer is compiled and compared with the library `tokenizers` where there is a Swift compiler
(SWIFTC, or swiftc on the PATH). The model needs Core ML: only its names are compared.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from PIL import Image
from tiny_model import tiny_model

from m1clip.data.images import Preprocess, to_square
from m1clip.export import coreml
from m1clip.model.folder import read_model
from m1clip.text import bpe
from m1clip.text.tokenizers import CharTokenizer, Tokenizer, wordpiece_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "ios"
TOKENIZER = (FOLDER / "Tokenizer.swift").read_text(encoding="utf-8")
MODEL = (FOLDER / "ClipModel.swift").read_text(encoding="utf-8")
SEARCH = (FOLDER / "Search.swift").read_text(encoding="utf-8")
SWIFTC = shutil.which(os.environ.get("SWIFTC", "swiftc"))
# Prints the ids of texts: tokenizer.json, a list of texts, and the length are its arguments; or the
# placement of an image: its width and height, the side of the square, and the rule.
MAIN = """
import Foundation
let words = CommandLine.arguments
if words.count == 6 {
    let place = placement(
        width: Int(words[2])!, height: Int(words[3])!, side: Int(words[4])!, resize: words[5])
    print(place.minX, place.minY, place.width, place.height)
    exit(0)
}
let tokenizer = try Tokenizer(contentsOf: URL(fileURLWithPath: words[1]))
let json = try Data(contentsOf: URL(fileURLWithPath: words[2]))
let texts = try JSONSerialization.jsonObject(with: json) as! [String]
let rows = texts.map { tokenizer.encode($0, length: Int(words[3])!, padding: -1).map { Int($0) } }
print(String(data: try JSONSerialization.data(withJSONObject: rows), encoding: .utf8)!)
"""
LENGTH = 24
TEXTS = [
    "",
    "A dog's ball, on the GRASS!",
    "two dogs run along the beach.Two   more follow",
    "Zürich CAFÉ naïve İstanbul ΟΔΟΣ",  # lowercasing changes lengths and splits a character
    "cafe\u0301 \u00c5ngstro\u0308m \u212b",
    "小狗在海滩上 and a cat",
    "강아지가 뛴다",
    "“quotes” don’t $5+3=8 [CLS] <|endoftext|> ##ing",
    "\ttabs\nlines\u3000spaces\u00a0\u200bnone\ufeff",
    "a dog 🐶🏖️ on a beach",
    "x" * 101 + " after a long word",
    "unknownzzz word",
    "one two three four five six seven eight nine ten " * 3,
]


def constant(name: str) -> str:
    """The value of `static let NAME = "..."` or `#"..."#`."""
    match = re.search(rf'static let {name} = #?"(.*)"#?$', TOKENIZER, re.MULTILINE)
    assert match, name
    return match[1]


def test_tokens_and_pattern_are_those_of_the_tokenizers() -> None:
    assert constant("start") == bpe.START
    assert constant("end") == bpe.END
    assert constant("endOfWord") == bpe.END_OF_WORD
    assert constant("wordPattern").replace(r"\u0345", "\u0345") == bpe.WORD_PATTERN
    characters = json.loads(CharTokenizer("abc ").library().to_str())
    assert {constant("start"), constant("end"), constant("unknown")} <= set(
        characters["model"]["vocab"]
    )
    assert characters["model"]["type"] == "WordPiece"
    full = json.loads(bpe.BpeTokenizer().library().to_str())
    assert full["model"]["type"] == "BPE"
    assert {constant("start"), constant("end")} <= set(full["model"]["vocab"])
    quotes = {
        (item["pattern"]["String"], item["content"])
        for item in full["normalizer"]["normalizers"]
        if item["type"] == "Replace"
    }
    swift = re.findall(r'\("([“”‘’])", "(\\"|\')"\)', TOKENIZER)
    assert {(curly, straight.replace("\\", "")) for curly, straight in swift} == quotes


def test_letters_of_bytes_are_those_of_the_vocabulary() -> None:
    ranges = re.findall(r"Array\((\d+)\.\.\.(\d+)\)", TOKENIZER)
    printable = {code for low, high in ranges for code in range(int(low), int(high) + 1)}
    later = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(later)) for byte in range(256)]
    ids = bpe._token_ids()
    assert sorted(ids[letter] for letter in letters) == list(range(256))
    rust = json.loads(bpe.BpeTokenizer().library().to_str())["model"]["vocab"]
    text = "é\n"  # bytes C3 A9 0A
    assert all(letters[byte] in rust for byte in text.encode())


def test_settings_and_packages_have_the_names_of_the_export() -> None:
    rule = {field.name for field in fields(Preprocess)}
    assert {"image_size", "resize"} <= rule
    source = inspect.getsource(coreml)
    for name in ("image", "context_length", "pad_id"):
        assert f'"{name}":' in source
        assert re.search(rf"let {name}: ", MODEL)
    for name in ("image_size", "resize"):
        assert re.search(rf"let {name}: ", MODEL)
    for name in ("image", "tokens", "vector"):
        assert f'"{name}"' in MODEL
        assert f'"{name}"' in source
    assert coreml.IMAGE_PACKAGE == "image.mlpackage"
    assert coreml.TEXT_PACKAGE == "text.mlpackage"


def test_every_resize_rule_is_known_to_the_code() -> None:
    rules = set(get_args(get_type_hints(Preprocess)["resize"]))
    beginnings = {rule.split("-")[0] for rule in rules}
    endings = {rule.split("-")[1] for rule in rules if "-" in rule}
    assert beginnings == {"squash", "shortest"}
    assert endings <= {"floor", "bilinear"}
    assert 'resize.hasPrefix("squash")' in SEARCH
    assert 'resize.contains("-floor")' in SEARCH
    assert 'resize.hasSuffix("bilinear")' in MODEL


def test_readme_says_what_was_not_run() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "`ClipModel.swift` was not compiled and not run" in readme


def wordpieces() -> list[str]:
    """A vocabulary with words, pieces that continue a word, and most characters of TEXTS."""
    letters = sorted({letter for text in TEXTS for letter in text.lower()} - set(" \t\nz"))
    pieces = ["dog", "beach", "bea", "##s", "##ch", "run", "##zzz", "unknown", "c", "##afe", "cafe"]
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    every = [*specials, *pieces, *letters, *(f"##{letter}" for letter in letters)]
    return list(dict.fromkeys(every))


TOKENIZERS: dict[str, Tokenizer] = {
    "bpe": bpe.BpeTokenizer(),
    "characters": CharTokenizer("abcdefghijklmnopqrstuvwxyz .,'"),
    "wordpiece": wordpiece_tokenizer(wordpieces()),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if SWIFTC is None:
        pytest.skip("no Swift compiler")
    folder = tmp_path_factory.mktemp("swift")
    (folder / "main.swift").write_text(MAIN, encoding="utf-8")
    command = [
        SWIFTC,
        *map(str, sorted(FOLDER.glob("[ST]*.swift"))),
        "main.swift",
        "-o",
        "tokenize",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "tokenize"


@pytest.mark.parametrize("resize", sorted(get_args(get_type_hints(Preprocess)["resize"])))
@pytest.mark.parametrize("size", [(31, 20), (20, 31), (32, 27), (27, 34), (20, 20), (1999, 1000)])
def test_swift_shows_the_part_of_an_image_that_python_shows(
    size: tuple[int, int], resize: str, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = 20
    calls: dict[str, tuple[int, ...]] = {}
    for method in ("resize", "crop"):
        original = getattr(Image.Image, method)

        def record(
            image: Any, box: Any, *args: Any, _of: Any = original, _name: str = method
        ) -> Any:
            calls[_name] = box
            return _of(image, box, *args)

        monkeypatch.setattr(Image.Image, method, record)
    to_square(Image.new("RGB", size), side, resize)
    wide, high = calls.get("resize", (side, side))
    left, top, *_ = calls.get("crop", (0, 0))
    words = [program, "place", *map(str, (*size, side)), resize]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert [float(word) for word in done.stdout.split()] == [-left, top - (high - side), wide, high]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_swift_gives_the_ids_of_the_library(name: str, program: Path, tmp_path: Path) -> None:
    library = TOKENIZERS[name].library()
    (tmp_path / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS), encoding="utf-8")
    words = [program, tmp_path / "tokenizer.json", tmp_path / "texts.json", str(LENGTH)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    for text, row in zip(TEXTS, json.loads(done.stdout), strict=True):
        ids = library.encode(text).ids
        expected = ids if len(ids) <= LENGTH else [*ids[: LENGTH - 1], ids[-1]]
        assert row == expected + [-1] * (LENGTH - len(expected)), text


@pytest.mark.parametrize("has_bias", [False, True])
def test_preprocess_json_has_the_scale_and_bias_of_the_model(
    has_bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without coremltools, which only the packages need."""

    def vector_only(module: torch.nn.Module, example: torch.Tensor, path: Path) -> torch.Tensor:
        with torch.no_grad():
            return module(example)

    monkeypatch.setattr(coreml, "_write_package", vector_only)
    monkeypatch.setattr(coreml, "find_spec", lambda name: True)
    tiny_model("char", ["two dogs"], logit_bias=has_bias).save(tmp_path / "model")
    saved = read_model(tmp_path / "model")
    coreml.write_coreml(tmp_path, saved)
    settings = json.loads((tmp_path / "preprocess.json").read_text())
    model = saved.build()
    assert settings["logit_scale"] == pytest.approx(model.scale().item())
    expected = None if model.logit_bias is None else model.logit_bias.item()
    assert (expected is not None) == has_bias
    assert settings["logit_bias"] == expected
