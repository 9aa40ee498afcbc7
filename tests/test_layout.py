"""Rules of the code base that ruff and mypy do not check."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import m1clip

PACKAGE = Path(m1clip.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|work|Users|root|tmp|mnt)/")
PICKLE = re.compile(
    r"torch\.load\((?!.*weights_only=True)|import pickle|from pickle|pickle\.loads?\("
    r"|import shelve|import marshal|import dill"
)

UNBOUNDED = re.compile(r"\.(read_text|read_bytes)\(")
PACKAGED = re.compile(r"resources\.files\(|\bfiles\(\"m1clip")
SYSTEM_FILES = ("io.py", "bench/doctor.py")  # of /proc and /sys


def public(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Public functions, classes and methods under a node, with their names."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            yield f"{prefix}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{prefix}{child.name}.")


def test_layout_rules_cover_the_package() -> None:
    assert len(FILES) > 40
    assert sum(1 for path in FILES for _ in public(ast.parse(path.read_text(encoding="utf-8")))) > 150


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_file_follows_code_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if text.strip():
        assert ast.get_docstring(tree), "a module needs a docstring"
    assert MACHINE_PATH.findall(text) == [], "no absolute path of one machine"
    assert PICKLE.findall(text) == [], "no format that runs code when read"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_user_files_are_read_with_bounded_reader(path: Path) -> None:
    unbounded = [
        line.strip()
        for line in path.read_text(encoding="utf-8").splitlines()
        if UNBOUNDED.search(line) and not PACKAGED.search(line)
    ]
    allowed = path.parent.name == "hardware" or IDS[FILES.index(path)] in SYSTEM_FILES
    assert allowed or unbounded == [], "use m1clip.io.read_small"
