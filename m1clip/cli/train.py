"""train and eval."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from m1clip.cli.app import app
from m1clip.config import COMMON, Config
from m1clip.errors import UserError
from m1clip.io import read_small

if TYPE_CHECKING:
    from m1clip.training.progress import Screen

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
    from m1clip.evaluation.statistics import scores_table
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
    screen.console.print(scores_table(result.scores, title=f"\n{SPLITS[result.split]}"))
    screen.say(f"model      {result.run}")
    screen.say(f"image    {result.grid}")


def _in_background(config: Config, preset: str | None, run: Path | None, resume: Path | None) -> None:
    from m1clip.training.process import start_in_background

    folder, pid = start_in_background(sys.argv[1:], run, preset or config.model.preset, resume)
    print(f"training   in the background: process {pid}, what it says goes to {folder / 'train.log'}")
    print(f"watch      m1clip monitor {folder}")
    print(f"stop       m1clip stop {folder}")


def _score_classes(
    screen: Screen, run: Path, folder: Path, names: Path | None, templates: tuple[str, ...], probe: bool, device: str
) -> None:
    from m1clip.evaluation.statistics import scores_table
    from m1clip.evaluation.zeroshot import score_classes
    from m1clip.hardware.device import choose_device
    from m1clip.hardware.facts import read_facts
    from m1clip.inference.encoder import load

    try:
        told = read_small(names).decode("utf-8-sig").splitlines() if names is not None else []
    except UnicodeDecodeError:
        raise UserError(f"--class-names {names}: not a UTF-8 text file; write one name per line") from None
    image = (run if (run / "config.toml").is_file() else Path()) / f"confusion-{folder.name or 'classes'}.png"
    bundle = load(run, device=choose_device(device, read_facts()))
    found = [line.strip() for line in told if line.strip()]
    scores, unreadable = score_classes(bundle, folder, found, templates, probe, image)
    for reason in unreadable[:3]:
        screen.warn(f"skipped {reason}")
    screen.console.print(scores_table(scores, title=f"\n{run}, classes of {folder}"))
    screen.say(f"image    {image}")


@app.command(name="eval")
def evaluate(
    run: Path,
    /,
    *,
    source: Annotated[tuple[str, ...], Parameter(name="--data", negative="")] = (),
    split: Literal["train", "val", "test"] = "test",
    classes: Path | None = None,
    class_names: Path | None = None,
    template: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    probe: Annotated[bool, Parameter(negative="")] = False,
    analysis: Annotated[bool, Parameter(negative="")] = False,
    device: Literal["auto", "cpu", "mps", "cuda"] = "auto",
) -> None:
    """Score a run's best model on a split of its data: mean recall (class folders: top-1 accuracy) and
    recall both ways, with chance and 95% interval.

    With --classes FOLDER it scores zero-shot classes instead: FOLDER holds a folder of images for each class, and
    the model is given only the names. Top-1 and top-5 accuracy, and the confusion matrix as an image.

    Parameters
    ----------
    run
        A run folder; with --classes also a model folder, or a model of others (open_clip, Hugging Face).
    source
        Other data to score on; default: the run's own.
    split
        Which split; train shows how far the model has learned by heart.
    classes
        A folder of class folders, for zero-shot accuracy.
    class_names
        With --classes: a text file with one name a line, in the order of the sorted folders; default: their names.
    template
        With --classes: sentence with {} for the class; give it again for the mean of several.
    probe
        With --classes: also train a linear classifier on the vectors of two thirds and score it on the rest.
    analysis
        Also what it learned and confuses: by category, colour, count and position (synthetic images), by difficulty
        and length of the caption, the space of vectors, the nearest confusions as an image.
    device
        Where to compute.
    """
    from m1clip.evaluation.evaluate import score_run
    from m1clip.evaluation.statistics import scores_table
    from m1clip.training.progress import Screen
    from m1clip.training.run import decode_plan

    screen = Screen()
    if classes is not None:
        _score_classes(screen, run, classes, class_names, template, probe, device)
        return
    scores, grid = score_run(run, split, device, source, decode_plan(screen))
    screen.console.print(scores_table(scores, title=f"\n{run}, {split} split"))
    screen.say(f"image    {grid}")
    if analysis:
        _analyse(screen, run, split, device, source)


def _analyse(screen: Screen, run: Path, split: str, device: str, source: tuple[str, ...]) -> None:
    from m1clip.evaluation.analysis import analysis_tables
    from m1clip.evaluation.evaluate import analyse_split, open_exam
    from m1clip.io import write_json
    from m1clip.training.run import decode_plan

    mark = f"{split}{'-other-data' if source else ''}"
    image, figures = run / f"confusions-{mark}.png", run / f"analysis-{mark}.json"
    found = analyse_split(open_exam(run, split, device, source, decode_plan(screen)), image)
    write_json(figures, found)
    for title, table in analysis_tables(found):
        screen.say(f"\n{title}")
        screen.console.print(table)
    screen.say(f"analysis   {figures}")
    if image.is_file():
        screen.say(f"confusions {image}")
