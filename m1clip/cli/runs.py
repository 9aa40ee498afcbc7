"""Commands on run folders. monitor, runs, stop and report do not import torch."""

import sys
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from m1clip.cli.app import RUNS, Flag, Port, app
from m1clip.errors import UserError
from m1clip.formatting import one_line, printable, size

RUNS_FOLDER = Path("runs")


@app.command(group=RUNS, sort_key=1, usage="Usage: m1clip monitor [RUN...] [OPTIONS]")
def monitor(
    *runs: Path,
    web: Flag = False,
    port: Port = 8765,
    browser: Annotated[bool, Parameter(negative="--no-browser")] = True,
    once: Flag = False,
) -> None:
    """Monitor running or finished runs, in this terminal or with --web in a browser.

    Without a name it shows the run that is training now, or else the newest in runs/; without a run
    it waits for one. Ctrl-C closes it and never affects the run.

        m1clip monitor
        m1clip monitor --web

    Parameters
    ----------
    runs
        Run folders, or a folder of runs, of which the terminal shows the one that is training, or the newest.
    web
        Serve a page at http://127.0.0.1:PORT with zoomable plots, overlaid runs and retrieval examples.
    port
        Port for --web; 0 picks a free port.
    browser
        With --web, open the page in your browser.
    once
        Print the screen once as plain text, for pipes and logs.
    """
    if web:
        from m1clip.web.server import serve

        serve(list(runs) or [RUNS_FOLDER], port, browser)
        return
    from m1clip.monitor import terminal
    from m1clip.monitor.status import find_runs, newest_run, require_run

    if not runs and not once and sys.stdout.isatty() and not find_runs(RUNS_FOLDER):
        started = terminal.wait_for_run(RUNS_FOLDER)
        if started is not None:
            terminal.monitor(started)
        return
    if not runs and not RUNS_FOLDER.is_dir():
        raise UserError(f"{RUNS_FOLDER}: no runs yet in this folder; m1clip train makes one")
    run_folders = [
        newest_run(run) if run.is_dir() else require_run(run) for run in runs or [RUNS_FOLDER]
    ]
    if once:
        for run in run_folders:
            print(terminal.once(run))
    elif len(run_folders) > 1:
        raise UserError("the terminal shows one run; --web shows several in one page")
    else:
        terminal.monitor(run_folders[0])


@app.command(group=RUNS, sort_key=2, usage="Usage: m1clip runs [FOLDER] [OPTIONS]")
def runs(folder: Path = RUNS_FOLDER, /, *, json: Flag = False) -> None:
    """List runs with their state (preparing, running, finished, stopped, crashed), progress and best score.

    A crashed run was killed, or its machine was switched off: m1clip train --resume continues it.

        m1clip runs
        m1clip runs --json

    Parameters
    ----------
    folder
        The folder that contains the runs.
    json
        Print JSON.
    """
    from m1clip.monitor.status import as_table, list_runs

    rows = list_runs(folder)
    print(dumps(rows, indent=2) if json else as_table(rows, folder))


@app.command(group=RUNS, sort_key=3, usage="Usage: m1clip stop RUN [OPTIONS]")
def stop(run: Path, /, *, wait: float = 120.0) -> None:
    """Stop a run after its current step; it saves a checkpoint, and m1clip train --resume continues it exactly.

    The same as Ctrl-C in the terminal of the run.

        m1clip stop runs/demo

    Parameters
    ----------
    run
        The run folder.
    wait
        Seconds to wait for the run to stop.
    """
    from m1clip.monitor.status import stop_run

    print(one_line(stop_run(run, wait)))


@app.command(group=RUNS, sort_key=4, usage="Usage: m1clip report RUN... [OPTIONS]")
def report(
    *runs: Path, out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None
) -> None:
    """Write one self-contained HTML file about a run: scores against chance, curves, examples, settings.

    Several runs are overlaid, with a table of their differences. Plots need matplotlib (pip install
    'm1clip[plot]').

        m1clip report runs/demo
        m1clip report runs/cpu runs/gpu --out cpu-gpu.html

    Parameters
    ----------
    runs
        Run folders; the first is the baseline.
    out
        The file to write; default: report.html in the first run's folder.
    """
    from m1clip.monitor.report import NO_PLOTS, has_matplotlib, write_report
    from m1clip.monitor.status import require_run

    if not runs:
        raise UserError("no run given; for example: m1clip report runs/demo")
    for run in runs:
        require_run(run)
    path = write_report(list(runs), out or runs[0] / "report.html")
    note = "" if has_matplotlib() else f" without plots; {NO_PLOTS}"
    print(f"report     {one_line(str(path))} ({size(path.stat().st_size)}){note}")


@app.command(group=RUNS, sort_key=5, usage="Usage: m1clip checkpoints RUN [OPTIONS]")
def checkpoints(run: Path, /, *, verify: Flag = False, json: Flag = False) -> None:
    """List the checkpoints of a run: step, size and time.

    m1clip train --resume RUN continues from the newest valid one, and skips damaged ones. The best
    model is in best/.

        m1clip checkpoints runs/demo --verify

    Parameters
    ----------
    run
        A run folder.
    verify
        Check the hashes of every checkpoint; exit code 1 if one is damaged. Nothing is modified.
    json
        Print JSON.
    """
    from m1clip.training.checkpoint import checkpoint_table, list_checkpoints

    listing = list_checkpoints(run, verify)
    print(dumps(listing, indent=2) if json else printable(checkpoint_table(run, listing)))
    if any(row["problem"] for row in listing):
        sys.exit(1)
