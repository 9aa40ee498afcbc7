"""Promise 1: a run that is killed at random moments ends with identical weights, optimizer state and samples."""

from __future__ import annotations

import hashlib
import math
import os
import random
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from small_run import TIMEOUT, Command, before_each_step, small_arguments

from m1clip.data.loader import Batch
from m1clip.runlog import read_log
from m1clip.training.compose import TrainStep

CHANGES = {"train.save_every": 7, "train.eval_every": 50, "data.crop_min": 0.6, "data.flip": 0.5}


def log_samples(path: Path, limit: float = math.inf) -> None:
    """In the training process: each step appends its number and a hash of its samples in their order.

    With `limit` lines, training waits to be killed: on any schedule, the kill comes before the end.
    """
    count = len(lines(path))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def log(train_step: TrainStep, batch: Batch, step: int) -> None:
        nonlocal count
        while count >= limit:
            time.sleep(0.01)
        count += 1
        digest = hashlib.sha256()
        for tensor in batch.tensors().values():
            digest.update(tensor.cpu().numpy().tobytes())
        os.write(handle, f"{step} {digest.hexdigest()}\n".encode())

    before_each_step(log)


def lines(path: Path) -> list[str]:
    """Complete lines: the last one may be cut off by the kill."""
    text = path.read_text() if path.exists() else ""
    return text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]


def hashes(run: Path, steps: int) -> dict[str, str]:
    """SHA-256 of every tensor file at the end."""
    files = [
        *(run / "checkpoints" / f"step-{steps:06d}").glob("*.safetensors"),
        *run.glob("*/model.safetensors"),
    ]
    hashes_by_file = {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }
    assert {"weights", "optimizer"} <= {Path(name).stem for name in hashes_by_file}
    assert {"model/model.safetensors", "best/model.safetensors"} <= set(hashes_by_file)
    return hashes_by_file


def killed_run(
    folder: Path, workers: int, kills: int, steps: int, apart: int, seed: int
) -> dict[str, float]:
    """Kill a run, resume it, and so on; compare with an undisturbed one.

    Fewer than `apart` steps between kills.
    """
    words = small_arguments({**CHANGES, "data.workers": workers, "train.steps": steps})
    samples, run = folder / "killed.txt", folder / "killed"
    draw, children, inside_epoch = random.Random(seed), list[psutil.Process](), 0

    def start(*words: str, log: Path = samples, limit: float = math.inf) -> Command:
        return Command("train", *words, cwd=folder, prepare=partial(log_samples, log, limit))

    assert start(*words, "--out", "reference", log=folder / "reference.txt").wait() == 0
    for number in range(kills):
        goal = len(lines(samples)) + draw.randrange(8, apart)  # a few steps more than a save
        first = [*words, "--out", "killed"]
        resumed = ["--resume", "killed"]
        process = start(*(resumed if (run / "config.toml").exists() else first), limit=goal + 8)
        process.wait_until(lambda goal=goal: len(lines(samples)) >= goal)
        time.sleep(draw.uniform(0, 0.05))
        children += psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, 9)
        assert process.wait() == -9, f"kill {number}: the run had ended before it"
        # Four steps per epoch.
        inside_epoch += max(int(line.split()[0]) for line in lines(samples)) % 4 != 0
    assert start("--resume", "killed").wait() == 0
    # torch's workers look every 5 seconds if their parent lives.
    assert psutil.wait_procs(children, timeout=TIMEOUT)[1] == [], "workers are still running"
    assert hashes(run, steps) == hashes(folder / "reference", steps)
    assert set(lines(samples)) == set(lines(folder / "reference.txt")), (
        "the same samples in each step"
    )
    repeated = len(lines(samples)) - len(lines(folder / "reference.txt"))
    return {"SIGKILLs": kills, "of them inside an epoch": inside_epoch, "steps repeated": repeated}


@pytest.mark.slow
def test_resume_after_sigkill_gives_identical_weights(tmp_path: Path) -> None:
    killed_run(tmp_path, workers=0, kills=1, steps=40, apart=28, seed=3)
    starts = [line["step"] for line in read_log(tmp_path / "killed") if line["kind"] == "start"]
    assert starts[0] == 0
    assert starts[1] >= 7, "it continued from a checkpoint"


@pytest.mark.long("Kill and resume, bit for bit")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_after_five_sigkills_gives_identical_weights(
    tmp_path: Path, workers: int, part: int, counts: dict[str, float]
) -> None:
    counts |= killed_run(tmp_path, workers, kills=5, steps=200, apart=38, seed=10 * workers + part)
    assert counts["of them inside an epoch"] >= 1
