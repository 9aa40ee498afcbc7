"""Recall of m1clip from random weights after more and more steps, by the rules for long runs.

    python benchmarks/more_time.py DATA --json OUT/more_time.json --seconds 330 --processes 10
    python benchmarks/more_time.py --json docs/results/more_time.json --table    # for docs/recipe.md

Each run is `m1clip train --recipe scratch --batch-size 64 --steps N`, several at a time on one GPU,
so augmentation and CutMix are what m1clip/training/budget.py decides for its number of epochs. 115
steps are a minute of two CPU cores (docs/recipe.md). The rows of the table `JOBS` come first that
matter most; a run that would not end in time is not started. Scores are of the validation split;
--test FILE also scores the test split, with the model that is best on validation, into a file of
its own: to be read when nothing is left to choose.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from recipe_study import start_mps
from sides import machine, write
from speedrun import write_splits

import m1clip
from m1clip.runlog import read_log
from m1clip.training.spec import read_spec

BATCH = 64
ALL_IMAGES = 6_000
RECALLS = ("text_to_image/recall@10", "image_to_text/recall@10")
STEPS_BY_MINUTES = {2: 230, 5: 575, 10: 1150, 15: 1725, 20: 2300, 30: 3450, 60: 6900}
FIRST_STEP_SECONDS = 45.0  # imports, checks and the first evaluation
GUESSED_STEP_SECONDS = 0.02  # when all processes run, until one has ended
MARGIN = 1.1


class Job(NamedTuple):
    """A run: its length in minutes of two CPU cores, its images (0: all), models side by side, and
    other options.
    """

    minutes: int
    seed: int = 0
    images: int = 0
    options: tuple[str, ...] = ()
    members: int = 1

    @property
    def steps(self) -> int:
        return STEPS_BY_MINUTES[self.minutes] // self.members

    @property
    def name(self) -> str:
        words = [f"{self.minutes}min", f"{self.images or 'all'}", f"s{self.seed}", *self.options]
        words += [f"x{self.members}"] if self.members > 1 else []
        return "-".join(word.strip("-").replace(".", "") for word in words)


def mix(part: float) -> tuple[str, ...]:
    return ("--cutmix", f"{part:g}")


CONSTANT = ("--mild-after", "0")
HARD = ("--label-smoothing", "0")
NEITHER = (*CONSTANT, *HARD)
LADDER = (60, 30, 20, 15, 10, 5)
JOBS = {
    "rule": [Job(minutes, seed) for seed in (0, 1) for minutes in LADDER],
    "third": [Job(minutes, 2) for minutes in LADDER],
    "halves": [Job(minutes, 0, 3000) for minutes in (60, 30, 15, 10, 5)],
    "halves again": [Job(minutes, 1, 3000) for minutes in (60, 30, 15, 10, 5)],
    "choice": [
        *(Job(60, seed, 0, mix(1)) for seed in (0, 1)),
        *(Job(minutes, seed, 0, mix(0.5)) for seed in (0, 1) for minutes in (20, 15)),
        *(Job(20, seed, 0, mix(0)) for seed in (0, 1)),
        *(Job(30, seed, 0, mix(1)) for seed in (0, 1)),
    ],
    # Label smoothing and milder augmentation at the end (both: the default), alone and without.
    "changes": [
        *(Job(60, seed, members=2) for seed in (0, 1, 2)),
        Job(60, 0, 0, NEITHER, members=2),
        *(Job(30, seed) for seed in (0, 1)),
        *(Job(10, seed) for seed in (0, 1, 2, 3)),
        *(Job(10, seed, 0, CONSTANT) for seed in (0, 1, 2)),
        *(Job(10, seed, 0, NEITHER) for seed in (0, 1, 2)),
        *(Job(10, seed, 0, HARD) for seed in (0, 1, 2)),
        *(Job(minutes, seed) for seed in (0, 1) for minutes in (5, 2)),
    ],
    "test": [
        *(Job(60, seed, members=2) for seed in (0, 1, 2)),
        Job(30),
        *(Job(10, seed) for seed in (0, 1, 2)),
    ],
    # As the rule decides with --minutes: models side by side, and 37 epochs at most.
    "members": [
        *(Job(60, seed, members=2) for seed in (0, 1, 2)),
        Job(60, 0, 3000, members=4),
        *(Job(30, seed) for seed in (0, 1, 2)),
        Job(30, 0, 3000, members=3),
        Job(60, 0, 1500, ("--steps", "851"), members=4),
        Job(20, 0, 3000, members=2),
        *(Job(10, seed) for seed in (0, 1, 2)),
        Job(10, 0, 3000),
        Job(10, 0, 1500, members=2),
        *(Job(5, 0, images) for images in (0, 3000, 1500)),
        *(Job(2, 0, images) for images in (0, 3000, 1500)),
    ],
}


class Study:
    """Runs jobs, several at a time, and writes what they found after each."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        self.deadline = time.time() + options.seconds
        self.step_seconds = GUESSED_STEP_SECONDS
        self.runs: list[dict[str, Any]] = []
        self.tests: dict[str, float] = {}  # by name of the run
        write_splits(str(options.data), scratch)

    def table_of(self, job: Job) -> Path:
        """The table of a run: its training images, validation, and test only where it is scored."""
        path = self.scratch / f"{job.name}.jsonl"
        lines = (self.scratch / "train.jsonl").read_text(encoding="utf-8").splitlines(True)
        if job.images:
            lines = random.Random(job.seed).sample(lines, job.images)
        for split in ("val", "test") if self.options.test is not None else ("val",):
            lines += (self.scratch / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(True)
        path.write_text("".join(lines), encoding="utf-8")
        return path

    def run(self, job: Job) -> None:
        """One run, if it would end in time."""
        expected = FIRST_STEP_SECONDS + job.steps * job.members * self.step_seconds
        if time.time() + MARGIN * expected > self.deadline:
            print(f"{job.name}: skipped, would take {expected:.0f} s", flush=True)
            return
        out = self.scratch / job.name
        words = [sys.executable, "-m", "m1clip", "train", "--data", str(self.table_of(job))]
        words += ["--recipe", "scratch", "--device", self.options.device, "--workers", "0"]
        words += ["--batch-size", str(BATCH), "--seed", str(job.seed)]
        words += [] if "--steps" in job.options else ["--steps", str(job.steps)]
        words += ["--members", str(job.members)]
        words += ["--evaluations", "4", "--out", str(out), "--cache-dir", str(self.scratch / "c")]
        begin = time.time()
        done = subprocess.run(
            [*words, *job.options, *self.options.options],
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.time() - begin
        if done.returncode:
            print(f"{job.name}: {done.stdout[-800:]}{done.stderr[-800:]}", flush=True)
            return
        self.step_seconds = max(0.001, (seconds - FIRST_STEP_SECONDS) / job.steps / job.members)
        self.runs.append(record(job, out, seconds) | {"views": self.by_view(job, out)})
        shown = " ".join(f"{point[1]:.1f}" for point in self.runs[-1]["validation"])
        at = self.options.seconds - (self.deadline - time.time())
        views = self.runs[-1]["views"]
        print(f"{at:4.0f} s  {job.name}: {shown} {views} ({seconds:.0f} s)", flush=True)
        if self.options.test is not None:
            self.tests[job.name] = self.runs[-1].pop("test")
            write(self.options.test, self.tests)
        write(self.options.json, {"machine": machine(), "runs": self.runs})

    def by_view(self, job: Job, out: Path) -> dict[str, float]:
        """Validation recall@10 of a run's best model, with mirror images and without."""
        table = str(self.table_of(job))
        found = {}
        for name, mirror in (("mirror", True), ("plain", False)):
            model = m1clip.load(out, device=self.options.device)
            model.clip.config = replace(model.clip.config, mirror=mirror)
            scores = m1clip.evaluate(model, table, "val", self.options.device)
            found[name] = both(dict(scores))
        return found


def record(job: Job, out: Path, seconds: float) -> dict[str, Any]:
    """What a run found, with the settings that the rules decided."""
    log = list(read_log(out))
    data = read_spec(out).config.data
    decided = {name: getattr(data, name) for name in ("crop_min", "word_dropout", "cutmix")}
    curve = [
        [entry["step"], both(entry)] for entry in log if entry["kind"] == "eval" and entry["step"]
    ]
    record_of_job = {**job._asdict(), "steps": job.steps, "settings": decided, "validation": curve}
    end = next((entry for entry in log if entry["kind"] == "end"), {})
    if end.get("split") == "test":
        record_of_job["test"] = both(end)
    return record_of_job | {"seconds": round(seconds, 1)}


def table(runs: list[dict[str, Any]]) -> str:
    """What the last evaluation of the runs found, for the documentation."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        settings = run["settings"]
        members = run.get("members", 1)
        key = (-(run["images"] or ALL_IMAGES), run["minutes"], members, settings["cutmix"])
        groups.setdefault(key, []).append(run)
    lines = [
        "| images | steps (minutes) | models | epochs | crops, word dropout, CutMix | recall@10 | n |",
        "|---|---|---|---|---|---|---|",
    ]
    for (images, minutes, members, cutmix), own in sorted(groups.items()):
        settings = own[0]["settings"]
        epochs = own[0]["steps"] / (-images // BATCH)
        values = [run["validation"][-1][1] for run in own]
        shown = ", ".join(f"{value:.1f}" for value in values)
        how = f"{settings['crop_min']:g}, {settings['word_dropout']:g}, {cutmix:g}"
        mean = f"{statistics.fmean(values):.1f} ({shown})"
        columns = (
            f"{-images:,}",
            f"{own[0]['steps']:,} ({minutes})",
            str(members),
            f"{epochs:.0f}",
            how,
            mean,
            str(len(values)),
        )
        lines.append(f"| {' | '.join(columns)} |")
    for (images, minutes, members, _), own in sorted(groups.items()):
        tested = [run["test"] for run in own if "test" in run]
        if tested:
            shown = ", ".join(f"{value:.1f}" for value in tested)
            mean = f"{statistics.fmean(tested):.1f} ({shown})"
            lines.append(f"test, {-images:,} images, {minutes} minutes, models {members}: {mean}")
    return "\n".join(lines)


def both(entry: dict[str, Any]) -> float:
    """The mean of both recall@10 in percent."""
    return round(50 * sum(float(entry[name]) for name in RECALLS), 2)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path, help="a folder with the splits of Flickr8k")
    parser.add_argument("--table", action="store_true", help="print the table of a finished study")
    parser.add_argument(
        "--jobs", nargs="+", choices=JOBS, default=[name for name in JOBS if name != "test"]
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--test", type=Path, help="a file for scores of the test split")
    parser.add_argument(
        "--options", nargs=argparse.REMAINDER, default=[], help="last: more for m1clip train"
    )
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.json.read_text(encoding="utf-8"))["runs"]))
        return
    if options.data is None:
        parser.error("name the data")
    if options.device == "cuda":
        start_mps()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        study = Study(options, Path(folder))
        jobs = [job for name in options.jobs for job in JOBS[name]]
        # The first run alone would decode the images for all; each has its own copy in memory.
        with ThreadPoolExecutor(options.processes) as pool:
            for _ in pool.map(study.run, jobs):
                pass
    print(f"{len(study.runs)} of {len(jobs)} runs", flush=True)


if __name__ == "__main__":
    main()
