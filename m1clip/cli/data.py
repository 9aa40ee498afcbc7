"""data formats, make, template, lint, index and pack."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from m1clip import console
from m1clip.cli.app import DATA, Count, Flag, app
from m1clip.errors import UserError
from m1clip.formatting import one_line, plural, printable, table

if TYPE_CHECKING:
    from m1clip.data.types import Source

data = App(
    name="data",
    help="Make, check and pack image-caption datasets.",
    usage="Usage: m1clip data COMMAND [ARGUMENTS] [OPTIONS]",
    group=DATA,
)
app.command(data)

Data = Annotated[
    str, Parameter(help="A file or folder in any format that m1clip data formats lists.")
]
NewFolder = Annotated[Path, Parameter(help="A new or empty folder.")]
ImageColumn = Annotated[str | None, Parameter(help="Tables only: the column with the image path.")]
CaptionColumn = Annotated[
    tuple[str, ...],
    Parameter(negative="", show_default=False, help="Tables only: the caption columns."),
]


def _open(path: str, image_column: str | None, caption_columns: tuple[str, ...]) -> Source:
    from m1clip.data.sources import Options, open_sources

    return open_sources([path], options=Options(image_column, caption_columns))


@data.command(name="formats")
def data_formats() -> None:
    """List the formats of --data. The first that fits is used; csv:PATH names one."""
    from m1clip.data.sources.formats import FORMATS

    rows = [(data_format.name, data_format.help) for data_format in FORMATS.values()]
    print(table(("name", "reads"), rows))


@data.command(name="make")
def data_make(
    folder: NewFolder, /, *, count: Count = 1000, image_size: Count = 112, seed: int = 0
) -> None:
    """Write a synthetic dataset that any tool can read: images/ and captions.csv.

    Parameters
    ----------
    count
        Number of images; 10% each go to validation and test.
    image_size
        Side in pixels, 32 to 224.
    seed
        The same seed gives the same dataset.
    """
    from m1clip.data.synthetic.source import write_folder

    with console.progress("drawing"):
        summary = write_folder(folder, count, image_size, seed)
    console.print(summary)


@data.command(name="template")
def data_template(folder: Annotated[Path, Parameter(help="A folder of images.")], /) -> None:
    """Write captions.csv with one row per image of a folder; the captions are empty, for you to fill in.

    m1clip data template photos, then write the captions into photos/captions.csv, with a spreadsheet or an editor. An
    image may have several rows, each with a caption. m1clip train photos skips rows without one.
    """
    import csv
    import io

    from m1clip.data.sources.base import walk_images
    from m1clip.io import write_text

    text = io.StringIO(newline="")
    path = folder / "captions.csv"
    if path.exists():
        raise UserError(
            f"{path}: already exists; write the captions into it, or rename it to start again"
        )
    # A table cannot name others.
    names = [name for name in walk_images(folder) if name.isprintable()]
    if not names:
        raise UserError(f"{folder}: no images found in this folder or below it")
    csv.writer(text).writerows([("image", "caption"), *((name, "") for name in names)])
    write_text(path, "\ufeff" + text.getvalue())  # the mark tells spreadsheets that it is UTF-8
    message = f"{path}: {plural(len(names), 'image')}; write a caption beside each, then m1clip train {folder}"
    print(f"wrote      {one_line(message)}")


@data.command(name="lint")
def data_lint(
    path: Data,
    /,
    *,
    json: Flag = False,
    context_length: Count = 32,
    quick: Flag = False,
    image_column: ImageColumn = None,
    caption_column: CaptionColumn = (),
) -> None:
    """Check a dataset before training on it; the exit code is 1 if it has problems.

    Parameters
    ----------
    json
        Print the complete report as JSON.
    context_length
        Context length of the model (tiny 32, others 77); captions that will be truncated are reported.
    quick
        Check only 64 images, as training does before each run.
    """
    from m1clip.data.lint import QUICK, lint
    from m1clip.hardware.machine_info import usable_cpus

    source, sample = _open(path, image_column, caption_column), QUICK if quick else None
    if json or quick:
        report = lint(source, sample, context_length=context_length, workers=usable_cpus())
    else:
        with console.progress("checking"):
            report = lint(source, context_length=context_length, workers=usable_cpus())
    print(report.to_json() if json else printable(report.to_text()))
    if report.verdict == "problems":
        sys.exit(1)


@data.command(name="index")
def data_index(
    shards: Annotated[
        str, Parameter(help="Shards: a folder, a pattern such as train-{000..099}.tar, or a URL.")
    ],
    /,
    *,
    cache_dir: str | None = None,
) -> None:
    """Index webdataset shards, so that training can stream them: m1clip data index 's3://bucket/train-{0000..0999}.tar'

    Each shard is read once, from start to end; m1clip train does the same if an index is missing. The index is written
    next to the shard (upload it with the shard), or to the cache folder if the shard is remote or read-only.

    Parameters
    ----------
    cache_dir
        Folder for the indexes of remote shards. Default: the user's cache folder.
    """
    import time

    from m1clip.data.sources import Options
    from m1clip.data.sources.shards import list_shards
    from m1clip.data.sources.stream import open_shards
    from m1clip.formatting import duration

    start = time.perf_counter()
    with console.progress("indexing"):
        found, made = open_shards(list_shards(shards), Options(cache_dir=cache_dir))
    problems = [problem for shard in found for problem in shard.problems]
    for problem in problems[:10]:
        console.warn(str(problem))
    if len(problems) > 10:
        console.warn(f"{plural(len(problems) - 10, 'more problem')}")
    counts = f"{plural(sum(s.samples for s in found), 'image')}, {plural(sum(s.captions for s in found), 'caption')}"
    seconds = duration(time.perf_counter() - start)
    console.print(
        f"{plural(len(found), 'shard')}, {counts}; {plural(made, 'shard')} indexed in {seconds}"
    )
    if empty := sum(not shard.samples for shard in found):
        raise UserError(
            f"{plural(empty, 'shard')} without images that can be read: see above; replace or remove them"
        )


@data.command(name="pack")
def data_pack(
    path: Data,
    folder: NewFolder,
    /,
    *,
    shard_size: Count = 1000,
    image_size: Count | None = None,
    image_column: ImageColumn = None,
    caption_column: CaptionColumn = (),
) -> None:
    """Write webdataset shards (train-000000.tar, ...) that webdataset, open_clip and m1clip read.

    If it is interrupted, the same command continues.

    Parameters
    ----------
    shard_size
        Images per shard.
    image_size
        Resize larger images to this short side and save them as JPEG. Default: copy the files unchanged.
    """
    from m1clip.data.pack import pack
    from m1clip.hardware.machine_info import usable_cpus

    source = _open(path, image_column, caption_column)
    with console.progress("packing"):
        packed = pack(source, folder, shard_size, image_size, usable_cpus())
    for line in packed.skipped[:10]:
        console.warn(f"skipped {line}")
    if len(packed.skipped) > 10:
        console.warn(
            f"skipped {plural(len(packed.skipped), 'image')} that cannot be read; m1clip data lint lists them"
        )
    console.print(str(packed))
