"""Commands that search photos: index, search, teach, duplicates and serve."""

from __future__ import annotations

import json as json_text
import os
import re
import shlex
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from m1clip import console
from m1clip.cli.app import PHOTOS, Count, Flag, Port, app
from m1clip.errors import UserError
from m1clip.formatting import duration, one_line, plural, size

if TYPE_CHECKING:
    from m1clip.search.index import Report
    from m1clip.search.query import Index
    from m1clip.search.results import Result, Results

Texts = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]
PROBLEMS_SHOWN = 5  # problems on screen
NEAREST_SHOWN = 3  # results of a search that found nothing likely


@app.command(group=PHOTOS, sort_key=1, usage="Usage: m1clip index FOLDER [OPTIONS]")
def index(
    folder: Path,
    /,
    *,
    model: Path | None = None,
    problems: Flag = False,
    watch: Flag = False,
    export: Path | None = None,
    when_done: Flag = False,
    back: Flag = False,
) -> None:
    """Index a folder of photos for search; a second call only reads what is new or changed.

    The index is stored in .m1clip-index in that folder, or in your user data folder if that is not
    writable or belongs to another user. Indexing can be interrupted at any time; the next call
    continues it.

        m1clip index ~/Pictures
        m1clip index ~/Pictures --model runs/frozen

    Parameters
    ----------
    folder
        A folder of images; subfolders are included.
    model
        general (the model in the box), a run, a model folder, or an open_clip or Hugging Face model. Default: the one
        that this folder was indexed with last; for a new index, the newest finished run in runs/ that was trained on
        photos (one of the Label page only if you search with its model), or general. Each model has its own vectors.
    problems
        List every file that cannot be used, not only the first five.
    watch
        Keep the index up to date until Ctrl-C.
    export
        Also write the vectors to this Parquet file, for a vector database.
    when_done
        With a new --model: search with the current model until all images are indexed with the new one.
    back
        Search with the previous model again: its vectors are kept, and only new images are indexed.
    """
    from m1clip.model.named import WAYS, NoModelError
    from m1clip.search.index import update_index, watch_folder
    from m1clip.search.query import Index

    if back:
        if model is not None:
            raise UserError("--back chooses the previous model: remove --model")
        before = Index(folder).model_before
        if before is None:
            raise UserError(
                f"{folder}: was indexed with one model only, so there is no previous one"
            )
        model = Path(before)

    def update(always: bool) -> None:
        with console.progress("indexing images", beginning="loading the model"):
            report = update_index(folder, model, when_done)
        if always or report.added or report.reused or report.removed:
            for line in _report_lines(report, None if problems else PROBLEMS_SHOWN):
                console.print(line)
        if always and model is not None and report.indexed:
            _mention_words(Index(folder, model))
        if report.chose_model:
            _mention_chosen_run(folder, report.model)
        elif always and model is None:
            _mention_newest_run(folder, report.model)

    changes = watch_folder(folder) if watch else iter(())
    try:
        update(always=True)
    except NoModelError:
        error = UserError("there is no model yet; to get one:")
        error.add_note(WAYS)
        raise error from None
    except KeyboardInterrupt as interrupt:
        if not back:  # which may mean another model by then
            interrupt.add_note("the same command continues with the other images")
        raise
    if export is not None:
        console.print(
            f"export     {export} ({plural(Index(folder, model).export(export), 'vector')})"
        )
    with suppress(KeyboardInterrupt):
        for _ in changes:
            update(always=False)


def _report_lines(report: Report, shown: int | None) -> list[str]:
    changes = f"{report.added:,} new, {report.reused:,} moved or copied, {report.removed:,} removed"
    skipped = (
        f"{report.hidden:,} hidden, {plural(report.links, 'link')},"
        f" {plural(report.other, 'other file')}"
    )
    lines = [
        f"index      {_from_home(report.folder)}",
        f"model      {_shown_model(report.model)}",
        f"images     {report.indexed:,} ({changes}) in {duration(report.seconds)}",
        f"skipped    {skipped}, {plural(len(report.problems), 'file')} that cannot be used",
    ]
    lines += [f"           {path}: {why}" for path, why in report.problems[:shown]]
    if shown is not None and len(report.problems) > shown:
        lines.append("           ... --problems lists all of them")
    return lines


