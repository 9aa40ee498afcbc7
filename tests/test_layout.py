"""Rules of the code base that ruff and mypy do not check."""

import ast
import pkgutil
import re
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


def test_layout_rules_cover_the_package() -> None:
    """The rules below check the files that Python would import, and no fewer."""
    modules = {module.name for module in pkgutil.walk_packages([str(PACKAGE)], "m1clip.")} | {
        "m1clip"
    }
    named = {
        ".".join(("m1clip", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in FILES
    }
    assert {name.removesuffix(".__init__") for name in named} == modules


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
