"""Commands about this machine: compare, doctor and plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from m1clip.bench.options import CompareOptions, PlanOptions
from m1clip.cli.app import app

Flat = Parameter(name="*")
Json = Annotated[bool, Parameter(negative="")]


@app.command
def compare(
    options: Annotated[CompareOptions, Flat] | None = None, *, out: Path = Path("comparison"), share: Path | None = None
) -> None:
    """Measure the training step on each device of this machine, in each precision, and report which is fastest.

    m1clip compare --model small --batch-size 12 also tries attention kernels, thread counts, gradient
    checkpointing and the compiler. m1clip compare --model tiny small 200M --batch-size 1 8 64 finds the batch size
    from which a GPU is faster than the CPU.

    Parameters
    ----------
    out
        Folder for comparison.json.
    share
        Also write a small JSON file with the chip, versions and speeds, without names or paths: for docs/machines.md.
    """
    from rich.console import Console

    from m1clip.bench.compare import compare as run
    from m1clip.bench.report import shared, text
    from m1clip.io import write_json

    console = Console(highlight=False)
    with console.status("starting") as status:

        def show(message: str, used: float) -> None:
            line = f"{min(used, 1.0):4.0%}  {message}"
            status.update(line) if console.is_terminal else print(line, flush=True)

        found = run(options or CompareOptions(), out, show)
    print(text(found.results, found.skipped))
    print(f"data       {out / 'comparison.json'}")
    if share is not None:
        write_json(share, shared(found.facts, found.results))
        print(f"share      {share}: send it in an issue, for docs/machines.md")


@app.command
def doctor(*, json: Json = False) -> None:
    """Check this machine for anything that slows down or breaks training; exit code 1 if there is a problem.

    Each line is ok, a warning or a problem with its fix. docs/troubleshooting.md explains each of them.

    Parameters
    ----------
    json
        Print everything as JSON, for scripts and bug reports.
    """
    from dataclasses import asdict

    from m1clip.bench.doctor import check, doctor_text, read_machine

    machine = read_machine()
    findings = check(machine)
    if json:
        _print_json({"machine": asdict(machine), "findings": [asdict(finding) for finding in findings]})
    else:
        print(doctor_text(findings))
    if any(finding.level == "problem" for finding in findings):
        sys.exit(1)


@app.command
def plan(options: Annotated[PlanOptions, Flat] | None = None, *, json: Json = False) -> None:
    """Predict what a training run will take: memory by component, the largest batch size, time and energy.

    Uses the step times that m1clip compare measured on this machine, or else measures matrix multiplication speed.

    Parameters
    ----------
    json
        Print the plan as JSON.
    """
    from m1clip.bench.plan import make_plan, plan_text

    found = make_plan(options or PlanOptions())
    _print_json(found) if json else print(plan_text(found))


def _print_json(values: dict[str, Any]) -> None:
    from json import dumps

    from m1clip.runlog import json_safe

    print(dumps(json_safe(values), indent=2, ensure_ascii=False))
