"""Every code block of the README runs, in order and in one folder.

An HTML comment above a block sets how: `<!-- test: skip -->` for set-up, or options for a smaller `m1clip train`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import command, environment

import m1clip
from m1clip.data.synthetic.source import write_folder

ROOT = Path(m1clip.__file__).parent.parent
BLOCK = re.compile(r"(?:<!-- test: ([^\n]*) -->\n)?```(bash|python)\n(.*?)```", re.DOTALL)
SET_UP = ("make", "source", "pip", "git", "cd")
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="not run from the repository")


def train_words(words: list[str], options: list[str]) -> list[str]:
    """A shorter `m1clip train`: options instead of its duration."""
    if words[0] != "train" or "--resume" in words:
        return words
    if "--minutes" in words:
        at = words.index("--minutes")
        words = words[:at] + words[at + 2 :]
    return [*words, *options]


@pytest.mark.slow
def test_readme_code_blocks_run(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", 60, 32, seed=0)
    shutil.copy(tmp_path / "photos" / "images" / "train-000000.png", tmp_path / "dog.jpg")
    ran = 0
    for mark, language, text in BLOCK.findall((ROOT / "README.md").read_text()):
        if language == "python":
            subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=environment(), check=True, timeout=300)
            continue
        for line in text.replace("\\\n", " ").splitlines():
            name, *words = shlex.split(line, comments=True)
            if mark == "skip":
                assert name in SET_UP, "only set-up may be skipped"
                assert name != "make" or re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
                continue
            assert name == "m1clip"
            done = command(*train_words(words, shlex.split(mark)), cwd=tmp_path, timeout=300)
            assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            ran += 1
    assert ran > 3


def test_readme_links_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
