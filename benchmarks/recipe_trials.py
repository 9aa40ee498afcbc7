"""Queues for recipe_study.py: changes that may raise recall after the steps of ten minutes, and of an hour.

    python benchmarks/recipe_trials.py QUEUE.json                # then recipe_study.py run
    python benchmarks/recipe_trials.py QUEUE.json --seeds 3      # fewer seeds of each change
    python benchmarks/recipe_trials.py --show OUT/runs.jsonl     # the table, mean over seeds

All with the settings that m1clip/training/budget.py decides for so many steps, scored with mirror
images on the validation split.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m1clip.training.budget import augmentation_strength

STEPS_PER_EPOCH = 6_000 // 64
TEN_MINUTES, THIRTY_MINUTES = 1150, 3450
# Changes with all seeds, and with the first three.
MILD = {"mild_end": 0.2}
SMOOTH = {"label_smoothing": 0.1}
MAIN: dict[str, dict[str, Any]] = {
    "base": {},
    "mild": MILD,
    "smooth": SMOOTH,
    "mild-smooth": MILD | SMOOTH,
    "clip": {"clip": 1.0},
}
MORE: dict[str, dict[str, Any]] = {
    "ramp": {"mild_end": 0.5, "ramp": True},
    "mild-stronger": {"mild_end": 0.3, "crop_min": 0.5, "word_dropout": 0.4},
    "mild-swap": MILD | {"text_swap": 0.05},
    "mild-patch": MILD | {"patch_dropout": 0.25},
    "mild-average": MILD | {"floor": 0.2, "average_end": 0.2, "muon_lr": 0.015},
    "mild-views": MILD | {"image_views": 0.2, "steps": 800},  # costs as much as 1,150 without
    "mild-smooth-512": MILD | SMOOTH | {"embed_dim": 512},
}
PAIRS: dict[str, dict[str, Any]] = {
    "base": {},
    "mild": MILD,
    "smooth": SMOOTH,
    "mild-smooth": MILD | SMOOTH,
}


def settings(steps: int) -> dict[str, Any]:
    """The augmentation of a run from random weights."""
    strength = augmentation_strength(steps / STEPS_PER_EPOCH)
    return strength._asdict() | {"steps": steps, "mirror": True, "evaluations": 3}


def queue(seeds: int, pairs: bool) -> Iterator[dict[str, Any]]:
    """The jobs, longest first, then those of one seed after the other."""
    for change, values in PAIRS.items() if pairs else ():
        for member in (0, 1):
            common = {"name": f"30-{change}-m{member}", "init_seed": 100 + member, "keep": True}
            yield settings(THIRTY_MINUTES) | common | values
        yield {"ensemble": f"60 {change}", "of": [f"30-{change}-m{member}" for member in (0, 1)]}
    for seed in range(seeds):
        for change, values in {**MAIN, **(MORE if seed < 3 else {})}.items():
            yield settings(TEN_MINUTES) | {"name": f"10-{change}-s{seed}", "seed": seed} | values


def show(path: Path) -> None:
    """Print what each change reached, and what it gained over `base` with the same seeds."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    values: dict[str, dict[str, float]] = {}
    plain: dict[str, list[float]] = {}
    for record in records:
        if "ensemble" in record:
            print(f"{record['ensemble']:<20} {record['val'][0]:.1f}")
        if "validation" in record:
            change, _, seed = record["name"].rpartition("-")
            best = max([record["validation"], *(point[1] for point in record["averaged"][-1:])])
            values.setdefault(change, {})[seed] = best
            plain.setdefault(change, []).append(record["views"]["val"]["complete"])
    for change, own in values.items():
        base = values.get(f"{change.split('-')[0]}-base", {})
        gains = [value - base[seed] for seed, value in own.items() if seed in base]
        gain = f"{statistics.fmean(gains):+.2f} (n={len(gains)})" if gains else ""
        shown = ", ".join(f"{value:.1f}" for _, value in sorted(own.items()))
        mean = statistics.fmean(own.values())
        print(
            f"{change:<20} {mean:.2f} ({shown}); gain {gain}; plain {statistics.fmean(plain[change]):.2f}"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("queue", nargs="?", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--no-pairs", dest="pairs", action="store_false")
    parser.add_argument("--show", type=Path)
    options = parser.parse_args()
    if options.show is not None:
        show(options.show)
    else:
        jobs = list(queue(options.seeds, options.pairs))
        options.queue.write_text(json.dumps(jobs), encoding="utf-8")


if __name__ == "__main__":
    main()
