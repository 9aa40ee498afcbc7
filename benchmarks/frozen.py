"""The frozen recipe on validation: towers, seeds, seconds from an empty cache, and few images.

    python benchmarks/frozen.py DATA                              # all rows; about 15 minutes on two cores
    python benchmarks/frozen.py DATA --rows both --seeds 0 --test    # scores the test split, once

The first seed of a row starts with an empty cache, the others reuse its features. `few` trains on
300 random images, another draw for each seed; `few-random` does so from random heads instead of
CCA.
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
from pathlib import Path
from typing import Any, NamedTuple

from sides import RESULTS, machine, write
from speedrun import RECALLS, mean_spread, recall_at_10, write_splits

from m1clip.formatting import clock, plural
from m1clip.runlog import read_log

FEW = 300
RANDOM_HEADS = (
    "import m1clip.training.transfer as t, m1clip.__main__ as m; "
    "t.fit_projections = lambda *_: None; m.main()"
)


class Kind(NamedTuple):
    """A row of the table."""

    words: str
    options: tuple[str, ...] = ()
    images: int | None = None  # training images, drawn at random; None: all
    cca: bool = True


KINDS = {
    "lite0": Kind("EfficientNet-Lite0 and MiniLM", ("--image-tower", "efficientnet-lite0")),
    "lite2": Kind("EfficientNet-Lite2 and MiniLM", ("--image-tower", "efficientnet-lite2")),
    "both": Kind("EfficientNet-Lite0 and -Lite2, and MiniLM (the default)"),
    "few": Kind(f"the default towers on {FEW} random training images", images=FEW),
    "few-random": Kind(
        f"the same {FEW} images, heads from random weights",
        ("--epochs", "40", "--lr", "1e-3"),
        FEW,
        cca=False,
    ),
}


def main() -> None:
    """Train every row with every seed; write the figures after each run."""
    options = parse()
    result: dict[str, Any] = (
        json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    )
    runs = result.get("runs", [])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_splits(options.data, folder)
        machine_facts = {**machine(), "data": Path(options.data).resolve().name}
        for name in options.rows:
            for seed in options.seeds:
                run = train(
                    name, seed, seed == options.seeds[0] and not options.cache, options, folder
                )
                key = ("row", "seed", "split")
                runs = [
                    *(r for r in runs if any(r[part] != run[part] for part in key)),
                    {**run, "machine": machine_facts},
                ]
                took = (
                    f" in {clock(run['seconds'])} from an empty cache" if run["empty_cache"] else ""
                )
                print(
                    f"{name}, seed {seed}: {run['split']} recall@10"
                    f" {100 * recall_at_10(run):.1f}{took}",
                    flush=True,
                )
                write(options.json, {"machine": machine_facts, "rows": rows(runs), "runs": runs})


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", help="a folder that m1clip train accepts, with train, val and test splits"
    )
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--test", action="store_true", help="score the test split instead of validation"
    )
    parser.add_argument(
        "--options",
        nargs=argparse.REMAINDER,
        default=[],
        help="last: more options for m1clip train",
    )
    parser.add_argument("--cache", type=Path, help="keep features here and do not time them")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "frozen.json", help="runs are added to this file"
    )
    return parser.parse_args()


def train(
    name: str, seed: int, empty_cache: bool, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """One run of `m1clip train --recipe frozen`: its recalls and seconds, start to end."""
    kind, run = KINDS[name], folder / f"{name}-{seed}"
    # One set of towers each.
    cache = options.cache or folder / ("both-cache" if kind.images else f"{name}-cache")
    # In one folder for all rows: the cache knows an image by its path below the folder of the
    # table.
    table = choose(folder, folder / f"{run.name}.jsonl", kind.images, seed, options.test)
    words = [
        sys.executable,
        *(("-m", "m1clip") if kind.cca else ("-c", RANDOM_HEADS)),
        "train",
        "--data",
        str(table),
    ]
    words += [
        "--recipe",
        "frozen",
        "--out",
        str(run),
        "--seed",
        str(seed),
        "--cache-dir",
        str(cache),
        "--device",
        "cpu",
    ]
    # Nor is the choice of the precision remembered from an earlier run.
    variables = {**os.environ, "XDG_CACHE_HOME": f"{cache}-home"}
    begin = time.time()
    done = subprocess.run(
        [*words, *kind.options, *options.options],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    end = next(record for record in read_log(run) if record["kind"] == "end")
    return {
        **{"row": name, "seed": seed, "split": end["split"], "seconds": time.time() - begin},
        **{
            "empty_cache": empty_cache and not kind.images,
            "options": [*kind.options, *options.options],
        },
        **{recall: float(end[recall]) for recall in RECALLS},
    }


def choose(folder: Path, path: Path, images: int | None, seed: int, test: bool) -> Path:
    """A table of the data for one run: some or all training images, validation, and test only where it is scored."""
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    if images:
        lines = random.Random(seed).sample(lines, images)
    for split in ("val", "test") if test else ("val",):
        lines += (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def rows(runs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The table, for tools/results_table.py."""
    lines = []
    for name, kind in KINDS.items():
        for split in ("val", "test"):
            own = [run for run in runs if (run["row"], run["split"]) == (name, split)]
            if not own:
                continue
            ten = mean_spread([100 * recall_at_10(run) for run in own])
            six = mean_spread(
                [100 * statistics.fmean(run[recall] for recall in RECALLS) for run in own]
            )
            times = [
                f"; {clock(run['seconds'])} from an empty cache"
                for run in own
                if run["empty_cache"]
            ]
            where, test = ("test", " --test") if split == "test" else ("validation", "")
            lines.append(
                {
                    "what": (
                        f"{own[0]['machine']['data']}, frozen {kind.words}: mean of both {where}"
                        " recall@10"
                    ),
                    "figure": f"**{ten}%**, mean of six recalls {six}" + "".join(times),
                    "n": plural(len(own), "draw" if kind.images else "seed"),
                    "command": f"python benchmarks/frozen.py DATA --rows {name}{test}",
                }
            )
    return lines


if __name__ == "__main__":
    main()
