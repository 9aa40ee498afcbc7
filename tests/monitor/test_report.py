"""The report: one file, complete in itself, with every section."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from m1clip.errors import UserError
from m1clip.monitor import report
from m1clip.monitor.history import History
from m1clip.monitor.report import Curve, bars, heatmap, html_table, lines, summary, write_images, write_report

from .made_runs import append, full_run, line, make_run, step

needs_matplotlib = pytest.mark.skipif(not report.has_matplotlib(), reason="needs matplotlib (pip install m1clip[plot])")


class Links(HTMLParser):
    """Every address in a page, every figure, and whether each tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.alts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.alts += [value or "" for name, value in attrs if name == "alt"]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Links:
    links = Links()
    links.feed(page)
    assert links.open == []
    assert all(link.startswith("data:image/") for link in links.links)
    assert all(links.alts)
    assert "<script" not in page
    assert "http" not in re.sub(r"http-equiv", "", page)
    return links


def svg(links: Links, title: str) -> str:
    """The SVG of the plot with this title."""
    source = next(link for link, alt in zip(links.links, links.alts, strict=True) if alt.startswith(title))
    return base64.b64decode(source.partition("base64,")[2]).decode()


@needs_matplotlib
def test_a_report_of_one_run(tmp_path: Path) -> None:
    page = write_report([full_run(tmp_path / "demo")], tmp_path / "out" / "report.html").read_text()
    links = parsed(page)
    for words in (
        *("40.0%", "35.0% to 45.0%", "1.0%", "Gradient norm by layer", "Temperature", "a blue dog", "not measured"),
        *("Accuracy by similarity of the wrong caption", "Accuracy against generated negatives", "Recall@1 by colour"),
        *("Step time by phase", "Memory, of a peak of 30 MB", "Nearest confusions", "config.toml"),
        *("environment.json", "m1clip train --config", "@media print", "&lt;b&gt;cat&lt;/b&gt;"),
    ):
        assert words in page, words
    assert "Power, W" not in page  # there was no meter
    assert "image block 1" in svg(links, "Gradient norm by layer")
    assert "Loss: demo from 3.85 to 1.33" in links.alts


@needs_matplotlib
def test_several_runs_are_overlaid_with_their_differences(tmp_path: Path) -> None:
    runs = [full_run(tmp_path / "first", 0.4), full_run(tmp_path / "second", 0.6), full_run(tmp_path / "third", 0.41)]
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert "60.0% (+20.0 *)" in page  # intervals apart
    assert "41.0% (+1.0)" in page  # within each other's interval
    loss = svg(parsed(page), "Loss")
    assert all(f">{run.name}<" in loss for run in runs)


def test_without_matplotlib_the_report_has_everything_but_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "has_matplotlib", lambda: False)
    run = full_run(tmp_path / "demo")
    page = write_report([run], tmp_path / "report.html").read_text()
    parsed(page)
    assert "plots need matplotlib: pip install &#x27;m1clip[plot]&#x27;" in page
    assert "40.0%" in page
    with pytest.raises(UserError, match=r"--png: plots need matplotlib: pip install 'm1clip\[plot\]'"):
        write_images([run], tmp_path / "png")


def test_a_large_grid_is_scaled_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "has_matplotlib", lambda: False)
    run = full_run(tmp_path / "demo")
    noise = Image.effect_noise((1800, 1800), 80).convert("RGB")
    noise.save(run / "retrieval.png")
    assert (run / "retrieval.png").stat().st_size > 3_000_000
    assert write_report([run] * 3, tmp_path / "report.html").stat().st_size < 5_000_000


def test_a_run_without_an_evaluation_and_one_without_anything(tmp_path: Path) -> None:
    run = make_run(tmp_path / "young", [step(1), step(2, loss="nan")])
    assert "no evaluation yet" in summary([History(run).poll()])
    assert write_report([run], tmp_path / "report.html").stat().st_size > 1000
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has not started yet"):
        write_report([tmp_path / "empty"], tmp_path / "x.html")


@needs_matplotlib
def test_plots_of_odd_values() -> None:
    assert lines("x", [Curve("a", [(2, -1.0)])], log=True) == lines("x", []) == bars("x", []) == []
    assert heatmap("x", ["a"], [[float("nan")]], "") == []
    (single,) = lines("$x^{$", [Curve("$", [(1, 2.0)]), Curve("huge", [(1, 1e100), (2, 1e-100)])], log=True)
    assert b"<svg" in single.render("svg")
    (many,) = lines("x", [Curve("a", [(n, 1.0 + n % 7) for n in range(2000)])])
    assert len(many.render("svg")) < 200_000
    (zeros,) = bars("x", [("$a", 0.0, "$0")])
    assert zeros.render("png").startswith(b"\x89PNG")
    assert "<x>" not in html_table(["<x>"], [["<x>"]])


@needs_matplotlib
def test_the_plots_as_files(tmp_path: Path) -> None:
    run = full_run(tmp_path / "demo")
    append(run, [line("layers", step=102, layers={"image block 1": ["nan", "inf"], "text stem": [2.0, 2e-3]})])
    files = write_images([run], tmp_path / "png")
    names = {file.name for file in files}
    assert names >= {"loss.png", "recall-1-on-validation.png", "demo-step-time-by-phase.png"}
    assert "power-w.png" not in names  # there was no meter
    assert all(Image.open(file).width > 500 for file in files)
