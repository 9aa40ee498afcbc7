"""docs/reference/ is generated from the code, and describes what a run really writes."""

import sys
from pathlib import Path

import pytest
from small_run import finished_run

import m1clip

ROOT = Path(m1clip.__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "tools").exists(), reason="not run from the repository")
sys.path.insert(0, str(ROOT / "tools"))


def test_pages_are_those_of_the_code() -> None:
    import reference

    for name in reference.PAGES:
        page = (reference.FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert page == reference.rendered(name), f"{name}: run python tools/reference.py"


def test_commands_page_has_every_command_and_every_option_of_train() -> None:
    import reference

    page = reference.rendered("commands")
    for name in [name_ for name_ in reference.app if not name_.startswith("-")]:
        assert f"### m1clip {name}" in page
    options = reference.rendered("options")
    for name in set(reference.NAMES) - {"plan", "data"}:
        assert f"`--{name.replace('_', '-')}`" in options


def test_run_folder_page_lists_what_a_run_writes() -> None:
    import reference

    folder = finished_run()
    written = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert written - {"run.lock"} <= set(reference.RUN_FILES)
    assert set(reference.RUN_FILES) - written <= {"retrieval.png", "splits.json"}


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "reference").glob("*.md")]
    missing = [
        path.name
        for path in pages
        if f" {path.relative_to(ROOT / 'docs').as_posix()}\n" not in text
    ]
    assert missing == []
