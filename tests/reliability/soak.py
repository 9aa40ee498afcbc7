"""An hour beside a run: training with evaluation and checkpoints, a terminal monitor and a dashboard, all watched.

    .venv/bin/python tests/reliability/soak.py --minutes 60

It samples memory, file descriptors, threads and disk of each process, tests their slopes after the warm-up (a quarter
of the time), and that the run's log tells of every step. Exit code 0: all flat and complete.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from drift import Limit, judge  # noqa: E402
from reliability_results import UNFINISHED, record  # noqa: E402
from small_run import small_arguments  # noqa: E402

MIB = 2**20
LOG_EVERY, EVAL_EVERY, SAVE_EVERY = 10, 400, 200
# Growth over the window after the warm-up that is still called flat. Python's and malloc's heaps move by some MiB.
LIMITS = {
    "rss": Limit(share=0.03, amount=12 * MIB),
    "fds": Limit(share=0.0, amount=1.0),
    "threads": Limit(share=0.0, amount=1.0),
    "disk": Limit(share=0.05, amount=1 * MIB),
}
LOG_BYTES_PER_STEP = 200  # the log itself must grow, by a bounded number of bytes a step: measured about 60


def main() -> None:
    """Parse the words, soak, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=5, help="seconds between two samples")
    parser.add_argument("--folder", type=Path, help="where the run is made; default: a temporary folder, removed")
    parser.add_argument("--json", type=Path, help="write the samples there")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--record", type=Path, metavar="FILE", help="put the result into this file of rows")
    words = parser.parse_args()
    place = words.folder or Path(tempfile.mkdtemp(prefix="m1clip-soak-"))
    place.mkdir(parents=True, exist_ok=True)
    if words.record:
        record("soak", {}, UNFINISHED, words.minutes >= 60, words.record)
    try:
        told = soak(place, words.minutes * 60, words.every, words.workers)
    finally:
        if words.folder is None:
            shutil.rmtree(place, ignore_errors=True)
    if words.json:
        words.json.parent.mkdir(parents=True, exist_ok=True)
        words.json.write_text(json.dumps({**told, "samples": thinned(told["samples"])}) + "\n")
    for line in summary(told):
        print(line)
    if words.record:
        figures = {
            name: {figure: each["growth"] for figure, each in found.items() if "growth" in each}
            for name, found in told["verdicts"].items()
        }
        record("soak", {"minutes": words.minutes, "steps": told["log"]["last_step"], "growth": figures},
               "passed" if told["ok"] else "FAILED", words.minutes >= 60, words.record)  # fmt: skip
    sys.exit(0 if told["ok"] else 1)


def soak(folder: Path, seconds: float, every: float, workers: int = 1) -> dict[str, Any]:
    """Run it all for so long; what was measured, and the verdicts."""
    run = folder / "run"
    changes = {
        "train.steps": 10_000_000, "train.eval_every": EVAL_EVERY,
        "train.save_every": SAVE_EVERY, "data.workers": workers, "data.train_count": 512, "optim.warmup": 100,
    }  # fmt: skip
    trainer = start("train", *small_arguments(changes), "--run", str(run), output=folder / "train.txt")
    watchers: dict[str, psutil.Process] = {}
    samples: dict[str, list[dict[str, float]]] = {}
    polls = {"pages": 0, "bytes": 0, "screen_bytes": 0}
    ended = threading.Event()
    try:
        wait_for(lambda: (run / "run.jsonl").is_file() and (run / "run.jsonl").stat().st_size > 2000, trainer)
        with terminal(run, ended, polls) as monitor, dashboard(run, folder, ended, polls) as page:
            watchers = {"train": psutil.Process(trainer.pid), "monitor": monitor, "dashboard": page}
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                at = time.monotonic() - began
                for name, process in watchers.items():
                    samples.setdefault(name, []).append({"t": round(at, 2), **look(process)})
                for number, worker in enumerate(psutil.Process(trainer.pid).children(recursive=True)):
                    samples.setdefault(f"worker-{number}", []).append({"t": round(at, 2), **look(worker)})
                samples.setdefault("folder", []).append({"t": round(at, 2), **disk(run)})
                time.sleep(every)
            alive = {name: process.is_running() for name, process in watchers.items()}
            trainer.send_signal(signal.SIGTERM)
            code = trainer.wait(timeout=120)
            ended.set()
    finally:
        ended.set()
        if trainer.poll() is None:
            trainer.kill()
    log = complete(run)
    verdicts = weigh(samples, seconds / 4)
    ok = (
        code == 128 + signal.SIGTERM
        and all(alive.values())
        and not log["missing"]
        and log["bytes_per_step"] < LOG_BYTES_PER_STEP
        and polls["pages"] > 0
        and polls["screen_bytes"] > 0
        and all(found["ok"] for each in verdicts.values() for found in each.values())
    )
    machine = f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"ok": ok, "minutes": seconds / 60, "machine": machine, "exit_code": code, "alive": alive, "log": log,
            "polls": polls, "verdicts": verdicts, "limits": {n: vars(v) for n, v in LIMITS.items()},
            "samples": samples}  # fmt: skip


