"""Every code block of the README and of the pages about Python runs, in order and in one folder.

An HTML comment above a block says how: `<!-- test: skip -->` for set-up, or options for a smaller
`m1clip train`. In any page, `<!-- test: output -->` marks a block whose commands print exactly what
follows them.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_run import command, exit_code, small_options

import m1clip
from m1clip.data.sources import FORMATS
from m1clip.data.synthetic.source import write_folder

ROOT = Path(m1clip.__file__).parent.parent
BLOCK = re.compile(r"(?:<!-- test: ([^\n]*) -->\n)?```(bash|python)\n(.*?)```", re.DOTALL)
OUTPUT = re.compile(r"<!-- test: output -->\n```\n(.*?)```", re.DOTALL)
SET_UP = ("make", "source", "pip", "git", "cd")
pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").exists(), reason="not run from the repository"
)


def train_words(words: list[str], options: list[str]) -> list[str]:
    """A shorter `m1clip train`: options instead of its duration."""
    if words[0] != "train" or "--resume" in words:
        return words
    if "--minutes" in words:
        at = words.index("--minutes")
        words = words[:at] + words[at + 2 :]
    return [*words, *options]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pages", [["README.md"], ["docs/python.md", "docs/python-runs.md"]], ids=["README", "python"]
)
def test_code_blocks_run(pages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    write_folder(tmp_path / "photos", 60, 32, seed=0)
    shutil.copy(tmp_path / "photos" / "images" / "train-000000.png", tmp_path / "dog.jpg")
    monkeypatch.chdir(tmp_path)
    train = m1clip.train

    def short_train(data: str, **options: Any) -> Any:
        small = small_options(
            {"data.synthetic_images": None, "train.steps": 3, "train.eval_every": 2}
        )
        return train(data, **{**small, **options})

    monkeypatch.setattr(m1clip, "train", short_train)
    namespace: dict[str, Any] = {}
    ran = 0
    blocks = [block for page in pages for block in BLOCK.findall((ROOT / page).read_text())]
    for mark, language, text in blocks:
        if language == "python":
            exec(compile(text, pages[0], "exec"), namespace)
            ran += 1
            continue
        for line in text.replace("\\\n", " ").splitlines():
            name, *words = shlex.split(line, comments=True)
            if mark == "skip":
                is_venv = [name, *words[:2]] == ["python3", "-m", "venv"]
                assert is_venv or name in SET_UP, "only set-up may be skipped"
                assert name != "make" or re.search(
                    rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE
                )
                continue
            assert name == "m1clip"
            done = command(*train_words(words, shlex.split(mark)), cwd=tmp_path, timeout=300)
            assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            ran += 1
    assert ran >= (3 if pages == ["README.md"] else 14)


@pytest.mark.parametrize("page", [Path("README.md"), Path("docs/python.md")])
def test_links_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert links
    assert [link for link in links if not (ROOT / page.parent / link).exists()] == []


def printed_blocks() -> list[tuple[str, str, str]]:
    """(page, command, output) of each marked block."""
    return [
        (page.name, line, output)
        for page in sorted((ROOT / "docs").glob("*.md"))
        for block in OUTPUT.findall(page.read_text())
        for line, output in re.findall(r"^\$ m1clip (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE)
    ]


@pytest.mark.parametrize(("page", "line", "output"), printed_blocks())
def test_marked_blocks_show_what_is_printed(
    page: str, line: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*shlex.split(line)) == 0
    assert capsys.readouterr().out == output, f"docs/{page}: write what m1clip {line} prints"


def test_data_pages_show_and_describe_every_format_in_order() -> None:
    assert ("data.md", "data formats") in [(page, line) for page, line, _ in printed_blocks()]
    table = (ROOT / "docs/data-details.md").read_text().partition("| format | layout |\n")[2]
    cells = re.findall(r"^\| (`[^|]*) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert [name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)] == list(FORMATS)