def _shown_model(model: str) -> str:
    """How to name a model on the command line: a run, instead of its best/ or model/."""
    from m1clip.monitor.status import is_run

    path = Path(model)
    if not path.exists():
        return model  # in the package, or of the Hub
    shown_path = path.parent if is_run(path.parent) else path
    return str(
        shown_path.relative_to(Path.cwd()) if shown_path.is_relative_to(Path.cwd()) else shown_path
    )


def _mention_words(opened: Index) -> None:
    """Say what became of words that were taught with another model."""
    missing = [mark for mark in opened.concepts.all_marks() if mark.vector is None]
    if not missing:
        return
    has_vector = {(mark.name, mark.sha256) for mark in opened.concepts.rows()}
    fitted = [mark for mark in missing if (mark.name, mark.sha256) in has_vector]
    left = len(missing) - len(fitted)
    notes = []
    if fitted:
        words = plural(len({mark.name for mark in fitted}), "taught word")
        photos = plural(len(fitted), "marked photo")
        notes.append(f"{words} fitted again to this model, from {photos}")
    if left:
        examples = plural(left, "example")
        notes.append(f"{examples} of images that are not in this folder must be taught again")
    console.print(f"words      {'; '.join(notes)}")


def _mention_chosen_run(folder: Path, used: str) -> None:
    """Say how to search with the model in the box, if a run was chosen for a new index."""
    from m1clip.model.named import BOXED, GENERAL

    if used in BOXED:
        return
    run = _shown_model(used)
    command = shlex.join(["m1clip", "index", str(folder), "--model", GENERAL])
    console.print(
        f"note       {run} was chosen as the newest finished run; for the model in the box: {command}"
    )


def _mention_newest_run(folder: Path, used: str) -> None:
    """Say how to search with the newest run, if the index uses an older model."""
    from m1clip.model.folder import newest_run

    run = newest_run(of_photos=True)
    if run is None or Path(used).is_relative_to(run.absolute()):
        return
    command = shlex.join(["m1clip", "index", str(folder), "--model", str(run)])
    console.print(f"note       the newest run is {run}; to search with it: {command}")


@app.command(group=PHOTOS, sort_key=2, usage="Usage: m1clip search TEXT... [OPTIONS]")
def search(
    *text: str,
    k: Annotated[Count, Parameter(name=["--count", "-k"])] = 20,
    folder: Annotated[Path | None, Parameter(name="--index")] = None,
    like: Annotated[tuple[Path, ...], Parameter(negative="", show_default=False)] = (),
    exclude: Annotated[Texts, Parameter(name="--not")] = (),
    since: str | None = None,
    until: str | None = None,
    subfolder: str | None = None,
    orientation: Literal["landscape", "portrait"] | None = None,
    min_side: Count | None = None,
    copies: Flag = False,
    all_: Annotated[Flag, Parameter(name="--all")] = False,
    model: Path | None = None,
    json: Flag = False,
    open_: Annotated[Flag, Parameter(name="--open")] = False,
) -> None:
    """Search an indexed folder of photos by text or by image.

    With the model general, it says so if nothing matches; with others, it lists the nearest images.
    Text and images can be combined, and the results filtered by date, folder and shape.

        m1clip search "two dogs on a beach"
        m1clip search "at night" --like photo.jpg --not people --since 2024-05
        m1clip search "2*dog" beach

    Parameters
    ----------
    text
        What to look for. Several texts are combined; 2*dog has twice the weight.
    k
        Number of results.
    folder
        The indexed folder; default: the current folder, or the one that was indexed last.
    like
        An image that the results should be similar to.
    exclude
        What the results should not show.
    since
        Only images taken since this year, month or day (2024, 2024-05, 2024-05-31).
    until
        Only images taken up to and including this year, month or day.
    subfolder
        Only images in this folder, relative to the indexed one.
    orientation
        Only landscape or portrait images.
    min_side
        Only images whose shorter side has at least this many pixels.
    copies
        List near-duplicates as separate results.
    all_
        Also list results of less than 20%, which are very unlikely to match.
    model
        Search the vectors of this model; default: the one that was indexed last.
    json
        Print JSON.
    open_
        Open the best result in the system's image viewer.
    """
    from m1clip.search.query import Index
    from m1clip.search.results import Filter

    _reject_folders(text)
    where = Filter(since, until, subfolder, orientation, min_side)
    opened = Index(folder, model)
    if folder is None:
        _mention_index(opened.root, "--index chooses another")
    with console.waiting("loading the model"):  # which takes nearly all of the time
        results = opened.search(
            text, k, like=like, exclude=exclude, where=where, collapse=not copies
        )
    listed = results.nearest if all_ else results.possible
    _mention_phrase(text)
    if json:
        counts: dict[str, int | None] = {"matches": None, "possible": None}
        if results.has_probabilities:
            counts = {"matches": len(results.matches), "possible": len(results.possible)}
        print(json_text.dumps({"root": str(opened.root), **counts, **asdict(results)}, indent=2))
    else:
        if text and results.nearest and not opened.has_probabilities:
            model_name = one_line(_shown_model(opened.model_path))
            images = plural(results.searched, "image")
            print(f"nearest of {images} (which of them match is not known with {model_name}):")
        marks = opened.marks(text[0], [result.id for result in listed]) if len(text) == 1 else {}
        _show(results, listed, marks, filtered=where != Filter())
        if text and not results.matches and results.has_probabilities:
            _suggest_sentence(text)
    if open_ and listed:
        _open(opened.file(listed[0].id), opened.root)


