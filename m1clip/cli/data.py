"""data formats, make, template, caption, howmany, lint, index and pack."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from m1clip import console
from m1clip.cli.app import DATA, Count, Flag, Integer, app
from m1clip.errors import UserError
from m1clip.formatting import one_line, plural, printable, table

if TYPE_CHECKING:
    from collections.abc import Sequence

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
ImageColumn = Annotated[str | None, Parameter(help="Column with the image path, in tables and hf.")]
CaptionColumn = Annotated[
    tuple[str, ...],
    Parameter(negative="", show_default=False, help="Caption columns, in tables and hf."),
]


def _open(
    paths: Sequence[str], image_column: str | None, caption_columns: tuple[str, ...]
) -> Source:
    from m1clip.data.sources import Options, open_sources

    return open_sources(paths, options=Options(image_column, caption_columns))


@data.command(name="formats", usage="Usage: m1clip data formats")
def data_formats() -> None:
    """List the formats of image-caption data.

    The first that fits is used; csv:PATH names one.

        m1clip data formats
        m1clip train csv:photos/table.csv
    """
    from m1clip.data.sources.formats import FORMATS

    rows = [(data_format.name, data_format.help) for data_format in FORMATS.values()]
    print(table(("name", "reads"), rows))


@data.command(name="make", usage="Usage: m1clip data make FOLDER [OPTIONS]")
def data_make(
    folder: NewFolder, /, *, count: Count = 1000, image_size: Count = 112, seed: Integer = 0
) -> None:
    """Write a synthetic dataset that any tool can read: images/ and captions.csv.

    Each image shows colored shapes and has five captions, which say what is where.

        m1clip data make scenes --count 500

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


@data.command(name="template", usage="Usage: m1clip data template FOLDER")
def data_template(folder: Annotated[Path, Parameter(help="A folder of images.")], /) -> None:
    """Write captions.csv with one row per image of a folder; the captions are empty, for you to fill in.

    Write the captions into the file with a spreadsheet or an editor. An image may have several
    rows, each with a caption. Training skips rows without one.

        m1clip data template photos
        m1clip train photos
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
    message = (
        f"{path}: {plural(len(names), 'image')}; write a caption beside each, then m1clip train"
        f" {folder}"
    )
    print(f"wrote      {one_line(message)}")


@data.command(name="caption", usage="Usage: m1clip data caption FOLDER [OPTIONS]")
def data_caption(
    folder: Annotated[Path, Parameter(help="A folder of photos; subfolders are included.")],
    /,
    *,
    server: str = "http://127.0.0.1:11434/v1",
    model: str | None = None,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    parallel: Count = 2,
    dry_run: Flag = False,
    replace: Flag = False,
    limit: Count | None = None,
    max_side: Count = 768,
    max_tokens: Count = 200,
    timeout: float = 120.0,
    tries: Count = 4,
    allow_remote: Flag = False,
) -> None:
    """Let a vision model on your computer write a caption for each photo, into captions.csv beside them.

    Works with any server with OpenAI's interface, such as Ollama, LM Studio and llama.cpp. If it is
    interrupted, the same command continues. Captions that people wrote, or that the photos contain,
    stay; m1clip train --captions person leaves out the generated ones.

        m1clip data caption photos --dry-run --model gemma3
        m1clip data caption photos --model gemma3

    Parameters
    ----------
    server
        URL of the server, on this computer.
    model
        Name of a vision model. Default: the server's only model; if it has several, an error lists them.
    prompt
        What the model is asked, instead of the default, which --dry-run shows.
    prompt_file
        A text file with the prompt.
    parallel
        Photos that are asked about at the same time.
    dry_run
        Ask about three photos, show prompt and answers, and write nothing.
    replace
        Also ask about photos with a generated caption, and replace it.
    limit
        Maximum number of photos to ask about.
    max_side
        Longer side in pixels of the image that is sent.
    max_tokens
        Longest answer, with the reasoning of models that reason first.
    timeout
        Seconds to wait for an answer.
    tries
        How often a photo is sent if the server is overloaded or does not answer.
    allow_remote
        Accept a server that is not this computer: your photos are sent to it.
    """
    from m1clip.data.captioning.photos import CaptionSettings, caption_photos, sample_captions

    chosen_prompt = _read_prompt(prompt, prompt_file)
    settings = CaptionSettings(
        **({} if chosen_prompt is None else {"prompt": chosen_prompt}),
        parallel=parallel,
        timeout=timeout,
        tries=tries,
        max_side=max_side,
        max_tokens=max_tokens,
        replace=replace,
        limit=limit,
    )
    if not dry_run:
        report = caption_photos(folder, server, model, settings=settings, allow_remote=allow_remote)
        console.print(str(report))
        if report.failures and not report.generated:
            sys.exit(1)
        return
    samples = sample_captions(folder, server, model, settings=settings, allow_remote=allow_remote)
    console.print(str(samples))


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    """The prompt that the user gave, if any."""
    from m1clip.io import read_small

    if prompt_file is None:
        return prompt
    if prompt is not None:
        raise UserError("use either --prompt or --prompt-file, not both")
    try:
        return read_small(prompt_file).decode("utf-8-sig").strip()
    except OSError as error:
        raise UserError(f"{prompt_file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{prompt_file}: is not text in UTF-8") from None


@data.command(name="howmany", usage="Usage: m1clip data howmany SOURCE [OPTIONS]")
def data_howmany(
    source: Annotated[
        str, Parameter(help="Photos with captions in any format, or a run (its data and model).")
    ],
    /,
    *,
    model: str | None = None,
    more: Annotated[
        tuple[int, ...], Parameter(negative="", show_default=lambda more: " ".join(map(str, more)))
    ] = (100, 200, 500),
    captions: Literal["all", "person"] = "person",
    json: Flag = False,
    seed: Integer = 0,
    device: Literal["auto", "cpu", "mps", "cuda"] = "auto",
) -> None:
    """Predict how much more captions would help: "200 more captions: +3.1 points [+1.2, +5.0]".

    Heads are fitted to parts of the captioned photos and tested on the others, and the curve is
    continued. Recall is that among the held-out photos, so it is only comparable with itself. The
    features are computed once, then it takes seconds.

        m1clip data howmany photos
        m1clip data howmany photos --model towers --more 1000

    Parameters
    ----------
    model
        A model that the captions are to improve, or towers for new heads on pretrained towers, as m1clip train
        --recipe frozen; default: that of the run, or general.
    more
        How many more photos with captions; repeat the option for several numbers.
    captions
        person: leave out captions that m1clip data caption generated.
    json
        Print the curve as JSON.
    seed
        Another seed draws other parts of the photos.
    device
        Device to run on.
    """
    from json import dumps

    from m1clip.training.how_many import how_many

    curve = how_many(source, model=model, more=more, captions=captions, seed=seed, device=device)
    print(dumps(curve.as_dict(), indent=2) if json else str(curve))


@data.command(name="lint", usage="Usage: m1clip data lint PATH... [OPTIONS]")
def data_lint(
    path: Data,
    /,
    *more: Data,
    json: Flag = False,
    context_length: Count = 32,
    quick: Flag = False,
    image_column: ImageColumn = None,
    caption_column: CaptionColumn = (),
) -> None:
    """Check a dataset before training on it; the exit code is 1 if it has problems.

    Several sets are checked together, as m1clip train reads them.

        m1clip data lint photos
        m1clip data lint train.csv val.csv test.csv

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

    source, sample = _open((path, *more), image_column, caption_column), QUICK if quick else None
    if json or quick:
        report = lint(source, sample, context_length=context_length, workers=usable_cpus())
    else:
        with console.progress("checking"):
            report = lint(source, context_length=context_length, workers=usable_cpus())
    print(report.to_json() if json else printable(report.to_text()))
    if report.verdict == "problems":
        sys.exit(1)


