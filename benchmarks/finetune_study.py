"""Which settings of `--recipe finetune` pay, at equal work? A search on validation, then test once.

    python benchmarks/finetune_study.py flickr8k-112 --starts frozen=runs/frozen general=general \
        --json OUT/finetune_study.json --test OUT/finetune_test.json --seconds 400 --processes 5
    python benchmarks/finetune_study.py --json docs/results/finetune_study.json --table

Each run is m1clip's own training step from a frozen run, for as many images as two CPU cores train
on in 30 minutes (docs/lab-finetune.md); what costs more per image gets fewer. The stages follow
each other, and each tries changes of the best settings so far. After a run, its weights, means of
the weights over its last steps, and mixtures with the weights before it (WiSE-FT) are scored, each
with the images as they are and averaged with their mirror images. At the end the best settings and
the default are repeated with three seeds, and the test split is scored with what validation chose.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import statistics
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from recipe_study import recall, start_mps
from sides import machine, write
from torch import Tensor

from m1clip import console
from m1clip.data.augment import render
from m1clip.data.decoding import read_or_replace
from m1clip.data.images import Preprocess
from m1clip.data.loader import batches
from m1clip.data.prepare import Split
from m1clip.formatting import ceil_div
from m1clip.model.clip import CLIP
from m1clip.training.inputs import RunInputs
from m1clip.training.schedule import scheduled_lr_fraction
from m1clip.training.spec import Settings
from m1clip.training.workbench import Workbench

IMAGES = 158 * 128  # that two cores trained on in 30 minutes (docs/lab-finetune.md)
LAST_PARTS = (0.3, 0.5, 0.7)  # of the steps, over which the mean of the weights is scored
MIXTURES = (0.5, 0.75)  # of the trained weights in WiSE-FT
LARGER = 1.1  # times the image size
SEEDS = (0, 1, 2)
PLAIN = "last"
MIRRORED = "last, mirror"
ENCODE_BATCH = 250
DECODE_MARGIN = "decode_margin"  # no option of m1clip: training images are decoded so much larger


class Change(NamedTuple):
    """Options of `m1clip train`, and the work of an image with them (1: by default)."""

    name: str
    options: dict[str, Any]
    work: float = 1.0
    start: str = ""  # another model to start from


# Guesses of the processor seconds of an image, divided by those of the default.
ALL_BLOCKS, FIVE_BLOCKS, THREE_CAPTIONS = 1.3, 1.2, 0.85
SMOOTHING = Change("label smoothing 0.1", {"label_smoothing": 0.1})
CONTRAST = Change("text contrast 0.2", {"text_contrast": 0.2})
WORDS = Change("word dropout 0.15", {"word_dropout": 0.15})
STAGES: dict[str, tuple[Change, ...]] = {
    "learning rate": (
        Change("lr 2e-4", {"lr": 2e-4}),
        Change("lr 3e-4", {"lr": 3e-4}),
        Change("lr 5e-4, layer decay 0.7", {"lr": 5e-4, "layer_decay": 0.7}),
        Change("batch 64, lr 2e-4", {"batch_size": 64, "lr": 2e-4}),
        Change("batch 256, lr 4e-4", {"batch_size": 256, "lr": 4e-4}),
    ),
    "what is trained": (
        Change("all blocks", {"unfreeze_image": -1}, ALL_BLOCKS),
        Change("five stages", {"unfreeze_image": 5}, FIVE_BLOCKS),
        Change("three captions", {"captions_per_step": 3}, THREE_CAPTIONS),
        Change("layer decay 0.65", {"layer_decay": 0.65}),
        Change("layer decay 0.9", {"layer_decay": 0.9}),
    ),
    "regularization": (
        Change("crops of at least 0.8", {"crop_min": 0.8}),
        Change("decoded at the training size", {DECODE_MARGIN: 1.0}),
        Change("CutMix 0.3", {"cutmix": 0.3}),
        CONTRAST,
        SMOOTHING,
        WORDS,
    ),
    "more": (
        Change("crops of at least 0.4", {"crop_min": 0.4}),
        Change("no color jitter", {"color_jitter": 0.0}),
        Change("warmup 0.3", {"warmup": 0.3}),
        CONTRAST,
        SMOOTHING,
        WORDS,
    ),
    "start": (
        Change("from general", {}, start="general"),
        Change("from heads of general, trained", {}, start="tuned"),
    ),
}
BATCH = 128


@dataclass(frozen=True)
class Job:
    """One training run."""

    stage: str
    name: str
    start: str  # a name of --starts
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    work: float = 1.0

    @property
    def steps(self) -> int:
        return round(IMAGES / self.work / self.options.get("batch_size", BATCH))

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.stage, self.name, self.start, self.seed

    def changed(self, stage: str, change: Change) -> Job:
        """These settings with a change."""
        options = self.options | change.options
        start = change.start or self.start
        return Job(stage, change.name, start, self.seed, options, self.work * change.work)


class WeightMeans:
    """Means of the trainable weights over the last parts of a run."""

    def __init__(self, model: CLIP, steps: int) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.begins = {part: round((1 - part) * steps) for part in LAST_PARTS}
        self.sums = {part: [torch.zeros_like(p) for p in self.weights] for part in LAST_PARTS}
        self.counts = dict.fromkeys(LAST_PARTS, 0)

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Add the weights after a step."""
        for part, begin in self.begins.items():
            if step >= begin:
                torch._foreach_add_(self.sums[part], [p.detach() for p in self.weights])
                self.counts[part] += 1

    def means(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Each mean with its name."""
        for part, total in self.sums.items():
            yield f"mean of the last {part:.0%}", torch._foreach_div(total, self.counts[part])


class SplitScorer:
    """Recall of models on a split whose images stay on the device."""

    def __init__(self, split: Split, preprocess: Preprocess, device: torch.device) -> None:
        rows = np.arange(len(split.images))
        _, pixels, _ = read_or_replace(split.images, rows, seed=0, epoch=0)
        self.pixels = torch.from_numpy(np.ascontiguousarray(pixels)).to(device)
        captions = split.captions
        longest = int(captions.lengths.max())
        self.tokens = torch.from_numpy(captions.tokens[:, :longest].astype(np.int64)).to(device)
        self.preprocess = preprocess
        counts = np.diff(captions.first)
        assert counts.min() == counts.max(), "each image needs equally many captions"
        self.captions_per_image = int(counts[0])

    @torch.inference_mode()
    def score(self, model: CLIP, larger: bool = False) -> dict[str, list[float]]:
        """(mean of both recall@10, mean of six recalls) of the images, and with mirror images."""
        side = self.preprocess.image_size
        preprocess = Preprocess(
            image_size=round(LARGER * side) if larger else side,
            mean=self.preprocess.mean,
            std=self.preprocess.std,
        )
        complete = torch.tensor([0.0, 0, 1, 1, 0, 1, 1]).repeat(ENCODE_BATCH, 1)
        views = []
        model.eval()
        with torch.autocast(self.pixels.device.type, torch.bfloat16):
            for part in self.pixels.split(ENCODE_BATCH):
                images = render(part, complete[: len(part)] if larger else None, preprocess)
                views.append((model.encode_view(images), model.encode_view(images.flip(3))))
            text = torch.cat([model.encode_text(part) for part in self.tokens.split(1000)])
        model.train()
        plain, mirrored = (torch.cat(side) for side in zip(*views, strict=True))
        texts = text.view(len(plain), self.captions_per_image, -1)
        both = torch.nn.functional.normalize(plain + mirrored, dim=1)
        return {
            name: list(recall(vectors, texts)[:2])
            for name, vectors in (("", plain), (", mirror", both))
        }


def prepare(
    options: argparse.Namespace, start: str, seed: int, device: str, changes: dict[str, Any]
) -> tuple[Workbench, RunInputs]:
    """What a run works with; decoded images are in a cache that all processes share."""
    models = options.starts[start]
    changes = dict(changes)
    margin = changes.pop(DECODE_MARGIN, None)
    settings = Settings(
        {
            "data": (str(options.data),),
            "recipe": "finetune",
            "init": models[seed % len(models)],
            "device": device,
            "precision": "bf16",
            "seed": seed,
            "cache": "disk",
            "cache_dir": str(options.cache),
            "evaluations": 1,
            **changes,
        }
    )
    with console.quiet(), contextlib.ExitStack() as stack:
        if margin is not None:
            patched = mock.patch("m1clip.training.workbench.crop_margin", return_value=margin)
            stack.enter_context(patched)
        workbench = Workbench()
        inputs = workbench.inputs(workbench.resolve(settings))
    return workbench, inputs


def run(job: Job, options: argparse.Namespace, with_test: bool) -> dict[str, Any]:
    """Train, and score all sets of weights."""
    begin = time.time()
    changes = {"steps": max(2, job.steps // options.shorter), **job.options}
    workbench, inputs = prepare(options, job.start, job.seed, options.device, changes)
    spec = inputs.spec
    train_step = inputs.make_step(workbench.initial_model(inputs))
    model = train_step.model
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    steps = spec.config.train.steps
    means = WeightMeans(model, steps)
    device = inputs.device.torch
    scorers = {
        name: SplitScorer(inputs.splits[name], inputs.model.preprocess, device)
        for name in (("val", "test") if with_test else ("val",))
    }
    start_scores = scorers["val"].score(model)
    set_up = time.time() - begin
    for step, batch in enumerate(batches(inputs.training, 0, steps, 0, "fork", pin=False)):
        fraction = scheduled_lr_fraction(spec.config.optim, spec.plan, step)
        train_step.optimizer.set_lr(fraction)
        train_step.run(batch, step)
        means.add(step)
    inputs.device.synchronize()
    trained_seconds = time.time() - begin - set_up
    last = [p.detach().clone() for p in trained]
    weight_sets = {PLAIN: last, **dict(means.means())}
    for part in MIXTURES:
        weight_sets[f"WiSE-FT {part:g}"] = torch._foreach_lerp(before, last, part)
    scores: dict[str, dict[str, list[float]]] = {name: {} for name in scorers}
    for split, scorer in scorers.items():
        for name, weights in weight_sets.items():
            _assign(trained, weights)
            for view, values in scorer.score(model).items():
                scores[split][name + view] = values
        _assign(trained, last)
        for view, values in scorer.score(model, larger=True).items():
            scores[split][f"{PLAIN}, larger{view}"] = values
    return {
        "stage": job.stage,
        "name": job.name,
        "start": job.start,
        "seed": job.seed,
        "options": job.options,
        "steps": steps,
        "work": round(job.work, 3),
        "at the start": start_scores,
        **scores,
        "seconds": [round(set_up, 1), round(trained_seconds, 1), round(time.time() - begin, 1)],
    }


@torch.no_grad()
def _assign(parameters: list[Any], values: list[Tensor]) -> None:
    torch._foreach_copy_([p.data for p in parameters], values)


def worker(jobs: Any, results: Any, options: argparse.Namespace) -> None:
    """Run jobs until the study ends."""
    torch.set_num_threads(1)
    while True:
        job, with_test = jobs.get()
        try:
            results.put((job, run(job, options, with_test)))
        except Exception:  # noqa: BLE001  one job must not end the others
            results.put((job, {"name": job.name, "error": traceback.format_exc()[-1500:]}))
        if options.device == "cuda":
            torch.cuda.empty_cache()


class Study:
    """Runs stages of jobs on several processes, and writes what they gave after each job."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.time()
        self.runs: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {}
        self.tests: list[dict[str, Any]] = []
        if options.device == "cuda":
            start_mps()  # its variables are inherited
        context = multiprocessing.get_context("spawn")
        self.jobs, self.results = context.Queue(), context.Queue()
        arguments = (self.jobs, self.results, options)
        self.processes = [
            context.Process(target=worker, args=arguments) for _ in range(options.processes)
        ]
        for process in self.processes:
            process.start()
        # One process decodes the images for all, while they import what they need.
        prepare(options, next(iter(options.starts)), 0, "cpu", {"steps": 2})
        print(f"{self.seconds:4.0f} s  decoded", flush=True)

    @property
    def seconds(self) -> float:
        return time.time() - self.begin

    def run(self, jobs: list[Job], until: float, with_test: bool = False) -> list[Any]:
        """The results of jobs; those that have not begun after `until` seconds are dropped."""
        for job in jobs:
            self.jobs.put((job, with_test))
        waiting = {job.key for job in jobs}
        done: list[tuple[Job, dict[str, Any]]] = []
        while waiting and self.seconds < self.options.seconds:
            if self.seconds > until:
                waiting -= self.drop()
            try:
                job, result = self.results.get(timeout=1)
            except queue.Empty:
                if not any(process.is_alive() for process in self.processes):
                    break
                continue
            waiting.discard(job.key)
            if "error" in result:
                print(f"{job.name}: {result['error']}", flush=True)
                continue
            self.record(job, result)
            done.append((job, result))
        return done

    def drop(self) -> set[tuple[str, str, str, int]]:
        """Take back the jobs that have not begun."""
        dropped = set()
        with contextlib.suppress(queue.Empty):
            while True:
                job, _ = self.jobs.get_nowait()
                print(f"{self.seconds:4.0f} s  no time for {job.stage}: {job.name}", flush=True)
                dropped.add(job.key)
        return dropped

    def record(self, job: Job, result: dict[str, Any]) -> None:
        """Write a result; scores of the test split go to a file of their own."""
        test = result.pop("test", None)
        if test is not None:
            self.tests.append({"name": job.name, "seed": job.seed, "test": test})
            write(self.options.test, {"runs": self.tests})
        self.runs.append(result)
        self.show(result)
        self.write()

    def write(self) -> None:
        result = {"machine": machine(), "data": self.options.data.name, "best": self.best}
        write(self.options.json, {**result, "runs": self.runs})

    def show(self, result: dict[str, Any]) -> None:
        """One line about a run."""
        plain, mirrored = result["val"][PLAIN], result["val"][MIRRORED]
        best = max(result["val"].items(), key=lambda item: item[1][0])
        start = result["at the start"][""]
        print(
            f"{self.seconds:4.0f} s  {result['stage']}: {result['name']}, seed {result['seed']}:"
            f" {start[0]} -> {plain}, mirror {mirrored}, best {best}, {result['seconds']} s",
            flush=True,
        )

    def end(self) -> None:
        for process in self.processes:
            process.terminate()


def score_of(result: dict[str, Any]) -> float:
    """What the search maximizes: less noisy than recall@10 alone."""
    return statistics.fmean(result["val"][MIRRORED])


def search(study: Study, options: argparse.Namespace) -> Job:
    """The best settings, stage by stage."""
    base = Job("default", "default", "frozen")
    best, best_score = base, -1.0
    begin = study.seconds
    end = options.search_part * options.seconds
    rounds = {name: ceil_div(len(jobs), options.processes) for name, jobs in STAGES.items()}
    done_rounds = 0
    for number, (stage, changes) in enumerate(STAGES.items()):
        jobs = [best.changed(stage, change) for change in changes]
        repeated = (best.options, best.start)
        jobs = [
            job
            for job in jobs
            if job.start in options.starts and (job.options, job.start) != repeated
        ]
        if number == 0:
            jobs.insert(0, base)
        done_rounds += rounds[stage]
        part = done_rounds / sum(rounds.values())
        for job, result in study.run(jobs, begin + part * (end - begin)):
            if score_of(result) > best_score:
                best, best_score = job, score_of(result)
        print(f"{study.seconds:4.0f} s  best: {best.start}, {best.options} {best_score:.2f}")
    return best


def confirm(study: Study, best: Job, options: argparse.Namespace) -> None:
    """The default and the best settings with three seeds, with test."""
    jobs = []
    for seed in options.seeds:
        jobs.append(Job("confirm", "best", best.start, seed, best.options, best.work))
        if best.start != "frozen":
            jobs.append(Job("confirm", "best from frozen", "frozen", seed, best.options, best.work))
        jobs.append(Job("confirm", "default", "frozen", seed))
    study.run(jobs, options.seconds, with_test=options.test is not None)


def table(result: dict[str, Any]) -> str:
    """The runs, and the sets of weights over all of them, for the documentation."""
    lines = [
        "| change | start | steps | recall@10 | with mirror images | mean recall with them |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for entry in result["runs"]:
        groups.setdefault((entry["stage"], entry["name"], entry["start"]), []).append(entry)
    for (stage, name, start), runs in groups.items():
        cells = [f"{stage}: {name}", start, str(runs[0]["steps"])]
        for key, position in ((PLAIN, 0), (MIRRORED, 0), (MIRRORED, 1)):
            cells.append(_mean([run["val"][key][position] for run in runs]))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| weights, images | difference in recall@10 | in mean recall | n |"]
    lines += ["|---|---|---|---|"]
    for name in result["runs"][0]["val"]:
        differences = [
            [run["val"][name][position] - run["val"][PLAIN][position] for run in result["runs"]]
            for position in (0, 1)
        ]
        cells = [f"{statistics.fmean(values):+.2f}" for values in differences]
        lines.append(f"| {name} | {' | '.join(cells)} | {len(differences[0])} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.fmean(values):.1f} ({', '.join(f'{value:.1f}' for value in values)})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--table", action="store_true", help="print the tables of a finished study")
    parser.add_argument(
        "--starts",
        nargs="+",
        default=[],
        metavar="NAME=MODEL,...",
        help="models to start from, one for each seed: frozen, and perhaps general and tuned",
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--test", type=Path, help="a file for scores of the test split")
    parser.add_argument("--confirm", type=Path, help="no search: the best settings of this study")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="at the end")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/finetune-study-cache"))
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--search-part", type=float, default=0.72, help="of the seconds")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shorter", type=int, default=1, help="a smoke test: a part of the steps")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.json.read_text(encoding="utf-8"))))
        return
    if options.data is None:
        parser.error("name the data")
    pairs = (item.partition("=") for item in options.starts)
    options.starts = {name: models.split(",") for name, _, models in pairs}
    os.environ["OMP_NUM_THREADS"] = "1"
    study = Study(options)
    try:
        if options.confirm:
            stored = json.loads(options.confirm.read_text(encoding="utf-8"))["best"]
            best = Job("stored", "best", "frozen", 0, stored["options"], stored["work"])
        else:
            best = search(study, options)
        study.best = {"start": best.start, "options": best.options, "work": best.work}
        study.write()
        confirm(study, best, options)
    finally:
        study.end()
    print(f"ended after {study.seconds:.0f} s")


if __name__ == "__main__":
    main()
