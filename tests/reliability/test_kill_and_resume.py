"""Promise 1: a run killed at any moments ends with the bits of one that was not: weights, optimizer, samples."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from real_process import environment
from reliability_results import recorded
from small_run import small_arguments

TRAINER = Path(__file__).with_name("logged_train.py")
CHANGES = {"train.save_every": 7, "model.dropout": 0.1, "data.crop_min": 0.6, "data.flip": 0.5, "optim.ema": 0.9,
           "train.eval_every": 50}  # fmt: skip
ORPHAN_SECONDS = 30  # torch's workers look for their parent every 5 seconds


def start(folder: Path, samples: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(TRAINER), str(samples), "train", *words],
        cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error


def lines(path: Path) -> list[bytes]:
    """Whole lines: the last may be torn by the kill."""
    return (
        [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.exists() else []
    )


def state_of(run: Path, steps: int) -> dict[str, str]:
    """sha256 of every file of tensors at the end."""
    files = [*(run / "checkpoints" / f"step-{steps:06d}").glob("*.safetensors"), *run.glob("*/model.safetensors")]
    found = {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert {"weights", "optimizer", "ema"} <= {Path(name).stem for name in found}
    assert {"model/model.safetensors", "best/model.safetensors"} <= set(found)
    return found


def killed_run(folder: Path, workers: int, kills: int, steps: int, apart: int, seed: int) -> dict[str, int]:
    """Kill a run `kills` times, continue it each time, and compare with one that nobody touched.

    Between two kills lie less than `apart` steps, and some milliseconds.
    """
    words = [*small_arguments({**CHANGES, "data.workers": workers, "train.steps": steps})]
    finish(start(folder, folder / "whole.txt", *words, "--run", "whole"))
    draw = random.Random(seed)
    samples, run = folder / "killed.txt", folder / "killed"
    children: list[psutil.Process] = []
    resumed_inside = 0
    for number in range(kills):
        command = ["--resume", "killed"] if (run / "config.toml").exists() else [*words, "--run", "killed"]
        process = start(folder, samples, *command)
        # From the last kill's place on: a few steps more than a save, then some milliseconds of chance.
        goal = len(lines(samples)) + draw.randrange(8, apart)
        deadline = time.monotonic() + 120
        while len(lines(samples)) < goal and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        if process.poll() is None:
            children += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -9, f"kill {number}: the run had ended before it"
        last = max((int(line.split()[0]) for line in lines(samples)), default=0)
        resumed_inside += last % 4 != 0  # four steps an epoch
    finish(start(folder, samples, "--resume", "killed"))
    _, alive = psutil.wait_procs(children, timeout=ORPHAN_SECONDS)
    assert not alive, "workers outlived their run"
    assert state_of(run, steps) == state_of(folder / "whole", steps)
    seen, expected = dict[bytes, set[bytes]](), dict[bytes, bytes]()
    for line in lines(folder / "whole.txt"):
        step, digest = line.split()
        expected[step] = digest
    for line in lines(samples):
        step, digest = line.split()
        seen.setdefault(step, set()).add(digest)
    assert {step: {digest} for step, digest in expected.items()} == seen
    again = len(lines(samples)) - len(expected)
    return {
        "kills": kills,
        "steps": steps,
        "steps done twice": again,
        "kills in the middle of an epoch": resumed_inside,
    }


@pytest.mark.slow
def test_one_kill(tmp_path: Path) -> None:
    found = killed_run(tmp_path, workers=0, kills=1, steps=40, apart=28, seed=3)
    assert found["steps done twice"] > 0


PARTS, KILLS = 4, 5


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, PARTS + 1))
@pytest.mark.parametrize("workers", [0, 2])
def test_twenty_kills(tmp_path: Path, workers: int, part: int) -> None:
    """Five kills in each of four runs: 20 for each number of workers."""
    with recorded(f"kill and resume, {workers} workers", part, PARTS) as counts:
        seed = 10 * workers + part
        counts.update(killed_run(tmp_path, workers, KILLS, steps=40 * KILLS, apart=38, seed=seed))
        assert counts["kills in the middle of an epoch"] >= 1
