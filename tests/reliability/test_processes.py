"""Real training processes whose workers, terminal, output or run folder go away."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from small_run import command, environment, run_small, small_arguments, weights_sha256

from m1clip.data.loader import TrainingSet
from m1clip.errors import UserError
from m1clip.runlog import read_log
from m1clip.training.checkpoint_list import verify

pytestmark = pytest.mark.slow

LONG = {"train.steps": 100_000, "train.save_every": 7, "data.workers": 2}


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def kill_what_a_failed_test_leaves() -> Iterator[None]:
    yield
    while STARTED:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(STARTED.pop().pid, signal.SIGKILL)


def start(folder: Path, changes: dict[str, Any], **options: Any) -> subprocess.Popen[str]:
    words = [*small_arguments({**LONG, **changes}), "--run", "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    process = subprocess.Popen(
        [sys.executable, "-m", "m1clip", "train", *words],
        cwd=folder, env=environment(), text=True, start_new_session=True, **pipes,
    )  # fmt: skip
    STARTED.append(process)
    return process


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "run.jsonl").exists() and "checkpoint" in [line["kind"] for line in read_log(run)]:
            return
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint; exit code {process.poll()}")


def test_run_with_a_killed_data_worker_ends_with_the_same_weights(tmp_path: Path) -> None:
    changes = {"train.steps": 300}
    whole = command("train", *small_arguments({**LONG, **changes}), "--run", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    process = start(tmp_path, changes)
    wait_for_checkpoint(process, tmp_path / "run")
    psutil.Process(process.pid).children()[0].kill()
    output, error = process.communicate(timeout=100)
    assert (process.returncode, error) == (0, "")
    assert "was killed (exit code -9) while preparing step" in output
    assert weights_sha256(tmp_path / "run") == weights_sha256(tmp_path / "whole")


def test_run_whose_workers_die_again_and_again_is_saved_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = TrainingSet.__getitem__

    def deadly(self: TrainingSet, step: int) -> Any:
        if step == 5 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(self, step)

    monkeypatch.setattr(TrainingSet, "__getitem__", deadly)
    with pytest.raises(UserError, match="3 restarts did not help") as caught:
        run_small(tmp_path / "run", {"data.workers": 2, "train.save_every": 100})
    assert "\n" not in str(caught.value)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()  # workers die ahead of the training
    assert f"(step {int(saved.name[5:])} is saved; continue with: " in str(caught.value)
    assert verify(saved) == ""
    assert multiprocessing.active_children() == []


def test_killed_decoder_ends_the_run_with_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, {"data.train_count": 20_000, "model.image_size": 64})
    helpers: list[psutil.Process] = []
    while not helpers and process.poll() is None:
        helpers = psutil.Process(process.pid).children()
        time.sleep(0.02)
    if not helpers:
        pytest.skip("one core: no helpers here")
    time.sleep(0.3)  # so that they have begun
    helpers[0].kill()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.startswith("m1clip: a process that decodes images was killed")
    assert error.count("\n") == 1
    assert psutil.wait_procs(helpers, timeout=30)[1] == []


def test_no_data_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    process = start(tmp_path, {})
    wait_for_checkpoint(process, tmp_path / "run")
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    for worker in workers:
        worker.suspend()  # where they are, so that none notices anything by itself before it goes on
    process.kill()
    process.wait(timeout=60)
    for worker in workers:
        worker.resume()
    assert psutil.wait_procs(workers, timeout=30)[1] == []
    process.communicate(timeout=60)


def test_closed_terminal_saves_the_run(tmp_path: Path) -> None:
    process = start(tmp_path, {})
    wait_for_checkpoint(process, tmp_path / "run")
    os.killpg(process.pid, signal.SIGHUP)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (129, "")
    (stopped,) = [line for line in read_log(tmp_path / "run") if line["kind"] == "event"]
    assert stopped["event"] == "stopped by signal 1"
    assert verify(tmp_path / "run" / "checkpoints" / f"step-{stopped['step']:06d}") == ""
    assert f"stopped at step {stopped['step']}; continue with: m1clip train --resume run" in output


def test_nohup_run_ignores_the_closed_terminal(tmp_path: Path) -> None:
    process = start(tmp_path, {"train.steps": 200}, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for_checkpoint(process, tmp_path / "run")
    os.killpg(process.pid, signal.SIGHUP)
    assert (process.communicate(timeout=100)[1], process.returncode) == ("", 0)


@pytest.mark.parametrize("output", ["| head -1", "> /dev/full", ">&-"])
def test_training_goes_on_without_standard_output(tmp_path: Path, output: str) -> None:
    words = " ".join(small_arguments({"train.eval_every": 2, "data.workers": 2}))
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shlex.quote(sys.executable)} -m m1clip train {words} --run run {output}"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line["kind"] for line in read_log(tmp_path / "run")][-1] == "end"
    assert (tmp_path / "run" / "retrieval.png").is_file()


@pytest.mark.parametrize("change", ["removed", "renamed", "replaced"])
def test_run_stops_when_its_folder_is_gone(tmp_path: Path, change: str) -> None:
    run = tmp_path / "run"
    process = start(tmp_path, {"train.eval_every": 5})
    wait_for_checkpoint(process, run)
    run.rename(tmp_path / "moved")
    if change == "removed":
        shutil.rmtree(tmp_path / "moved")
    if change == "replaced":
        run.mkdir()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.startswith("m1clip: run: the run folder (or its run.jsonl) was removed or renamed")
    assert error.count("\n") == 1
    assert list(run.rglob("*")) == []
    assert run.exists() == (change == "replaced")
    if change == "renamed":
        assert verify(max((tmp_path / "moved" / "checkpoints").glob("step-??????"))) == ""


def test_many_interrupts_print_no_traceback(tmp_path: Path) -> None:
    process = start(tmp_path, {})
    wait_for_checkpoint(process, tmp_path / "run")
    for _ in range(20):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.005)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error in ("", "m1clip: interrupted\n")


def test_stop_does_not_wait_for_a_zombie(tmp_path: Path) -> None:
    process = start(tmp_path, {})
    wait_for_checkpoint(process, tmp_path / "run")
    stopped = command("stop", "run", "--wait", "30", cwd=tmp_path)  # we have not reaped it: a zombie
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert "continue with: m1clip train --resume run" in stopped.stdout
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_unknown_model_in_the_background_leaves_no_folder(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text("import time; time.sleep(3)")  # a busy machine: slow imports
    path = os.pathsep.join([str(slow), environment()["PYTHONPATH"]])
    ended = subprocess.run(
        [sys.executable, "-m", "m1clip", "train", "--model", "tinny", "--background"],
        cwd=tmp_path, env={**environment(), "PYTHONPATH": path}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "unknown model preset 'tinny'" in ended.stderr
    assert not (tmp_path / "runs").exists()
