"""Outputs in docs/ are those of the program today, except for their numbers.

`<!-- test: shape -->` marks a block. Its commands run in order, in one folder for each page, and
print the lines that follow them; `...` stands for any lines. Runs are small ones (`SMALL_RUN`).
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cyclopts import App
from small_run import command

import m1clip
from m1clip.cli.main import app
from m1clip.data.synthetic.source import write_folder

DOCS = Path(m1clip.__file__).parent.parent / "docs"
BLOCK = re.compile(r"<!-- test: shape -->\n```(?:text)?\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
INLINE_COMMAND = re.compile(r"`m1clip ([a-z]+(?: [^`\n]*)?)`")
LINE_COMMAND = re.compile(
    r"^(?:\$ )?(?:[^|`\n]* -m )?m1clip ([a-z]+ [^|`\n]*?)(?: +#.*)?$", re.MULTILINE
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
QUESTIONS_AND_ANSWERS = ("faq.md", "dos-and-donts.md")
MAX_GUIDE_LINES = 130  # two screens, and the code on them
FIRST_CODE_LINE = 20
EARLIER_COMMITS = ("benchmarks.md",)  # its commands are those of the commits that were measured
PROGRESS = re.compile(r"^[a-z ]+: [\d,]+ of [\d,]+, .* left$")  # on a slow computer only
OPTIONS_OF_OTHERS = (
    *("--rdzv-endpoint", "--nproc-per-node", "--max-restarts", "--shm-size"),  # torchrun, Docker
    *("--accum-freq", "--force-context-length", "--force-image-size", "--force-quick-gelu"),
    *("--image-mean", "--image-std"),  # of open_clip, as are those before
    "--general",  # of benchmarks/few_images.py
)
TOOLS = ("head", "ls")
SMALL_RUN = (
    "--recipe scratch --steps 2 --batch-size 16 --image-size 32 --vision-width 32 --vision-layers 1"
    " --text-width 32 --text-layers 1 --eval-every 0 --device cpu --precision fp32 --threads 1"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DOCS.exists(), reason="not run from the repository"),
]


def write_photos(folder: Path) -> None:
    """The folder that data.md makes, with damaged images, without captions and with other columns."""
    photos, bad = folder / "photos", folder / "bad"
    write_folder(photos, 200, 64, seed=1)
    shutil.copytree(photos, bad)
    (bad / "images/train-000003.png").write_bytes(b"")
    (bad / "images/train-000010.png").write_bytes(
        (photos / "images/train-000010.png").read_bytes()[:800]
    )
    (bad / "images/train-000020.png").unlink()
    shutil.copy(bad / "images/train-000030.png", bad / "images/val-000000.png")
    (folder / "plain").mkdir()
    for path in sorted((photos / "images").iterdir())[:12]:
        shutil.copy(path, folder / "plain")
    table = (photos / "captions.csv").read_text(encoding="utf-8")
    renamed = table.replace("image,caption", "bild,text_en", 1)
    (photos / "odd.csv").write_text(renamed, encoding="utf-8")


def data_scene(folder: Path) -> None:
    """The same without photos/, which the page makes."""
    write_photos(folder)
    shutil.rmtree(folder / "photos")


SCENES: dict[str, Callable[[Path], None]] = {"data.md": data_scene, "data-details.md": write_photos}


def shape(text: str) -> list[str]:
    """The lines of an output without numbers, alignment and progress."""
    lines = [line for line in text.splitlines() if line.strip() and not PROGRESS.match(line)]
    return [" ".join(re.sub(r"\d[\d,.]*", "#", line).split()) for line in lines]


def is_shown(expected: list[str], printed: list[str]) -> bool:
    """Whether the expected lines are printed in order, with any lines for each `...`."""
    if not expected:
        return not printed
    if expected[0] == "...":
        rest = range(len(printed) + 1)
        return any(is_shown(expected[1:], printed[start:]) for start in rest)
    return bool(printed) and expected[0] == printed[0] and is_shown(expected[1:], printed[1:])


def run(line: str, folder: Path) -> str:
    """What a command prints on standard output and standard error."""
    name, *words = shlex.split(line, comments=True)
    if name == "m1clip":
        if words[0] == "train":
            words = [*words[:2], *shlex.split(SMALL_RUN)]
        done = command(*words, cwd=folder)
        _, message, rest = done.stderr.partition("m1clip: ")  # after progress
        return done.stdout if done.returncode == 0 else message + rest + done.stdout
    assert name in TOOLS
    return subprocess.run(
        [name, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("page", sorted(SCENES))
def test_pages_show_what_commands_print(page: str, tmp_path: Path) -> None:
    SCENES[page](tmp_path)
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert blocks
    for text in blocks:
        commands = COMMAND.findall(text)
        assert commands
        for line, output in commands:
            printed = run(line, tmp_path)
            message = f"docs/{page}: {line} prints now:\n{printed}"
            assert is_shown(shape(output), shape(printed)), message


def test_every_marked_page_is_run() -> None:
    pages = {
        path.name for path in DOCS.glob("*.md") if BLOCK.search(path.read_text(encoding="utf-8"))
    }
    assert pages == set(SCENES)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a 1 b", "a  2 b", True),
        ("a 1 b", "a 1 c", False),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nb\nd\nc", False),
        ("a\n...", "a", True),
        ("a", "a\nb", False),
        ("a", "drawing: 136 of 600, 76/s, 0:06 left\na", True),
    ],
)
def test_outputs_are_compared_by_their_words(expected: str, printed: str, same: bool) -> None:
    assert is_shown(shape(expected), shape(printed)) is same


def documented_commands() -> list[tuple[str, str]]:
    """(page, words after m1clip) of each command in the docs and the README."""
    paths = [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"]
    commands = []
    for path in paths:
        if path.name in EARLIER_COMMITS:
            continue
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = INLINE_COMMAND.findall(text) + LINE_COMMAND.findall(text)
        commands += [(path.name, line.partition(" m1clip ")[0]) for line in lines]
    return commands


def options_of(command: App) -> set[str]:
    arguments = command.assemble_argument_collection()
    return {option for argument in arguments for option in argument.names} | {
        "--help",
        "--help-all",
    }


def test_documented_commands_have_these_options() -> None:
    checked = 0
    for page, line in documented_commands():
        name, *words = line.split()
        if name not in set(app):  # a sentence that begins with m1clip
            continue
        described = app[name]
        if name == "data":
            described = described[words[0]]
        assert set(OPTION.findall(line)) <= options_of(described), f"{page}: m1clip {line}"
        checked += 1
    assert checked > 250


def guides() -> list[str]:
    """The pages of the section Guides of the site."""
    if not DOCS.exists():
        return []
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    section = navigation.partition("  - Guides:\n")[2].partition("  - Reference:\n")[0]
    return re.findall(r"([\w-]+\.md)$", section, re.MULTILINE)


@pytest.mark.parametrize("page", guides())
def test_options_in_the_sentences_of_guides_exist(page: str) -> None:
    commands = [app[name] for name in app if name.isalpha() and name != "data"]
    commands += [app["data"][name] for name in app["data"] if name.isalpha()]
    known_options = set(OPTIONS_OF_OTHERS).union(*(options_of(command) for command in commands))
    inline = re.findall(r"`(--[^`\n]+)`", (DOCS / page).read_text(encoding="utf-8"))
    assert set(OPTION.findall(" ".join(inline))) <= known_options


@pytest.mark.parametrize("page", guides())
def test_guides_are_short_and_begin_with_a_command(page: str) -> None:
    """Details belong in the reference, measurements in docs/lab-*.md."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_GUIDE_LINES
    code = [number for number, line in enumerate(lines, 1) if line.startswith("```")]
    assert page in QUESTIONS_AND_ANSWERS or code[0] <= FIRST_CODE_LINE


def test_guides_are_found() -> None:
    assert {"data.md", "search.md", "finetune.md"} <= set(guides())


def anchors(page: Path) -> set[str]:
    """What can follow # in a link to a page, by the rule of GitHub."""
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", title.lower()).split() for title in titles]
    return {"-".join(title) for title in words} | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize(
    "page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"]
)
def test_links_of_pages_outside_the_site_exist(page: str) -> None:
    """Those of the site are checked by `make docs`."""
    path = DOCS.parent / page
    links = re.findall(r"\]\(([^:)#\s]+)(?:#([^)\s]+))?\)", path.read_text(encoding="utf-8"))
    assert links
    for target, anchor in links:
        linked = path.parent / target
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"
