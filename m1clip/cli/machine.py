"""Commands about this machine: compare, doctor and plan."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from m1clip.cli.app import Flag, app
from m1clip.config import OptimizerName
from m1clip.formatting import one_line

Several = Parameter(
    consume_multiple=True,
    negative="",
    show_default=lambda values: " ".join(map(str, values)) or "all",
)


@app.command
def compare(
    *,
    model: Annotated[tuple[str, ...], Several] = ("tiny",),
    batch_size: Annotated[tuple[int, ...], Several] = (64,),
    device: Annotated[tuple[str, ...], Several] = (),
    precision: Annotated[tuple[str, ...], Several] = (),
    optimizer: OptimizerName = "muon",
    minutes: float = 4.7,
    out: Path = Path("comparison"),
    share: Path | None = None,
) -> None:
    """Measure the training step on each device of this machine, in each precision, and report which is fastest.

    m1clip compare --model small --batch-size 12 also tries thread counts, gradient checkpointing and the compiler.
    m1clip compare --model tiny small 200M --batch-size 1 8 64 finds the batch size from which a GPU is faster than the
    CPU.

    Parameters
    ----------
    model
        Model presets: tiny, small, ViT-B-32, ... With more than one, only device and precision vary.
    batch_size
        Images per step, one or more values.
    device
        Only these devices, such as cpu cuda.
    precision
        Only these precisions, such as fp32 bf16; fp16 is measured only if listed.
    optimizer
        As in train.
    minutes
        Time budget in minutes. Configurations that do not fit are skipped and listed.
    out
        Folder for comparison.json.
    share
        Also write a small JSON file with the chip, versions and speeds, without names or paths: for docs/machines.md.
    """
    from rich.console import Console

    from m1clip.bench.compare import CompareOptions
    from m1clip.bench.compare import compare as run
    from m1clip.bench.report import shared, text
    from m1clip.io import write_json

    options = CompareOptions(
        models=model,
        batch_sizes=batch_size,
        devices=device,
        precisions=precision,
        optimizer=optimizer,
        minutes=minutes,
    )
    console = Console(highlight=False)
    with console.status("starting") as status:

        def show(message: str, used: float) -> None:
            line = f"{min(used, 1.0):4.0%}  {message}"
            status.update(line) if console.is_terminal else print(line, flush=True)

        found = run(options, out, show)
    print(text(found.results, found.skipped))
    print(f"data       {one_line(str(out / 'comparison.json'))}")
    if share is not None:
        write_json(share, shared(found.facts, found.results))
        print(f"share      {one_line(str(share))}: send it in an issue, for docs/machines.md")


@app.command
def doctor(*, clear_choices: Flag = False, json: Flag = False) -> None:
    """Check this machine for anything that slows down or breaks training; exit code 1 if there is a problem.

    Each line is ok, a warning or a problem, with a suggested fix. docs/troubleshooting.md explains the checks.

    Parameters
    ----------
    clear_choices
        Forget which device and precision earlier runs measured to be the fastest: the next run measures again.
    json
        Print everything as JSON, for scripts and bug reports.
    """
    from dataclasses import asdict

    from m1clip.bench.doctor import check, doctor_text, read_machine

    if clear_choices:
        from m1clip.formatting import plural
        from m1clip.hardware import choices

        print(f"removed {plural(choices.clear(), 'kept measurement')}")
        return
    machine = read_machine()
    findings = check(machine)
    if json:
        _print_json(
            {"machine": asdict(machine), "findings": [asdict(finding) for finding in findings]}
        )
    else:
        print(doctor_text(findings))
    if any(finding.level == "problem" for finding in findings):
        sys.exit(1)


@app.command
def plan(
    *,
    model: str = "tiny",
    batch_size: int = 64,
    images: int = 8000,
    epochs: float = 10.0,
    device: Literal["auto", "cpu", "mps", "cuda"] = "auto",
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    optimizer: OptimizerName = "muon",
    memory: str | None = None,
    ranks: int | None = None,
    bandwidth: str | None = None,
    json: Flag = False,
) -> None:
    """Predict the memory, the largest batch size and the time of a training run.

    Uses the step times that m1clip compare measured on this machine, or else measures matrix multiplication speed.
    For several ranks: torchrun --nproc-per-node 2 -m m1clip plan --ranks 8 measures the bandwidth between two ranks.

    Parameters
    ----------
    model
        Model preset: tiny, small, ViT-B-32, 200M, 500M, 1B, ...
    batch_size
        Images per step.
    images
        Number of training images.
    epochs
        Number of epochs.
    device
        As in train.
    precision
        As in train.
    optimizer
        As in train.
    memory
        Memory limit, such as 8GB. Default: all memory of the device.
    ranks
        Number of ranks, with one device each. Default: those of torchrun, or one.
    bandwidth
        Bytes that each rank sends per second, such as 10GB. Default: measured between the ranks of torchrun.
    json
        Print the plan as JSON.
    """
    from m1clip.bench.plan import make_plan, plan_text
    from m1clip.training.distributed import connect

    found = make_plan(
        model, batch_size, images, epochs, device, precision, optimizer, memory, ranks, bandwidth
    )
    if connect().rank == 0:
        _print_json(found) if json else print(plan_text(found))


def _print_json(values: dict[str, Any]) -> None:
    from json import dumps

    from m1clip.runlog import json_safe

    print(dumps(json_safe(values), indent=2))
