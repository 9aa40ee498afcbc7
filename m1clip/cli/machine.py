"""Commands about this machine: compare, doctor and plan."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from m1clip import console
from m1clip.cli.app import MACHINE, Flag, app
from m1clip.cli.options import with_settings
from m1clip.config import COMMON, DataConfig, OptimizerName
from m1clip.errors import UserError, docs_page
from m1clip.formatting import one_line, table
from m1clip.optimizers import DEFAULT_OPTIMIZER

Several = Parameter(
    consume_multiple=True,
    negative="",
    show_default=lambda values: " ".join(map(str, values)) or "all",
)


@app.command(group=MACHINE, sort_key=3, usage="Usage: m1clip compare [OPTIONS]")
def compare(
    *,
    model: Annotated[tuple[str, ...], Several] = ("tiny",),
    batch_size: Annotated[tuple[int, ...], Several] = (64,),
    device: Annotated[tuple[str, ...], Several] = (),
    precision: Annotated[tuple[str, ...], Several] = (),
    optimizer: OptimizerName = DEFAULT_OPTIMIZER,
    minutes: float = 4.7,
    out: Path = Path("comparison"),
    share: Path | None = None,
) -> None:
    """Measure the training step on each device of this machine, in each precision, and report which is fastest.

    Also measures the time by stage, loss spikes, the overhead of each device and the loader, and
    writes a page with plots. With one model and batch size it also tries thread counts, gradient
    checkpointing and the compiler; with several, it finds the batch size from which a GPU is
    faster than the CPU.

        m1clip compare
        m1clip compare --model original --batch-size 12
        m1clip compare --model tiny original 200M --batch-size 1 8 64

    Parameters
    ----------
    model
        Model presets: tiny, original, ViT-B-32, ... With more than one, only device and precision vary.
    batch_size
        Images per step, one or more values.
    device
        Only these devices, such as cpu cuda.
    precision
        Only these precisions, such as fp32 bf16.
    optimizer
        As in train.
    minutes
        Time budget in minutes. Configurations that do not fit are skipped and listed.
    out
        Folder for comparison.json and comparison.html.
    share
        Also write a small JSON file with the chip, versions and speeds, without names or paths: for the page
        Machines of the documentation.
    """
    from rich.console import Console

    from m1clip.bench.compare import CompareOptions, print_progress, run_comparison
    from m1clip.bench.page import PAGE_NAME
    from m1clip.bench.report import shared
    from m1clip.io import write_json
    from m1clip.time_use import process_seconds

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
            if console.is_terminal:
                status.update(f"{min(used, 1.0):4.0%}  {message}")
            else:
                print_progress(message, used)

        comparison = run_comparison(options, out, show, process_seconds())
    print(comparison)
    print(f"data       {one_line(str(out / 'comparison.json'))}")
    print(f"page       {one_line(str(out / PAGE_NAME))}")
    if share is not None:
        write_json(share, shared(comparison.facts, comparison.results))
        print(
            f"share      {one_line(str(share))}: send it in an issue, for {docs_page('machines')}"
        )


@app.command(group=MACHINE, sort_key=1, usage="Usage: m1clip doctor [OPTIONS]")
def doctor(*, clear_choices: Flag = False, json: Flag = False) -> None:
    """Check this machine for anything that slows down or breaks training; exit code 1 if there is a problem.

    Each line is ok, a warning or a problem, with a suggested fix. The page Troubleshooting of the
    documentation explains the checks.

        m1clip doctor
        m1clip doctor --json

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


# Settings of a run of `train` that `plan` decides and predicts without data; the others have little
# effect on them.
PLANNED = (
    *("model", "batch_size", "micro_batch", "memory", "epochs", "steps"),
    *("device", "precision", "optimizer", "fsdp", "threads", "grad_checkpointing"),
)


# What m1clip plan --help shows of the settings, which are those of `train`.
PLAN_HELP = (*PLANNED, "data", "minutes", "recipe", "init")
# Options of `plan` itself.
PLAN_OPTIONS = ("preset", "config", "save", "images", "ranks", "bandwidth", "sizes", "json")


