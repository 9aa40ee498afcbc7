"""What all probes of a run cost: runs of `tiny` with and without them, in alternation.

    python benchmarks/probes.py --json docs/results/probes.json

Probes are the analyses at evaluations, the counted step of the memory table, and the readings of
cores and sensors in each log line. Their work is far below the noise of a run's time, so each one
is timed as well, in processor time, which other programs add little to. The percentage is that of a
ten-minute run with `--evaluations` evaluations and `--log-lines` lines, one thread, and everything
that happens once. Not included: synchronized steps (MPS, MLX, CUDA graphs), which a run limits to
1% of its time, and the second of idle power, which only a machine with an energy meter needs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from sides import machine, write

import m1clip
from m1clip.analyses import ANALYSES, Analysis
from m1clip.io import read_small
from m1clip.runlog import read_log
from m1clip.training.logger import Telemetry
from m1clip.training.measured_step import StepMeasurements
from m1clip.training.memory_parts import MemoryProbe

RUN_SECONDS = 600.0
GOAL = 0.02  # of the time of a run
COUNTED_STEP = "step whose tensors are counted"
RECORD = "table of memory"
TELEMETRY = "sensors of a log line"
# Of a ten-minute run; the others happen at each evaluation.
ONCE = (COUNTED_STEP,)
TWICE = (RECORD,)


def train(folder: Path, steps: int, every: int) -> dict[str, Any]:
    """Train in this process; the figures of the run, and its weights."""
    used = time.process_time()
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
        "cpu_seconds": time.process_time() - used,
        "evaluations": sum(record["kind"] == "eval" for record in read_log(run.path)),
        "weights": read_small(run.path / "model" / "model.safetensors", 2**30),
    }


def timed_train(folder: Path, steps: int, every: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Train with all probes; also the median processor seconds of each of them."""
    used: dict[str, list[float]] = defaultdict(list)
    step_seconds: list[float] = []

    def timed(owner: Any, method: str, name: Callable[..., str]) -> Any:
        original = getattr(owner, method)

        def call(self: Any, *arguments: Any) -> Any:
            began = time.process_time()
            try:
                return original(self, *arguments)
            finally:
                used[name(self)].append(time.process_time() - began)

        return mock.patch.object(owner, method, call)

    during = StepMeasurements.during

    @contextlib.contextmanager
    def timed_step(self: StepMeasurements, *arguments: Any) -> Iterator[None]:
        was_counted = self.memory.done
        began = time.process_time()
        with during(self, *arguments):
            yield
        seconds = time.process_time() - began
        if self.memory.done and not was_counted:
            used[COUNTED_STEP].append(seconds)
        else:
            step_seconds.append(seconds)

    with (
        timed(Analysis, "compute", lambda analysis: analysis.name),
        timed(Telemetry, "read", lambda telemetry: TELEMETRY),
        timed(MemoryProbe, "record", lambda probe: RECORD),
        mock.patch.object(StepMeasurements, "during", timed_step),
    ):
        result = train(folder, steps, every)
    costs = {name: statistics.median(values) for name, values in used.items()}
    costs[COUNTED_STEP] = max(0.0, costs[COUNTED_STEP] - statistics.median(step_seconds))
    return result, costs


@contextlib.contextmanager
def without_probes() -> Iterator[None]:
    """Train without analyses, without counting memory, and without sensors."""

    def no_memory(self: MemoryProbe) -> None:
        self.resident_before = 0

    with (
        mock.patch.dict(ANALYSES, clear=True),
        mock.patch.object(MemoryProbe, "__post_init__", no_memory),
        mock.patch.object(MemoryProbe, "watch", return_value=contextlib.nullcontext()),
        mock.patch.object(Telemetry, "read", return_value={}),
    ):
        yield


def times_in_a_run(name: str, evaluations: int, log_lines: int) -> int:
    """How often a ten-minute run makes a probe."""
    if name == TELEMETRY:
        return log_lines
    if name in ONCE or name in TWICE:
        return 1 + (name in TWICE)
    return evaluations


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=24, help="of a run")
    parser.add_argument("--eval-every", type=int, default=4, help="steps between evaluations")
    parser.add_argument("--evaluations", type=int, default=20, help="of the ten-minute run")
    parser.add_argument("--log-lines", type=int, default=600, help="of the ten-minute run")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    costs: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "first", 4, 2)  # loads code
        for number in range(options.rounds):
            on, by_analysis = timed_train(
                Path(folder) / f"on-{number}", options.steps, options.eval_every
            )
            with without_probes():
                off = train(Path(folder) / f"off-{number}", options.steps, options.eval_every)
            if on["weights"] != off["weights"]:
                raise SystemExit("the probes changed the weights")
            for name, seconds in by_analysis.items():
                costs[name].append(seconds)
            rounds.append({"on": on["cpu_seconds"], "off": off["cpu_seconds"]})
            print(f"  round {number + 1}: {on['cpu_seconds']:.2f} s with, ", end="")
            print(f"{off['cpu_seconds']:.2f} s without probes, of the processor", flush=True)
    medians = {name: statistics.median(values) for name, values in costs.items()}
    counts = {
        name: times_in_a_run(name, options.evaluations, options.log_lines) for name in medians
    }
    for name, seconds in medians.items():
        print(f"  {name:32} {1e3 * seconds:8.2f} ms, {counts[name]} times in ten minutes")
    evaluations = options.steps // options.eval_every
    differences = [(pair["on"] - pair["off"]) / evaluations for pair in rounds]
    shown = ", ".join(f"{1e3 * seconds:.0f}" for seconds in differences)
    print(f"  with minus without, by evaluation: {shown} ms")
    in_all = sum(counts[name] * seconds for name, seconds in medians.items())
    fraction = in_all / RUN_SECONDS
    bound = options.evaluations * max(differences) / RUN_SECONDS
    words = "ok" if fraction < GOAL else f"above {GOAL:.0%}"
    print(f"  all: {in_all:.2f} s of ten minutes, {fraction:.2%}: {words}")
    print(f"  by the largest difference of two runs: {bound:.2%}")
    print("  the same weights, bit for bit, with and without")
    if options.json:
        result = {
            "machine": machine(),
            "rounds": rounds,
            "seconds_by_probe": medians,
            "times_in_a_run": counts,
            "evaluations": options.evaluations,
            "log_lines": options.log_lines,
            "fraction": fraction,
            "fraction_by_difference": bound,
        }
        write(options.json, result)


if __name__ == "__main__":
    main()
