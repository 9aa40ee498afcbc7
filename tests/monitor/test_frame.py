"""The terminal's image as a pure function: sizes, letters, states."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len

from m1clip.monitor.history import History
from m1clip.monitor.status import Status
from m1clip.monitor.terminal import View, ansi, chart, fit, frame, meter, plain, sparks

from .made_runs import BEGIN, append, full_run, line, make_run, step

RUNNING = Status("running", "running", 1)
SIZES = [(80, 24), (200, 50), (100, 30), (60, 16), (40, 10), (150, 20), (300, 80)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("unicode", [True, False])
def test_every_line_has_the_width_of_the_window(tmp_path: Path, size: tuple[int, int], unicode: bool) -> None:
    history = History(full_run(tmp_path / "a run", finished=False)).poll_all()
    view = View(*size, unicode=unicode, colour=unicode)
    lines = frame(history, RUNNING, view, BEGIN + 60)
    assert len(lines) == size[1]
    assert {sum(cell_len(text) for text, _ in line) for line in lines} == {size[0]}
    if not unicode:
        letters = set(plain(lines)) - {"°", "…", "“", "”"}
        assert all(ord(letter) < 128 for letter in letters)


def test_the_small_window_shows_all_that_was_asked_for(tmp_path: Path) -> None:
    history = History(full_run(tmp_path / "demo", finished=False)).poll_all()
    text = plain(frame(history, RUNNING, View(80, 24), BEGIN + 60))
    for words in ("demo", "running", "100%  step 100 of 100", "loss", "mean recall", "chance", "temperature",
                  "learning rate", "256 samples/s", "forward 40%", "backward 50%", "data 1%", "memory 1 GB of 8 GB",
                  "cores",
                  "power and heat not measured", "it learns", "checkpoint saved at step 100", "q quit"):  # fmt: skip
        assert words in text, words


def test_a_run_that_has_not_begun_and_one_that_died(tmp_path: Path) -> None:
    empty = History(tmp_path)
    assert "waiting for the first figures" in plain(
        frame(empty, Status("preparing", "preparing its data"), View(), BEGIN)
    )
    history = History(make_run(tmp_path / "dead", [step(10)])).poll_all()
    text = plain(frame(history, Status("died", "died at step 10"), View(200, 30), BEGIN))
    assert f"it died at step 10; go on with: m1clip train --resume {tmp_path / 'dead'}" in text
    assert "left" not in text.split("─")[0]


def test_metrics_switch_and_the_machine_without_a_meter_says_so(tmp_path: Path) -> None:
    history = History(full_run(tmp_path)).poll_all()
    titles = {plain(frame(history, RUNNING, View(left=n), BEGIN)).splitlines()[2][:40] for n in range(10)}
    assert len(titles) == 10
    watts = plain(frame(history, RUNNING, View(left=8), BEGIN))
    assert "not measured on this machine" in watts
    assert "(log)" in plain(frame(history, RUNNING, View(log=True), BEGIN))
    assert "quit (the run goes on)" in plain(frame(history, RUNNING, View(help=True), BEGIN))
    assert "PAUSED" in plain(frame(history, RUNNING, View(paused=True), BEGIN))
    assert "too small" in plain(frame(history, RUNNING, View(30, 5), BEGIN))


def test_hostile_words_cannot_move_the_cursor(tmp_path: Path) -> None:
    run = make_run(tmp_path, [step(1), line("warning", text="\x1b[2J\x07\u202eboo\r\n")])
    append(run, [line("event", event="界" * 200)])
    lines = frame(History(run).poll_all(), RUNNING, View(80, 24), BEGIN)
    assert "\x1b[2J" not in "".join(ansi(each, colour=True) for each in lines)
    assert {sum(cell_len(text) for text, _ in each) for each in lines} == {80}


def test_no_colour_means_no_colour_codes() -> None:
    line_ = fit([("bad", "bad"), ("good", "good"), ("dim", "dim")], 20)
    assert "\x1b[32m" in ansi(line_, colour=True)
    assert "3" not in ansi(line_, colour=False).replace("\x1b[0m", "").replace("\x1b[1m", "").replace("\x1b[2m", "")


def test_a_chart_runs_from_its_highest_to_its_lowest() -> None:
    lines = chart([(x, x * x) for x in range(20)], 40, 8)
    assert len(lines) == 8
    assert lines[0].startswith(" 361") or lines[0].lstrip().startswith("361")
    assert lines[6].lstrip().startswith("0")
    assert lines[-1].endswith("step 19")
    flat = chart([(1, 5.0), (2, 5.0)], 40, 6)
    assert any("⠉" in each or "⠒" in each or "⠤" in each or "⣀" in each for each in flat)
    ascii_ = chart([(0, 1.0), (9, 10.0)], 30, 6, braille=False, log=True)
    assert "*" in "".join(ascii_)
    assert chart([(1, float("nan"))], 40, 5)[2].strip() == "waiting for the first figures"


def test_bars_are_as_long_as_their_share() -> None:
    assert meter(0.5, 4) == "██░░"
    assert meter(2.0, 3) == "███"
    assert meter(0.0, 3, unicode=False) == "..."
    assert sparks([0.0, 0.5, 1.0]) == " ▄█"
