"""Promise 5: SIGINT and SIGTERM in any phase: a documented code, a checkpoint, no orphan, no lock held, in time."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from real_process import environment
from reliability_results import recorded
from small_run import small_arguments

from m1clip.runlog import read_log
from m1clip.training.checkpoint_list import checkpoint_folder, saved_steps, verify
from m1clip.training.process import lock_run

sys.path.append(str(Path(__file__).parents[1] / "data"))
from image_sets import make_set

SCRIPT = Path(__file__).with_name("phase_train.py")
DEADLINE = 40.0  # seconds, on a busy machine: a step, an evaluation's batch or a save takes far less
CHANGES = {"train.steps": 4000, "train.save_every": 5, "train.eval_every": 5}


def start(folder: Path, phase: str, nap: float, changes: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), phase, str(folder / "mark"), str(nap), "train",
         *small_arguments({**CHANGES, **changes}), "--run", "run"],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def wait_for_mark(process: subprocess.Popen[str], mark: Path) -> None:
    deadline = time.monotonic() + 120
    while not mark.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def signalled(
    folder: Path, phase: str, number: signal.Signals, workers: int, nap: float, delay: float, group: bool
) -> tuple[float, bool]:
    """Send a signal inside a phase and check all that must hold afterwards.

    Gives the seconds until the end, and whether the phase was really on when it was sent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    changes: dict[str, Any] = {"data.workers": workers}
    if phase == "caching":
        make_set(folder / "set", train=80)
        changes |= {"data.source": str(folder / "set"), "data.cache": "disk", "data.cache_dir": str(folder / "cache")}
    process = start(folder, phase, nap, changes)
    wait_for_mark(process, folder / "mark")
    time.sleep(delay)
    children = psutil.Process(process.pid).children(recursive=True)
    inside, begin = (folder / "mark.inside").exists(), time.monotonic()
    (os.killpg if group else os.kill)(process.pid, number)
    output, error = process.communicate(timeout=DEADLINE)
    seconds = time.monotonic() - begin
    assert "Traceback" not in error + output
    _, alive = psutil.wait_procs(children, timeout=DEADLINE)
    assert not alive, "an orphan"
    run = folder / "run"
    if phase == "caching":
        # Nothing is trained yet: the folder is given back, so that the same command works again.
        assert process.returncode == 128 + number
        assert not (run / "config.toml").exists()
        assert not run.exists()
        return seconds, inside
    assert process.returncode == 128 + number, (output, error)
    assert "continue with: m1clip train --resume run" in output
    newest = max(saved_steps(run))
    assert verify(checkpoint_folder(run, newest)) == ""
    stopped = [line for line in read_log(run) if line["kind"] == "event"][-1]
    assert stopped["step"] == newest, "the last step is in the checkpoint"
    assert not list(run.rglob("*.partial"))
    with lock_run(run):  # nobody holds it any more
        pass
    return seconds, inside


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "number"), [("caching", signal.SIGTERM), ("evaluating", signal.SIGINT)])
def test_a_signal_inside_a_phase(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    nap = 0.02 if phase == "caching" else 0.2  # a chunk of 64 images is finished first
    signalled(tmp_path, phase, number, workers=0, nap=nap, delay=0.02, group=False)


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_loses_no_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path, "saving", 30.0, {"data.workers": 0})
    wait_for_mark(process, tmp_path / "mark")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)  # far less than the save would take
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert all(verify(checkpoint_folder(tmp_path / "run", step)) == "" for step in saved_steps(tmp_path / "run"))
    with lock_run(tmp_path / "run"):
        pass


# By phase: seconds that it dwells each time, and the most that the signal waits after it was entered.
PHASES = {"stepping": (0.1, 1.5), "evaluating": (0.3, 0.25), "saving": (0.3, 0.25), "caching": (0.05, 0.5)}
KINDS = tuple(itertools.product((signal.SIGINT, signal.SIGTERM), (0, 2)))  # a part each
EACH = 3


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, len(KINDS) + 1))
@pytest.mark.parametrize("phase", PHASES)
def test_many_signals(tmp_path: Path, phase: str, part: int) -> None:
    """Twelve in each phase: both signals, without and with workers, to the process or to its whole group."""
    kind, workers = KINDS[part - 1]
    with recorded(f"signals, {phase}", part, len(KINDS)) as counts:
        draw = random.Random(f"{phase} {part}")
        nap, most = PHASES[phase]
        ends = []
        for number in range(EACH):
            folder, group = tmp_path / str(number), (number + part) % 2 == 0
            ends.append(signalled(folder, phase, kind, workers, nap, draw.uniform(0, most), group))
        inside = sum(inside for _, inside in ends)
        assert inside or phase == "stepping", "else this is no test of the phase; a run steps between two steps too"
        counts |= {
            "signals": EACH,
            "sent inside the phase": inside,
            "by kind": {f"{kind.name}, {workers} workers": EACH},
            "slowest exit in seconds": round(max(seconds for seconds, _ in ends), 2),
        }
