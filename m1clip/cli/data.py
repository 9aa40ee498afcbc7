"""data make, lint and pack."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from m1clip.cli.app import Count, app

data = App(name="data", help="Make, check and pack image-caption sets.")
app.command(data)


@data.command(name="make")
def data_make(
    folder: Path, /, *, count: Count = 1000, image_size: Count = 112, seed: int = 0, captions: Count = 5
) -> None:
    """Write a synthetic set that any tool can read: images/, captions.csv, scenes.jsonl, negatives.csv.

    Parameters
    ----------
    folder
        A folder that is empty or not there yet.
    count
        Images in all; a tenth each go to validation and test.
    image_size
        Side in pixels, 32 to 224.
    seed
        The same seed gives the same set.
    captions
        Paraphrases of each image.
    """
    from m1clip.data.synthetic.source import write_folder
    from m1clip.training.progress import Screen

    screen = Screen()
    with screen.counter("drawing") as show:
        summary = write_folder(folder, count, image_size, seed, captions_per_image=captions, progress=show)
    screen.say(str(summary))


@data.command(name="lint")
def data_lint(
    path: str,
    /,
    *,
    json: bool = False,
    image_size: Count | None = None,
    context_length: Count = 32,
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
        The size you will train at: smaller images are counted.
    context_length
        Tokens that your model reads (tiny 32, the others 77): captions that will be cut are counted.
    quick
        Look at 64 images only, as is done before each run.
    image_column
        Table only: name of the column with the image's path.
    caption_column
        Table only: names of the caption columns.
    """
    from m1clip.data.lint import lint, quick_lint
    from m1clip.data.lint.captions import bpe_lengths
    from m1clip.data.sources import open_sources
    from m1clip.data.sources.base import Options
    from m1clip.hardware.facts import usable_cpus
    from m1clip.training.progress import Screen

    screen = Screen()
    source = open_sources([path], options=Options(image_column, caption_column))
    if quick:
        report = quick_lint(source, image_size=image_size, tokenizer_lengths=bpe_lengths, context_length=context_length)
    else:
        with nullcontext() if json else screen.counter("checking") as show:
            report = lint(source, True, image_size, bpe_lengths, context_length, workers=usable_cpus(), progress=show)
    print(report.to_json() if json else report.to_text())
    if report.verdict == "problems":
        sys.exit(1)


@data.command(name="pack")
def data_pack(
    path: str,
    folder: Path,
    /,
    *,
    shard_size: Count = 1000,
    image_size: Count | None = None,
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
        Images in a shard.
    image_size
        Make larger images smaller, to this short side, as JPEG; else all bytes stay as they are.
    image_column
        Table only: name of the column with the image's path.
    caption_column
        Table only: names of the caption columns.
    """
    from m1clip.data.pack import pack
    from m1clip.data.sources import open_sources
    from m1clip.data.sources.base import Options
    from m1clip.training.progress import Screen

    screen = Screen()
    source = open_sources([path], options=Options(image_column, caption_column))
    with screen.counter("packing") as show:
        packed = pack(source, folder, shard_size, image_size, show)
    for line in packed.skipped[:10]:
        screen.warn(f"left out {line}")
    if len(packed.skipped) > 10:
        screen.warn(f"left out {len(packed.skipped):,} images that cannot be read; m1clip data lint lists them")
    screen.say(str(packed))
