"""monitor, runs, stop and report: looking at runs from outside. None of them imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from m1clip.cli.app import app

RUNS = Path("runs")


@app.command
def monitor(
    *runs: Path,
    web: Annotated[bool, Parameter(negative="")] = False,
    port: int = 8765,
    browser: Annotated[bool, Parameter(negative="--no-browser")] = True,
    once: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Watch runs while they train, or look at finished ones: in this terminal, or with --web in a browser.

    Without a name it shows the run that is training now, else the newest in runs/. Closing it never disturbs
    the run. Keys in the terminal: q quit, p pause, m next metric, r next recall, l log scale, n next run, ? help.

    Parameters
    ----------
    runs
        Run folders, or a folder that holds runs.
    web
        A page at http://127.0.0.1:PORT with plots to zoom, runs laid over each other, and what the model finds.
    port
        For --web; 0 takes a free one.
    browser
        For --web: open the page in your browser.
    once
        Print one image as plain text and end: for a pipe, a mail, a log.
    """
    from m1clip.monitor.status import find_runs, need_run, newest_run

    if web:
        from m1clip.web.server import serve

        serve(list(runs) or [RUNS], port, browser)
        return
    found = [run for each in runs for run in (find_runs(each) or [need_run(each)])]
    from m1clip.monitor import terminal as room

    if once:
        for run in found or [newest_run(RUNS)]:
            print(room.once(run))
        return
    room.monitor(found or [newest_run(RUNS)])


@app.command
def runs(folder: Path = RUNS, /, *, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """List runs with their state (preparing, running, finished, stopped, died), progress and best score.

    The state comes from the run's folder and from its own process, known by number and start time.

    Parameters
    ----------
    folder
        Where to look.
    json
        The same as JSON, for a program.
    """
    from m1clip.monitor.status import as_json, as_table, list_runs

    rows = list_runs(folder)
    print(as_json(rows) if json else as_table(rows, folder))


@app.command
def stop(run: Path, /, *, wait: float = 120.0) -> None:
    """Stop a run after its current step; it saves a checkpoint first, so that --resume continues it exactly.

    Parameters
    ----------
    run
        The run's folder.
    wait
        Seconds to wait until it has ended.
    """
    from m1clip.monitor.status import stop_run

    print(stop_run(run, wait))


@app.command
def report(
    *runs: Path,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    png: Annotated[Path | None, Parameter()] = None,
) -> None:
    """Write one HTML file that holds everything about a run: figures against chance, curves, images, settings.

    It opens without a network and prints well. Several runs are laid over each other, with a table of differences.

    Parameters
    ----------
    runs
        Run folders, the one to compare against first.
    out
        The file to write; default: report.html in the first run's folder.
    png
        A folder for the plots as PNG files too (pip install 'm1clip[plot]').
    """
    from m1clip.errors import UserError
    from m1clip.monitor.report import write_report
    from m1clip.monitor.status import need_run

    if not runs:
        raise UserError("name a run: m1clip report runs/demo")
    for run in runs:
        need_run(run)
    path = write_report(list(runs), out or runs[0] / "report.html")
    print(f"report     {path} ({path.stat().st_size / 1e6:.1f} MB)")
    if png is not None:
        from m1clip.monitor.report import write_images

        for image in write_images(list(runs), png):
            print(f"image    {image}")


checkpoint = App(name="checkpoint", help="List, check and thin out the checkpoints of a run.")
app.command(checkpoint)
JSON = Annotated[bool, Parameter(negative="")]


@checkpoint.command
def ls(run: Path, /, *, json: JSON = False) -> None:
    """List the checkpoints of a run: step, size, when each was saved. Fast: nothing is read but names and sizes.

    A run continues from the newest one that is whole (m1clip train --resume RUN). The best model is apart, in best/.

    Parameters
    ----------
    run
        A run folder.
    json
        The same as JSON, for a program.
    """
    from m1clip.training.checkpoint_files import as_json, rows, table

    found = rows(run)
    print(as_json(found) if json else table(run, found))


@checkpoint.command
def verify(run: Path, /, *, json: JSON = False) -> None:
    """Read every checkpoint of a run and compare it with its hashes; exit code 1 if one is damaged.

    Nothing is changed. A damaged one is passed over by --resume, which then takes the one before it.

    Parameters
    ----------
    run
        A run folder.
    json
        The same as JSON, for a program.
    """
    from m1clip.training.checkpoint_files import as_json, checked_rows, table

    found = checked_rows(run)
    print(as_json(found) if json else table(run, found))
    if any(row.problem for row in found):
        sys.exit(1)


@checkpoint.command
def prune(run: Path, /, *, keep: int = 1) -> None:
    """Delete all but the newest checkpoints of a run that is not training; the newest whole one is never deleted.

    Parameters
    ----------
    run
        A run folder.
    keep
        How many to keep, at least 1.
    """
    from m1clip.training.checkpoint_files import prune_checkpoints

    print(prune_checkpoints(run, keep))
