"""Finds the commands of a Markdown page and runs them in a folder of their own.

A block ```bash, ```sh or ```console holds commands (in a console block, the lines after "$ "); a block ```python
is a program. HTML comments right above a block say how a test runs it:

    <!-- test: --steps 3 --train-count 64 -->   added to each `m1clip train` of the block; an option that the
                                                     command has already is replaced, a duration replaces any other
    <!-- test: images photos -->                   first makes a small set of images with captions in photos/
    <!-- test: skip (reason) -->                     for set-up alone: git, pip, cd, make, python -m venv, source

`make TARGET` is never run here, but the target must exist.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^( *)```(bash|sh|shell|console|python|py)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!--\s*test:\s*(.*?)\s*-->", re.DOTALL)
DURATIONS = ("--minutes", "--epochs", "--steps", "--minutes", "--epochs", "--steps")
SET_UP = ("git", "pip", "cd", "make", "source", ".", "python", "python3", "uv", "brew")


@dataclass(frozen=True)
class Block:
    """One fenced block and the marks above it."""

    line: int
    language: str  # "shell" or "python"
    text: str
    arguments: tuple[str, ...] = ()  # for each `m1clip train`
    images: tuple[str, ...] = ()  # folders to make first
    skip: str = ""  # the reason

    def commands(self) -> list[list[str]]:
        """The words of each command."""
        text = self.text
        if re.search(r"^\$ ", text, re.MULTILINE):  # a console: what has no prompt is output
            text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
        lines = text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: str) -> list[Block]:
    """All blocks of a page that can be run, in order."""
    found = []
    for match in _BLOCK.finditer(page):
        indent, language, text = match.groups()
        text = "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
        arguments: list[str] = []
        images: list[str] = []
        skip = ""
        for mark in _marks_above(page[: match.start()]):
            if mark.startswith("skip"):
                skip = mark.removeprefix("skip").strip(" ()")
                if not skip:
                    raise ValueError(f"line {_line(page, match)}: a skip needs its reason in brackets")
            elif mark.startswith("images "):
                images += shlex.split(mark)[1:]
            elif mark.startswith("--"):
                arguments += shlex.split(mark)
            else:
                raise ValueError(f"line {_line(page, match)}: a mark that no one understands: {mark}")
        kind = "python" if language in ("python", "py") else "shell"
        found.append(Block(_line(page, match), kind, text, tuple(arguments), tuple(images), skip))
    return found


def _line(page: str, match: re.Match[str]) -> int:
    return page.count("\n", 0, match.start()) + 1


def _marks_above(page: str) -> list[str]:
    """The marks that stand right above the end of this text, with nothing but space between."""
    marks: list[str] = []
    while match := re.search(r"<!--(?:(?!<!--).)*?-->\s*\Z", page, re.DOTALL):
        inner = _MARK.match(match.group())
        if inner:
            marks.insert(0, inner.group(1))
        page = page[: match.start()]
    return marks


def with_arguments(words: list[str], extra: tuple[str, ...]) -> list[str]:
    """A command with other settings: those it has already are replaced."""
    if words[:2] != ["m1clip", "train"] or not extra or "--resume" in words:
        return words
    names = {word.partition("=")[0] for word in extra if word.startswith("--")}
    if names & set(DURATIONS):
        names |= set(DURATIONS)
    kept: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in names
        if not skipping:
            kept.append(word)
    return [*kept, *extra]


def check_set_up(block: Block, makefile: Path) -> None:
    """A block that is skipped holds set-up alone, and the targets it names are real."""
    for words in block.commands():
        name = words[0]
        if name not in SET_UP:
            raise AssertionError(
                f"line {block.line}: '{name}' cannot be skipped: only set-up can ({', '.join(SET_UP)})"
            )
        if name == "make":
            check_make(words, block, makefile)


def check_make(words: list[str], block: Block, makefile: Path) -> None:
    """Every target named after `make` is in the Makefile."""
    targets = set(re.findall(r"^([\w.-]+):", makefile.read_text(encoding="utf-8"), re.MULTILINE))
    for target in words[1:]:
        if "=" not in target and not target.startswith("-") and target not in targets:
            raise AssertionError(f"line {block.line}: the Makefile has no target '{target}'")
