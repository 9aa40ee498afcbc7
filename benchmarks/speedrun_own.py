"""One run of `m1clip train` against the clock: set-up and calibration inside it, the test split after it."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1clip.config import load_config
from m1clip.runlog import read_log

RESERVE = 0.03  # of the time asked: `--minutes` is turned into steps by a few timed ones, which may err
STOPPING = 0.005
RECALLS = tuple(f"{way}/recall@{k}" for way in ("text_to_image", "image_to_text") for k in (1, 5, 10))


@dataclass(frozen=True)
class Plan:
    """What all runs of a speedrun share."""

    data: str
    seconds: float
    folder: Path
    device: str
    flags: tuple[str, ...] = ()  # for every run, such as --batch-size 64
    quick: bool = False  # four steps instead of minutes: a smoke test


def command(plan: Plan, run: Path, seed: int, recipe: tuple[str, ...], duration: tuple[str, ...]) -> list[str]:
    """`m1clip train` with a cache of its own, so that decoding is inside the clock each time."""
    words = [sys.executable, "-m", "m1clip", "train", "--data", plan.data, "--run", str(run), "--seed", str(seed)]
    cache = ("--cache-dir", str(run.with_name(run.name + "-cache")))
    return [*words, "--device", plan.device, *cache, *plan.flags, *recipe, *duration]


def setup_seconds(plan: Plan, name: str, recipe: tuple[str, ...]) -> float:
    """From the start of the process to the first step, measured by a run of two steps with an empty cache."""
    run = plan.folder / f"{name}-setup"
    begin = time.time()
    _run(command(plan, run, 0, recipe, ("--steps", "2")), run)
    start = next(record for record in read_log(run) if record["kind"] == "start")
    return float(start["time"]) - begin


def train(plan: Plan, name: str, recipe: tuple[str, ...], seed: int, setup: float) -> dict[str, Any]:
    """One seed: what is left of the time after set-up is asked of `--minutes`; stopped if it is not over by then."""
    run = plan.folder / f"{name}-seed{seed}"
    minutes = (plan.seconds * (1 - RESERVE) - setup) / 60
    if minutes <= 0:
        raise SystemExit(f"set-up alone takes {setup:.0f} s: give more --minutes")
    begin = time.time()
    duration = ("--steps", "4") if plan.quick else ("--minutes", f"{minutes:.4f}")
    # Stopping takes the step under way and a checkpoint.
    deadline = begin + plan.seconds - max(1.0, STOPPING * plan.seconds)
    stopped = _run(command(plan, run, seed, recipe, duration), run, deadline)
    records = list(read_log(run))
    found = summary(records, begin)
    found |= {"recipe": name, "seed": seed, "flags": list(recipe), "stopped": stopped}
    found["captions_per_step"] = load_config(run / "config.toml").data.captions_per_step or 1
    end = [record for record in records if record["kind"] == "end"]
    if end and end[-1]["split"] == "test":
        found["test"] = recalls(end[-1])
    else:
        found["test"] = _score(run, plan.device)
    return found


def summary(records: list[dict[str, Any]], begin: float) -> dict[str, Any]:
    """Seconds, samples and the validation curve, from a run's log and the time its process was started."""
    steps = [record for record in records if record["kind"] == "step"]
    evals = [record for record in records if record["kind"] == "eval" and record.get("split") == "val"]
    starts = [record for record in records if record["kind"] == "start"]
    if not steps or not evals:
        raise SystemExit("the run made no step or no evaluation on a validation split: give more --minutes")
    trained = [record for record in records if record["kind"] in ("step", "eval", "checkpoint")]
    best = max(evals, key=lambda record: record["mean_recall"])
    batch = steps[-1]["images_per_second"] * steps[-1]["step_seconds"]
    return {
        "seconds": trained[-1]["time"] - begin,
        "setup_seconds": starts[0]["time"] - begin,  # the calibration is in it
        "steps": steps[-1]["step"],
        "images_seen": round(steps[-1]["step"] * batch),
        "images_per_second": statistics.median(record["images_per_second"] for record in steps),
        "val": recalls(best),
        "curve": [{"seconds": r["time"] - begin, "recall_at_10": recall_at_10(r)} for r in evals],
    }


def recalls(record: dict[str, Any]) -> dict[str, float]:
    """The six recalls of a record, as shares."""
    return {name: float(record[name]) for name in RECALLS}


def recall_at_10(record: dict[str, Any]) -> float:
    """The mean of both ways."""
    return (float(record["text_to_image/recall@10"]) + float(record["image_to_text/recall@10"])) / 2


def seconds_until(curve: list[dict[str, float]], recall: float) -> float | None:
    """Seconds of the first evaluation on validation that reached the recall."""
    return next((point["seconds"] for point in curve if point["recall_at_10"] >= recall), None)


def _trained(run: Path) -> bool:
    """Whether the last step was made and saved: what follows is the test, outside the clock."""
    try:
        records = list(read_log(run))
    except OSError:
        return False
    total = next((record["steps"] for record in records if record["kind"] == "start"), None)
    return any(record["kind"] == "checkpoint" and record["step"] == total for record in records)


def _run(words: list[str], run: Path, deadline: float = float("inf")) -> bool:
    """Run to the end; at the deadline training is stopped (it saves itself). Gives whether that was needed."""
    stopped = False
    # What m1clip remembers of earlier runs (which device is fastest) would be work done outside the clock.
    fresh = {**os.environ, "XDG_CACHE_HOME": str(run.with_name(run.name + "-home").absolute())}
    with run.with_suffix(".txt").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=fresh)
        while process.poll() is None:
            time.sleep(0.2)
            if time.time() > deadline:
                deadline = float("inf")
                if not _trained(run):
                    process.send_signal(signal.SIGINT)
                    stopped = True
        if process.returncode and not stopped:
            output.seek(0)
            raise SystemExit(f"{' '.join(words)}\nended with {process.returncode}:\n{output.read()[-3000:]}")
    return stopped


def _score(run: Path, device: str) -> dict[str, float]:
    """The test figures of a run that was stopped at the deadline, by the best model it had saved."""
    from m1clip.evaluation.evaluate import open_split

    evaluator = open_split(run, device_name=device)
    return recalls(dict(evaluator.scores(evaluator.encode())))
