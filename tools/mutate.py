"""Change the code in one place at a time and run the tests of the changed module: which changes do they miss?

    python tools/mutate.py m1clip/formatting.py m1clip/training/schedule.py --count 10 --seed 0

A mutant that no test notices (a survivor) is listed with its line: a test is missing there, or the
change has no effect that matters. Works on a copy of the repository; the tests of m1clip/a/b.py are
tests/a/test_b.py.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
}
MIN_LIMIT_SECONDS = 120.0
LIMIT_FACTOR = 10  # times as long as the tests took without a change: an endless loop


def mutable_nodes(tree: ast.Module) -> list[ast.AST]:
    """The nodes inside functions that can be changed, without annotations, docstrings and messages of errors."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        raised = [node.exc] if isinstance(node, ast.Raise) else []
        for part in (*annotations, *raised):
            if part is not None:
                skipped.update(id(child) for child in ast.walk(part))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {
        id(child): child
        for function in functions
        for item in function.body
        for child in ast.walk(item)
    }
    return [node for key, node in inside.items() if key not in skipped and changes(node)]


def changes(node: ast.AST) -> list[str]:
    """The names of the changes that a node allows."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        return ["comparison"]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return ["operator"]
    if isinstance(node, ast.BoolOp):
        return ["and/or"]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["not removed"]
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return ["condition negated"]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        return ["constant"]
    if isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        return ["statement removed"]
    return []


class Change(ast.NodeTransformer):
    """Applies one change to the node with a number; nodes are numbered by `places`."""

    def __init__(self, target: ast.AST) -> None:
        self.target = target

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self.target:
            return self.generic_visit(node)
        if isinstance(node, ast.Compare):
            node.ops[0] = COMPARISONS[type(node.ops[0])]()
        elif isinstance(node, ast.BinOp):
            node.op = OPERATORS[type(node.op)]()
        elif isinstance(node, ast.BoolOp):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        elif isinstance(node, ast.UnaryOp):
            return node.operand
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Constant):
            node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        else:
            return ast.copy_location(ast.Pass(), node)
        return node


def mutants(path: Path, count: int, draw: random.Random) -> Iterator[tuple[int, str, str, str]]:
    """(line, kind of change, the original line, the changed source) of randomly chosen mutants of a module."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    numbers = range(len(mutable_nodes(tree)))
    for number in sorted(draw.sample(numbers, min(count, len(numbers)))):
        changed = copy.deepcopy(tree)
        node = mutable_nodes(changed)[number]
        line = node.lineno  # type: ignore[attr-defined]
        kind = changes(node)[0]
        mutated = ast.unparse(ast.fix_missing_locations(Change(node).visit(changed)))
        yield line, kind, source.splitlines()[line - 1].strip(), mutated


def tests_of(module: Path) -> Path:
    inner = module.relative_to("m1clip")
    return Path("tests") / inner.parent / f"test_{inner.name}"


def tests_fail(tests: list[Path], limit_seconds: float) -> bool | None:
    """Run tests in a forked process, which has torch already and none of our modules.

    None: they did not end within the limit.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *map(str, tests)])))
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="+", type=Path, help="such as m1clip/losses/registry.py")
    parser.add_argument("--count", type=int, default=10, help="mutants per module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tests", nargs="*", type=Path, default=[], help="more test files, for every module"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no mutant after this time"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="m1clip-mutants-") as folder:
        copied = Path(folder) / "m1clip"
        shutil.copytree(
            ROOT, copied, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__")
        )
        os.chdir(copied)
        sys.path.insert(0, str(copied))
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1"}
        import torch  # noqa: F401  once for all mutants

        for module in arguments.modules:
            if time.monotonic() - began > 60 * arguments.minutes:
                sys.exit(f"{module} and those after it: no time left")
            tests = [tests_of(module), *arguments.tests]
            original = module.read_text(encoding="utf-8")
            tests_began = time.monotonic()
            if tests_fail(tests, 60 * arguments.minutes) is not False:
                sys.exit(f"{module}: its tests fail without a change: {' '.join(map(str, tests))}")
            limit = max(MIN_LIMIT_SECONDS, LIMIT_FACTOR * (time.monotonic() - tests_began))
            made = survived = endless = 0
            for line, kind, text, mutated in mutants(
                module, arguments.count, random.Random(arguments.seed)
            ):
                if time.monotonic() - began > 60 * arguments.minutes:
                    break
                module.write_text(mutated, encoding="utf-8")
                made += 1
                failed = tests_fail(tests, limit)
                where = f"{module}:{line}: {kind}: {text}"
                if failed is None:
                    endless += 1
                    print(f"  no end within {limit:.0f} s: {where}", flush=True)
                elif not failed:
                    survived += 1
                    print(f"  survived: {where}", flush=True)
                module.write_text(original, encoding="utf-8")
            noticed = made - survived - endless
            print(
                f"{module}: {noticed} of {made} mutants noticed, {survived} survived,"
                f" {endless} did not end",
                flush=True,
            )


if __name__ == "__main__":
    main()
