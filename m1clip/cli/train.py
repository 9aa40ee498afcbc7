"""train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from m1clip.cli.app import app
from m1clip.config import COMMON, Config

if TYPE_CHECKING:
    pass

SPLITS = {
    "test": "test split, never trained on",
    "val": "validation split, never trained on, but it chose the model (the data has no test split)",
    "train": "training split: how far it was learned by heart (the data has no other)",
}


@app.command
def train(
    *,
    config: Annotated[Config, Parameter(name="*")] = Config(),  # noqa: B008  frozen
    preset: Annotated[str | None, Parameter(group=COMMON)] = None,
    config_file: Annotated[Path | None, Parameter(name="--config", group=COMMON)] = None,
    run: Annotated[Path | None, Parameter(group=COMMON)] = None,
    resume: Annotated[Path | None, Parameter(group=COMMON)] = None,
    background: Annotated[bool, Parameter(group=COMMON, negative="")] = False,
) -> None:
    """Train a CLIP, from random weights, on synthetic images or on your own.

    m1clip train --minutes 3 trains on synthetic images for three minutes. m1clip train --resume runs/tiny
    continues a run that was stopped or killed.

    Ctrl-C, SIGTERM or a closed terminal (SIGHUP) finishes the step, saves a checkpoint and leaves with code 130, 143 or
    129; a second one leaves at once. Other exit codes: 0 trained to the end, 2 something that you must change, in one
    line.

    Parameters
    ----------
    preset
        A shipped setting for a whole run: demo, prior-art.
    config_file
        Settings from a TOML file, such as a run's config.toml: that repeats the run.
    run
        Folder for the new run; default runs/MODEL, runs/MODEL-2, ...
    resume
        Continue the run in this folder from its newest checkpoint; other settings are read from there.
    background
        Train in a process of its own that outlives this terminal; says how to watch and how to stop it.
    """
    if background:
        _in_background(config, preset, run, resume)
        return
    from m1clip.training.process import Interrupted, Stopped
    from m1clip.training.progress import Screen
    from m1clip.training.run import resume as resume_run
    from m1clip.training.run import train as train_run

    screen = Screen()
    # Without a file, m1clip/arguments.py has put the recipe's settings under the words of the command line.
    settled = config.transfer.recipe == "finetune" and preset is None and config_file is None
    try:
        result = resume_run(resume, screen) if resume is not None else train_run(config, run, screen, preset, settled)
    except Stopped as stopped:
        screen.say(str(stopped))
        sys.exit(stopped.exit_code)
    except Interrupted as interrupted:
        screen.say(f"{interrupted} outside of training; m1clip train --resume continues a run that had begun")
        sys.exit(interrupted.exit_code)
    screen.say(f"\n{SPLITS[result.split]}\n\n{result.scores}\n")
    screen.say(f"model      {result.run}")
    screen.say(f"image    {result.grid}")


def _in_background(config: Config, preset: str | None, run: Path | None, resume: Path | None) -> None:
    from m1clip.training.process import start_in_background

    folder, pid = start_in_background(sys.argv[1:], run, preset or config.model.preset, resume)
    print(f"training   in the background: process {pid}, what it says goes to {folder / 'train.log'}")
    print(f"watch      m1clip monitor {folder}")
    print(f"stop       m1clip stop {folder}")
