"""train and eval."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from m1clip.commands import app
from m1clip.config import COMMON, Config

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
) -> None:
    """Train a CLIP, from random weights, on synthetic pictures or on your own.

    m1clip train --minutes 3 trains on synthetic pictures for three minutes. m1clip train --resume runs/tiny
    continues a run that was stopped or killed.

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
    """
    from m1clip.evaluate.table import scores_table
    from m1clip.train.run import resume as resume_run
    from m1clip.train.run import train as train_run
    from m1clip.train.screen import Screen
    from m1clip.train.stopping import Stopped

    screen = Screen()
    try:
        result = resume_run(resume, screen) if resume is not None else train_run(config, run, screen, preset)
    except Stopped as stopped:
        screen.say(str(stopped))
        sys.exit(stopped.exit_code)
    screen.console.print(scores_table(result.scores, title=f"\n{SPLITS[result.split]}"))
    screen.say(f"model      {result.run}")
    screen.say(f"picture    {result.grid}")


@app.command(name="eval")
def evaluate(
    run: Path,
    /,
    *,
    source: Annotated[tuple[str, ...], Parameter(name="--data", negative="")] = (),
    split: Literal["train", "val", "test"] = "test",
    device: Literal["auto", "cpu", "mps", "cuda"] = "auto",
) -> None:
    """Score a run's best model on a split of its data: recall both ways with chance and 95% interval.

    Parameters
    ----------
    run
        A run folder.
    source
        Other data to score on; default: the run's own.
    split
        Which split; train shows how far the model has learned by heart.
    device
        Where to compute.
    """
    from m1clip.evaluate.table import scores_table
    from m1clip.train.run import decode_plan
    from m1clip.train.score import score_run
    from m1clip.train.screen import Screen

    screen = Screen()
    scores, grid = score_run(run, split, device, source, decode_plan(screen))
    screen.console.print(scores_table(scores, title=f"\n{run}, {split} split"))
    screen.say(f"picture    {grid}")