def start(*words: str, output: Path) -> subprocess.Popen[bytes]:
    """A command of ours as a process of its own."""
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "m1clip", *words], stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )


def wait_for(true: Any, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Until it holds; an error when the process ends first."""
    deadline = time.monotonic() + seconds
    while not true():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"did not begin (exit code {process.poll()})")
        time.sleep(0.05)


@contextlib.contextmanager
def terminal(run: Path, ended: threading.Event, polls: dict[str, int]) -> Iterator[psutil.Process]:
    """`m1clip monitor` in a pseudo-terminal whose screen someone reads and whose keys someone presses."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "m1clip", "monitor", str(run)],
        stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm-256color"}, start_new_session=True,
    )  # fmt: skip
    os.close(slave)

    def reader() -> None:
        pressed = time.monotonic()
        with contextlib.suppress(OSError):
            while not ended.is_set():
                polls["screen_bytes"] += len(os.read(master, 65536))
                if time.monotonic() - pressed > 3:
                    os.write(master, b"m")
                    pressed = time.monotonic()

    threading.Thread(target=reader, daemon=True).start()
    try:
        yield psutil.Process(process.pid)
    finally:
        with contextlib.suppress(OSError):
            os.write(master, b"q")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)


@contextlib.contextmanager
def dashboard(run: Path, folder: Path, ended: threading.Event, polls: dict[str, int]) -> Iterator[psutil.Process]:
    """`m1clip monitor --web`, whose page is opened, followed for a while and reloaded, over and over."""
    said = folder / "dashboard.txt"
    process = start("monitor", str(run), "--web", "--port", "0", "--no-browser", output=said)
    wait_for(lambda: re.search(r"http://\S+/", said.read_text()), process)
    found = re.search(r"http://\S+/", said.read_text())
    assert found
    url = found[0]

    def visit() -> None:
        key, cursor = "none", "new"
        while not ended.is_set():
            with contextlib.suppress(OSError, ValueError):
                with urllib.request.urlopen(f"{url}api/update?{key}={cursor}", timeout=10) as answer:
                    body = answer.read()
                found = json.loads(body)
                key = found["runs"][0]["id"]
                cursor = found["rows"][0]["cursor"] if found["rows"] and polls["pages"] % 10 else "new"  # reloaded
                polls["bytes"] += len(body)
                for step in found["runs"][0]["snapshots"][-1:]:
                    with urllib.request.urlopen(f"{url}api/snapshot?run={key}&index={step}", timeout=10) as answer:
                        polls["bytes"] += len(answer.read())
                polls["pages"] += 1
            ended.wait(0.5)

    threading.Thread(target=visit, daemon=True).start()
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        if process.poll() is None:
            process.kill()
            process.wait()


