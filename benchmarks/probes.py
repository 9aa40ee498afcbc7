"""What the analyses of a run cost: runs of `tiny` with and without them, in alternation.

    python benchmarks/probes.py --json docs/results/probes.json

The work of an analysis is far below the noise of a run's time, so each one is timed as well, in
processor time, which other programs do not add to. The percentage is that of a ten-minute run with
`--evaluations` of them. It does not include the memory probe, one step of a session, nor
synchronized steps, which a run limits to 1% of its time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

from sides import machine, write

import m1clip
from m1clip.analyses import ANALYSES, Analysis
from m1clip.io import read_small
from m1clip.runlog import read_log

RUN_SECONDS = 600.0
GOAL = 0.02  # of the time of a run


def train(folder: Path, steps: int, every: int) -> dict[str, Any]:
    """Train in this process; the figures of the run, and a hash of its weights."""
    began, used = time.perf_counter(), time.process_time()
    run = m1clip.train(
        "synthetic",
        steps=steps,
        eval_every=every,
        model="tiny",
        recipe="scratch",
        batch_size=16,
        synthetic_images=200,
        image_size=32,
        device="cpu",
        precision="fp32",
        threads=1,
        save_every=steps,
        out=folder,
    )
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - used,
        "evaluations": sum(record["kind"] == "eval" for record in read_log(run.path)),
        "weights": read_small(run.path / "model" / "model.safetensors", 2**30),
    }


def timed_train(folder: Path, steps: int, every: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Train with all analyses; also the processor seconds of each one at an evaluation."""
    used: dict[str, list[float]] = defaultdict(list)
    compute = Analysis.compute

    def timed(self: Analysis, *needed: Any) -> Any:
        began = time.process_time()
        try:
            return compute(self, *needed)
        finally:
            used[self.name].append(time.process_time() - began)

    with mock.patch.object(Analysis, "compute", timed):
        result = train(folder, steps, every)
    return result, {name: statistics.median(values) for name, values in used.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=24, help="of a run")
    parser.add_argument("--eval-every", type=int, default=4, help="steps between evaluations")
    parser.add_argument("--evaluations", type=int, default=20, help="of the ten-minute run")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    costs: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            on, each = timed_train(Path(folder) / f"on-{number}", options.steps, options.eval_every)
            with mock.patch.dict(ANALYSES, clear=True):
                off = train(Path(folder) / f"off-{number}", options.steps, options.eval_every)
            if on["weights"] != off["weights"]:
                raise SystemExit("the analyses changed the weights")
            for name, seconds in each.items():
                costs[name].append(seconds)
            rounds.append({"on": on["cpu_seconds"], "off": off["cpu_seconds"]})
            print(f"  round {number + 1}: {on['cpu_seconds']:.2f} s with, ", end="")
            print(f"{off['cpu_seconds']:.2f} s without analyses, of the processor", flush=True)
    medians = {name: statistics.median(values) for name, values in costs.items()}
    for name, seconds in medians.items():
        print(f"  {name:26} {1e3 * seconds:8.2f} ms of an evaluation")
    evaluations = options.steps // options.eval_every
    differences = [(each["on"] - each["off"]) / evaluations for each in rounds]
    shown = ", ".join(f"{1e3 * seconds:.0f}" for seconds in differences)
    print(f"  with minus without, by evaluation: {shown} ms (the first loads code)")
    per_evaluation = sum(medians.values())
    fraction = options.evaluations * per_evaluation / RUN_SECONDS
    words = "ok" if fraction < GOAL else f"above {GOAL:.0%}"
    print(
        f"  all: {1e3 * per_evaluation:.1f} ms; {options.evaluations} evaluations in ten minutes: "
    )
    print(f"  {fraction:.2%} of the run: {words}; the same weights, bit for bit, with and without")
    if options.json:
        result = {
            "machine": machine(),
            "rounds": rounds,
            "seconds_by_analysis": medians,
            "evaluations": options.evaluations,
            "fraction": fraction,
        }
        write(options.json, result)


if __name__ == "__main__":
    main()
