"""The run of the original project, in full, and its figures beside the original's.

    python benchmarks/original_run.py --json docs/results/original.json      # 20 to 40 minutes
    python benchmarks/original_run.py --table

The first command trains with `m1clip train --preset original`. `--table` writes the stored figures
into docs/findings.md. The times count as measured if other programs used little of the processor,
which is stored with them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from sides import RESULTS, machine, variables_for, write

from m1clip.epochs import epoch_rows
from m1clip.io import read_small
from m1clip.monitor.original import COMPARISON_FILE, COMPARISON_HEAD, write_comparison
from m1clip.runlog import read_log

PAGE = RESULTS.parent / "findings.md"
BEGIN = "<!-- original run: begin -->"
END = "<!-- original run: end -->"


def train(out: Path, flags: list[str]) -> float:
    """Train in a fresh process; returns the fraction of the processor that other programs used."""
    command = [sys.executable, "-m", "m1clip", "train", "--preset", "original", *flags]
    began, busy, own = time.perf_counter(), busy_seconds(), own_seconds()
    subprocess.run([*command, "--out", str(out)], env=variables_for(sys.executable), check=True)
    available = (time.perf_counter() - began) * (psutil.cpu_count() or 1)
    others = busy_seconds() - busy - (own_seconds() - own)
    return max(0.0, others) / available


def busy_seconds() -> float:
    """Processor seconds of all programs since the machine was started."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


def own_seconds() -> float:
    """Processor seconds of the processes that this one has started and that have ended."""
    times = psutil.Process().cpu_times()
    return float(times.children_user + times.children_system)


def result_of(run: Path) -> dict[str, Any]:
    """Read the figures of a finished run: those of the original, and the table by epoch."""
    print(write_comparison(run))
    steps = [record for record in read_log(run) if record["kind"] == "step"]
    evaluations = [record for record in read_log(run) if record["kind"] == "eval"]
    return {
        **json.loads(read_small(run / COMPARISON_FILE)),
        "epochs": [asdict(row) for row in epoch_rows(steps, evaluations, "mean_recall")],
    }


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/findings.md."""
    facts = result["machine"]
    head = [*COMPARISON_HEAD[:2], f"this run ({facts['cores']} cores, {facts['cpu']})"]
    lines = [head, ["---"] * len(head)]
    lines += [[row[name] for name in COMPARISON_HEAD] for row in result["rows"]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_table(page: str, result: dict[str, Any]) -> str:
    """Replace the table of docs/findings.md."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{markdown(result)}\n\n{END}{after}"


def main() -> None:
    """Train or read, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="of the run; default: a temporary folder")
    parser.add_argument("--flags", default="", help="more options of m1clip train")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--table", action="store_true", help="write the table of docs/findings.md")
    options = parser.parse_args()
    if not options.table:
        facts = machine()
        with tempfile.TemporaryDirectory() as folder:
            run = options.out or Path(folder) / "run"
            others = train(run, options.flags.split())
            result = result_of(run)
        result |= {"machine": facts, "other_programs": others}
        if options.json:
            write(options.json, result)
    if options.table:
        stored = options.json or RESULTS / "original.json"
        result = json.loads(stored.read_text(encoding="utf-8"))
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")


if __name__ == "__main__":
    main()
