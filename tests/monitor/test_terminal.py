"""The monitor in the terminal: its screen at each size, and a real process in a pseudo-terminal."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from small_run import TIMEOUT, command

from m1clip.cli import runs
from m1clip.errors import UserError
from m1clip.io import lock_content
from m1clip.monitor import terminal
from m1clip.monitor.history import History
from m1clip.monitor.status import Status
from m1clip.monitor.terminal import frame, once, plot

from .made_runs import BEGIN, append, full_run, line, make_run, step

RUNNING = Status("running", "running", 1)
SIZES = [(80, 24), (200, 50), (60, 16), (40, 10), (150, 20)]


def screen_of(
    history: History,
    status: Status = RUNNING,
    size: tuple[int, int] = (80, 24),
    encoding: str = "utf-8",
) -> list[str]:
    console = Console(
        file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), width=size[0], height=size[1]
    )
    with console.capture() as capture:
        console.print(frame(history, status, BEGIN + 60, console))
    return capture.get().removesuffix("\n").split("\n")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_screen_fills_the_window(tmp_path: Path, size: tuple[int, int], encoding: str) -> None:
    history = History(full_run(tmp_path / "a run", finished=False)).poll()
    lines = screen_of(history, size=size, encoding=encoding)
    assert len(lines) == size[1]
    assert {cell_len(row) for row in lines} == {size[0]}
    if encoding == "ascii":
        assert "".join(lines).replace("°", "").replace("…", "").isascii()


def test_small_window_shows_everything(tmp_path: Path) -> None:
    history = History(full_run(tmp_path / "demo", finished=False)).poll()
    text = "\n".join(screen_of(history))
    for words in (
        *(
            "demo",
            "running",
            "100%  step 100 of 100",
            "loss",
            "mean recall",
            "chance",
            "temperature",
            "Ctrl-C",
        ),
        *(
            "learning rate",
            "256 images/s",
            "forward 40%",
            "backward 50%",
            "data 1%",
            "memory 1 GB of 8 GB",
            "cores",
        ),
        *(
            "power and temperature not measured",
            "the model is learning",
            "checkpoint saved at step 100",
        ),
    ):
        assert words in text, words
    assert "ranks" not in text
    append(tmp_path / "demo", [step(101, rank_seconds=[0.4, 0.5])])
    assert " ranks 2  images/s of each: 1: 128, 0: 160 " in "\n".join(screen_of(history.poll()))
    assert "too small" in screen_of(history, size=(30, 5))[0]


def test_run_that_has_not_started_and_one_that_died(tmp_path: Path) -> None:
    empty = screen_of(History(tmp_path), Status("preparing", "preparing its data"))
    assert "waiting for the first values" in "\n".join(empty)
    history = History(make_run(tmp_path / "dead", [step(10)])).poll()
    text = "\n".join(screen_of(history, Status("crashed", "crashed at step 10"), size=(250, 30)))
    assert f"crashed at step 10; continue with: m1clip train --resume {tmp_path / 'dead'}" in text
    assert " left" not in text


def test_control_characters_in_log_are_not_printed(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        [
            step(1),
            line("warning", text="\x1b[2J\x07\u202eboo\r\n"),
            line("event", event="界" * 200),
        ],
    )
    lines = screen_of(History(run).poll())
    assert "\x1b" not in "".join(lines)
    assert {cell_len(row) for row in lines} == {80}


def test_plot_spans_minimum_to_maximum() -> None:
    lines = plot([(x, x * x) for x in range(20)], 40, 8, unicode=True).split("\n")
    assert len(lines) == 8
    assert lines[0].lstrip().startswith("361")
    assert lines[5].lstrip().startswith("0")
    assert lines[-1].split() == ["0", "19"]
    assert "⣀" in plot([(1, 5.0), (2, 5.0)], 40, 6, unicode=True)
    assert plot([(0, 1.0), (9, 10.0)], 30, 6, unicode=False).isascii()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_monitor_follows_a_run_and_a_resized_window(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = make_run(tmp_path / "live", [step(10)])
    (run / "run.lock").write_text(lock_content())  # this process acts as the training process
    terminal, slave = pty.openpty()

    def resize(width: int, height: int) -> None:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    resize(80, 24)
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    env |= {"TERM": "xterm-256color", "PYTHONUTF8": "1", "NO_COLOR": "1"}
    words = [sys.executable, "-m", "m1clip", "monitor", "live"]
    process = subprocess.Popen(
        words, cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave, env=env
    )
    os.close(slave)
    output = b""

    def until(true: Callable[[str], object]) -> str:
        """Read until the condition holds for the last screen, which starts at the home position."""
        nonlocal output
        deadline = time.monotonic() + TIMEOUT
        while True:
            screen = re.sub(
                r"\x1b\[\??[\d;]*[A-Za-z]|\r",
                "",
                output.decode("utf-8", "replace").split("\x1b[H")[-1],
            )
            if true(screen):
                return screen
            assert time.monotonic() < deadline, screen
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    output += os.read(terminal, 65536)
                except OSError:  # on Linux: the other end is closed
                    assert process.wait(timeout=TIMEOUT) == code
                    return ""

    try:
        until(lambda text: "step 10 of 100" in text and "running" in text and "left, until" in text)
        resize(120, 40)
        until(lambda text: "Ctrl-C" in text.splitlines()[-1] and len(text.splitlines()) == 40)
        (run / "run.lock").write_text("1\n" + lock_content().splitlines()[1] + "\n1.0\n")
        until(
            lambda text: "crashed" in text and "continue with: m1clip train --resume live" in text
        )
        (run / "run.lock").write_text(lock_content())
        append(run, [line("start", step=10, steps=100), step(50)])  # resumed
        until(lambda text: "running" in text and "step 50 of 100" in text)
        assert b"\x1b[3" not in output  # no colors
        process.send_signal(number)
        until(lambda text: False)
        # The terminal is as it was.
        assert output.rfind(b"\x1b[?1049l") > output.rfind(b"\x1b[?1049h")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=TIMEOUT)
        os.close(terminal)


def test_monitor_without_a_run_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown: list[Path] = []
    monkeypatch.setattr(terminal, "monitor", shown.append)

    def sleep(seconds: float) -> None:
        if Path("runs").is_dir():
            make_run(Path("runs/demo"), [])
        Path("runs").mkdir(exist_ok=True)  # the folder is there before the run

    monkeypatch.setattr(time, "sleep", sleep)
    runs.monitor()
    assert shown == [Path("runs/demo")]
    assert "runs: no runs yet; waiting for one to start (Ctrl-C" in capsys.readouterr().out


def test_monitor_that_waits_for_a_run_ends_by_ctrl_c_and_once_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    runs.monitor()
    with pytest.raises(UserError, match="runs: no runs yet in this folder"):
        runs.monitor(once=True)


@pytest.mark.slow
def test_monitor_without_terminal_error_names_hint(tmp_path: Path) -> None:
    full_run(tmp_path / "demo")
    refused = command("monitor", "demo", cwd=tmp_path)
    words = (
        "m1clip: the monitor needs a terminal; --once prints the screen once, --web opens a page\n"
    )
    assert (refused.returncode, refused.stderr) == (2, words)


@pytest.mark.parametrize(
    ("status", "continues"),
    [
        (RUNNING, True),
        (Status("preparing", "preparing its data", 1), True),
        (Status("finished", "finished at step 100"), False),
        (Status("stopped", "stopped at step 100"), False),
        (Status("crashed", "crashed at step 100"), False),
    ],
)
def test_only_a_running_run_continues(tmp_path: Path, status: Status, continues: bool) -> None:
    history = History(full_run(tmp_path / "demo", finished=status.state == "finished")).poll()
    last = screen_of(history, status, (100, 30))[-1]
    assert "Ctrl-C closes the monitor" in last
    assert ("the run continues" in last) == continues


def test_screen_that_is_printed_once_has_no_keys(tmp_path: Path) -> None:
    for finished in (False, True):
        text = once(full_run(tmp_path / f"{finished}", finished=finished), (100, 30))
        assert "Ctrl-C" not in text
        assert "continues" not in text
        assert "m1clip monitor --web" in text.splitlines()[-1]


def test_once_prints_the_screen_as_text(tmp_path: Path) -> None:
    text = once(full_run(tmp_path / "demo"), (100, 30))
    assert "finished at step 100: test mean recall 40.0%" in text
    assert "\x1b" not in text
