"""Same minutes: how good a model is after MINUTES from random weights, m1clip compared with open_clip's own trainer.

    python benchmarks/speedrun.py DATA --minutes 10 --seeds 3 --peers PEERS/bin/python

The clock runs from the start of the process to the end of training: decoding, tokenizer, calibration and validation
are inside. The data's own split; the test split is scored once a seed, after the clock, and decides nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import tempfile
from pathlib import Path
from typing import Any

from sides import NO_PEERS, machine, write
from speedrun_own import RECALLS, Plan, recall_at_10, seconds_until, setup_seconds, train

RECIPES: dict[str, tuple[str, ...]] = {
    "default": ("--recipe", "scratch"),
    "adamw": ("--recipe", "scratch", "--optimizer", "adamw", "--lr", "1e-3"),  # the rate that open_clip gets
}


def mean_spread(values: list[float], form: str = ".1f") -> str:
    """`17.5 +- 0.4`: mean and standard deviation over seeds; one seed has none."""
    mean = f"{statistics.fmean(values):{form}}"
    return f"{mean} ± {statistics.stdev(values):{form}}" if len(values) > 1 else mean


def rows(runs: list[dict[str, Any]], target: float | None, limit: float) -> list[list[str]]:
    """The table: a recipe a row, means over seeds."""
    head = [
        "recipe",
        "seeds",
        "images/s",
        "seen in training",
        "text to image R@1 / 5 / 10",
        "image to text R@1 / 5 / 10",
        "mean R@10",
        "minutes",
    ]
    head += [f"seconds to val R@10 {100 * target:.1f}"] if target is not None else []
    table = [head]
    for name in dict.fromkeys(run["recipe"] for run in runs):
        own = [run for run in runs if run["recipe"] == name]
        cells = [mean_spread([100 * run["test"][recall] for run in own]) for recall in RECALLS]
        over = " (over)" if any(run["seconds"] > limit for run in own) else ""
        row = [
            name,
            str(len(own)),
            mean_spread([run["images_per_second"] for run in own], ".0f"),
            seen(own),
            " / ".join(cells[:3]),
            " / ".join(cells[3:]),
            mean_spread([100 * recall_at_10(run["test"]) for run in own]),
            mean_spread([run["seconds"] / 60 for run in own], ".2f") + over,
        ]
        if target is not None:
            row.append(until(own, target))
        table.append(row)
    return table


def seen(runs: list[dict[str, Any]]) -> str:
    """Images seen in training, and the captions of each if there are several."""
    captions = runs[0].get("captions_per_step", 1)
    images = mean_spread([run["images_seen"] for run in runs], ",.0f") + " images seen"
    return images + (f", {captions} captions each" if captions > 1 else "")


def until(runs: list[dict[str, Any]], target: float) -> str:
    """When validation first showed the recall, in the seeds that reached it."""
    found = [seconds_until(run["curve"], target) for run in runs]
    reached = [seconds for seconds in found if seconds is not None]
    if not any(run["curve"] for run in runs):
        return "no curve"
    if not reached:
        return "not reached"
    part = f" ({len(reached)} of {len(runs)} seeds)" if len(reached) < len(runs) else ""
    return mean_spread(reached, ".0f") + part


def markdown(table: list[list[str]]) -> str:
    """The table as markdown, which a terminal can be read in too."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in table]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def named_recipes(names: str, more: list[str]) -> dict[str, tuple[str, ...]]:
    """The recipes asked for: known names, and `NAME=FLAGS` given in addition."""
    known = RECIPES | {name: tuple(shlex.split(flags)) for name, _, flags in (item.partition("=") for item in more)}
    wanted = [name for name in names.split(",") if name] + [item.partition("=")[0] for item in more]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no recipe {unknown[0]!r}: known are {', '.join(known)}; or --recipe {unknown[0]}='FLAGS'")
    return {name: known[name] for name in wanted}