def _mention_index(root: Path, hint: str, why: str = "indexed last") -> None:
    """Say which index was opened, if it is not that of the current folder."""
    if not Path.cwd().is_relative_to(root):
        print(f"index      {one_line(_from_home(root))} ({why}; {hint})", file=sys.stderr)


def _from_home(path: Path) -> str:
    """A path, with ~ for the home folder."""
    home = Path(os.path.expanduser("~"))
    return str(Path("~") / path.relative_to(home)) if path.is_relative_to(home) else str(path)


def _reject_folders(texts: tuple[str, ...]) -> None:
    """Raise a UserError for a folder that was given as a text; a single word may be the name of a folder too."""
    for text in texts:
        if (len(texts) > 1 or os.sep in text) and os.path.isdir(os.path.expanduser(text)):
            raise UserError(
                f"{text}: is a folder; to search in it: --index {text} (if it is indexed) or"
                f" --subfolder {text} (if it is in the indexed folder); to search for the word:"
                f" '1*{text}'"
            )


def _mention_phrase(texts: tuple[str, ...]) -> None:
    """Say that several words were taken for several texts: quotes may have been forgotten."""
    if len(texts) > 1 and all(re.fullmatch(r"[^\s*]+", text) for text in texts):
        phrase = one_line(" ".join(texts))
        print(f'note       {len(texts)} texts combined; for a phrase: "{phrase}"', file=sys.stderr)


def _suggest_sentence(texts: tuple[str, ...]) -> None:
    """Say that a sentence about a scene is more often a sure match than a word.

    "a photo of a dog" is none: it is less sure than the word.
    """
    if len(texts) == 1 and re.fullmatch(r"\w+", texts[0]):
        example = '"a dog runs on the grass"'
        print(
            f"note       single words are rarely sure; describe a scene: {example}", file=sys.stderr
        )


def _show(results: Results, listed: list[Result], marks: dict[int, bool], filtered: bool) -> None:
    from m1clip.search.match import UNSURE

    images = plural(results.searched, "image")
    if not results.nearest:
        print(
            "no image passes the filters" if filtered else "no image is left in the indexed folder"
        )
    elif not results.possible:
        print(f"nothing here matches, in {images}; the nearest, all unlikely:")
        listed = listed or results.nearest[:NEAREST_SHOWN]
    elif not results.matches:
        print(f"no sure match in {images}; perhaps:")
    matches = len(results.matches)
    for rank, result in enumerate(listed):
        if 0 < matches == rank:
            print("less likely:")
        marked = marks.get(result.id)
        chance = "" if result.probability is None else f"{100 * result.probability:3.0f}%  "
        if chance and marked is not None:  # known, not estimated
            chance = " " * len(chance)
        more = f"  (+{plural(len(result.copies), 'near-duplicate')})" if result.copies else ""
        if marked is not None:
            more += f"  (marked by you{'' if marked else ' as wrong'})"
        print(f"{chance}{result.score:6.3f}  {one_line(result.path)}{more}")
    unlisted = len(results) - len(listed)
    if unlisted:
        print(
            f"{plural(unlisted, 'nearest image')} of less than {UNSURE:.0%} not listed (--all lists"
            " them)"
        )


