"""Real processes: killed, interrupted, repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_run import command, environment, small_arguments, weights_sha256

from m1clip.runlog import read_log

pytestmark = pytest.mark.slow

LONG = {"train.steps": 60, "train.save_every": 7, "data.workers": 2, "model.dropout": 0.1}


def start(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "m1clip", "train", *words],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path) -> int:
    """The step of the first checkpoint that the run's log tells of."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "run.jsonl").exists():
            steps = [line["step"] for line in read_log(run) if line["kind"] == "checkpoint"]
            if steps:
                return steps[-1]
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint was written; {process.communicate(timeout=10)}")


def kinds(run: Path) -> list[Any]:
    return [line["kind"] for line in read_log(run)]


def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    whole = command("train", *small_arguments(LONG), "--run", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr

    run = tmp_path / "killed"
    process = start(tmp_path, [*small_arguments(LONG), "--run", "killed"])
    wait_for_checkpoint(process, run)
    process.kill()
    process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "end" not in kinds(run), "the run was over before it could be killed"

    resumed = command("train", "--resume", "killed", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    began_again = [line["step"] for line in read_log(run) if line["kind"] == "start"][1]
    assert 0 < began_again < 60
    assert weights_sha256(run) == weights_sha256(tmp_path / "whole")


@pytest.mark.parametrize(("workers", "number"), [(0, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_signal_saves_the_step_and_a_resume_goes_on_from_it(
    tmp_path: Path, workers: int, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    changes = {**LONG, "train.steps": 400, "data.workers": workers}
    process = start(tmp_path, [*small_arguments(changes), "--run", "run"])
    wait_for_checkpoint(process, run)
    os.killpg(process.pid, number)  # as a terminal does it: to the workers too
    output, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert error == ""
    (stopped,) = [line for line in read_log(run) if line["kind"] == "event"]
    assert stopped["event"] == f"stopped by signal {int(number)}"
    assert 7 <= stopped["step"] < 400
    assert (run / "checkpoints" / f"step-{stopped['step']:06d}" / "manifest.json").exists()
    said = f"stopped at step {stopped['step']}; continue with: m1clip train --resume run"
    assert said in output.splitlines()


def test_the_command_line_repeats_a_run_from_its_config(tmp_path: Path) -> None:
    first = command("train", *small_arguments(), "--run", "first", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    again = command("train", "--config", "first/config.toml", "--run", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert weights_sha256(tmp_path / "first") == weights_sha256(tmp_path / "again")
    assert "\x1b[" not in first.stdout  # clean where there is no terminal
    assert "first/retrieval.png" in first.stdout

    refused = command("train", *small_arguments(), "--run", "first", cwd=tmp_path)
    assert refused.returncode == 2
    assert (
        refused.stderr
        == "m1clip: first: already contains a run; continue it with --resume first, or choose another --run\n"
    )

    scored = command("eval", "first", "--split", "val", "--device", "cpu", cwd=tmp_path)
    assert scored.returncode == 0, scored.stderr
    assert "mean recall" in scored.stdout
