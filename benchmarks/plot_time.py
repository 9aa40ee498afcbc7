"""Plot time against recall: the rule of m1clip/training/budget.py, no rule, and open_clip.

    python benchmarks/plot_time.py          # writes docs/images/time-recall.png from docs/results

Steps are converted to minutes of two CPU cores: 115 steps of `tiny` a minute (docs/recipe.md). It
needs matplotlib (pip install 'm1clip[plot]').
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from sides import RESULTS

from m1clip.training.budget import augmentation_strength, best_members

STEPS_PER_MINUTE = 115
IMAGES = Path(__file__).parents[1] / "docs" / "images"
BATCH = 64
TRAINING_IMAGES = 6_000
# What a run of so many minutes is: by the rule, and with the settings of a short run.
BUDGETS = (2, 5, 10, 15, 20, 30, 60)
COLORS = {"rule": "#1f77b4", "none": "#999999", "peer": "#d62728"}


def matching(runs: list[dict[str, Any]], steps: int, **settings: Any) -> list[float]:
    """Final validation recall of the runs with exactly these settings, over seeds."""
    found = []
    for run in runs:
        own = {name: v for name, v in run.get("settings", {}).items() if name != "seed"}
        if run["steps"] == steps and own == settings:
            found.append(run["validation"][-1][1])
    return found


def points(runs: list[dict[str, Any]]) -> dict[str, list[tuple[float, list[float]]]]:
    """Minutes and values of each line."""
    plain: list[tuple[float, list[float]]] = []
    for minutes in BUDGETS:
        values = matching(runs, round(minutes * STEPS_PER_MINUTE))
        if values:
            plain.append((minutes, values))
    return {"rule": by_rule(), "none": plain}


def by_rule() -> list[tuple[float, list[float]]]:
    """Minutes and values of m1clip itself, by the rule (benchmarks/recipe_device.sh).

    At 2 and 5 minutes with label smoothing, which the rule has not.
    """
    runs = json.loads((RESULTS / "recipe_changes.json").read_text(encoding="utf-8"))["runs"]
    epoch = TRAINING_IMAGES // BATCH
    found: dict[int, list[float]] = {}
    for run in runs:
        minutes = run["minutes"]
        settings = run["settings"]
        smoothing = augmentation_strength(run["steps"] / epoch).label_smoothing
        by_rule = settings["mild_after"] and (
            minutes < 10 or settings["label_smoothing"] == smoothing
        )
        if by_rule and run["members"] == best_members(minutes * STEPS_PER_MINUTE, epoch):
            found.setdefault(minutes, []).append(run["validation"][-1][1])
    return [(float(minutes), values) for minutes, values in sorted(found.items())]


def peer_trials() -> dict[int, dict[tuple[float, ...], list[float]]]:
    """Minutes -> settings of a trial of open_clip -> values of its seeds.

    From benchmarks/peers/open_clip_budget.py.
    """
    path = RESULTS / "open_clip_budget.json"
    runs = [r for r in json.loads(path.read_text(encoding="utf-8"))["runs"] if "validation" in r]
    by_minutes: dict[int, dict[tuple[float, ...], list[float]]] = {}
    for minutes in sorted({run["minutes"] for run in runs}):
        trials = by_minutes.setdefault(minutes, {})
        for run in runs:
            if run["minutes"] == minutes:
                settings = (run["lr"], run["batch"], run["crop_min"])
                trials.setdefault(settings, []).append(run["validation"])
    return by_minutes


def tuned_peer() -> list[tuple[float, list[float]]]:
    """Minutes and values of the seeds of the best trial at each budget.

    The trials have one seed, the best of them has more.
    """
    best = []
    for minutes, trials in peer_trials().items():
        values = max(trials.values(), key=lambda values: (len(values), max(values)))
        best.append((float(minutes), values))
    return best


def peer() -> list[float]:
    """Validation recall@10 of open_clip's entry of the speedrun, ten minutes of two cores."""
    runs = json.loads((RESULTS / "speedrun.json").read_text(encoding="utf-8"))["runs"]
    own = [
        run
        for run in runs
        if (run["entry"], run["data"]) == ("open_clip-muon", "flickr8k-112") and run.get("val")
    ]
    directions = ("text_to_image/recall@10", "image_to_text/recall@10")
    return [100 * statistics.fmean(run["val"][name] for name in directions) for run in own]


def main() -> None:
    """Draw the lines with the range of seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES / "time-recall.png")
    options = parser.parse_args()
    runs = json.loads((RESULTS / "recipe_budget.json").read_text(encoding="utf-8"))["runs"]
    lines = points(runs)
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=130)
    names = {
        "none": "prototype without mirror images, augmentation of a short run",
        "rule": "m1clip: more augmentation, then CutMix (30 minutes), then two models (60)",
    }
    for key in ("none", "rule"):
        minutes = [point[0] for point in lines[key]]
        means = [statistics.fmean(point[1]) for point in lines[key]]
        style = "o--" if key == "none" else "o-"
        axes.plot(minutes, means, style, color=COLORS[key], label=names[key])
        for x, values in lines[key]:
            if len(values) > 1:
                axes.plot([x, x], [min(values), max(values)], color=COLORS[key], lw=3, alpha=0.4)
    tuned = tuned_peer()
    fewest_trials = min(len(trials) for trials in peer_trials().values())
    label = f"open_clip 4.2 with Muon, tuned at each budget ({fewest_trials} trials or more)"
    means = [statistics.fmean(values) for _, values in tuned]
    axes.plot([minutes for minutes, _ in tuned], means, "s-", color=COLORS["peer"], label=label)
    for minutes, values in tuned:
        axes.plot([minutes] * 2, [min(values), max(values)], color=COLORS["peer"], lw=3, alpha=0.4)
    other = peer()
    label = "open_clip 4.2 with Muon, its own trainer on two cores"
    axes.plot([10] * len(other), other, "x", color="black", label=label)
    axes.set_xscale("log")
    axes.set_xticks(BUDGETS, [str(minutes) for minutes in BUDGETS])
    axes.minorticks_off()
    axes.set_ylim(0, 43)
    axes.set_xlabel("minutes of two CPU cores")
    axes.set_ylabel("recall@10, validation (%)")
    axes.set_title("Flickr8k (6,000 images) from random weights, 112 px", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(options.out)
    for key, line in lines.items():
        print(key, [(minutes, [round(value, 1) for value in values]) for minutes, values in line])
    print("open_clip", tuned, other)


if __name__ == "__main__":
    main()