def check_splits(data: str) -> None:
    """The three splits must be the data's own, or test images might have been trained on elsewhere."""
    from m1clip.data.sources import open_sources

    missing = {"train", "val", "test"} - set(open_sources((data,)).splits())
    if missing:
        raise SystemExit(f"{data}: has no {', '.join(sorted(missing))} split; a speedrun needs train, val and test")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a set that m1clip train --data takes, with train, val and test")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="to repeat one that was disturbed")
    parser.add_argument("--recipes", default="default,adamw", help="of m1clip, with commas between; may be empty")
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME=FLAGS", help="one more recipe")
    parser.add_argument("--flags", default="", help="flags of m1clip train for every recipe")
    parser.add_argument("--peers", default=os.environ.get("PEERS"), help="a Python with open_clip")
    parser.add_argument("--peer-seeds", type=int, help="of open_clip; default: as many as --seeds")
    parser.add_argument("--peer-batch", type=int, default=256)
    parser.add_argument("--peer-precision", default="amp_bf16", help="as open_clip names it")
    parser.add_argument(
        "--until-recall",
        type=float,
        metavar="PERCENT",
        help="also: seconds until validation has this mean recall@10; default: what open_clip reached on validation",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "mps"))
    parser.add_argument("--quick", action="store_true", help="four steps instead of --minutes: a smoke test")
    parser.add_argument("--keep", type=Path, help="keep run folders there (must be new); else they are removed")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    return parser.parse_args()


def main() -> None:
    """Run every recipe with every seed, print the table, write the figures after each run."""
    options = parse()
    recipes = named_recipes(options.recipes, options.recipe)
    check_splits(options.data)
    if options.keep:
        options.keep.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        flags = tuple(shlex.split(options.flags))
        plan = Plan(options.data, 60 * options.minutes, folder, options.device, flags, options.quick)
        run_all(options, recipes, plan)


def run_all(options: argparse.Namespace, recipes: dict[str, tuple[str, ...]], plan: Plan) -> None:
    """Seeds in the outer loop, so that a slow hour of the machine falls on all recipes alike."""
    result: dict[str, Any] = {
        "machine": machine(),
        "data": Path(options.data).name,
        "minutes": options.minutes,
        "seeds": options.seeds,
        "peer": None,
        "runs": [],
    }
    target = options.until_recall / 100 if options.until_recall is not None else None
    peer, probed = None, (0.0, 0.0)
    if options.peers:
        from speedrun_peer import OpenClip

        peer = OpenClip(options.peers, plan, options.peer_batch, options.peer_precision)
        probed = peer.probe()
        print(f"open_clip: {probed[1]:.0f} images/s and {probed[0]:.0f} s around training in a probe", flush=True)
    setups = {name: setup_seconds(plan, name, flags) for name, flags in recipes.items()}
    print("set-up: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in setups.items()), flush=True)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name, flags in recipes.items():
            note(result, train(plan, name, flags, seed, setups[name]), options.out)
        peer_seeds = options.seeds if options.peer_seeds is None else options.peer_seeds
        if peer is not None and seed < options.first_seed + peer_seeds:
            note(result, peer.train(seed, *probed), options.out)
            result["peer"] = f"open_clip {peer.version}, {options.peer_precision}, batch {options.peer_batch}"
    theirs = [recall_at_10(run["val"]) for run in result["runs"] if run["recipe"] == "open_clip"]
    if target is None and theirs:
        target = statistics.fmean(theirs)
    result["until_recall"] = target
    table = rows(result["runs"], target, plan.seconds)
    place = result["machine"]
    print(
        f"\n{place['cpu']}, {place['cores']} cores, torch {place['torch']}, commit {place['commit']}; "
        f"{result['data']}, {options.minutes:g} minutes, test split, mean ± deviation over seeds"
    )
    print(markdown(table))
    print(f"peer: {result['peer'] or NO_PEERS}")
    if options.out:
        write(options.out, result)


def note(result: dict[str, Any], run: dict[str, Any], out: Path | None) -> None:
    """Keep a run, and say what it gave on validation; the test is shown at the end."""
    result["runs"].append(run)
    print(
        f"{run['recipe']} seed {run['seed']}: {run['images_seen']:,} samples at {run['images_per_second']:.0f}/s, "
        f"val R@10 {100 * recall_at_10(run['val']):.1f}, {run['seconds']:.0f} s",
        flush=True,
    )
    if out:
        write(out, result)


if __name__ == "__main__":
    main()
