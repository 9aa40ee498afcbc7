"""Files about the project agree with each other: version, addresses, pinned actions, oldest versions."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import m1clip
from m1clip import errors
from m1clip.cli.main import app

ROOT = Path(m1clip.__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="not run from the repository"
)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_version_is_written_once_and_cited() -> None:
    assert "version" in project()["dynamic"]
    assert "version" not in project()
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {m1clip.__version__}\n" in citation


def test_addresses_are_those_of_the_messages() -> None:
    urls = project()["urls"]
    assert urls["Documentation"] == errors.DOCS_URL


def test_every_page_that_a_message_names_exists() -> None:
    called = r"""docs_page\(["']([a-z0-9-]+)["'](?:, ["']([a-z0-9-]+)["'])?\)"""
    named = set()
    for path in (ROOT / "m1clip").rglob("*.py"):
        named |= set(re.findall(called, path.read_text(encoding="utf-8")))
    assert len(named) > 2
    for page, section in named:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") for title in titles}
        assert not section or section in anchors, (page, section)


def message_texts() -> Iterator[tuple[Path, str]]:
    """Each text in the code that is not a docstring, with X for its variable parts."""
    for path in sorted((ROOT / "m1clip").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts = {id(part) for node in joined for part in node.values}
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in joined:
            values = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield path, "".join(map(str, values))
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in parts | docstrings:
                yield path, str(node.value)


def test_messages_name_commands_and_options_that_exist() -> None:
    """In "run: m1clip index PHOTOS --model RUN", for example, and no file of the repository."""
    checked = 0
    for path, text in message_texts():
        assert not re.search(r"\bdocs/\S+\.md", text), f"{path}: {text}"
        for words in re.findall(r"\bm1clip ([a-z]+(?: [^,;:()`\n]*)?)", text):
            name, _, rest = words.partition(" ")
            if name not in set(app):
                assert not re.search(rf"(run|run:|with|use|see|then|or)\s+m1clip {name}\b", text), (
                    text
                )
                continue
            command = app[name]
            if name == "data" and rest.split()[:1] and rest.split()[0] in set(command):
                command = command[rest.split()[0]]
            arguments = command.assemble_argument_collection() if command.default_command else []
            known_options = {option for argument in arguments for option in argument.names}
            options = re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest.partition(" m1clip ")[0])
            assert set(options) <= known_options | {"--help"}, f"{path}: m1clip {words}"
            checked += 1
    assert checked > 100


def test_actions_are_pinned_to_commits() -> None:
    uses = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        uses += re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))
    assert len(uses) > 5
    assert [name for name in uses if not re.search(r"@[0-9a-f]{40}$", name)] == []


def test_oldest_versions_follow_the_lower_bounds_of_a_platform() -> None:
    from oldest_versions import oldest, requirements

    lines = ["torch>=2.10; sys_platform != 'darwin'", "torch>=2.14; sys_platform == 'darwin'"]
    lines += ["fsspec[http]>=2024.2", "plotext>=5.3,<6", "types-psutil"]
    on_linux = {"torch": "2.10", "fsspec": "2024.2", "plotext": "5.3"}
    assert oldest(lines, "linux") == on_linux
    assert oldest(lines, "darwin") == on_linux | {"torch": "2.14"}
    assert oldest(requirements(project()), "linux").keys() >= {"numpy", "pillow", "cyclopts"}


def test_results_name_no_folder_of_a_machine() -> None:
    folder = re.compile(r"/(?:home|root|tmp|work|Users|private|mnt)/\w")
    results = sorted((ROOT / "docs/results").glob("**/*.json"))
    assert len(results) > 20
    assert [path.name for path in results if folder.search(path.read_text())] == []
