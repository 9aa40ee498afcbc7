"""Promise 12: while a run trains and is monitored, nothing grows, and no line of its log is missing."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_run import Command, environment, small_arguments

from m1clip.runlog import read_log

MIB = 2**20
EVERY = {"step": 10, "eval": 400, "checkpoint": 200}
# Growth after the warmup that counts as flat; the heaps of Python and malloc move by some MiB.
ALLOWED = {"rss": 12 * MIB, "fds": 1, "threads": 1, "disk": MIB}
# By process and figure: (seconds, value).
Samples = dict[tuple[str, str], list[tuple[float, float]]]


def soak(folder: Path, seconds: float, every: float) -> tuple[Path, Samples]:
    """Train for some time with a monitor in a terminal and a web page that is visited.

    Returns run and samples.
    """
    run, samples, ended = folder / "run", defaultdict[Any, Any](list), threading.Event()
    changes = {
        "train.steps": 10_000_000,
        "data.workers": 1,
        "data.synthetic_images": 512,
        "optim.warmup": 100,
    }
    changes |= {"train.eval_every": EVERY["eval"], "train.save_every": EVERY["checkpoint"]}
    trainer = Command("train", *small_arguments(changes), "--out", "run", cwd=folder)
    # The first evaluation starts the threads of numpy's matmuls, and the first save opens its
    # files.
    trainer.wait_until(lambda: has_records(run, "eval", "checkpoint"))
    page = Command("monitor", "run", "--web", "--port", "0", "--no-browser", cwd=folder)
    page.wait_until(lambda: re.search(r"http://\S+/", page.read()[0]))
    url = re.search(r"http://\S+/", page.read()[0])[0]
    with terminal(run, ended) as (monitor, screen), repeated(lambda: visit(url), ended) as visits:
        processes = {"train": trainer.pid, "monitor": monitor, "web page": page.pid}
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < seconds:
            for name, pid in processes.items():
                process = psutil.Process(pid)
                samples[name, "rss"].append((now, process.memory_info().rss))
                samples[name, "fds"].append((now, process.num_fds()))
                samples[name, "threads"].append((now, process.num_threads()))
            samples["folder", "disk"].append((now, folder_bytes(run)))
            time.sleep(every)
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait() == 143
        page.send_signal(signal.SIGINT)
        assert page.wait() in (0, 130)
    assert sum(visits) > 0
    assert sum(screen) > 0
    return run, samples


def has_records(run: Path, *kinds: str) -> bool:
    """Whether the log of a run has a record of each kind."""
    if not (run / "run.jsonl").is_file():
        return False
    return set(kinds) <= {record["kind"] for record in read_log(run)}


@contextlib.contextmanager
def repeated(work: Callable[[], int], ended: threading.Event) -> Iterator[list[int]]:
    """Do something in a thread, again and again; gives its results."""
    results: list[int] = []

    def loop() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                results.append(work())

    threading.Thread(target=loop, daemon=True).start()
    try:
        yield results
    finally:
        ended.set()


@contextlib.contextmanager
def terminal(run: Path, ended: threading.Event) -> Iterator[tuple[int, list[int]]]:
    """`m1clip monitor` in a pseudo-terminal that is read."""
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "m1clip", "monitor", str(run)]
    env = {**environment(), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
    )
    os.close(slave)

    try:
        with repeated(lambda: len(os.read(master, 65536)), ended) as screen:
            yield process.pid, screen
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def visit(url: str) -> int:
    """Open the page, follow the run for five polls, look at its last snapshot.

    Returns the bytes read.
    """
    key, cursor, read = "none", "new", 0
    for _ in range(5):
        with urllib.request.urlopen(f"{url}api/update?{key}={cursor}", timeout=30) as answer:
            text = answer.read()
        values = json.loads(text)
        key = values["runs"][0]["id"]
        cursor = values["rows"][0]["cursor"] if values["rows"] else "new"
        read += len(text)
        time.sleep(0.2)
    for step in values["runs"][0]["snapshots"][-1:]:
        with urllib.request.urlopen(
            f"{url}api/snapshot?run={key}&index={step}", timeout=30
        ) as answer:
            read += len(answer.read())
    return read


def folder_bytes(run: Path) -> int:
    """Without the log, which must grow."""
    total = 0
    for path in run.rglob("*"):
        with contextlib.suppress(OSError):  # a checkpoint that is being replaced
            total += path.stat().st_size if path.is_file() and path.name != "run.jsonl" else 0
    return total


def growth(samples: list[tuple[float, float]]) -> float:
    """After the first quarter: the median slope between all pairs of samples (Theil-Sen), times the seconds."""
    window = samples[len(samples) // 4 :]
    window = window[:: max(1, len(window) // 400)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(window) for b in window[i + 1 :]]
    return statistics.median(slopes) * (window[-1][0] - window[0][0])


def missing(run: Path) -> list[tuple[str, int]]:
    """Steps, evaluations and checkpoints that the log should contain and does not."""
    records = {(line["kind"], line.get("step")) for line in read_log(run)}
    last = max(step for _, step in records if step)
    return [
        (kind, step)
        for kind, every in EVERY.items()
        for step in range(every, last + 1, every)
        if (kind, step) not in records
        and not (kind == "eval" and step == last)  # the last one may have been interrupted
    ]


def test_growth_is_found_under_noise_and_a_single_jump_is_ignored() -> None:
    flat = [(float(t), 100.0 + (-1) ** t) for t in range(60)]
    assert abs(growth(flat)) < 2
    assert abs(growth([(t, value + (500 if t == 30 else 0)) for t, value in flat])) < 2
    assert growth([(t, value + 0.5 * t) for t, value in flat]) == pytest.approx(22, abs=2)


@pytest.mark.slow
def test_short_soak_leaves_no_files_or_threads_open(tmp_path: Path) -> None:
    run, samples = soak(tmp_path, seconds=3, every=0.1)
    assert missing(run) == []
    for (name, figure), values in samples.items():  # memory is still warming up
        assert figure not in ("fds", "threads") or growth(values) <= ALLOWED[figure], name


@pytest.mark.long("Soak")
def test_soak_for_an_hour(tmp_path: Path, counts: dict[str, float]) -> None:
    minutes = float(os.environ.get("SOAK_MINUTES", "60"))
    run, samples = soak(tmp_path, seconds=60 * minutes, every=5)
    assert missing(run) == []
    steps = max(line.get("step", 0) for line in read_log(run))
    assert (run / "run.jsonl").stat().st_size / steps < 200
    for (name, figure), values in samples.items():
        assert growth(values) <= max(
            ALLOWED[figure], 0.03 * values[-1][1] * (figure in ("rss", "disk"))
        ), (name, figure)
        if figure == "rss":
            counts[f"MB of growth ({name})"] = round(growth(values) / 1e6, 1)
    counts |= {"minutes": minutes, "steps": steps}
