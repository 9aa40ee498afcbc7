"""Training in the background: started, listed, stopped and resumed, each by its command."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_run import TIMEOUT, command, small_arguments

from m1clip.io import read_owner
from m1clip.runlog import read_log

LONG: dict[str, Any] = {
    "train.steps": 1_000_000,
    "train.eval_every": 0,
    "train.save_every": 1_000_000,
}


def state(folder: Path) -> dict[str, Any]:
    listed = command("runs", ".", "--json", cwd=folder)
    assert listed.returncode == 0, listed.stderr
    (row,) = json.loads(listed.stdout)
    return dict(row)


def wait_until(true: Any, seconds: float = TIMEOUT) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


@pytest.mark.slow
def test_background_start_list_stop_resume(tmp_path: Path) -> None:
    started = command("train", *small_arguments(LONG), "--out", "run", "--background", cwd=tmp_path)
    assert started.returncode == 0, started.stderr
    assert started.stdout.splitlines()[1:] == [
        "watch      m1clip monitor run",
        "stop       m1clip stop run",
    ]
    run = tmp_path / "run"
    process = psutil.Process(int(started.stdout.split("process ")[1].split(",")[0]))
    try:
        wait_until(
            lambda: (
                (run / "run.jsonl").is_file() and any(r["kind"] == "step" for r in read_log(run))
            )
        )
        owner = read_owner(run)
        assert owner is not None
        assert owner.process() == process
        assert process.terminal() is None  # of no terminal, and so not ended with one
        row = state(tmp_path)
        assert (row["state"], row["pid"], row["steps"]) == (
            "running",
            owner.pid,
            LONG["train.steps"],
        )
        again = command("train", "--resume", "run", cwd=tmp_path)
        assert again.returncode == 2
        assert f"process {owner.pid} is training in this folder" in again.stderr

        stopped = command("stop", "run", cwd=tmp_path)
        assert stopped.returncode == 0, stopped.stderr
        assert "continue with: m1clip train --resume run" in stopped.stdout
        assert not psutil.pid_exists(owner.pid) or owner.process() is None
        row = state(tmp_path)
        assert row["state"] == "stopped"
        assert (run / "checkpoints" / f"step-{row['step']:06d}" / "manifest.json").is_file()
        assert f"stopped at step {row['step']:,}" in (run / "train.log").read_text()
        refused = command("stop", "run", cwd=tmp_path)
        assert "nothing to stop: it stopped at step" in refused.stderr
    finally:
        if process.is_running():
            process.kill()


@pytest.mark.slow
def test_background_error_is_reported_and_leaves_no_folder(tmp_path: Path) -> None:
    words = small_arguments({"data.source": "nowhere"})
    refused = command("train", *words, "--out", "run", "--background", cwd=tmp_path)
    if refused.returncode:
        assert "nowhere" in refused.stderr
        assert refused.stderr.count("\n") == 1
        assert not (tmp_path / "run").exists()
    else:  # a slow machine needs longer than the first look: then the run's own output has it
        wait_until(lambda: "nowhere" in (tmp_path / "run" / "train.log").read_text())
    missing = command("train", "--resume", "none", "--background", cwd=tmp_path)
    assert missing.stderr == "m1clip: none: no such file or folder\n"
