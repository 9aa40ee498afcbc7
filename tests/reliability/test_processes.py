"""Training processes whose workers, terminal, output or run folder go away."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_run import (
    TIMEOUT,
    Command,
    environment,
    hold_at,
    run_small,
    small_arguments,
    weights_sha256,
)

from m1clip.data.loader import TrainingSet
from m1clip.errors import UserError
from m1clip.runlog import read_log
from m1clip.training.checkpoint import verify

pytestmark = pytest.mark.slow

ENDLESS = {"train.steps": 100_000, "train.save_every": 7, "data.workers": 2}


def start(folder: Path, prepare: Any = None, **changes: Any) -> Command:
    """Train until the first checkpoint is saved."""
    words = small_arguments(
        {**ENDLESS, **{f"train.{name}": value for name, value in changes.items()}}
    )
    process = Command("train", *words, "--out", "run", cwd=folder, prepare=prepare)
    process.wait_until(
        lambda: (folder / "run" / "run.jsonl").exists() and "checkpoint" in kinds(folder / "run")
    )
    return process


def kinds(run: Path) -> list[str]:
    return [line["kind"] for line in read_log(run)]


def steps(run: Path) -> list[int]:
    return [line["step"] for line in read_log(run) if line["kind"] == "step"]


def test_run_with_a_killed_data_worker_ends_with_the_same_weights(tmp_path: Path) -> None:
    run_small(tmp_path / "reference", {**ENDLESS, "train.steps": 16, "data.workers": 0})
    process = start(tmp_path, partial(hold_at, 8, tmp_path / "go"), steps=16)
    psutil.Process(process.pid).children()[0].kill()
    (tmp_path / "go").touch()
    assert process.wait() == 0, process.read()
    output, error = process.read()
    assert error == ""
    assert "was killed (exit code -9) while preparing step" in output
    assert weights_sha256(tmp_path / "run") == weights_sha256(tmp_path / "reference")


def test_run_whose_workers_die_repeatedly_is_saved_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TrainingSet.piece

    def deadly(self: TrainingSet, step: int, *piece: int) -> Any:
        if step == 5 and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, step, *piece)

    monkeypatch.setattr(TrainingSet, "piece", deadly)
    with pytest.raises(UserError, match="3 restarts did not help") as caught:
        run_small(tmp_path / "run", {"data.workers": 2, "train.save_every": 100})
    assert "\n" not in str(caught.value)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()  # workers die ahead of the training
    assert f"(step {int(saved.name[5:])} is saved; continue with: " in str(caught.value)
    assert verify(saved) == ""
    assert multiprocessing.active_children() == []


def test_no_data_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    process = start(tmp_path)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    for worker in workers:
        worker.suspend()  # so that none notices anything before it is resumed
    process.send_signal(signal.SIGKILL)
    process.wait()
    for worker in workers:
        worker.resume()
    assert psutil.wait_procs(workers, timeout=TIMEOUT)[1] == []


def hang_at(step: int) -> None:
    """In the training process: its workers never finish the batch of this step."""
    original = TrainingSet.__getitem__

    def hang(self: TrainingSet, number: int) -> Any:
        while number >= step:
            time.sleep(0.01)
        return original(self, number)

    TrainingSet.__getitem__ = hang  # type: ignore[method-assign]


def test_closed_terminal_saves_the_run_while_it_waits_for_data(tmp_path: Path) -> None:
    process = start(tmp_path, partial(hang_at, 20))
    trained = psutil.Process(process.pid)
    # There is no batch for the next one.
    process.wait_until(lambda: steps(tmp_path / "run")[-1:] == [20])
    process.wait_until(lambda: trained.status() == psutil.STATUS_SLEEPING)
    for worker in trained.children(recursive=True):
        worker.suspend()
    process.send_signal(signal.SIGHUP, group=True)
    assert process.wait() == 129
    output, error = process.read()
    assert error == ""
    (stopped,) = [line for line in read_log(tmp_path / "run") if line["kind"] == "event"]
    assert stopped["event"] == "stopped by signal 1"
    assert verify(tmp_path / "run" / "checkpoints" / f"step-{stopped['step']:06d}") == ""
    assert f"stopped at step {stopped['step']}; continue with: m1clip train --resume run" in output


def ignore_hangup_and_hold(step: int, file: Path) -> None:
    """In the training process: as `nohup` starts it, and wait before a step."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hold_at(step, file)


def test_nohup_run_ignores_the_closed_terminal(tmp_path: Path) -> None:
    held = partial(ignore_hangup_and_hold, 8, tmp_path / "go")
    process = start(tmp_path, held, steps=12)
    process.send_signal(signal.SIGHUP, group=True)
    (tmp_path / "go").touch()
    assert (process.wait(), process.read()[1]) == (0, "")
    assert kinds(tmp_path / "run")[-1] == "end"


@pytest.mark.parametrize("output", ["| head -1", "> /dev/full", ">&-"])
def test_training_continues_without_standard_output(tmp_path: Path, output: str) -> None:
    words = " ".join(small_arguments({"train.eval_every": 2, "data.workers": 2}))
    ended = subprocess.run(
        [
            "bash",
            "-c",
            (
                f"set -o pipefail; {shlex.quote(sys.executable)} -m m1clip train {words} --out run"
                f" {output}"
            ),
        ],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert kinds(tmp_path / "run")[-1] == "end"
    assert (tmp_path / "run" / "retrieval.png").is_file()


@pytest.mark.parametrize("change", ["renamed", "replaced"])
def test_run_stops_when_its_folder_is_gone(tmp_path: Path, change: str) -> None:
    run = tmp_path / "run"
    process = start(tmp_path, eval_every=5)
    run.rename(tmp_path / "moved")
    if change == "replaced":
        run.mkdir()
    assert process.wait() == 2
    error = process.read()[1]
    assert error.startswith("m1clip: run: the run folder (or its run.jsonl) was removed or renamed")
    assert error.count("\n") == 1
    assert list(run.rglob("*")) == []
    assert run.exists() == (change == "replaced")
    if change == "renamed":
        assert verify(max((tmp_path / "moved" / "checkpoints").glob("step-??????"))) == ""


def test_many_interrupts_print_no_traceback(tmp_path: Path) -> None:
    process = start(tmp_path)
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        time.sleep(0.005)
    assert process.wait() == 130
    assert process.read()[1] in ("", "m1clip: interrupted\n")
