"""34: the short training loop, the notebooks, and the page that explains a run."""

import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import notebooks  # noqa: E402


def test_loss_of_the_short_loop_falls() -> None:
    path = ROOT / "examples" / "short_loop.py"
    functions = runpy.run_path(str(path))
    losses = functions["train"](steps=24, count=64)
    assert sum(losses[-4:]) / 4 < 0.8 * losses[0]
    assert functions["train"](steps=2, count=64) == losses[:2], "one seed gives one result"
    assert functions["train"](steps=1, count=96) != losses[:1], "other data, another loss"
    assert len(path.read_text().splitlines()) < 100


@pytest.mark.parametrize("path", notebooks.notebooks(), ids=lambda path: path.stem)
def test_notebook_runs_and_prints_what_is_written_in_it(path: Path, tmp_path: Path) -> None:
    """With the small settings, without cells tagged slow.

    `python tools/notebooks.py --check` runs all.
    """
    notebook = notebooks.read(path)
    if missing := notebooks.missing_extras(notebook):
        pytest.skip(f"needs {', '.join(missing)}")
    outputs, names = notebooks.run(notebook, tmp_path, quick=True)
    stored = notebooks.stored_outputs(notebook)
    assert notebooks.structure(outputs) == notebooks.structure(stored)
    if path.stem == "what-is-clip":
        assert names["losses"][-1] < 0.8 * names["losses"][0]
        assert names["after"].diagonal().mean() > names["before"].diagonal().mean()
        assert names["accuracy"] > 2 / 32


@pytest.mark.parametrize("path", notebooks.notebooks(), ids=lambda path: path.stem)
def test_outputs_of_notebook_have_no_folder_of_a_machine(path: Path) -> None:
    notebook = notebooks.read(path)
    stored = notebooks.stored_outputs(notebook)
    assert any(stored), "run python tools/notebooks.py"
    above_checkout = re.escape(f"{Path(__file__).parents[4]}/")
    assert not re.search(rf"(/home/|/tmp/|/Users/|/root/|{above_checkout})", json.dumps(notebook))
    assert "Traceback" not in json.dumps(stored)


@pytest.mark.parametrize("path", notebooks.notebooks(), ids=lambda path: path.stem)
def test_outputs_were_written_by_the_tool_for_this_code(path: Path) -> None:
    notebook = notebooks.read(path)
    written = notebook["metadata"]["m1clip"]["written"]
    assert written == notebooks.digest(notebook), f"run python tools/notebooks.py {path.stem}"
    next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")["source"] += ["# x"]
    assert written != notebooks.digest(notebook)


def test_figure_that_was_open_before_is_no_output(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib.pyplot").figure()
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": ["print('a')"]}
    outputs, _ = notebooks.run({"cells": [cell], "metadata": {}}, tmp_path)
    assert notebooks.structure(outputs) == [[("stream", 1)]]


def test_changed_output_of_a_notebook_is_noticed(tmp_path: Path) -> None:
    """A line more, or an image less, is another structure."""
    cell = {"cell_type": "code", "metadata": {}, "outputs": []}
    one = {"cells": [{**cell, "source": ["print('a')\n", "print('b')"]}], "metadata": {}}
    two = {"cells": [{**cell, "source": ["print('a')"]}], "metadata": {}}
    of_one, _ = notebooks.run(one, tmp_path)
    of_two, _ = notebooks.run(two, tmp_path)
    assert notebooks.structure(of_one) == [[("stream", 2)]]
    assert notebooks.structure(of_two) == [[("stream", 1)]]
    assert notebooks.stored_outputs(json.loads(notebooks.with_outputs(one, of_one))) == of_one


def test_page_explains_the_terms_of_a_run() -> None:
    text = (ROOT / "docs" / "learn.md").read_text()
    for term in ("loss", "temperature", "similarity matrix", "chance", "recall", "interval"):
        assert term in text.lower()
    for file in ("notebooks/what-is-clip.ipynb", "../examples/short_loop.py"):
        assert file in text
        assert os.path.exists(ROOT / "docs" / file)
