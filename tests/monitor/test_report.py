"""The HTML report."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from small_run import exit_code

from m1clip.errors import UserError
from m1clip.monitor import report
from m1clip.monitor.report import plot, write_report
from m1clip.runlog import FIELDS, LogField, plotted_fields

from .made_runs import append, ended, full_run, make_run, step

needs_matplotlib = pytest.mark.skipif(
    not report.has_matplotlib(), reason="needs matplotlib (pip install m1clip[plot])"
)


class Links(HTMLParser):
    """Every address in a page, every figure, and whether each tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.alts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]
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
    source = next(
        link for link, alt in zip(links.links, links.alts, strict=True) if alt.startswith(title)
    )
    return base64.b64decode(source.partition("base64,")[2]).decode()


@needs_matplotlib
def test_report_of_one_run_has_every_section(tmp_path: Path) -> None:
    page = write_report(
        [full_run(tmp_path / "<b>demo")], tmp_path / "out" / "report.html"
    ).read_text()
    links = parsed(page)
    for words in (
        *(
            "40.0%",
            "35.0% to 45.0%",
            "1.0%",
            "Temperature",
            "not measured",
            "step time by stage",
            "forward 40%",
        ),
        *("Accuracy against similar captions", "config.toml", "&lt;b&gt;demo"),
        *("By epoch", "cannot be compared between runs", "Phases of the loss"),
        *("Mean recall by category, step 100", "<th scope='row'>animals</th><td>40.0%</td>"),
        *("environment.json", "m1clip train --config", "@media print", "class='wide'"),
    ):
        assert words in page, words
    assert "Power, W" not in page  # there was no meter
    assert "Gradient norm by layer" in page
    assert "<th scope='col'>first (step 50)</th><th scope='col'>last (step 100)</th>" in page
    cells = "<td>0.05</td><td>0.0333</td><td>0.0333 at step 100</td><td>0.05 at step 50</td>"
    assert f"<th scope='row'>image/block 1</th>{cells}" in page
    assert "Loss: <b>demo from 3.85 to 1.33" in links.alts
    assert ">chance<" in svg(links, "Recall@1 text to image")


@needs_matplotlib
def test_several_runs_are_overlaid_with_their_differences(tmp_path: Path) -> None:
    runs = [
        full_run(tmp_path / "first", 0.4),
        full_run(tmp_path / "second", 0.6),
        full_run(tmp_path / "third", 0.41),
    ]
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert "60.0% (+20.0 *)" in page  # the intervals do not overlap
    assert "41.0% (+1.0)" in page
    loss = svg(parsed(page), "Loss")
    assert all(f">{run.name}<" in loss for run in runs)


def test_finished_and_unfinished_runs_are_compared_on_the_validation_split(tmp_path: Path) -> None:
    finished = full_run(tmp_path / "finished", 0.4)
    append(finished, [ended(100, 0.1)])
    unfinished = full_run(tmp_path / "unfinished", 0.6, finished=False)
    page = write_report([finished, unfinished], tmp_path / "report.html").read_text()
    assert "finished: val split, best evaluation (step 100)" in page
    assert "unfinished: val split, best evaluation so far (step 100)" in page
    assert "<td>40.0%</td><td>60.0% (+20.0 *)</td>" in page
    assert "10.0%" not in page.partition("<h3>Cost")[0], "the score of the test split"


def test_runs_without_a_common_split_or_with_other_data_are_not_compared(tmp_path: Path) -> None:
    finished = make_run(tmp_path / "finished", [step(1), ended(100, 0.1)])
    unfinished = full_run(tmp_path / "unfinished", 0.6, finished=False)
    page = write_report([finished, unfinished], tmp_path / "report.html").read_text()
    assert "<td>10.0%</td><td>60.0%</td>" in page
    assert "finished: test split, after training" in page
    assert "are not compared with it" in page

    first, other = full_run(tmp_path / "first", 0.4), full_run(tmp_path / "other", 0.6)
    environment = other / "environment.json"
    environment.write_text(environment.read_text().replace("0" * 64, "1" * 64))
    page = write_report([first, other], tmp_path / "report.html").read_text()
    assert "<td>40.0%</td><td>60.0%</td>" in page
    assert "do not overlap" not in page


def run_at_chance(folder: Path, batch_size: int) -> Path:
    chance = 1 / batch_size
    steps = [step(number, batch_accuracy=chance, batch_chance=chance) for number in (1, 2)]
    return make_run(folder, steps, config=f"[train]\nbatch_size = {batch_size}\n")


