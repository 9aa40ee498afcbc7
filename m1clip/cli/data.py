"""data make, lint and pack."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from m1clip.cli.app import Count, app

data = App(name="data", help="Make, check and pack image-caption datasets.")
app.command(data)

ImageColumn = Annotated[str | None, Parameter(help="Tables only: the column with the image path.")]
CaptionColumn = Annotated[tuple[str, ...], Parameter(negative="", help="Tables only: the caption columns.")]


@data.command(name="make")
def data_make(
    folder: Path, /, *, count: Count = 1000, image_size: Count = 112, seed: int = 0, captions: Count = 5
) -> None:
    """Write a synthetic dataset that any tool can read: images/ and captions.csv.

    Parameters
    ----------
    folder
        A new or empty folder.
    count
        Number of images; 10% each go to validation and test.
    image_size
        Side in pixels, 32 to 224.
    seed
        The same seed gives the same dataset.
    captions
        Captions per image.
    """
    from m1clip.data.synthetic.source import write_folder
    from m1clip.training.progress import Screen

    screen = Screen()
    with screen.counter("drawing") as show:
        summary = write_folder(folder, count, image_size, seed, captions_per_image=captions, progress=show)
    screen.say(summary)


@data.command(name="lint")
def data_lint(
    path: str,
    /,
    *,
    json: bool = False,
    image_size: Count | None = None,
    context_length: Count = 32,
    quick: bool = False,
    image_column: ImageColumn = None,
    caption_column: CaptionColumn = (),
) -> None:
    """Check a dataset before training on it; the exit code is 1 if it has problems.

    Parameters
    ----------
    path
        A file or folder in any format that --data accepts.
    json
        Print the complete report as JSON.
    image_size
        The image size to train at; smaller images are reported.
    context_length
        Context length of the model (tiny 32, others 77); captions that will be truncated are reported.
    quick
        Check only 64 images, as training does before each run.
    """
    from m1clip.data.lint import QUICK, lint
    from m1clip.data.sources import Options, open_sources
    from m1clip.hardware.facts import usable_cpus
    from m1clip.training.progress import Screen

    source = open_sources([path], options=Options(image_column, caption_column))
    with nullcontext() if json or quick else Screen().counter("checking") as show:
        report = lint(
            source,
            QUICK if quick else None,
            image_size=image_size,
            context_length=context_length,
            workers=usable_cpus(),
            progress=show,
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
    shard_size: Count = 1000,
    image_size: Count | None = None,
    image_column: ImageColumn = None,
    caption_column: CaptionColumn = (),
) -> None:
    """Write webdataset shards (train-000000.tar, ...) that webdataset, open_clip and m1clip read.

    Parameters
    ----------
    path
        A file or folder in any format that --data accepts.
    folder
        A new or empty folder.
    shard_size
        Images per shard.
    image_size
        Resize larger images to this short side and save them as JPEG. Default: copy the files unchanged.
    """
    from m1clip.data.pack import pack
    from m1clip.data.sources import Options, open_sources
    from m1clip.training.progress import Screen

    screen = Screen()
    source = open_sources([path], options=Options(image_column, caption_column))
    with screen.counter("packing") as show:
        packed = pack(source, folder, shard_size, image_size, show)
    for line in packed.skipped[:10]:
        screen.warn(f"skipped {line}")
    if len(packed.skipped) > 10:
        screen.warn(f"skipped {len(packed.skipped):,} images that cannot be read; m1clip data lint lists them")
    screen.say(str(packed))
