"""Files about the project agree with each other: version, addresses, pinned actions, oldest versions."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

import m1clip
from m1clip.cli import app

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
    assert urls["Documentation"] == app.DOCS_URL


def test_every_page_that_a_message_names_exists() -> None:
    named = set()
    for path in (ROOT / "m1clip").rglob("*.py"):
        named |= set(re.findall(r'docs_page\("([a-z0-9-]+)"', path.read_text(encoding="utf-8")))
    assert named
    for page in named:
        assert (ROOT / "docs" / f"{page}.md").is_file(), page


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