@needs_matplotlib
def test_each_batch_size_has_its_own_chance_level(tmp_path: Path) -> None:
    sizes = {"small": 16, "large": 128, "also-large": 128}
    runs = [run_at_chance(tmp_path / name, size) for name, size in sizes.items()]
    page = write_report(runs, tmp_path / "report.html").read_text()
    links = parsed(page)
    title = "Training accuracy within a batch"
    (alt,) = (alt for alt in links.alts if alt.startswith(title))
    assert "; chance of small from 6.25 to 6.25; chance of large, also-large from 0.781" in alt
    dashed = re.findall(r"stroke-dasharray: [^\"]*?stroke: (#\w+)", svg(links, title))
    assert set(dashed) == set(report.PLOT_COLORS[:2]), "the colors of small and large"
    assert page.count(report.NOT_COMPARABLE_LOSSES) == 1

    same = write_report(runs[1:], tmp_path / "same.html").read_text()
    (alt,) = (alt for alt in parsed(same).alts if alt.startswith(title))
    assert "; chance from 0.781" in alt
    assert report.NOT_COMPARABLE_LOSSES not in same


def test_without_matplotlib_the_report_has_everything_but_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "has_matplotlib", lambda: False)
    run = full_run(tmp_path / "demo")
    Image.effect_noise((1800, 1800), 80).convert("RGB").save(run / "retrieval.png")
    page = write_report([run], tmp_path / "report.html").read_text()
    parsed(page)
    assert "plots need matplotlib: pip install &#x27;m1clip[plot]&#x27;" in page
    assert "40.0%" in page
    # A large grid is scaled down.
    assert len(page) < 1_500_000 < (run / "retrieval.png").stat().st_size


def test_run_without_an_evaluation_and_one_without_a_log(tmp_path: Path) -> None:
    run = make_run(tmp_path / "young", [step(1), step(2, loss="nan")])
    assert "no evaluation yet" in write_report([run], tmp_path / "report.html").read_text()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has not started yet"):
        write_report([tmp_path / "empty"], tmp_path / "x.html")


def test_report_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Such as /dev/stdout, which root could replace."""
    link, target = tmp_path / "stdout", tmp_path / "target"
    target.write_text("before")
    link.symlink_to(target)
    with pytest.raises(UserError, match="stdout: is a symbolic link"):
        write_report([full_run(tmp_path / "demo")], link)
    assert link.is_symlink()
    assert target.read_text() == "before"


@needs_matplotlib
def test_plots_of_extreme_values() -> None:
    assert plot("x", []) == ""
    # Points at or below 0 are drawn, on a linear axis.
    below = plot("x", [("a", [(1, 2.0), (2, -1.0), (3, 0.0)])], log=True)
    svg = base64.b64decode(re.search(r"base64,([^'\"]+)", below)[1]).decode()  # type: ignore[index]
    labels = re.findall(r">(\S+)</text>", svg)
    assert {"0.0", "\N{MINUS SIGN}1.0", "2.0"} <= set(labels)
    single = plot("$x^{$", [("$", [(1, 2.0)]), ("huge", [(1, 1e100), (2, 1e-100)])], log=True)
    many = plot("x", [("a", [(n, 1.0 + n % 7) for n in range(2000)])])
    assert all(500 < len(drawing) < 300_000 for drawing in (single, many))


HOSTILE = "run\x1b[2J\x9b31m\u202egpj\r"


@pytest.mark.filterwarnings("error")
def test_name_of_a_run_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [full_run(tmp_path / HOSTILE), full_run(tmp_path / "other")]
    assert exit_code("report", *runs) == 0
    assert exit_code("checkpoints", runs[0]) == 0
    output = "".join(capsys.readouterr())
    assert HOSTILE.encode("unicode_escape").decode() in output
    assert all(line.isprintable() for line in output.split("\n"))


@needs_matplotlib
def test_each_plotted_field_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharpness = LogField(name="sharpness", curve="step", title="Sharpness, %", factor=100.0)
    monkeypatch.setitem(FIELDS, sharpness.name, sharpness)
    run = full_run(tmp_path / "run")
    measured = {"watts": 20.0, "celsius": 50.0, "fan_rpm": 900.0, "battery_percent": 80.0}
    append(run, [step(number, sharpness=0.5, **measured) for number in (101, 102)])
    page = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    alts = parsed(page).alts
    for field in (*plotted_fields("step"), *plotted_fields("eval")):
        assert any(alt.startswith(f"{field.title}: ") for alt in alts), field.title
    assert "Sharpness, %: run from 50 to 50" in alts
