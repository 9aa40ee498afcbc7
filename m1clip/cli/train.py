"""The commands demo and train."""

from __future__ import annotations

import gc
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from m1clip import console
from m1clip.cli.app import START_HERE, Flag, app
from m1clip.cli.options import command_words, print_all_options, with_settings
from m1clip.config import COMMON
from m1clip.errors import UserError, docs_page

if TYPE_CHECKING:
    from m1clip.training.run import Run

SPLIT_DESCRIPTIONS = {
    "test": "test split, not seen in training",
    "val": (
        "validation split, not trained on, but used to choose the model (the data has no test"
        " split)"
    ),
    "train": (
        "training split: how well the model fits its own training data (the data has no other"
        " split)"
    ),
}
# Settings that may differ from those of a run that is resumed.
RESUME_OPTIONS = ("device", "fsdp")
# What m1clip train --help shows; --help-all shows the rest.
COMMON_OPTIONS = (
    "data",
    "out",
    "minutes",
    "epochs",
    "recipe",
    "init",
    "model",
    "batch_size",
    "device",
    "resume",
    "help_all",
)
DETAILS = """Some defaults depend on the recipe: "default: 10; frozen: 8; finetune: 5; --init: 10" is 10
from random weights, 8 for --recipe frozen, 5 for --recipe finetune and 10 for --init with a CLIP model. A
recipe that is not listed has the first value, and --init that of finetune.

--recipe finetune first trains heads on frozen towers, with the duration and learning rate of --recipe
frozen. The options for the duration and the learning rate are those of the second stage.

Ctrl-C, SIGTERM or a closed terminal (SIGHUP) finishes the step, saves a checkpoint and exits with code
130, 143 or 129; a second signal exits immediately. Other exit codes: 0 training finished, 2 a user error,
reported in one line."""


@app.command(group=START_HERE, sort_key=1, usage="Usage: m1clip demo [OPTIONS]")
def demo(*, out: Path | None = None) -> None:
    """Train a small CLIP on synthetic images and show what it finds, in 6 minutes at most.

    A slow or busy machine makes fewer steps. The same as m1clip train --preset demo, followed by what to try next.

        m1clip demo

    Parameters
    ----------
    out
        Folder of the new run; default runs/demo, runs/demo-2, ...
    """
    result = _train(preset="demo", out=out)
    folder = result.path
    steps, full_steps = _demo_steps(folder)
    if steps < full_steps:
        print(
            f"\nThis machine was slow or busy: {steps} of {full_steps} steps fitted in the time. For"
            f" better scores: m1clip train --preset demo --steps {full_steps}"
        )
    print(f"\nnext\n{_activation()}{_next_steps(folder)}")


def _next_steps(folder: Path) -> str:
    """What to do after the demo: one command per line, and what it shows."""
    from m1clip.monitor.report import has_matplotlib

    curves = "" if has_matplotlib() else " (pip install 'm1clip[plot]' for the curves)"
    return (
        f"  m1clip monitor {folder}                the losses and scores of the run\n"
        f"  m1clip train --preset demo --lr 0.001  the demo again with one change\n"
        f"  m1clip eval {folder} --analysis        what the model confuses, and how often\n"
        f"  m1clip report {folder}                 curves, examples and settings as one HTML file{curves}\n"
        f"  m1clip train photos --minutes 10       your own images: a folder with captions.csv\n"
        f"  m1clip index ~/Pictures --model general   search your photos (pip install 'm1clip[towers,search]')\n"
        f"  {docs_page('learn')}   what happened in this run, step by step"
    )


def _activation() -> str:
    """A line that puts `m1clip` on the PATH, if it is not there: `make demo` runs it by its path."""
    script = Path(sys.executable).parent / "activate"
    if shutil.which("m1clip") or not script.exists():
        return ""
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    return f"  source {shlex.quote(str(script))}\n"


def _demo_steps(folder: Path) -> tuple[int, int]:
    """The steps of a run of the demo, and those of a machine that is fast enough."""
    from m1clip.training.budget import steps_of_epochs
    from m1clip.training.spec import read_spec

    config = read_spec(folder).config
    steps = config.train.steps
    if config.train.max_epochs is None:
        return steps, steps
    steps_per_epoch = config.data.synthetic_images // config.train.batch_size
    return steps, steps_of_epochs(config.train.max_epochs, steps_per_epoch)


