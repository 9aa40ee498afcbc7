"""The monitor as a person uses it: a real process in a pseudo-terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from m1clip.io import lock_content

from .made_runs import append, full_run, line, make_run, step
from .terminal_screen import in_terminal

pytestmark = pytest.mark.slow


def test_small_large_resized_quit(tmp_path: Path) -> None:
    full_run(tmp_path / "runs" / "demo")
    with in_terminal("monitor", "runs/demo", cwd=tmp_path) as screen:
        text = screen.until(lambda text: "q quit" in text and "finished" in text)
        assert len(text.splitlines()) == 24
        assert screen.alternate
        assert "\x1b[32m" in screen.raw
        screen.resize(200, 50)
        text = screen.until(lambda text: len(text.splitlines()) == 50 and "q quit" in text.splitlines()[-1])
        assert max(map(len, text.splitlines())) == 200
        assert "gradient norm" in text  # more charts where there is room
        screen.press("m")
        screen.until(lambda text: text.splitlines()[2].startswith("─ gradient norm"))
        screen.press("?")
        screen.until(lambda text: "quit (the run goes on)" in text)
        screen.press("q")
        assert screen.ends() == 0
        assert not screen.alternate  # the terminal is as it was
        assert screen.raw.rstrip().endswith("\x1b[?1049l")


def test_a_run_that_grows_is_paused_goes_on_and_dies(tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", [step(10)])
    (run / "run.lock").write_text(lock_content())  # this very process plays the training
    with in_terminal("monitor", "live", cwd=tmp_path, NO_COLOR="1") as screen:
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
        (run / "run.lock").write_text("1\n1.0\n" + lock_content().splitlines()[2] + "\n")
        screen.until(lambda text: "died" in text and "go on with: m1clip train --resume live" in text)
        with (run / "run.jsonl").open("ab") as file:
            file.write(b"\n")
        (run / "run.lock").write_text(lock_content())
        append(run, [line("start", step=30, steps=100), step(50)])  # and continued
        screen.until(lambda text: "running" in text and "step 50 of 100" in text)
        (run / "run.jsonl").unlink()
        make_run(run, [step(1)], steps=7)
        screen.until(lambda text: "step 1 of 7" in text)
        assert "\x1b[3" not in screen.raw.replace("\x1b[3;1H", "").replace("\x1b[3;", "")  # no colours
        screen.process.terminate()
        assert screen.ends() == 143
        assert not screen.alternate


def test_it_never_imports_torch(tmp_path: Path) -> None:
    full_run(tmp_path / "runs" / "demo")
    with in_terminal("monitor", cwd=tmp_path, imports="1") as screen:  # without a name: the newest of runs/
        screen.until(lambda text: "finished" in text)
        screen.press("q")
        assert screen.ends() == 0
        assert screen.process.stderr is not None
        imported = screen.process.stderr.read().decode()
    assert "m1clip.monitor.terminal" in imported
    for name in ("torch", "numpy", "matplotlib", "PIL"):
        assert f" {name}\n" not in imported, name


def test_a_log_of_half_a_gigabyte_is_read_in_little_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", [step(1)], steps=2_000_000)
    block = b"".join(json.dumps(step(number), separators=(",", ":")).encode() + b"\n" for number in range(2, 2502))
    with (run / "run.jsonl").open("ab") as file:
        for _ in range(500_000_000 // len(block) + 1):
            file.write(block)
    append(run, [step(1_999_999)])
    with in_terminal("monitor", "long", cwd=tmp_path) as screen:
        screen.until(lambda text: "step 1,999,999 of 2,000,000" in text)
        process = psutil.Process(screen.process.pid)
        assert process.memory_info().rss < 250e6
        append(run, [step(2_000_000)])
        screen.until(lambda text: "step 2,000,000 of 2,000,000" in text)
        screen.press("q")
        assert screen.ends() == 0
    (run / "run.jsonl").unlink()


def test_without_a_terminal_it_says_what_to_do(tmp_path: Path) -> None:
    from small_run import command

    full_run(tmp_path / "demo")
    refused = command("monitor", "demo", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (
        2, "m1clip: the monitor needs a terminal; --once prints one image, --web shows a page\n",
    )  # fmt: skip
    once = command("monitor", "demo", "--once", cwd=tmp_path)
    assert once.returncode == 0, once.stderr
    assert "finished at step 100: test mean recall 40.0%" in once.stdout
    assert "\x1b" not in once.stdout
    listed = command("runs", ".", "--json", cwd=tmp_path)
    assert json.loads(listed.stdout)[0]["state"] == "finished"
    assert os.sep not in json.loads(listed.stdout)[0]["run"]
