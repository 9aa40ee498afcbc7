"""Promise 4: a full disk gives a clear error, keeps the old checkpoint, and leaves nothing incomplete."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import SERVER, command, small_arguments

from m1clip.io import PARTIAL, write_text
from m1clip.runlog import RunLog, read_log
from m1clip.training.checkpoint import TrainState, checkpoint_folder, save, saved_steps, verify


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB; needs root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def groups(step: int, size: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "weights": {"a": torch.full((size,), float(step))},
        "optimizer": {"m": torch.full((size,), 1.0)},
    }


def assert_complete(run: Path, steps: list[int]) -> None:
    assert sorted(saved_steps(run)) == steps
    assert all(verify(checkpoint_folder(run, step)) == "" for step in steps)
    assert not list(run.rglob(f"*{PARTIAL}*"))


def limited(run: Path, tensors: dict[str, dict[str, torch.Tensor]], answers: Any) -> None:
    """In a forked process, where OpenMP hangs: no torch operation, and no file larger than 64 KiB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    for write in (
        lambda: save(run, TrainState(step=2), tensors, keep=1),
        lambda: write_text(run / "note.txt", "x" * 2**17),
    ):
        try:
            write()
            answers.send("no error")
        except OSError as error:
            answers.send(error.errno)


def test_failed_write_leaves_nothing_incomplete(tmp_path: Path) -> None:
    save(tmp_path, TrainState(step=1), groups(1, 100), keep=1)
    write_text(tmp_path / "note.txt", "old")
    own_end, there = SERVER.Pipe()
    process = SERVER.Process(target=limited, args=(tmp_path, groups(2, 2**16), there))
    process.start()
    there.close()  # so that recv fails if the child dies
    process.join(60)
    assert [own_end.recv(), own_end.recv()] == [errno.EFBIG, errno.EFBIG]
    assert_complete(tmp_path, [1])
    assert (tmp_path / "note.txt").read_text() == "old"


def fill(folder: Path, leave: int) -> None:
    """Fill the disk, leaving some bytes free."""
    room = os.statvfs(folder)
    with (folder / "filler").open("wb") as file:
        file.write(bytes(max(0, room.f_bavail * room.f_frsize - leave)))


def full_saves(folder: Path, rounds: int) -> int:
    """Saves with less and less free space: each is complete or absent; returns how many failed."""
    failed = 0
    for number in range(rounds):
        run = folder / "run"
        save(run, TrainState(step=1), groups(1, 20_000), keep=2)
        fill(folder, leave=number * 400_000 // rounds)
        try:
            save(run, TrainState(step=2), groups(2, 40_000), keep=2)
            steps = [1, 2]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            failed += 1
            steps = [1]
        assert_complete(run, steps)
        subprocess.run(["rm", "-rf", str(folder / "filler"), str(run)], check=True)
    return failed


def test_full_disk_keeps_the_old_checkpoint(small_disk: Path) -> None:
    assert 2 < full_saves(small_disk, 8) < 8


@pytest.mark.long("Disk full")
def test_saves_with_less_and_less_free_space(small_disk: Path, counts: dict[str, float]) -> None:
    failed = full_saves(small_disk, 200)
    assert 50 < failed < 200
    counts |= {"saves with less and less free space": 200, "of them with too little": failed}


def test_log_on_a_full_disk_has_no_incomplete_line(small_disk: Path) -> None:
    log = RunLog(small_disk)
    log.write("step", step=1)
    fill(small_disk, leave=0)

    def write_until_full() -> None:
        for step in range(2, 1000):
            log.write("step", step=step, text="x" * 300)

    with pytest.raises(OSError, match="No space"):
        write_until_full()
    (small_disk / "filler").unlink()
    log.write("step", step=1000)
    log.close()
    lines = (small_disk / "run.jsonl").read_bytes().splitlines()
    assert len(list(read_log(small_disk))) == len(lines), "every line is complete"
    assert list(read_log(small_disk))[-1]["step"] == 1000


@pytest.mark.slow
def test_training_stops_with_one_line_and_can_be_resumed(small_disk: Path) -> None:
    run = small_disk / "run"
    words = small_arguments(
        {"train.steps": 24, "train.save_every": 4, "train.save_total_limit": 100}
    )
    ended = command("train", *words, "--out", str(run), cwd=small_disk.parent)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 2
    assert "full" in ended.stderr or "No space" in ended.stderr
    steps = sorted(saved_steps(run))
    assert 4 <= steps[-1] < 24
    assert_complete(run, steps)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    ended = command("train", "--resume", str(run), cwd=small_disk.parent)
    assert ended.returncode == 0, ended.stderr
    assert sorted(saved_steps(run)) == [4, 8, 12, 16, 20, 24]
