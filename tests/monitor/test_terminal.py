"""The monitor in the terminal: its screen at each size, and a real process in a pseudo-terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from small_run import command

from m1clip.io import lock_content
from m1clip.monitor.history import History
from m1clip.monitor.status import Status
from m1clip.monitor.terminal import View, frame, once, plot

from .made_runs import BEGIN, append, full_run, line, make_run, step
from .terminal_screen import in_terminal

RUNNING = Status("running", "running", 1)
SIZES = [(80, 24), (200, 50), (100, 30), (60, 16), (40, 10), (150, 20), (300, 80)]


def screen_of(
    history: History, status: Status = RUNNING, size: tuple[int, int] = (80, 24), encoding: str = "utf-8", **view: Any
) -> list[str]:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), width=size[0], height=size[1])
    with console.capture() as capture:
        console.print(frame(history, status, View(**view), BEGIN + 60, console))
    return capture.get().removesuffix("\n").split("\n")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_screen_fills_the_window(tmp_path: Path, size: tuple[int, int], encoding: str) -> None:
    history = History(full_run(tmp_path / "a run", finished=False)).poll()
    lines = screen_of(history, size=size, encoding=encoding)
    assert len(lines) == size[1]
    assert {cell_len(each) for each in lines} == {size[0]}
    if encoding == "ascii":
        assert "".join(lines).replace("°", "").replace("…", "").isascii()


def test_small_window_shows_everything(tmp_path: Path) -> None:
    text = "\n".join(screen_of(History(full_run(tmp_path / "demo", finished=False)).poll()))
    for words in (
        *("demo", "running", "100%  step 100 of 100", "loss", "mean recall", "chance", "temperature", "q quit"),
        *("learning rate", "256 images/s", "forward 40%", "backward 50%", "data 1%", "memory 1 GB of 8 GB", "cores"),
        *("power and temperature not measured", "the model is learning", "checkpoint saved at step 100"),
    ):
        assert words in text, words


def test_run_that_has_not_started_and_one_that_died(tmp_path: Path) -> None:
    empty = screen_of(History(tmp_path), Status("preparing", "preparing its data"))
    assert "waiting for the first values" in "\n".join(empty)
    history = History(make_run(tmp_path / "dead", [step(10)])).poll()
    text = "\n".join(screen_of(history, Status("died", "died at step 10"), size=(250, 30)))
    assert f"died at step 10; continue with: m1clip train --resume {tmp_path / 'dead'}" in text
    assert " left" not in text


def test_switching_metrics_names_unmeasured_ones(tmp_path: Path) -> None:
    history = History(full_run(tmp_path)).poll()
    assert len({screen_of(history, left=n)[2][:38] for n in range(9)}) == 9
    assert len({screen_of(history, right=n)[2][40:] for n in range(5)}) == 5
    assert "not measured on this machine" in "".join(screen_of(history, left=7))
    assert "PAUSED" in screen_of(history, paused=True)[0]
    assert "run 2 of 3" in screen_of(history, place=1, runs=3)[0]
    assert "too small" in screen_of(history, size=(30, 5))[0]


def test_control_characters_in_log_are_not_printed(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, [step(1), line("warning", text="\x1b[2J\x07\u202eboo\r\n"), line("event", event="界" * 200)]
    )
    lines = screen_of(History(run).poll())
    assert "\x1b" not in "".join(lines)
    assert {cell_len(each) for each in lines} == {80}


def test_plot_spans_minimum_to_maximum() -> None:
    lines = plot([(x, x * x) for x in range(20)], 40, 8, unicode=True).split("\n")
    assert len(lines) == 8
    assert lines[0].lstrip().startswith("361")
    assert lines[5].lstrip().startswith("0")
    assert lines[-1].split() == ["0", "19"]
    assert "⣀" in plot([(1, 5.0), (2, 5.0)], 40, 6, unicode=True)
    assert plot([(0, 1.0), (9, 10.0)], 30, 6, unicode=False).isascii()


@pytest.mark.slow
def test_monitor_resize_and_quit(tmp_path: Path) -> None:
    full_run(tmp_path / "runs" / "demo")
    with in_terminal("monitor", "runs/demo", cwd=tmp_path) as screen:
        screen.until(lambda text: "q quit" in text and "finished" in text and len(text.splitlines()) == 24)
        assert screen.alternate
        assert "\x1b[32m" in screen.raw
        screen.resize(200, 50)
        text = screen.until(lambda text: len(text.splitlines()) == 50 and "q quit" in text.splitlines()[-1])
        assert max(map(len, text.splitlines())) == 200
        screen.press("m")
        screen.until(lambda text: [line[:13] for line in text.splitlines()[2:3]] == ["Gradient norm"])
        screen.press("q")
        assert screen.ends() == 0
        assert not screen.alternate  # the terminal is as it was


@pytest.mark.slow
def test_monitor_of_growing_paused_and_died_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", [step(10)])
    (run / "run.lock").write_text(lock_content())  # this process acts as the training process
    with in_terminal("monitor", "live", cwd=tmp_path, width=100, NO_COLOR="1") as screen:
        screen.until(lambda text: "step 10 of 100" in text and "running" in text and "left, until" in text)
        append(run, [step(20)])
        screen.until(lambda text: "step 20 of 100" in text)
        screen.press("p")
        screen.until(lambda text: "PAUSED" in text)
        append(run, [step(30)])
        screen.press("p")
        screen.until(lambda text: "step 30 of 100" in text and "PAUSED" not in text)
        with (run / "run.jsonl").open("ab") as file:
            file.write(json.dumps(step(40)).encode()[:30])  # killed in the middle of a line
        (run / "run.lock").write_text("1\n" + lock_content().splitlines()[1] + "\n1.0\n")
        screen.until(lambda text: "died" in text and "continue with: m1clip train --resume live" in text)
        with (run / "run.jsonl").open("ab") as file:
            file.write(b"\n")
        (run / "run.lock").write_text(lock_content())
        append(run, [line("start", step=30, steps=100), step(50)])  # and resumed
        screen.until(lambda text: "running" in text and "step 50 of 100" in text)
        (run / "run.jsonl").unlink()
        make_run(run, [step(1)], steps=7)
        screen.until(lambda text: "step 1 of 7" in text)
        assert "\x1b[3" not in screen.raw  # no colors
        screen.process.terminate()
        assert screen.ends() == 143
        assert not screen.alternate


@pytest.mark.slow
def test_monitor_without_terminal_error_names_remedy(tmp_path: Path) -> None:
    full_run(tmp_path / "demo")
    refused = command("monitor", "demo", cwd=tmp_path)
    words = "m1clip: the monitor needs a terminal; --once prints the screen once, --web opens a page\n"
    assert (refused.returncode, refused.stderr) == (2, words)


def test_once_prints_the_screen_as_text(tmp_path: Path) -> None:
    text = once(full_run(tmp_path / "demo"), (100, 30))
    assert "finished at step 100: test mean recall 40.0%" in text
    assert "\x1b" not in text
