"""Promise 6: one writer per run.

A second one gets an error with the first one's pid; a lock ends with its process.
"""

from __future__ import annotations

import os
import platform
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from small_run import SERVER

from m1clip.errors import UserError
from m1clip.io import RUN_LOCK, lock_content, read_owner
from m1clip.training.process import lock_run


def contend(run: Path, start: Any, answers: Connection) -> None:
    """Try to lock the run at the same moment as the others; hold it until asked to release it."""
    start.wait()
    try:
        with lock_run(run):
            answers.send(("held", os.getpid()))
            answers.recv()
    except UserError as error:
        answers.send(("refused", str(error)))


def one_round(run: Path, contenders: int) -> None:
    """Exactly one gets the lock, the others name its pid.

    Then it is killed, and the run is free.
    """
    start = SERVER.Event()
    pipes = [SERVER.Pipe() for _ in range(contenders)]
    processes = [SERVER.Process(target=contend, args=(run, start, there)) for _, there in pipes]
    for process in processes:
        process.start()
    for _, there in pipes:
        there.close()  # so that recv fails if a child dies
    start.set()
    answered = [own_end.recv() for own_end, _ in pipes]
    winners = [pid for word, pid in answered if word == "held"]
    assert len(winners) == 1
    assert all("is training in this folder" in text for word, text in answered if word == "refused")
    with (
        pytest.raises(UserError, match=f"process {winners[0]} is training in this folder"),
        lock_run(run),
    ):
        pass
    os.kill(winners[0], signal.SIGKILL)
    for process in processes:
        process.join()
    with lock_run(run):
        owner = read_owner(run)
        assert owner is not None
        assert owner.pid == os.getpid()


def test_one_of_many_processes_gets_the_lock(tmp_path: Path) -> None:
    for _ in range(5):
        one_round(tmp_path, 6)


@pytest.mark.long("Two writers")
@pytest.mark.parametrize("part", range(2))
def test_one_of_eight_processes_gets_the_lock_every_time(
    tmp_path: Path, part: int, counts: dict[str, float]
) -> None:
    for _ in range(100):
        one_round(tmp_path, 8)
    counts["rounds of 8 processes, holder killed each time"] = 100


@pytest.mark.parametrize(
    "mark",
    [
        f"1\n{platform.node()}\n1.0\n",  # process 1 lives, but began at another time: a reboot
        f"999999999\n{platform.node()}\n1.0\n",
        "77\nanother-machine\n1.0\n",
        "",
        "nonsense\n",
        "\0" * 64,
        f"{2**70}\n{platform.node()}\nnan\n",
        lock_content(),
    ],
    ids=[
        "reboot",
        "dead",
        "elsewhere",
        "empty",
        "nonsense",
        "zeros",
        "absurd",
        "own number, reused",
    ],
)
def test_stale_lock_is_replaced(tmp_path: Path, mark: str) -> None:
    (tmp_path / RUN_LOCK).write_text(mark)
    owner = read_owner(tmp_path)
    if owner is not None and mark != lock_content():
        assert owner.process() is None
    with lock_run(tmp_path):
        assert (tmp_path / RUN_LOCK).read_text() == lock_content()


def test_fifo_in_place_of_the_lock_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / RUN_LOCK)
    assert read_owner(tmp_path) is None
