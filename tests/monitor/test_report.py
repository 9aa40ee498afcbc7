"""The report: one file, whole in itself, with every section."""

from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from m1clip.errors import UserError
from m1clip.monitor.history import History
from m1clip.monitor.report import (
    FIGURES,
    Curve,
    against_prior_art,
    is_prior_art,
    log_ticks,
    plot,
    ramp,
    summary,
    ticks,
    write_images,
    write_report,
)

from .made_runs import evaluation, full_run, make_run, step

PRIOR = '[model]\npreset = "small"\n[data]\ntrain_count = 216\n[train]\nbatch = 12\ndevice = "cpu"\n'


class Links(HTMLParser):
    """Every address in a page, and whether each tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "img", "br", "path", "rect", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "rect", "circle"):
            assert self.open.pop() == tag


def test_one_run(tmp_path: Path) -> None:
    page = write_report([full_run(tmp_path / "demo")], tmp_path / "out" / "report.html").read_text()
    parser = Links()
    parser.feed(page)
    assert parser.open == []
    assert parser.links
    assert all(link.startswith("data:image/") for link in parser.links)
    assert "<script" not in page
    assert "&lt;b&gt;cat&lt;/b&gt;" in page
    assert "http" not in re.sub(r"http-equiv", "", page)
    for words in ("40.0%", "35.0 - 45.0%", "1.0%", "image block 1", "Temperature", "Where the loss fell",
                  "Accuracy by similarity of the wrong caption", "Accuracy against made-up negatives",
                  "Where the time of a step goes", "Memory by component", "Power, watts", "not measured in this run",
                  "Nearest confusions", "a blue dog", "Recall@1 by colour", "config.toml", "environment.json",
                  "m1clip train --config", "@media print"):  # fmt: skip
        assert words in page, words
    assert "published" not in page  # nothing of another project beside a run of one's own


def test_several_runs_are_laid_over_each_other_with_their_differences(tmp_path: Path) -> None:
    runs = [full_run(tmp_path / "first", 0.4), full_run(tmp_path / "second", 0.6), full_run(tmp_path / "third", 0.41)]
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert "60.0% (+20.0 *)" in page  # intervals apart
    assert "41.0% (+1.0)" in page  # within each other's interval
    loss = page[page.index("<figcaption>Loss") :]
    assert loss[: loss.index("</figure>")].count("stroke-width='1.7'") == 3


def test_a_large_grid_is_made_small_enough(tmp_path: Path) -> None:
    run = full_run(tmp_path / "demo")
    noise = Image.effect_noise((1800, 1800), 80).convert("RGB")
    noise.save(run / "retrieval.png")
    assert (run / "retrieval.png").stat().st_size > 3_000_000
    assert write_report([run] * 3, tmp_path / "report.html").stat().st_size < 5_000_000


def test_the_published_figures_stand_beside_the_job_that_repeats_them(tmp_path: Path) -> None:
    accuracy = {
        "in_batch_12/accuracy": 0.3,
        "in_batch_12/accuracy/low": 0.2,
        "in_batch_12/accuracy/high": 0.4,
        "in_batch_12/accuracy/chance": 1 / 12,
        "in_batch_12/accuracy/n": 24,
    }
    run = make_run(tmp_path, [step(1), step(2), evaluation(2, 0.1, **accuracy)], PRIOR)
    page = write_report([run], tmp_path / "report.html").read_text()
    for _, theirs, _ in FIGURES:
        assert theirs in page
    table = against_prior_art(History(run).poll_all())
    assert "30.0% [20.0 - 40.0%]" in table
    assert "M1 MacBook Pro" in table
    assert not is_prior_art({"model": {"preset": "tiny"}, "data": {}, "train": {}})
    assert not is_prior_art({})


def test_a_run_without_an_evaluation_or_without_anything(tmp_path: Path) -> None:
    run = make_run(tmp_path / "young", [step(1), step(2, loss="nan")])
    assert "no evaluation yet" in summary([History(run).poll_all()])
    assert write_report([run], tmp_path / "report.html").stat().st_size > 1000
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has not begun yet"):
        write_report([tmp_path / "empty"], tmp_path / "x.html")


def test_plots_bear_odd_numbers() -> None:
    assert "not measured" in plot("x", [Curve("a", [(1, float("nan")), (2, -1.0)])], log=True)
    assert "<circle" in plot("x", [Curve("a", [(1, 2.0)])])
    many = plot("<x>", [Curve("<y>", [(n, n % 7) for n in range(100_000)])])
    assert len(many) < 40_000
    assert "<x>" not in many
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(5, 5) == [5]
    assert log_ticks(0.5, 6) == [0.5, 1, 2, 5]
    assert log_ticks(0.001, 20) == pytest.approx([0.001, 0.01, 0.1, 1, 10])
    assert log_ticks(3, 4) == [3, 4]
    assert ramp(-1) == "#30123b"


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib (pip install m1clip[plot])"
)
def test_the_plots_as_files(tmp_path: Path) -> None:
    files = write_images([full_run(tmp_path / "demo")], tmp_path / "png")
    names = {file.name for file in files}
    assert names >= {"loss.png", "recall.png", "temperature.png", "time-split-demo.png"}
    assert "watts.png" not in names  # there was no meter
    assert all(Image.open(file).width > 500 for file in files)
