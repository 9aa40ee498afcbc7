"""34: the short training loop, the notebook, and the page that explains a run."""

import io
import json
import os
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def test_loss_of_the_short_loop_falls() -> None:
    path = ROOT / "examples" / "short_loop.py"
    functions = runpy.run_path(str(path))
    losses = functions["train"](steps=24, count=64)
    assert sum(losses[-4:]) / 4 < 0.8 * losses[0]
    assert functions["train"](steps=2, count=64) == losses[:2], "one seed gives one result"
    assert functions["train"](steps=1, count=96) != losses[:1], "other data, another loss"
    assert len(path.read_text().splitlines()) < 100


def test_notebook_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    notebook = json.loads((ROOT / "docs" / "notebooks" / "what-is-clip.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "notebook"}
    output = io.StringIO()
    with redirect_stdout(output):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert not cell["outputs"], "clear the outputs before you save"
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["losses"][-1] < 0.8 * names["losses"][0]
    assert names["after"].diagonal().mean() > names["before"].diagonal().mean()
    assert names["accuracy"] > 2 / 32
    assert "accuracy within the batch" in output.getvalue()


def test_page_explains_the_terms_of_a_run() -> None:
    text = (ROOT / "docs" / "learn.md").read_text()
    for term in ("loss", "temperature", "similarity matrix", "chance", "recall", "interval"):
        assert term in text.lower()
    for file in ("notebooks/what-is-clip.ipynb", "../examples/short_loop.py"):
        assert file in text
        assert os.path.exists(ROOT / "docs" / file)
