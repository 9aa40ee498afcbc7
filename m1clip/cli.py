"""The command table. A command imports its room only when it is called, so that --help answers at once."""

from __future__ import annotations

import os
import platform
import sys
import traceback
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter

from m1clip import __version__
from m1clip.arguments import layers, spelled_out
from m1clip.config import COMMON, Config
from m1clip.errors import UserError

app = App(
    name="m1clip",
    version=__version__,
    help="Train CLIP on the computer you have. Every command takes --help, and --debug to show a full traceback.",
    group_parameters=Group("All settings", sort_key=1),
    suppress_keyboard_interrupt=False,  # main says how to continue
)
data = App(name="data", help="Make, check and pack picture-caption sets.")
app.command(data)

SPLITS = {
    "test": "test split, never trained on",
    "val": "validation split, never trained on, but it chose the model (the data has no test split)",
    "train": "training split: how far it was learned by heart (the data has no other)",
}
INTERRUPTED = 130  # the shell's code for Ctrl-C


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


@data.command(name="make")
def data_make(
    folder: Path, /, *, count: int = 1000, image_size: int = 112, seed: int = 0, captions: int = 5
) -> None:
    """Write a synthetic set that any tool can read: images/, captions.csv, scenes.jsonl, negatives.csv.

    Parameters
    ----------
    folder
        A folder that is empty or not there yet.
    count
        Pictures in all; a tenth each go to validation and test.
    image_size
        Side in pixels, 32 to 224.
    seed
        The same seed gives the same set.
    captions
        Paraphrases of each picture.
    """
    from m1clip.data.synthetic.write import write_folder
    from m1clip.train.screen import Screen

    screen = Screen()
    show = screen.counter("drawing")
    summary = write_folder(folder, count, image_size, seed, captions_per_image=captions, progress=show)
    screen.say(str(summary))


@data.command(name="lint")
def data_lint(
    path: str,
    /,
    *,
    json: bool = False,
    image_size: int | None = None,
    context_length: int = 32,
    quick: bool = False,
    image_column: str | None = None,
    caption_column: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> None:
    """Check a set before hours are lost on it; exit code 1 when it has problems.

    Parameters
    ----------
    path
        A file or folder of any kind that --data takes.
    json
        The whole report as JSON, for a program.
    image_size
        The size you will train at: smaller pictures are counted.
    context_length
        Tokens that your model reads (tiny 32, the others 77): captions that will be cut are counted.
    quick
        Look at 64 pictures only, as is done before each run.
    image_column
        Table only: name of the column with the picture's path.
    caption_column
        Table only: names of the caption columns.
    """
    from m1clip.data.lint import bpe_lengths, lint, quick_lint
    from m1clip.data.sources import Options, open_sources
    from m1clip.hardware.facts import usable_cpus
    from m1clip.train.screen import Screen

    screen = Screen()
    source = open_sources([path], options=Options(image_column, caption_column))
    if quick:
        report = quick_lint(
            source, image_size=image_size, tokenizer_lengths=bpe_lengths, context_length=context_length
        )
    else:
        show = None if json else screen.counter("checking")
        report = lint(
            source, True, image_size, bpe_lengths, context_length, workers=usable_cpus(), progress=show
        )
    print(report.to_json() if json else report.to_text())
    if report.verdict == "problems":
        sys.exit(1)


@data.command(name="pack")
def data_pack(
    path: str,
    folder: Path,
    /,
    *,
    shard_size: int = 1000,
    image_size: int | None = None,
    image_column: str | None = None,
    caption_column: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> None:
    """Write webdataset shards, train-000000.tar and so on, that webdataset, open_clip and m1clip read.

    Parameters
    ----------
    path
        A file or folder of any kind that --data takes.
    folder
        A folder that is empty or not there yet.
    shard_size
        Pictures in a shard.
    image_size
        Make larger pictures smaller, to this short side, as JPEG; else all bytes stay as they are.
    image_column
        Table only: name of the column with the picture's path.
    caption_column
        Table only: names of the caption columns.
    """
    from m1clip.data.pack import pack
    from m1clip.data.sources import Options, open_sources
    from m1clip.train.screen import Screen

    screen = Screen()
    source = open_sources([path], options=Options(image_column, caption_column))
    packed = pack(source, folder, shard_size, image_size, screen.counter("packing"))
    for line in packed.skipped[:10]:
        screen.warn(f"left out {line}")
    if len(packed.skipped) > 10:
        screen.warn(
            f"left out {len(packed.skipped):,} pictures that cannot be read; m1clip data lint lists them"
        )
    screen.say(str(packed))


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command; a person's mistake is one line and exit code 2, never a traceback (unless --debug)."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = spelled_out([word for word in words if word != "--debug"])
    try:
        if not {"--help", "-h", "--version"} & set(words):
            _set_environment()
        app.config = layers(words)
        app(words, exit_on_error=False, print_error=False)
    except (UserError, CycloptsError) as error:
        if debug:
            traceback.print_exc()
        print(f"m1clip: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of a pipe, such as head, has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        if debug:
            traceback.print_exc()
        where = f"{error.filename}: " if error.filename else ""
        print(f"m1clip: {_one_line(where + (error.strerror or str(error)))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("m1clip: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(0)


def _set_environment() -> None:
    """torch reads these once, when it is imported; no command has imported it yet."""
    from m1clip.hardware.device import environment

    os.environ.update(environment(platform.system(), os.environ))


def _one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())
