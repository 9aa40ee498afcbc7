"""Does `--minutes` keep its promise while another program takes the processor?

chrt -f 2 python benchmarks/minutes.py DATA --runs 10 --out docs/results/minutes.json

Each run trains from random weights for two minutes. From a random moment on, or until one, a load
makes the computer 1.5 to 3 times slower: the run is stopped and continued every few milliseconds,
as when a hypervisor or a busy program takes the processor away. On Linux as root, real-time
priority keeps other programs out, so that the strength of the load is the one that is reported.
Without it, what they take is added to the load (`load_average`, at the start and the end of a run).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sides import machine, write

SLICE_SECONDS = 0.01  # the run has the processor for this long at a time while the load is on
FACTORS = (1.5, 2.0, 3.0)  # how many times slower the load makes the computer


def main() -> None:
    """Print and store one row per run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="images with captions")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=20261118)
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    parser.add_argument(
        "--core", type=int, help="train on this core alone, so that other programs keep the others"
    )
    options = parser.parse_args()
    has_priority = shutil.which("chrt") is not None and os.geteuid() == 0
    prefix = ["chrt", "-f", "1"] if has_priority else []
    if options.core is not None:
        prefix = ["taskset", "--cpu-list", str(options.core), *prefix]
    facts = machine()
    draw = random.Random(options.seed)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.runs):
            begins = draw.choice([True, False])
            moment = draw.uniform(1 / 12, 11 / 12) * 60 * options.minutes
            factor = draw.choice(FACTORS)
            run = Path(folder) / f"run{number}"
            row = train_under_load(
                options.data, options.minutes, run, number, begins, moment, factor, prefix
            )
            rows.append(row)
            print(json.dumps(row), flush=True)
    worst = max(abs(row["off_percent"]) for row in rows)
    print(f"{len(rows)} runs of {options.minutes:g} minutes: at most {worst:.1f}% off")
    if options.out is not None:
        data = Path(options.data).resolve().name
        result = {
            "benchmark": "minutes",
            "machine": {**facts, "data": data},
            "real_time_priority": has_priority,
            "core": options.core,
            "minutes": options.minutes,
            "worst_off_percent": worst,
            "rows": rows,
        }
        write(options.out, result)


def train_under_load(
    data: str,
    minutes: float,
    run: Path,
    seed: int,
    begins: bool,
    moment: float,
    factor: float,
    prefix: list[str],
) -> dict[str, Any]:
    """Train with a load that begins or ends at `moment`; returns how well the time was kept."""
    command = [sys.executable, "-m", "m1clip", "train", data, "--minutes", f"{minutes:g}"]
    command += ["--recipe", "scratch", "--seed", str(seed), "--out", str(run)]
    load_before = os.getloadavg()[0]
    began = time.monotonic()
    process = subprocess.Popen([*prefix, *command], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        is_loaded = (time.monotonic() - began > moment) == begins
        time.sleep(SLICE_SECONDS)
        if is_loaded and process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(SLICE_SECONDS * (factor - 1))
            process.send_signal(signal.SIGCONT)
    seconds = time.monotonic() - began
    log = [json.loads(line) for line in (run / "run.jsonl").read_text().splitlines()]
    steps = [record for record in log if record["kind"] == "step"]
    times = sorted(record["step_seconds"] for record in steps)
    peak = max(record["lr"] for record in steps)
    return {
        "run": seed,
        "load": "begins" if begins else "ends",
        "at_seconds": round(moment),
        "times_slower": factor,
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "seconds": round(seconds, 1),
        "off_percent": round(100 * (seconds / (60 * minutes) - 1), 1),
        "exit_code": process.returncode,
        "steps": steps[-1]["step"],
        "plans": sum(record["kind"] == "plan" for record in log),
        "step_p90_over_p10": round(times[int(0.9 * len(times))] / times[len(times) // 10], 1),
        "last_lr_percent_of_peak": round(100 * steps[-1]["lr"] / peak, 2),
    }


if __name__ == "__main__":
    main()
