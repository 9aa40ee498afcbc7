"""The train command."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from m1clip.cli import app as commands
from m1clip.cli.app import app
from m1clip.config import ALIASES, COMMON, NAMES, Config
from m1clip.errors import UserError

SPLITS = {
    "test": "test split, not seen in training",
    "val": "validation split, not trained on, but used to choose the model (the data has no test split)",
    "train": "training split: how well the model fits its own training data (the data has no other split)",
}


@app.command
def train(
    *,
    config: Annotated[Config, Parameter(name="*")] = Config(),  # noqa: B008  frozen
    preset: Annotated[str | None, Parameter(group=COMMON)] = None,
    config_file: Annotated[Path | None, Parameter(name="--config", group=COMMON)] = None,
    run: Annotated[Path | None, Parameter(name=["--run", "--out"], group=COMMON)] = None,
    resume: Annotated[Path | None, Parameter(group=COMMON)] = None,
    background: Annotated[bool, Parameter(group=COMMON, negative="")] = False,
) -> None:
    """Train CLIP on your images, or on synthetic ones.

    m1clip train photos trains on a folder of images and captions: on pretrained towers where they are installed (pip
    install 'm1clip[towers]'), else from random weights. m1clip train photos --minutes 10 takes about ten minutes.
    m1clip train --resume runs/frozen continues a run that was stopped or killed.

    Ctrl-C, SIGTERM or a closed terminal (SIGHUP) finishes the step, saves a checkpoint and exits with code 130, 143 or
    129; a second signal exits immediately. Other exit codes: 0 training finished, 2 a user error, reported in one line.

    Parameters
    ----------
    preset
        Built-in settings for a complete run: demo, prior-art.
    config_file
        Settings from a TOML file; the config.toml of a run reproduces that run.
    run
        Folder of the new run; default runs/RECIPE (from random weights: runs/MODEL), runs/RECIPE-2, ... Under torchrun,
        write --out: torchrun takes --run for its own --run-path.
    resume
        Continue the run in this folder from its newest checkpoint, with its settings; --device and --shard may differ.
    background
        Train in a background process that survives closing this terminal.
    """
    if resume is not None:
        given = [word.partition("=")[0] for word in commands.words if word.startswith("--")]
        others = [name for name in given if name not in ("--resume", "--device", "--shard", "--background")]
        if others:
            raise UserError(f"--resume uses the settings of the run; remove {others[0]}, or start a new run")
    options = given_options(config, commands.words)
    from m1clip.training import run as runs
    from m1clip.training.process import Interrupted, Stopped, start_in_background
    from m1clip.training.progress import Screen
    from m1clip.training.spec import Settings

    screen = Screen()
    if background:
        name = preset or ""
        if resume is None:  # fail here, not in the background
            settings, _ = runs.decide_recipe(Settings(options, config_file, preset), screen)
            name = name or runs.run_name(settings.config)
        folder, pid = start_in_background(sys.argv[1:], run, name, resume)
        print(f"training   in the background: process {pid}, output in {folder / 'train.log'}")
        print(f"watch      m1clip monitor {folder}")
        print(f"stop       m1clip stop {folder}")
        return
    try:
        if resume is not None:
            result = runs.resume(resume, screen, device=options.get("device"), shard=options.get("shard"))
        else:
            result = runs.train(run=run, config=config_file, preset=preset, screen=screen, **options)
    except Stopped as stopped:
        screen.say(str(stopped))
        sys.exit(stopped.exit_code)
    except Interrupted as interrupted:
        screen.say(f"{interrupted} outside of training; m1clip train --resume continues a run that had started")
        sys.exit(interrupted.exit_code)
    screen.say(f"\n{SPLITS[result.split]}\n\n{result.scores}\n")
    screen.say(f"model      {result.path}")
    screen.say(f"image      {result.grid}")


def given_options(config: Config, words: list[str]) -> dict[str, Any]:
    """Settings given on the command line: flat name -> value parsed by cyclopts."""
    options: dict[str, Any] = {}
    for option, word in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = option.partition("=")
        flat = name.removeprefix("--").replace("-", "_")
        flat = ALIASES.get(flat, flat)
        if flat not in NAMES:
            flat = flat.removeprefix("no_")
        if not name.startswith("--") or flat not in NAMES:
            continue
        section, key = NAMES[flat]
        kind: Any = getattr(config, section) if section else config
        options[flat] = getattr(kind, key)
        typed = value if equals else word
        if type(options[flat]) is int and not typed.lstrip("-").isdecimal() and typed != "auto":
            raise UserError(f"{name} must be an integer, not {typed}")  # cyclopts turns 2.5 into 2
    return options
