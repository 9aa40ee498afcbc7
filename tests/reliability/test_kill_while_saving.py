"""Promise 2: a process killed at any point of a save leaves a valid checkpoint.

An incomplete one is never loaded.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from small_run import SERVER

from m1clip.io import PARTIAL, atomic_folder, write_text
from m1clip.training.checkpoint import (
    TrainState,
    checkpoint_folder,
    load_latest,
    save,
    saved_steps,
    verify,
)

KEEP = 2
CPU = torch.device("cpu")
CRASH = 77


def groups_of(step: int, size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors whose values are the step."""
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


def save_forever(run: Path, step: int, size: int, done: Path) -> None:
    """Save step after step, and append one byte after each."""
    handle = os.open(done, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while True:
        step += 1
        save_once(run, step, size)
        os.write(handle, b".")


def check_after_kill(run: Path, reported: int, size: int) -> int:
    """The newest reported checkpoint or a later one is loaded, and nothing incomplete is left.

    Returns its step.
    """
    for step in saved_steps(run):
        assert verify(checkpoint_folder(run, step)) == ""
    loaded = load_latest(run, CPU)
    if loaded is None:
        assert reported == 0
        return 0
    state, groups = loaded
    assert state.step >= reported
    for name, tensors in groups_of(state.step, size).items():
        for key, tensor in tensors.items():
            assert torch.equal(groups[name][key], tensor)
    assert not list((run / "checkpoints").glob(f"*{PARTIAL}"))
    return state.step


def killed_saves(run: Path, kills: int, size: int, seed: int) -> tuple[int, int]:
    """Kill a saving process at random moments.

    Returns the last step, and how many kills were inside a save.
    """
    draw = random.Random(seed)
    step, inside, done = 0, 0, run / "done"
    begin = time.perf_counter()
    save_once(run / "rehearsal", 1, size)
    one_save = time.perf_counter() - begin
    for _ in range(kills):
        done.unlink(missing_ok=True)
        process = SERVER.Process(target=save_forever, args=(run, step, size, done))
        process.start()
        saves = draw.randrange(4)  # counted, since a busy machine may need long for the first
        while not done.exists() or done.stat().st_size < saves:
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, one_save))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        inside += any((run / "checkpoints").glob(f"*{PARTIAL}"))
        step = check_after_kill(run, step + len(done.read_bytes()), size)
    return step, inside


def test_kills_at_random_moments(tmp_path: Path) -> None:
    assert killed_saves(tmp_path, 15, size=200_000, seed=0)[0] > 0


@pytest.mark.long("Kill while saving")
# Small: mostly renames and fsyncs; large: writes.
@pytest.mark.parametrize("size", [1_000, 100_000, 2_000_000])
@pytest.mark.parametrize("seed", range(2))
def test_many_kills_at_random_moments(
    tmp_path: Path, size: int, seed: int, counts: dict[str, float]
) -> None:
    _, inside = killed_saves(tmp_path, 35, size, seed)
    assert inside >= 5
    counts |= {"SIGKILLs": 35, "of them inside a save": inside}


@pytest.mark.long("Kill while saving")
@pytest.mark.parametrize("replace", [False, True])
def test_number_of_crash_points(tmp_path: Path, replace: bool, counts: dict[str, float]) -> None:
    counts["crashes, one at each file operation"] = crash_everywhere(tmp_path / "run", replace)


def crash_at(operation: int, run: Path, step: int) -> None:
    """Save, but exit at the n-th file operation: each open, mkdir, rename, remove and fsync counts."""
    count = 0

    def count_operation(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fsync"):
            count += 1
            if count == operation:
                os._exit(CRASH)

    original = os.fsync

    def fsync(handle: int) -> None:
        count_operation("fsync", ())
        original(handle)

    os.fsync = fsync
    sys.addaudithook(count_operation)
    save_once(run, step, 100)
    os._exit(0)


def crash_everywhere(run: Path, replace: bool) -> int:
    """A crash at every file operation of a save, one after the other; returns their number."""
    run.mkdir()
    for step in (1, 2):
        save_once(run, step, 100)
    step, operation = 2, 0
    while True:
        operation += 1
        target = step if replace else step + 1
        process = SERVER.Process(target=crash_at, args=(operation, run, target))
        process.start()
        process.join()
        assert process.exitcode in (0, CRASH)
        step = check_after_kill(run, step, 100)
        assert len(saved_steps(run)) >= KEEP
        if process.exitcode == 0:
            assert {path.name for path in run.iterdir() if PARTIAL not in path.name} == {
                "best",
                "checkpoints",
                "note.json",
            }
            return operation - 1


@pytest.mark.parametrize("replace", [False, True], ids=["the next step", "the same step"])
def test_crash_at_every_file_operation(tmp_path: Path, replace: bool) -> None:
    assert crash_everywhere(tmp_path / "run", replace) > 25
