"""Signals in every phase: the step, or the evaluation broken off; never a helper left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_run import assert_same_bits, environment, resume_quietly, run_small, small_arguments, tensors_of

from m1clip.runlog import read_log
from m1clip.training import validation
from m1clip.training.process import Interrupted, Stopped, stop_on_signals


def test_where_nobody_looks_a_signal_leaves_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught, stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_where_somebody_looks_it_waits_and_the_second_has_its_usual_effect() -> None:
    usual = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in a shell's background
    with stop_on_signals() as asked, asked.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.signal == signal.SIGINT
        with pytest.raises(Interrupted), asked.interrupting():
            raise AssertionError("a block that may be broken off is not begun")
        assert signal.getsignal(signal.SIGINT) is usual


def test_a_signal_breaks_off_the_evaluation_and_the_resume_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train.eval_every": 4, "train.save_every": 100, "optim.ema": 0.9, "train.steps": 8}
    run_small(tmp_path / "whole", changes)
    real, calls = validation.encode, []

    def encode(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(validation, "encode", encode)
    run = tmp_path / "run"
    with pytest.raises(Stopped) as stopped:
        run_small(run, changes)
    assert stopped.value.exit_code == 143
    assert [line["kind"] for line in read_log(run)][-2:] == ["checkpoint", "event"]
    assert "eval" not in [line["kind"] for line in read_log(run)]
    resume_quietly(run)

    def evaluations(path: Path) -> list[tuple[int, float]]:
        return [(line["step"], line["mean_recall"]) for line in read_log(path) if line["kind"] == "eval"]

    assert evaluations(run) == evaluations(tmp_path / "whole")
    assert_same_bits(tensors_of(run, 8), tensors_of(tmp_path / "whole", 8))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_helper_outlives_a_run_that_prepares_its_data(tmp_path: Path, number: signal.Signals) -> None:
    words = small_arguments({"data.train_count": 20_000, "model.image_size": 64})
    process = subprocess.Popen(
        [sys.executable, "-m", "m1clip", "train", *words, "--run", "run"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    helpers: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while not helpers and process.poll() is None and time.monotonic() < deadline:
        helpers = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.02)
    if not helpers:
        process.kill()
        pytest.skip("one core: no helpers here")
    time.sleep(0.3)  # so that they have begun
    if number == signal.SIGTERM:
        os.killpg(process.pid, number)  # as a batch system does it: to the helpers too
    else:
        process.kill()
    output, error = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(helpers, timeout=30)
    assert alive == []
    if number == signal.SIGTERM:
        assert (process.returncode, error) == (143, "")
        assert "stopped by signal 15" in output
        assert not (tmp_path / "run").exists(), "nothing had begun: the same command works again"
