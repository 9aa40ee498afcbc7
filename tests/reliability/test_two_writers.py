"""Promise 6: one writer a run. Who comes second is told who holds it; the dead hold nothing."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from real_process import command, environment
from reliability_results import recorded
from small_run import small_arguments

from m1clip.errors import UserError
from m1clip.io import LOCK, lock_content, read_owner
from m1clip.training.process import lock_run

FORK = multiprocessing.get_context("fork")


def contend(run: Path, start: Any, answers: Connection) -> None:
    """Try to hold the run at the same moment as the others; keep it until told."""
    start.wait()
    try:
        with lock_run(run):
            answers.send(("held", os.getpid()))
            answers.recv()
    except UserError as error:
        answers.send(("refused", str(error)))


def one_round(run: Path, contenders: int) -> None:
    """Exactly one wins, the others name it; then it is killed, and the run is free."""
    start = FORK.Event()
    pipes = [FORK.Pipe() for _ in range(contenders)]
    processes = [FORK.Process(target=contend, args=(run, start, there)) for _, there in pipes]
    for process in processes:
        process.start()
    for _, there in pipes:
        there.close()  # a child that dies is an end of file then, and no wait
    start.set()
    told = [here.recv() for here, _ in pipes]
    winners = [pid for word, pid in told if word == "held"]
    assert len(winners) == 1
    assert all("is training in this folder" in text for word, text in told if word == "refused")
    # The winner has said that it holds the run, so its name stands there by now.
    with pytest.raises(UserError, match=f"process {winners[0]} is training in this folder"), lock_run(run):
        pass
    os.kill(winners[0], signal.SIGKILL)
    for process in processes:
        process.join()
    with lock_run(run):
        owner = read_owner(run)
        assert owner is not None
        assert owner.pid == os.getpid()


def test_of_many_one_wins(tmp_path: Path) -> None:
    for _ in range(5):
        one_round(tmp_path, 6)


@pytest.mark.long
@pytest.mark.parametrize("part", [1, 2])
def test_of_many_one_wins_two_hundred_times(tmp_path: Path, part: int) -> None:
    with recorded("two writers", part, 2) as counts:
        for _ in range(100):
            one_round(tmp_path, 8)
        counts |= {"rounds": 100, "processes a round": 8, "holders killed": 100}


@pytest.mark.parametrize(
    "mark",
    [
        f"1\n1.0\n{platform.node()}\n",  # process 1 lives, but began at another time: a reboot
        f"999999999\n1.0\n{platform.node()}\n",
        "77\n1.0\nanother-machine\n",
        "",
        "nonsense\n",
        "\0" * 64,
        f"{2**70}\nnan\n{platform.node()}\n",
        lock_content(),
    ],
    ids=["reboot", "dead", "elsewhere", "empty", "nonsense", "zeros", "absurd", "own number, reused"],
)
def test_a_lock_left_behind_is_recovered(tmp_path: Path, mark: str) -> None:
    (tmp_path / LOCK).write_text(mark)
    owner = read_owner(tmp_path)
    if owner is not None and mark != lock_content():
        assert owner.process() is None
    with lock_run(tmp_path):
        assert (tmp_path / LOCK).read_text() == lock_content()


def test_a_pipe_in_the_place_of_the_lock_hangs_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    assert read_owner(tmp_path) is None


@pytest.mark.slow
def test_a_second_training_process_is_refused(tmp_path: Path) -> None:
    words = small_arguments({"train.steps": 100_000})
    first = subprocess.Popen(
        [sys.executable, "-m", "m1clip", "train", *words, "--run", "run"],
        cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not (tmp_path / "run" / "run.jsonl").exists():
            assert first.poll() is None
        second = command("train", "--resume", "run", cwd=tmp_path)
        assert second.returncode == 2
        assert second.stderr == (
            f"m1clip: run: process {first.pid} is training in this folder; wait for it, or stop it first\n"
        )
    finally:
        first.kill()
        first.wait()
