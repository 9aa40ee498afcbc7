"""What compare, doctor and plan print for a person."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from m1clip.bench.candidate import Candidate
from m1clip.bench.checks import Finding
from m1clip.bench.html import percent, rate, seconds, size
from m1clip.runlog import finite


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A bar over the time budget; where there is no terminal, a line for each thing measured."""
    console = Console(highlight=False)
    if not console.is_terminal:
        yield lambda text, used: console.print(f"{min(used, 1):4.0%}  {text}", markup=False, soft_wrap=True)
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda text, used: bar.update(task, completed=min(used, 1.0), description=text)


def table(document: dict[str, Any]) -> None:
    """The figures and the verdict."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    lines = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("candidate", "a step (quartiles), n", "pairs/s", "GEMM", "memory", "gradient"):
        lines.add_column(name, justify="left" if name == "candidate" else "right", overflow="fold")
    for r in document["results"]:
        t, parity = r["seconds"], r["parity"]
        memory = size(r["memory"]["total"]) if r["memory"] and r["memory"]["known"] else "-"
        lines.add_row(
            Candidate(**r["candidate"]).label,
            f"{seconds(t['median'])} \\[{seconds(t['low'])}, {seconds(t['high'])}], {t['n']}",
            rate(r["pairs_per_second"]),
            percent(r["gemm_share"]),
            memory,
            percent(parity["gradient_difference"]) if parity else "-",
        )
    console.print(lines)
    for line in document["verdict"]:
        console.print(f"- {line}", markup=False, soft_wrap=True)
    for r in document["results"]:
        for remark in r["remarks"]:
            console.print(
                f"warning: {Candidate(**r['candidate']).label}: {remark}", markup=False, soft_wrap=True
            )
    for item in document["left_out"]:
        console.print(f"left out: {item['label']}: {item['why']}", markup=False, soft_wrap=True)


def doctor_lines(findings: list[Finding]) -> str:
    """One line for each check, and the remedy under what is wrong."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:8} {finding.name}: {finding.text}")
        if finding.remedy:
            lines.append(f"         -> {finding.remedy}")
    counts = {level: sum(f.level == level for f in findings) for level in ("problem", "warning")}
    lines.append(f"{counts['problem']} problems, {counts['warning']} warnings")
    return "\n".join(lines)


def doctor_json(checkup: Any, findings: list[Finding]) -> str:
    """The same for a program, with the facts behind it."""
    values = {"facts": dataclasses.asdict(checkup), "findings": [dataclasses.asdict(f) for f in findings]}
    return json.dumps(finite(values), indent=2, ensure_ascii=False)


def plan_lines(found: dict[str, Any]) -> str:
    """A plan in lines."""
    memory, job = found["memory"], found["job"]
    parts = ", ".join(f"{name} {size(value)}" for name, value in memory["parts"].items() if value >= 5e5)
    fits = "fits" if memory["fits"] else "does NOT fit"
    lines = [
        f"model      {job['model']}: {job['parameters']:,} parameters, {job['flops_per_pair'] / 1e9:,.1f} GFLOP a pair "
        f"({job['text_tokens']} text tokens)",
        f"memory     {size(memory['total'])} at batch {job['batch']} in {job['precision']} with {job['optimizer']}: "
        f"{parts}",
        f"           {fits} in {size(memory['limit'])}; largest batch {memory['largest_batch']:,}, with recomputation "
        f"{memory['largest_batch_recompute']:,}, with --chunk the batch may be any",
        f"time       {seconds(found['step_seconds'])} a step, {found['steps']:,} steps: {_clock(found['seconds'])} "
        f"({found['basis']})",
        f"energy     {found['energy']}",
        "machines   "
        + ", ".join(
            f"{m['machines']}: {_clock(m['seconds'])} ({m['speedup']:.2f}x)" for m in found["machines"]
        ),
        f"           {size(found['gradient_bytes'])} of gradients a step at {size(found['network'])}/s between "
        f"machines, not hidden behind the backward pass",
    ]
    return "\n".join(lines)


def plan_json(found: dict[str, Any]) -> str:
    """A plan for a program."""
    return json.dumps(finite(found), indent=2)


def _clock(value: float) -> str:
    if value < 60:
        return f"{value:.1f} s"
    hours, rest = divmod(round(value), 3600)
    days, hours = divmod(hours, 24)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
