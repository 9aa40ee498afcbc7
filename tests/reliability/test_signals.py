"""Promise 5: SIGINT and SIGTERM in any phase: the documented code, a checkpoint, no process and no lock left behind."""

from __future__ import annotations

import importlib
import itertools
import math
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from image_sets import make_set
from small_run import TIMEOUT, Command, small_arguments

from m1clip.runlog import read_log
from m1clip.training.checkpoint import checkpoint_folder, saved_steps, verify
from m1clip.training.process import lock_run

CHANGES = {"train.steps": 4000, "train.save_every": 5, "train.eval_every": 5}
# By phase: a function that runs in it, the seconds added to it, and the longest wait before the
# signal.
PHASES: dict[str, tuple[str, float, float]] = {
    "training": ("m1clip.training.schedule.lr_fraction", 0.1, 1.5),
    "evaluation": ("m1clip.evaluation.retrieval.retrieval", 0.3, 0.25),
    "saving": ("m1clip.model.weights._tensor_header", 0.3, 0.25),
    "caching": ("m1clip.data.images.to_square", 0.05, 0.5),
}


def slow_down(function: str, mark: Path, seconds: float, after: Path | None = None) -> None:
    """In the training process: make a function slow, or with inf hold it until MARK.go exists; once `after` exists.

    MARK exists once it was called, MARK.inside while it runs, MARK.handled after the first signal.
    """
    module, _, name = function.rpartition(".")
    original: Callable[..., Any] = getattr(importlib.import_module(module), name)
    inside = mark.with_suffix(".inside")
    go = mark.with_suffix(".go")

    def slow(*args: Any, **named: Any) -> Any:
        if after is not None and not after.exists():
            return original(*args, **named)
        inside.touch()
        mark.touch()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not go.exists():
            time.sleep(0.01)  # short, as in real work: a signal is handled between two
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # restored by the first signal
                mark.with_suffix(".handled").touch()
        try:
            return original(*args, **named)
        finally:
            inside.unlink(missing_ok=True)

    for loaded_module in list(sys.modules.values()):
        if vars(loaded_module).get(name) is original:
            setattr(loaded_module, name, slow)


def start(
    folder: Path,
    phase: str,
    changes: dict[str, Any],
    seconds: float = math.inf,
    after: Path | None = None,
) -> Command:
    """Train with a phase that is slow or held, and wait until it is in it."""
    words = small_arguments({**CHANGES, **changes})
    prepare = partial(slow_down, PHASES[phase][0], folder / "mark", seconds, after)
    process = Command("train", *words, "--out", "run", cwd=folder, prepare=prepare)
    process.wait_until((folder / "mark").exists)
    return process


def send(
    folder: Path,
    phase: str,
    number: int,
    workers: int = 0,
    delay: float | None = None,
    group: bool = False,
) -> tuple[float, bool]:
    """Send a signal inside a phase and check what must hold; returns the seconds to the exit, and if it was inside.

    Without a delay, the phase is held until the signal is sent.
    """
    folder.mkdir(exist_ok=True)
    changes: dict[str, Any] = {"data.workers": workers}
    if phase == "caching":
        make_set(folder / "set", train=80)
        changes |= {
            "data.source": str(folder / "set"),
            "data.cache": "disk",
            "data.cache_dir": str(folder / "cache"),
        }
    process = start(folder, phase, changes, math.inf if delay is None else PHASES[phase][1])
    time.sleep(delay or 0.0)
    children = psutil.Process(process.pid).children(recursive=True)
    inside, begin = (folder / "mark.inside").exists(), time.monotonic()
    process.send_signal(number, group)
    (folder / "mark.go").touch()
    assert process.wait() == 128 + number, process.read()
    seconds = time.monotonic() - begin
    output, error = process.read()
    assert "Traceback" not in error + output
    assert psutil.wait_procs(children, timeout=TIMEOUT)[1] == []
    run = folder / "run"
    # Nothing is trained yet: the folder is removed, so that the same command works again.
    if phase == "caching":
        assert not run.exists()
        return seconds, inside
    assert "continue with: m1clip train --resume run" in output
    newest = max(saved_steps(run))
    assert verify(checkpoint_folder(run, newest)) == ""
    assert [line for line in read_log(run) if line["kind"] == "event"][-1]["step"] == newest
    assert not list(run.rglob("*.partial"))
    with lock_run(run):  # nobody holds it
        return seconds, inside


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "number", "workers"),
    [
        ("caching", signal.SIGTERM, 0),
        ("evaluation", signal.SIGINT, 0),
        ("training", signal.SIGINT, 2),
    ],
)
def test_signal_in_a_phase(
    tmp_path: Path, phase: str, number: signal.Signals, workers: int
) -> None:
    """To the process group, as a terminal or a batch system does it."""
    send(tmp_path, phase, number, workers, group=True)


@pytest.mark.slow
def test_second_signal_exits_at_once_and_keeps_the_checkpoints(tmp_path: Path) -> None:
    saved = checkpoint_folder(tmp_path / "run", 5)
    process = start(tmp_path, "saving", {"data.workers": 0}, after=saved)
    process.send_signal(signal.SIGTERM)
    process.wait_until((tmp_path / "mark.handled").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait() in (-signal.SIGTERM, 128 + signal.SIGTERM)  # the save would never end
    assert saved_steps(tmp_path / "run") == [5]
    assert verify(saved) == ""
    with lock_run(tmp_path / "run"):
        pass


@pytest.mark.long("Signals")
@pytest.mark.parametrize(
    ("number", "workers"), [*itertools.product((signal.SIGINT, signal.SIGTERM), (0, 2))]
)
@pytest.mark.parametrize("phase", PHASES)
def test_three_signals_in_a_phase(
    tmp_path: Path, phase: str, number: signal.Signals, workers: int, counts: dict[str, float]
) -> None:
    """To the process or to its group."""
    draw = random.Random(f"{phase} {number} {workers}")
    ends = [
        send(
            tmp_path / str(signal_number),
            phase,
            number,
            workers,
            draw.uniform(0, PHASES[phase][2]),
            group=draw.random() < 0.5,
        )
        for signal_number in range(3)
    ]
    # The rest of a training step counts too.
    assert any(inside for _, inside in ends) or phase == "training"
    counts |= {
        "signals in 4 phases": len(ends),
        "slowest exit in seconds": max(seconds for seconds, _ in ends),
    }
