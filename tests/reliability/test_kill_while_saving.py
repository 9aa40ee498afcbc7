"""Promise 2: a process killed at any point of a save leaves a valid checkpoint; an incomplete one is never loaded."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from m1clip.io import PARTIAL, atomic_folder, write_text
from m1clip.training.checkpoint import TrainState, checkpoint_folder, load_latest, save, saved_steps, verify

KEEP = 2
CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")
CRASH = 77


def groups_of(step: int, size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors that tell the step they belong to."""
    return {
        "weights": {"a": torch.full((size,), float(step)), "b": torch.full((7, 3), float(step))},
        "optimizer": {"momentum": torch.full((size,), float(-step))},
    }


def save_once(run: Path, step: int, size: int) -> None:
    """What a run does at a save: the checkpoint, the best model replaced, a small file replaced."""
    save(run, TrainState(step=step), groups_of(step, size), keep=KEEP)
    with atomic_folder(run / "best") as folder:
        (folder / "model").write_text(f"{step}" * 2000)
    write_text(run / "note.json", f"{step}" * 2000)


def save_for_ever(run: Path, step: int, size: int, done: Path) -> None:
    """Save step after step, and after each say so in one byte."""
    handle = os.open(done, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while True:
        step += 1
        save_once(run, step, size)
        os.write(handle, b".")


def check_after_kill(run: Path, acknowledged: int, size: int) -> tuple[int, list[str]]:
    """There is always one that loads, it is never a partial one, and nothing half is left; gives step and warnings."""
    for step in saved_steps(run):
        assert verify(checkpoint_folder(run, step)) == "", f"step {step} has its name but is not whole"
    warnings: list[str] = []
    kept = load_latest(run, CPU, warnings.append)
    if kept is None:
        assert acknowledged == 0
        return 0, warnings
    state, groups = kept
    assert state.step >= acknowledged
    for name, tensors in groups_of(state.step, size).items():
        for key, tensor in tensors.items():
            assert torch.equal(groups[name][key], tensor)
    assert not list((run / "checkpoints").glob(f"*{PARTIAL}"))
    return state.step, warnings


def killed_saves(run: Path, kills: int, size: int, seed: int) -> Counter[str]:
    """Kill a saving process again and again at moments of chance; gives what was found lying about."""
    draw = random.Random(seed)
    seen: Counter[str] = Counter()
    step = 0
    done = run / "done"
    begin = time.perf_counter()
    save_once(run / "rehearsal", 1, size)
    one_save = time.perf_counter() - begin
    for _ in range(kills):
        done.write_bytes(b"")
        process = FORK.Process(target=save_for_ever, args=(run, step, size, done))
        process.start()
        time.sleep(draw.uniform(0.0, 4 * one_save))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        partial = [path.name for path in (run / "checkpoints").glob(f"*{PARTIAL}")]
        seen["killed inside a save"] += bool(partial)
        seen["killed between two files"] += any(
            not (run / "checkpoints" / name / "manifest.json").exists() for name in partial
        )
        step, warnings = check_after_kill(run, step + len(done.read_bytes()), size)
        seen["warnings"] += len(warnings)
    seen["saves"] = step
    return seen


def test_kills_at_random_moments(tmp_path: Path) -> None:
    seen = killed_saves(tmp_path, 15, size=200_000, seed=0)
    assert seen["saves"] > 0


@pytest.mark.long("Kill while saving")
@pytest.mark.parametrize("size", [1_000, 100_000, 2_000_000])  # small: mostly renames and fsyncs; large: writes
@pytest.mark.parametrize("seed", range(2))
def test_many_kills_at_random_moments(tmp_path: Path, size: int, seed: int, counts: dict[str, float]) -> None:
    seen = killed_saves(tmp_path, 35, size, seed)
    assert seen["killed inside a save"] >= 5
    counts |= {"SIGKILLs": 35, "of them inside a save": seen["killed inside a save"]}


@pytest.mark.long("Kill while saving")
@pytest.mark.parametrize("replace", [False, True])
def test_number_of_crash_points(tmp_path: Path, replace: bool, counts: dict[str, float]) -> None:
    counts["crashes, one at each file operation"] = crash_everywhere(tmp_path / "run", replace)


def crash_at(operation: int, run: Path, job: Callable[[], None]) -> None:
    """Do the job, but be gone at the n-th operation on a file: each open, mkdir, rename, remove and fsync counts."""
    count = 0

    def step(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fsync"):
            count += 1
            if count == operation:
                os._exit(CRASH)

    usual = os.fsync

    def fsync(handle: int) -> None:
        step("fsync", ())
        usual(handle)

    os.fsync = fsync
    sys.addaudithook(step)
    job()
    os._exit(0)


def crash_everywhere(run: Path, replace: bool) -> int:
    """A crash at every file operation of a save, one after the other; gives the number of points."""
    run.mkdir()
    for step in (1, 2):
        save_once(run, step, 100)
    step, operation = 2, 0
    while True:
        operation += 1
        target = step if replace else step + 1
        process = FORK.Process(target=crash_at, args=(operation, run, lambda at=target: save_once(run, at, 100)))
        process.start()
        process.join()
        assert process.exitcode in (0, CRASH)
        step, _ = check_after_kill(run, step, 100)
        assert len(saved_steps(run)) >= KEEP
        if process.exitcode == 0:
            assert sorted(path.name for path in run.iterdir() if PARTIAL not in path.name) == [
                "best", "checkpoints", "note.json",
            ]  # fmt: skip
            return operation - 1


@pytest.mark.parametrize("replace", [False, True], ids=["the next step", "the same step again"])
def test_a_crash_at_every_file_operation(tmp_path: Path, replace: bool) -> None:
    assert crash_everywhere(tmp_path / "run", replace) > 25