def look(process: psutil.Process) -> dict[str, float]:
    """Memory, open files and threads of one process; nothing where it has just ended."""
    with contextlib.suppress(psutil.Error), process.oneshot():
        return {"rss": process.memory_info().rss, "fds": process.num_fds(), "threads": process.num_threads()}
    return {}


def disk(run: Path) -> dict[str, float]:
    """Bytes of the run's folder without its log, and of the log."""
    total = 0
    for path in run.rglob("*"):
        with contextlib.suppress(OSError):  # a checkpoint that is being replaced
            total += path.stat().st_size if path.is_file() and path.name != "run.jsonl" else 0
    return {"disk": total, "log": (run / "run.jsonl").stat().st_size}


def complete(run: Path) -> dict[str, Any]:
    """Which steps the log should tell of and does not."""
    records = [json.loads(line) for line in (run / "run.jsonl").read_bytes().splitlines()]
    steps = [record["step"] for record in records if record["kind"] == "step"]
    last = max(record.get("step", 0) for record in records)
    counts = {"step": LOG_EVERY, "eval": EVAL_EVERY, "checkpoint": SAVE_EVERY}
    missing = {}
    for kind, often in counts.items():
        there = {record["step"] for record in records if record["kind"] == kind}
        gone = [step for step in range(often, last + 1, often) if step not in there]
        if kind == "eval" and last in gone and _still_due(run, last):
            gone.remove(last)
        if gone:
            missing[kind] = gone[:10]
    size = (run / "run.jsonl").stat().st_size
    return {"lines": len(records), "steps": len(steps), "last_step": last, "missing": missing,
            "twice": len(steps) - len(set(steps)), "bytes_per_step": size / max(last, 1)}  # fmt: skip


def _still_due(run: Path, step: int) -> bool:
    """Whether the checkpoint of a step says that its evaluation was broken off: a resume makes it first."""
    state = run / "checkpoints" / f"step-{step:06d}" / "state.json"
    return state.is_file() and bool(json.loads(state.read_text())["evaluation_due"])


def weigh(samples: dict[str, list[dict[str, float]]], warm_up: float) -> dict[str, dict[str, Any]]:
    """The verdict on each figure of each process, and on the folder."""
    found: dict[str, dict[str, Any]] = {}
    for name, rows in samples.items():
        for figure, limit in LIMITS.items():
            points = [(row["t"], row[figure]) for row in rows if figure in row]
            if points:
                found.setdefault(name, {})[figure] = judge(points, warm_up, limit)
    return found


def thinned(samples: dict[str, list[dict[str, float]]], most: int = 120) -> dict[str, list[dict[str, float]]]:
    """Few enough samples for a file that is kept; the verdicts came from all."""
    return {name: rows[:: max(1, len(rows) // most)] for name, rows in samples.items()}


def summary(told: dict[str, Any]) -> list[str]:
    """The verdicts in a few lines."""
    lines = [f"soak       {told['minutes']:.1f} minutes on {told['machine']}"]
    for name, figures in told["verdicts"].items():
        for figure, found in figures.items():
            unit = MIB if figure in ("rss", "disk") else 1
            if "growth" not in found:
                lines.append(f"{name:10} {figure:8} {found['reason']}")
                continue
            growth, verdict = found["growth"] / unit, "ok" if found["ok"] else "GROWS"
            lines.append(
                f"{name:10} {figure:8} median {found['median'] / unit:9.1f}  growth {growth:+8.2f} "
                f"in {found['seconds']:.0f} s (allowed {found['allowed'] / unit:.2f})  {verdict}"
            )
    log = told["log"]
    lines.append(f"log        {log['last_step']:,} steps, {log['lines']:,} lines, missing {log['missing'] or 'none'}")
    lines.append(f"verdict    {'flat and complete' if told['ok'] else 'NOT flat or NOT complete'}")
    return lines


if __name__ == "__main__":
    main()
