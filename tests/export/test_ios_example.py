"""examples/ios agrees with what the Core ML export writes.

It is not compiled: no Swift toolchain is needed here.
"""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

from m1clip.data.images import Preprocess
from m1clip.export import coreml
from m1clip.text import bpe
from m1clip.text.tokenizers import CharTokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "ios"
TOKENIZER = (FOLDER / "Tokenizer.swift").read_text(encoding="utf-8")
MODEL = (FOLDER / "ClipModel.swift").read_text(encoding="utf-8")


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
    assert 'resize.hasPrefix("squash")' in MODEL
    assert 'resize.hasSuffix("bilinear")' in MODEL


def test_readme_says_that_it_was_not_compiled() -> None:
    assert "Not compiled and not run" in (FOLDER / "README.md").read_text(encoding="utf-8")