def _open(path: Path, root: Path) -> None:
    """Open an image in the system's viewer; other files, which an index may name, could be programs."""
    import subprocess

    from m1clip.data.images import SUFFIXES
    from m1clip.io import open_regular

    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"--open: {path} is not an image; the index was not written by m1clip")
    try:
        open_regular(path, inside=root).close()
    except OSError as error:
        raise UserError(f"--open: {path}: {error.strerror}") from None
    program = "open" if sys.platform == "darwin" else "xdg-open"
    try:
        subprocess.Popen([program, str(path)], stderr=subprocess.DEVNULL)
    except OSError as error:
        raise UserError(
            f"--open: cannot start {program} ({error.strerror}); open {path} yourself"
        ) from None


@app.command(group=PHOTOS, sort_key=4, usage="Usage: m1clip teach WORD IMAGE... [OPTIONS]")
def teach(
    name: Annotated[str, Parameter(name="WORD", show_default=False)] = "",
    /,
    *images: Path,
    negative: Annotated[tuple[Path, ...], Parameter(negative="", show_default=False)] = (),
    forget: Flag = False,
    captions: Path | None = None,
    folder: Annotated[Path | None, Parameter(name="--index")] = None,
) -> None:
    """Teach a new word from a few images, in seconds: the name of a pet, a person, a place or a product.

    Without a name, it lists all taught words, including those from marks on the page of m1clip
    serve.

        m1clip teach Rex rex/*.jpg
        m1clip search "Rex on a beach"
        m1clip teach --captions marks.csv
        m1clip train marks.csv

    Parameters
    ----------
    name
        The word; a search that contains it uses its examples.
    images
        3 to 20 images of it; a later call adds to them.
    negative
        An image that was found but does not show it.
    forget
        Forget the word and its examples.
    captions
        Write the positive examples of all words to this CSV file, with the word as the caption, for m1clip train.
    folder
        The indexed folder; default: the current folder, or that of the images, or the one that was indexed last.
    """
    import csv
    import io

    from m1clip.io import write_bytes
    from m1clip.search.query import Index

    of_images = _index_of_images([*images, *negative]) if folder is None else None
    opened = Index(folder or of_images)
    if folder is None:
        why = "indexed last" if of_images is None else "that of the images"
        _mention_index(opened.root, "--index chooses another", why)
    if forget:
        if not name:
            raise UserError("teach --forget: give the word, as in m1clip teach Rex --forget")
        count = opened.concepts.remove(name)
        if not count:
            raise UserError(f"{name}: was not taught; m1clip teach lists the words that were")
        print(f"forgot {one_line(name)} and its {plural(count, 'example')}")
        return
    if name:
        if not images and not negative:
            raise UserError(f"teach {name}: give 3 to 20 images of it")
        for paths, positive in ((images, True), (negative, False)):
            if paths:
                opened.teach(name, paths, positive)
    if captions is not None:
        pairs = opened.captions()
        lines = io.StringIO(newline="")
        csv.writer(lines).writerows([("image", "caption"), *pairs])
        write_bytes(captions, lines.getvalue().encode("utf-8", "surrogateescape"))
        print(f"wrote {plural(len(pairs), 'caption')} to {one_line(str(captions))}")
        return
    without = Counter(mark.name for mark in opened.concepts.all_marks())
    without.subtract(mark.name for mark in opened.concepts.rows())
    key = " ".join(name.split()).lower()  # a word may be written in capitals
    for word, (with_it, without_it) in opened.concepts.names().items():
        if key not in ("", word.lower()):
            continue
        examples = f"{plural(with_it, 'photo')} with it"
        print(f"{one_line(word)}: {examples}{f', {without_it:,} without' if without_it else ''}")
    for word, count in (+without).items():
        if key not in ("", word.lower()):
            continue
        print(
            f"{one_line(word)}: {plural(count, 'example')} taught with another model, of images that"
            " are not in this folder: teach them again"
        )
    if not name:
        if not opened.concepts.all_marks():
            print("no word was taught yet; for example: m1clip teach Rex rex/*.jpg")
        return
    if opened.uses_examples(name):
        print(f'now search for it: m1clip search "{one_line(name)}"')
    else:
        print(
            "these examples find no further photos better than the word does; add photos, or mark"
            " wrong ones"
        )


