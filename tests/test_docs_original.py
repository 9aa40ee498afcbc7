"""docs/original.md and docs/findings.md: commands exist, and tables are recomputed.

The original run's log is in docs/results/original.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

import m1clip
from m1clip.epochs import PHASE_HEAD, RunTables
from m1clip.evaluation.split_analyses import analysis_table
from m1clip.formatting import number, table
from m1clip.monitor.history import History
from m1clip.monitor.original import COMPARISON_HEAD, comparison_rows, measure
from m1clip.monitor.resources import memory_table
from m1clip.runlog import read_log

ROOT = Path(m1clip.__file__).parent.parent
DOCS = ROOT / "docs"
RUN = DOCS / "results" / "original"  # the log of the original run
SERVED = {str(number) for number in range(1, 37)}  # ids of the items
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="not run from the repository")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(item: int) -> str:
    """The text of an item of docs/original.md."""
    text = page("original.md")
    begin = text.index(f'<a id="{item}"></a>')
    return text[begin : text.find("<a id=", begin + 1)]


def commands() -> list[str]:
    """Every `$ m1clip ...` line of docs/original.md, without comments."""
    text = page("original.md").replace("\\\n", " ")
    return [line.partition("#")[0] for line in re.findall(r"^\$ (m1clip .*)$", text, re.MULTILINE)]


def test_each_item_has_a_section_a_row_and_a_test() -> None:
    text = page("original.md")
    assert set(re.findall(r'^<a id="(\d+)"></a>$', text, re.MULTILINE)) == SERVED
    assert set(re.findall(r"^\| (\d+) \| \[", text, re.MULTILINE)) == SERVED
    tests = {
        path.name[5:7].lstrip("0") for path in (ROOT / "tests/integration/original").glob("test_*")
    }
    assert tests == SERVED


@pytest.mark.parametrize("line", sorted(set(commands())) if DOCS.exists() else [])
def test_command_and_its_options_exist(line: str) -> None:
    """In the reference, which is generated from the code."""
    _, name, *words = shlex.split(line)
    reference = page("reference/commands.md") + page("reference/options.md")
    assert f"### m1clip {name}\n" in reference
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    documented = set(re.findall(r"--[a-z][a-z0-9-]*", reference))
    assert set(options) <= documented


def test_every_item_shows_output_or_its_page() -> None:
    for item in range(1, 37):
        assert "```" in section(item) or "](" in section(item), item


def test_links_of_the_page_exist() -> None:
    for name in ("original.md", "findings.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page(name)):
            assert (DOCS / target).exists(), f"{name}: {target}"


def test_figures_beside_those_of_the_original() -> None:
    stored = json.loads((DOCS / "results" / "original.json").read_text(encoding="utf-8"))
    rows = comparison_rows(measure(read_log(RUN)))
    assert [list(row) for row in rows] == [
        [row[name] for name in COMPARISON_HEAD] for row in stored["rows"]
    ]
    assert table(COMPARISON_HEAD, rows) in section(2)
    for row in stored["rows"]:
        cells = " | ".join(row[name] for name in COMPARISON_HEAD)
        assert f"| {cells} |" in page("findings.md")


def excerpts() -> dict[int, str]:
    """Item -> a table that the run of item 2 prints."""
    records = list(read_log(RUN))
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    tables = RunTables(steps, evaluations)
    analysis = evaluations[-1]["analysis"]
    parts = {}
    for name in ("category_recall", "held_out_batch_accuracy", "difficulty", "scene_difficulty"):
        parts[name] = (
            analysis_table({name: analysis[name]}).rpartition("\n(")[0].partition("\n\n")[2]
        )
    temperatures = [
        (f"{step['epoch']:g}", f"{step['temperature']:.4f}")
        for step in steps
        if step["step"] % 90 == 0
    ]
    norms = [record for record in records if record["kind"] == "analysis"]
    largest = {
        layer: max(record["layer_grad_norms"][layer] for record in norms)
        for layer in norms[0]["layer_grad_norms"]
    }
    norm_rows = [
        (
            layer,
            *(number(norms[at]["layer_grad_norms"][layer]) for at in (0, -1)),
            number(largest[layer]),
        )
        for layer in (
            "image/input",
            "image/block 1",
            "image/block 12",
            "text/input",
            "text/block 12",
            "scale",
        )
    ]
    stages = steps[-1]["seconds"]
    return {
        4: parts["category_recall"],
        14: table(tables.epoch_head, tables.epoch_cells),
        15: parts["held_out_batch_accuracy"],
        16: table(PHASE_HEAD, tables.phase_cells),
        17: table(("epoch", "temperature"), temperatures),
        18: table(("layer", "first", "last", "largest"), norm_rows),
        19: f"{parts['difficulty']}\n\n{parts['scene_difficulty']}",
        20: json.dumps(stages),
        21: table(("component", "bytes"), memory_table(History(RUN).poll())),
    }


@pytest.mark.parametrize(("item", "text"), excerpts().items() if RUN.exists() else [])
def test_tables_are_those_of_the_stored_run(item: int, text: str) -> None:
    assert text in section(item), f"write into docs/original.md#{item}:\n{text}"


def test_memory_on_the_h200() -> None:
    stored = json.loads((DOCS / "results" / "h200" / "memory.json").read_text(encoding="utf-8"))
    for model in stored["components"].values():
        rest = f"{model['rest'] / 1e6:,.0f} ({100 * model['rest'] / model['peak']:.1f}%)"
        assert f"| {model['peak'] / 1e6:,.0f} |" in section(21)
        assert rest in section(21)


def test_cost_of_the_probes() -> None:
    measured = json.loads((DOCS / "results" / "probes.json").read_text(encoding="utf-8"))
    assert measured["fraction"] < 0.02
    assert f"{100 * measured['fraction']:.2f}% of a ten-minute run" in page("original.md")


def test_hybrid_on_the_h200() -> None:
    measured = json.loads((DOCS / "results" / "h200" / "hybrid.json").read_text(encoding="utf-8"))
    seconds = {
        row["configuration"]["device"]: row["seconds"]["median"] for row in measured["results"]
    }
    ratio = seconds["cuda+cpu"] / seconds["cuda"]
    words = f"{ratio:.1f} times"
    for name in ("lab-compare.md", "findings.md", "original.md"):
        assert words in page(name), name
