"""Every command block of the README runs; and the runner that does it reads a page rightly."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from readme_blocks import Block, blocks, check_make, check_set_up, with_arguments
from small_run import environment

import m1clip
from m1clip.data.synthetic.source import write_folder

ROOT = Path(m1clip.__file__).parent.parent
README = ROOT / "README.md"

PAGE = """# Title

<!-- test: skip (needs the network) -->
```bash
git clone https://example.org/x && cd x   # fetch
make demo
```

<!-- a comment of another kind -->
<!-- test: --steps 3 --train-count 64 -->
<!-- test: images photos -->

```sh
m1clip train --data photos/ \\
    --minutes 10 --model tiny  # a comment
m1clip eval "runs/my tiny"
```

<!-- test: --steps 9 -->
Words between, so that the mark above belongs to nothing.

```console
$ m1clip --version
0.1.0
```

- in a list:

  ```python
  import m1clip
  if True:
      print(m1clip)
  ```

```toml
seed = 1
```
"""


def test_blocks_and_their_marks_are_found() -> None:
    found = blocks(PAGE)
    assert [(block.line, block.language) for block in found] == [
        (4, "shell"),
        (13, "shell"),
        (22, "shell"),
        (29, "python"),
    ]
    set_up, train, console, program = found
    assert set_up.skip == "needs the network"
    assert train.arguments == ("--steps", "3", "--train-count", "64")
    assert train.images == ("photos",)
    assert console.arguments == program.arguments == ()
    assert program.text == "import m1clip\nif True:\n    print(m1clip)\n"


def test_commands_are_split_as_a_shell_does() -> None:
    _, train, console, _ = blocks(PAGE)
    assert train.commands() == [
        ["m1clip", "train", "--data", "photos/", "--minutes", "10", "--model", "tiny"],
        ["m1clip", "eval", "runs/my tiny"],
    ]
    assert console.commands() == [["m1clip", "--version"]]


def test_settings_for_the_test_replace_the_pages() -> None:
    words = ["m1clip", "train", "--minutes", "10", "--batch-size=4", "--model", "tiny", "--run", "x"]
    changed = with_arguments(words, ("--steps", "3", "--batch-size", "8"))
    assert changed == ["m1clip", "train", "--model", "tiny", "--run", "x", "--steps", "3", "--batch-size", "8"]
    assert with_arguments(["m1clip", "eval", "x"], ("--steps", "3")) == ["m1clip", "eval", "x"]
    assert with_arguments(["m1clip", "train", "--resume", "x"], ("--steps", "3")) == [
        "m1clip",
        "train",
        "--resume",
        "x",
    ]


@pytest.mark.parametrize("mark", ["skip", "skip ()", "steps 3"])
def test_a_mark_must_be_understood(mark: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        blocks(f"<!-- test: {mark} -->\n```bash\nm1clip\n```\n")


def test_only_set_up_may_be_skipped_and_targets_must_exist(tmp_path: Path) -> None:
    makefile = tmp_path / "Makefile"
    makefile.write_text(".PHONY: demo\ndemo: venv\n\techo\n")
    check_set_up(Block(1, "shell", "git clone x\nmake demo\npip install m1clip\n"), makefile)
    with pytest.raises(AssertionError, match="'m1clip' cannot be skipped"):
        check_set_up(Block(1, "shell", "m1clip train\n"), makefile)
    with pytest.raises(AssertionError, match="no target 'dmeo'"):
        check_set_up(Block(1, "shell", "make dmeo\n"), makefile)


def run_block(block: Block, folder: Path) -> None:
    """Run one block; each command must end well."""
    for name in block.images:
        write_folder(folder / name, 60, 32)
    if block.language == "python":
        run_words([sys.executable, "-c", block.text], block, folder)
        return
    for words in block.commands():
        if words[0] == "make":
            check_make(words, block, ROOT / "Makefile")
            continue
        assert words[0] == "m1clip", f"README line {block.line}: '{words[0]}' is no command that a test may run"
        run_words([sys.executable, "-m", *with_arguments(words, block.arguments)], block, folder)


def run_words(words: list[str], block: Block, folder: Path) -> None:
    done = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"README line {block.line}: {words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.slow
def test_every_block_of_the_readme_runs(tmp_path: Path) -> None:
    """In order and in one folder, because a later block may use what an earlier one made."""
    if not README.exists():
        pytest.skip("the README is not beside an installed package")
    for block in blocks(README.read_text(encoding="utf-8")):
        if block.skip:
            check_set_up(block, ROOT / "Makefile")
        else:
            run_block(block, tmp_path)


@pytest.mark.slow
def test_the_runner_runs(tmp_path: Path) -> None:
    page = "<!-- test: images photos -->\n```bash\nm1clip data make more --count 30 --image-size 32\n```\n"
    for block in blocks(page + "```python\nimport m1clip\nassert open('photos/captions.csv').read()\n```\n"):
        run_block(block, tmp_path)
    assert (tmp_path / "more" / "captions.csv").exists()
    with pytest.raises(AssertionError, match="README line 1"):
        run_block(Block(1, "shell", "m1clip train --bogus 3\n"), tmp_path)
    with pytest.raises(AssertionError, match="no command that a test may run"):
        run_block(Block(1, "shell", "rm -rf x\n"), tmp_path)


def test_the_readme_is_finished() -> None:
    """No place-holder is left, and every image and page it links to is there."""
    if not README.exists():
        pytest.skip("the README is not beside an installed package")
    text = README.read_text(encoding="utf-8")
    assert not re.findall(r"^[A-Z_]{5,}$", text, re.MULTILINE)
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    for link in links:
        assert (ROOT / link).exists(), f"README links to {link}, which is not there"