@app.command(group=MACHINE, sort_key=2, usage="Usage: m1clip plan [DATA...] [OPTIONS]")
@with_settings(common=(*PLAN_HELP, *PLAN_OPTIONS))
def plan(
    data: list[str] | None = None,
    *,
    preset: Annotated[str | None, Parameter(group=COMMON)] = None,
    config: Annotated[Path | None, Parameter(group=COMMON)] = None,
    save: Annotated[Path | None, Parameter(group=COMMON)] = None,
    images: Annotated[int | None, Parameter(group=COMMON)] = None,
    ranks: Annotated[int | None, Parameter(group=COMMON)] = None,
    bandwidth: Annotated[str | None, Parameter(group=COMMON)] = None,
    sizes: Annotated[bool, Parameter(group=COMMON, negative="", show_default=False)] = False,
    json: Annotated[bool, Parameter(group=COMMON, negative="", show_default=False)] = False,
    **settings: Any,
) -> None:
    """Show what m1clip train would do with the same options, and why, without training.

    With DATA, --preset or --config, takes every option of m1clip train (train --help-all): reads
    the data, measures what train would measure, and prints what would happen and why.

    Without them, decides and predicts the memory and time of a model from random weights, with one
    caption per image. A device and a precision that are not given are measured as for train. For the
    time, uses the steps that m1clip compare measured on this machine, or else measures matrix
    multiplication speed. --sizes lists models from tiny to 1B with their memory and a recommended
    device of this machine. Under torchrun it measures the bandwidth between two ranks.

        m1clip plan photos --minutes 10
        m1clip plan photos --init general --save plan.toml
        m1clip train --config plan.toml
        m1clip plan --model ViT-B-32 --images 100000 --epochs 30
        m1clip plan --sizes
        torchrun --nproc-per-node 2 -m m1clip plan --ranks 8

    Parameters
    ----------
    preset
        Built-in settings for a complete run, as in m1clip train.
    config
        Settings from a TOML file, as in m1clip train.
    save
        With DATA: also write the decided settings to this file; m1clip train --config FILE makes that run.
    images
        Without DATA: number of training images. Default: 8000.
    ranks
        Number of ranks, with one device each. Default: those of torchrun, or one.
    bandwidth
        Bytes that each rank sends per second, such as 10GB. Default: measured between the ranks of torchrun.
    sizes
        List a model of each size (tiny, small, medium, large) instead of planning a run.
    json
        Print the plan and all decided settings as JSON.
    """
    if data is not None or preset is not None or config is not None:
        if data is not None:
            settings["data"] = data
        own = {"images": images, "ranks": ranks, "bandwidth": bandwidth, "sizes": sizes or None}
        _plan_run({"preset": preset, "config": config, **settings}, own, save, json)
        return
    if save is not None:
        raise UserError(
            "--save writes the run on some data; name it: m1clip plan photos --save FILE"
        )
    if sizes:
        _print_sizes(settings, json)
        return
    unplanned = [name for name in settings if name not in PLANNED and name != "minutes"]
    if unplanned:
        option = f"--{unplanned[0].replace('_', '-')}"
        raise UserError(f"{option} needs the data of the run: m1clip plan photos {option} ...")
    from m1clip.bench.plan import make_plan, plan_text
    from m1clip.training.distributed import connect

    with console.waiting("measuring this machine"):
        run_plan = make_plan(settings, images or DataConfig.synthetic_images, ranks, bandwidth)
    if connect().rank == 0:
        _print_json(run_plan) if json else print(plan_text(run_plan))


def _plan_run(
    options: dict[str, Any], without_data: dict[str, Any], save: Path | None, json: bool
) -> None:
    """Decide a run on data, and print it; `without_data` are options that do not apply here."""
    from m1clip.config import to_dict
    from m1clip.io import write_text
    from m1clip.training.run import plan as plan_run
    from m1clip.training.spec import setting

    for name, value in without_data.items():
        if value is not None:
            raise UserError(f"--{name} is for a plan without data; remove --{name} or the data")
    with console.quiet() if json else contextlib.nullcontext():
        spec = plan_run(**{name: value for name, value in options.items() if value is not None})
    if save is not None:
        write_text(save, spec.to_toml())
    if json:
        _print_json({"config": to_dict(spec.config), "chosen_by": dict(spec.chosen_by)})
        return
    rows = [
        (f"--{name.replace('_', '-')}", _as_words(setting(spec.config, name)), origin)
        for name, origin in spec.chosen_by.items()
    ]
    print(f"\n{table(('setting', 'value', 'chosen by'), rows)}\n")
    print("Nothing was trained. All other settings have their defaults (m1clip train --help-all).")
    if save is not None:
        print(f"saved      {one_line(str(save))}; to train: m1clip train --config {save}")


def _as_words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _print_sizes(settings: dict[str, Any], json: bool) -> None:
    from m1clip.bench.sizes import SIZE_BATCH, as_json, list_sizes, sizes_text

    others = [name for name in settings if name != "batch_size"]
    if others:
        option = f"--{others[0].replace('_', '-')}"
        raise UserError(f"--sizes takes only --batch-size and --json; remove {option}")
    batch_size = settings.get("batch_size") or SIZE_BATCH
    if not isinstance(batch_size, int) or not 2 <= batch_size <= 65_536:
        raise UserError(f"--batch-size must be a number from 2 to 65536 here, not {batch_size}")
    with console.waiting("measuring this machine"):
        rows = list_sizes(batch_size=batch_size)
    if json:
        _print_json({"batch_size": batch_size, "sizes": as_json(rows)})
    else:
        print(sizes_text(rows, batch_size))


def _print_json(values: dict[str, Any]) -> None:
    from json import dumps

    from m1clip.runlog import json_safe

    print(dumps(json_safe(values), indent=2))
