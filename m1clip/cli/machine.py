"""compare, doctor and plan: what this machine can do, what is wrong with it, what a job will take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from m1clip.cli.app import Count, app


@app.command
def compare(
    *,
    model: str = "tiny",
    batch: str = "64",
    sizes: str = "",
    devices: str = "",
    precisions: str = "",
    optimizer: Literal["muon", "adamw"] = "muon",
    minutes: float = 4.7,
    full: Annotated[bool, Parameter(negative="")] = False,
    against: Path | None = None,
    out: Path = Path("comparison"),
) -> None:
    """Measure the real training step on each device of this machine, in each precision, and say which to use.

    m1clip compare --model small --batch 12 tries every device, precision, attention, thread count and the
    compiler for one job. m1clip compare --sizes tiny,small,200M --batch 1,8,64 finds where one device overtakes
    another. Writes comparison.json, and comparison.html with plots, into a folder.

    Parameters
    ----------
    model
        A size from the table: tiny, small, ViT-B-32, ...
    batch
        Pairs in a step; several with commas: 1,8,64. The extras (attention, compile, threads) use the first.
    sizes
        Several models, with commas: then every size, batch, device and precision, without the extras.
    devices
        Only these, with commas: cpu,cuda. Default: all that this machine has.
    precisions
        Only these, with commas: fp32,bf16,fp16. Default: fp32 and bf16 where the device has it.
    optimizer
        muon, as train does it, or adamw.
    minutes
        A time budget. What does not fit into it is left out, and the report says so.
    full
        Every combination of attention and compiling, and not one change at a time. Takes long.
    against
        A comparison.json of another machine, to set beside this one.
    out
        Folder for comparison.json and comparison.html.
    """
    from m1clip.bench.compare import Ask
    from m1clip.bench.compare import compare as run
    from m1clip.bench.report import print_table, progress

    ask = Ask(
        model=model, batches=_numbers(batch), sizes=_words(sizes), devices=_words(devices),
        precisions=_words(precisions), optimizer=optimizer, minutes=minutes, full=full, against=against,
    )  # fmt: skip
    with progress() as show:
        document = run(ask, out, show)
    print_table(document)
    print(f"report     {out / 'comparison.html'}")
    print(f"figures    {out / 'comparison.json'}")


@app.command
def doctor(*, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Check this machine for what spoils training or measuring; exit code 1 when there is a problem.

    Each line is ok, a warning or a problem, with the remedy. docs/troubleshooting.md explains every one of them.

    Parameters
    ----------
    json
        All facts and findings as JSON, for a program or a bug report.
    """
    from m1clip.bench.doctor import check, read_checkup
    from m1clip.bench.report import doctor_json, doctor_lines

    checkup = read_checkup()
    findings = check(checkup)
    print(doctor_json(checkup, findings) if json else doctor_lines(findings))
    if any(finding.level == "problem" for finding in findings):
        sys.exit(1)


@app.command
def plan(
    *,
    model: str = "tiny",
    batch: Count = 64,
    images: Count = 8000,
    epochs: float = 10.0,
    device: Literal["auto", "cpu", "mps", "cuda"] = "auto",
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    optimizer: Literal["muon", "adamw"] = "muon",
    text_tokens: Count | None = None,
    rate: str | None = None,
    bandwidth: str | None = None,
    network: str = "1GB",
    watts: float | None = None,
    memory: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Say what a job will take before it is started: memory by component, time, energy, the largest batch, machines.

    Uses what m1clip compare or an earlier plan has measured here, or measures the matrix product rate now.

    Parameters
    ----------
    model
        A size from the table: tiny, small, ViT-B-32, 200M, 500M, 1B, ...
    batch
        Pairs in a step.
    images
        Training images; each is one sample of an epoch.
    epochs
        Passes over them.
    device
        Where it will run; this machine's unless --rate is given.
    precision
        Arithmetic of the towers.
    optimizer
        muon, as train does it, or adamw.
    text_tokens
        Length of the longest caption of a batch; default: as in the synthetic captions.
    rate
        Matrix product rate of the machine, such as 2.6TFLOP: for a machine that is not here.
    bandwidth
        Its memory bandwidth, such as 68GB (a second).
    network
        Bytes a second between machines, for gradients: 1GB is about 10 Gbit/s Ethernet.
    watts
        Power of the machine under load, for the energy; default: from a meter, else "not measured".
    memory
        Memory to stay within, such as 8GB; default: the device's own.
    json
        The whole plan as JSON.
    """
    from m1clip.bench.plan import PlanAsk, make_plan
    from m1clip.bench.report import plan_json, plan_lines

    ask = PlanAsk(
        model=model, batch=batch, images=images, epochs=epochs, device=device, precision=precision,
        optimizer=optimizer, text_tokens=text_tokens, rate=rate, bandwidth=bandwidth, network=network, watts=watts,
        memory=memory,
    )  # fmt: skip
    found = make_plan(ask)
    print(plan_json(found) if json else plan_lines(found))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    from m1clip.errors import UserError

    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise UserError(f"--batch {text}: give whole numbers with commas, such as 1,8,64") from None