@app.command(group=START_HERE, sort_key=2, usage="Usage: m1clip train [DATA...] [OPTIONS]")
@with_settings(common=COMMON_OPTIONS)
def train(
    data: list[str] | None = None,
    *,
    preset: Annotated[str | None, Parameter(group=COMMON)] = None,
    config: Annotated[Path | None, Parameter(group=COMMON)] = None,
    out: Annotated[Path | None, Parameter(group=COMMON)] = None,
    resume: Annotated[Path | None, Parameter(group=COMMON)] = None,
    background: Annotated[bool, Parameter(group=COMMON, negative="")] = False,
    help_all: Annotated[Flag, Parameter(group=COMMON)] = False,
    **settings: Any,
) -> None:
    """Train CLIP on your images, or on synthetic ones.

    Trains on pretrained towers where they are installed (pip install 'm1clip[towers]'), else from
    random weights, and prints what it chose and why.

        m1clip train photos --minutes 10
        m1clip train photos --init general --out runs/photos
        m1clip train --resume runs/photos

    Parameters
    ----------
    preset
        Built-in settings for a complete run: demo, original.
    config
        Settings from a TOML file; the config.toml of a run repeats that run. With other options, it gives what you
        chose for that run, and m1clip decides the rest again.
    out
        Folder of the new run; default runs/RECIPE (from random weights: runs/MODEL), runs/RECIPE-2, ...
    resume
        Continue the run in this folder from its newest checkpoint, with its settings; --device and --fsdp may differ.
    background
        Train in a background process that survives closing this terminal.
    help_all
        Show every option of m1clip train, with its default for each recipe.
    """
    if help_all:
        print_all_options(train, "m1clip train", DETAILS)
        return
    if data is not None:
        settings["data"] = data
    if resume is not None:
        command_options = {"preset": preset, "config": config, "out": out}
        typed = [name for name, value in command_options.items() if value is not None]
        others = [name for name in (*typed, *settings) if name not in RESUME_OPTIONS]
        if others:
            option = f"--{others[0].replace('_', '-')}"
            hint = f"remove {option}, or start a new run"
            raise UserError(f"--resume uses the settings of the run; {hint}")
    elif data is None and preset is None and config is None and "data" not in settings:
        _reject_unnamed_photos()
    if background:
        from m1clip.training import run as runs
        from m1clip.training.process import start_in_background
        from m1clip.training.spec import Settings

        name = preset or ""
        if resume is None:  # fail here, not in the background
            decided, _ = runs.decide_recipe(Settings(settings, config, preset))
            name = name or runs.run_name(decided.config)
        words = command_words({"preset": preset, "config": config, "resume": resume, **settings})
        folder, pid = start_in_background(["train", *words], out, name, resume)
        console.print(
            f"training   in the background: process {pid}, output in {folder / 'train.log'}"
        )
        console.print(f"watch      m1clip monitor {folder}")
        console.print(f"stop       m1clip stop {folder}")
        return
    _train(out=out, config=config, preset=preset, resume=resume, **settings)


def _reject_unnamed_photos() -> None:
    """Without data, training is on synthetic images: not what is meant in a folder of photos."""
    from m1clip.data.caption_table import CAPTIONS_FILE
    from m1clip.data.images import SUFFIXES

    # Not below it: a project may have images somewhere.
    if any(
        path.suffix.lower() in SUFFIXES or path.name == CAPTIONS_FILE for path in Path().iterdir()
    ):
        raise UserError(
            "name the data: m1clip train . for the images of this folder, m1clip train synthetic"
            " for synthetic ones"
        )


def _train(
    *,
    out: Path | None = None,
    config: Path | None = None,
    preset: str | None = None,
    resume: Path | None = None,
    **settings: Any,
) -> Run:
    """Train or resume in this process, and print the final scores; exits after a signal."""
    from m1clip.monitor import original
    from m1clip.training import run as runs
    from m1clip.training.process import Interrupted, Stopped

    gc.freeze()  # what was imported stays: each collection would search it for 0.1 s
    try:
        if resume is not None:
            result = runs.resume(resume, **settings)
        else:
            result = runs.train(out=out, config=config, preset=preset, **settings)
    except Stopped as stopped:
        console.print(str(stopped))
        console.tell_torchrun(str(stopped))
        sys.exit(stopped.exit_code)
    except Interrupted as interrupted:
        hints = getattr(interrupted, "__notes__", ["no step was saved, so start it again"])
        reason = f"{interrupted}; {'; '.join(hints)}"
        console.print(reason)
        console.tell_torchrun(reason)
        sys.exit(interrupted.exit_code)
    console.print(f"\n{SPLIT_DESCRIPTIONS[result.split]}\n\n{result.scores}\n")
    if preset == original.ORIGINAL_PRESET:
        console.print(f"{original.write_comparison(result.path)}\n")
    console.print(f"model      {result.path}")
    console.print(f"image      {result.grid}")
    return result
