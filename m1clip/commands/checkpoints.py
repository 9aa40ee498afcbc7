"""checkpoint ls, verify and prune: what a run has saved. None of them imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from m1clip.commands import app

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
    from m1clip.train.shelf import as_json, rows, table

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
    from m1clip.train.shelf import as_json, checked_rows, table

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
    from m1clip.train.shelf import thin_out

    print(thin_out(run, keep))