def _index_of_images(images: list[Path]) -> Path | None:
    """The indexed folder that contains images; None if no index contains them.

    A UserError if it is not clear which index is meant, as `teach` writes into it: if the images
    are in several, or in another than that of the current folder.
    """
    from m1clip.search.location import NotIndexedError, find_index

    roots: dict[str, Path] = {}  # by the folder of the index
    for image in images:
        with suppress(NotIndexedError):
            index_folder, root = find_index(image)
            roots.setdefault(os.path.realpath(index_folder), root)
    if not roots:
        return None
    of_images = next(iter(roots.values()))
    with suppress(NotIndexedError):
        index_folder, root = find_index()
        if Path.cwd().is_relative_to(root):
            roots.setdefault(os.path.realpath(index_folder), root)
    if len(roots) > 1:
        choices = " or ".join(f"--index {shlex.quote(str(root))}" for root in roots.values())
        raise UserError(
            f"the images and the current folder are in {len(roots)} indexed folders; choose one"
            f" with {choices}"
        )
    return of_images


@app.command(
    name="duplicates", group=PHOTOS, sort_key=5, usage="Usage: m1clip duplicates [FOLDER] [OPTIONS]"
)
def list_duplicates(folder: Path | None = None, /, *, json: Flag = False) -> None:
    """List groups of identical and near-duplicate images in an indexed folder; nothing is deleted.

    Near-duplicates look alike: re-encoded, resized, brightened or grayscale copies, or photos of
    the same scene. The first image of each group has the most pixels.

        m1clip duplicates ~/Pictures

    Parameters
    ----------
    folder
        The indexed folder; default: the current folder, or the one that was indexed last.
    json
        Print JSON.
    """
    from m1clip.search.query import Index

    opened = Index(folder)
    if folder is None:
        _mention_index(opened.root, "m1clip duplicates FOLDER lists those of another")
    groups = opened.duplicates()
    if json:
        print(json_text.dumps([[asdict(copy) for copy in group] for group in groups], indent=2))
        return
    for group in groups:
        for number, copy in enumerate(group):
            kind = "best" if number == 0 else "equal" if copy.equal else "near"
            print(
                f"{kind:5}  {f'{copy.width} x {copy.height}':>11}  {size(copy.bytes):>7}  {one_line(copy.path)}"
            )
        print()
    copies = [copy for group in groups for copy in group[1:]]
    total = f", {size(sum(copy.bytes for copy in copies))}" if copies else ""
    print(f"{plural(len(groups), 'group')}, {plural(len(copies), 'image')} besides the best{total}")


@app.command(group=PHOTOS, sort_key=3, usage="Usage: m1clip serve [FOLDER] [OPTIONS]")
def serve(
    folder: Path | None = None,
    /,
    *,
    runs: Annotated[tuple[Path, ...], Parameter(negative="", show_default=False)] = (),
    model: Path | None = None,
    port: Port = 8765,
    browser: Annotated[bool, Parameter(negative="--no-browser")] = True,
) -> None:
    """Serve a page on this machine only: search your photos, label them, train, and monitor runs.

    Type to search, drop an image to find similar ones, mark results as right or wrong. Nothing is
    sent over a network.

        m1clip serve ~/Pictures

    Parameters
    ----------
    folder
        The indexed folder; default: the current folder, or the one that was indexed last. It may be indexed later.
    runs
        Run folders, or folders of runs, for the tab with runs; default: runs.
    model
        Search the vectors of this model; default: the one that was indexed last.
    port
        Port of the page at http://127.0.0.1:PORT; 0 picks a free port.
    browser
        Open the page in your browser.
    """
    import atexit
    import threading

    from m1clip.monitor.status import is_run
    from m1clip.web import server
    from m1clip.web.photos import Photos

    if folder is not None and not folder.expanduser().is_dir():
        raise UserError(f"{one_line(str(folder))}: no such folder")
    folders = list(runs) or [server.DEFAULT_RUNS]
    photos = Photos(folder, model, next((path for path in folders if not is_run(path)), None))
    warm_up = threading.Thread(target=photos.warm_up, daemon=True)
    warm_up.start()
    server.serve(folders, port, browser, photos)
    # At exit, Python would end a thread within torch, which aborts the process.
    atexit.register(lambda: os._exit(0) if warm_up.is_alive() else None)