@data.command(name="index", usage="Usage: m1clip data index SHARDS [OPTIONS]")
def data_index(
    shards: Annotated[
        str, Parameter(help="Shards: a folder, a pattern such as train-{000..099}.tar, or a URL.")
    ],
    /,
    *,
    cache_dir: str | None = None,
) -> None:
    """Index webdataset shards, so that training can stream them.

    Each shard is read once, from start to end; m1clip train does the same if an index is missing.
    The index is written next to the shard (upload it with the shard), or to the cache folder if the
    shard is remote or read-only.

        m1clip data index 's3://bucket/train-{0000..0999}.tar'

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
        indexed_shards, made = open_shards(list_shards(shards), Options(cache_dir=cache_dir))
    problems = [problem for shard in indexed_shards for problem in shard.problems]
    for problem in problems[:10]:
        console.warn(str(problem))
    if len(problems) > 10:
        console.warn(f"{plural(len(problems) - 10, 'more problem')}")
    counts = (
        f"{plural(sum(s.samples for s in indexed_shards), 'image')},"
        f" {plural(sum(s.captions for s in indexed_shards), 'caption')}"
    )
    seconds = duration(time.perf_counter() - start)
    console.print(
        f"{plural(len(indexed_shards), 'shard')}, {counts}; {plural(made, 'shard')} indexed in {seconds}"
    )
    if empty := sum(not shard.samples for shard in indexed_shards):
        raise UserError(
            f"{plural(empty, 'shard')} without images that can be read: see above; replace or"
            " remove them"
        )


@data.command(name="pack", usage="Usage: m1clip data pack PATH FOLDER [OPTIONS]")
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

        m1clip data pack photos shards --image-size 256

    Parameters
    ----------
    shard_size
        Images per shard.
    image_size
        Resize larger images to this short side and save them as JPEG. Default: copy the files unchanged.
    """
    from m1clip.data.pack import pack
    from m1clip.hardware.machine_info import usable_cpus

    source = _open([path], image_column, caption_column)
    with console.progress("packing"):
        packed = pack(source, folder, shard_size, image_size, usable_cpus())
    for line in packed.skipped[:10]:
        console.warn(f"skipped {line}")
    if len(packed.skipped) > 10:
        console.warn(
            f"skipped {plural(len(packed.skipped), 'image')} that cannot be read; m1clip data lint"
            " lists them"
        )
    console.print(str(packed))
