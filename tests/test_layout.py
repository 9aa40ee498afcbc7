"""Rules of the code base that ruff and mypy do not check."""

import ast
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

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


def assigned_names(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    """(name, source of its value) of an assignment, also of A, B = 1, 2."""
    if isinstance(target, ast.Name):
        yield target.id, ast.unparse(value)
    elif isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
        for part, of_part in zip(target.elts, values, strict=True):
            yield from assigned_names(part, of_part)


def constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, source of its value) of each constant of a module; _NAME counts as NAME."""
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for name, value in assigned_names(target, node.value) if node.value else ():
                if name.isupper():
                    yield name.lstrip("_"), value


def test_constants_of_a_module_are_found() -> None:
    tree = ast.parse("A = 1\n_B: int = 2\nC, D = 3, {}\nE = F = 4\nG, H = range(2)\nlower = 5\n")
    assert "".join(name for name, _ in constants(tree)) == "ABCDEFGH"
    assert dict(constants(tree))["D"] == "{}"


def test_constant_name_has_one_value_in_the_whole_package() -> None:
    """HEAD_WIDTH cannot be 64 in one module and 512 in another: rename one, or import it."""
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, module in zip(FILES, IDS, strict=True):
        for name, value in constants(ast.parse(path.read_text(encoding="utf-8"))):
            values[name][value].append(module)
    assert {name: dict(by_value) for name, by_value in values.items() if len(by_value) > 1} == {}


# Vague words of STYLE.md: name what the value is.
FOREIGN_LOCAL = re.compile(
    r"found|each|places?|kept|most|least|asked|wanted|what|here|given|seen|known|it|got|want|meant"
    r"|mine|ones|those"
)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_locals_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assigned = {node.id for node in ast.walk(tree) if is_assigned(node)}
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    assert list(filter(FOREIGN_LOCAL.fullmatch, assigned | parameters)) == []


def is_assigned(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
