"""What all sources share: rows are joined by image, splits are assigned, problems are kept by name."""

from __future__ import annotations

import codecs
import importlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TextIO

from m1clip.data.images import SUFFIXES, FileImage, one_line
from m1clip.data.sources import splits
from m1clip.data.types import ImageRef, Sample
from m1clip.errors import UserError
from m1clip.io import open_regular, read_small


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that was skipped at reading: the file and row, what was wrong, and its kind."""

    where: str
    what: str
    kind: str = "row"

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may say about a set; each field left out is found by looking."""

    image_column: str | None = None
    caption_columns: tuple[str, ...] = ()
    split_column: str | None = None
    split_seed: int = 0
    split_fractions: tuple[float, float, float] = (0.9, 0.05, 0.05)
    templates: tuple[str, ...] = ("a photo of a {}.",)

    def __post_init__(self) -> None:
        if len(self.split_fractions) != 3 or not all(0 <= f <= 1 for f in self.split_fractions):
            raise UserError(
                f"split fractions {self.split_fractions}: give three numbers from 0 to 1 (train, val, test)"
            )
        if abs(sum(self.split_fractions) - 1) > 1e-6:
            raise UserError(f"split fractions {self.split_fractions}: they must sum to 1")
        if not self.templates or any("{}" not in template for template in self.templates):
            raise UserError(f"templates {self.templates}: each needs {{}} where the class name goes")


DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the data. `place` is (file, row number), row 0 meaning the file itself."""

    image: ImageRef
    captions: tuple[str, ...]
    id: str
    split: str | None
    place: tuple[str, int]


def place_text(place: tuple[str, int]) -> str:
    """A place in a person's words."""
    label, row = place
    return one_line(f"{label} row {row}" if row else label)


class BaseSource:
    """A source that knows all its samples. A kind of data is a subclass with `looks_like` and `rows`."""

    kind: ClassVar[str]
    by_templates: ClassVar[bool] = False

    def __init__(self, path: Path, options: Options = DEFAULT) -> None:
        self.path = path
        self.options = options
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._places: dict[str, list[tuple[str, int]]] = {}
        self._by_split = self._gather()

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """Whether the file or folder is of this kind, by a cheap look."""
        raise NotImplementedError

    def rows(self) -> Iterator[Row]:
        """Every usable row in the order of the data; what is not usable goes to `self.problem`."""
        raise NotImplementedError

    def splits(self) -> tuple[str, ...]:
        """The names of the splits that hold at least one sample: train, val, test, then others."""
        first = [name for name in splits.ORDER if name in self._by_split]
        return (*first, *sorted(set(self._by_split) - set(first)))

    def samples(self, split: str) -> Sequence[Sample]:
        """All samples of a split, in the order of the data."""
        if split not in self._by_split:
            raise UserError(f"{self.path}: no split {split!r}; it has {', '.join(self.splits())}")
        return self._by_split[split]

    def origin(self, id_: str, caption: int = 0) -> str:
        """The file and row a caption of a sample came from."""
        places = self._places[id_]
        return place_text(places[min(caption, len(places) - 1)])

    def problem(self, place: tuple[str, int], what: str, kind: str = "row") -> None:
        """Keep what was skipped and why."""
        self.problems.append(Problem(place_text(place), one_line(what), kind))

    def _gather(self) -> dict[str, tuple[Sample, ...]]:
        images: dict[str, ImageRef] = {}
        captions: dict[str, list[str]] = {}
        given: dict[str, str | None] = {}
        for row in self.rows():
            if row.id not in images:
                images[row.id], captions[row.id], given[row.id] = row.image, [], row.split
                self._places[row.id] = []
            elif given[row.id] is None:
                given[row.id] = row.split
            elif row.split and row.split != given[row.id]:
                # Captions of one image never cross: the first split named keeps it.
                what = f"{row.id} is in {given[row.id]} and in {row.split}; it stays in {given[row.id]}"
                self.problem(row.place, what, "split-conflict")
            captions[row.id].extend(row.captions)
            self._places[row.id].extend([row.place] * len(row.captions))
        if not images:
            raise UserError(self._nothing())
        split_of, notes = splits.assign(given, self.options.split_seed, self.options.split_fractions)
        self.notes.extend(one_line(note) for note in notes)
        by_split: dict[str, list[Sample]] = {}
        for id_, image in images.items():
            by_split.setdefault(split_of[id_], []).append(Sample(image, tuple(captions[id_]), id_))
        return {name: tuple(samples) for name, samples in by_split.items()}

    def _nothing(self) -> str:
        if not self.problems:
            return one_line(f"{self.path}: read as {self.kind}, it holds no images with captions")
        first = self.problems[0]
        return one_line(
            f"{self.path}: read as {self.kind}, none of its {len(self.problems)} rows can be used; the first: {first}"
        )


# Longer than any row a person wrote: a binary file read as text must not fill the memory.
MAX_LINE = 2**24
MAX_JSON = 2**30  # ten times the captions of COCO; once parsed it takes some ten times as much memory
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_IMAGE_FOLDERS = (
    *("images", "Images", "image", "imgs", "img", "pictures", "photos", "data"),
    *("Flicker8k_Dataset", "Flickr8k_Dataset", "flickr8k-images", "flickr30k-images", "flickr30k_images"),
)


def need(module: str, job: str) -> Any:
    """An optional library, or one line that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise UserError(f"{job} needs the library {name}: pip install 'm1clip[data]'") from error


def clean_text(text: str) -> str:
    """Whitespace made single, and what no encoding can hold (half a surrogate sample) replaced."""
    return " ".join(text.replace("\0", " ").encode("utf-8", "replace").decode("utf-8").split())


def find_encoding(path: Path) -> str:
    """utf-8 (with or without mark), utf-16 by its mark, else cp1252: what Excel writes on Windows."""
    with open_regular(path) as file:
        start = file.read(4)
        for bom, name in _BOMS:
            if start.startswith(bom):
                return name
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            decoder.decode(start)
            while chunk := file.read(2**20):
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return "cp1252"
    return "utf-8"


def open_text(path: Path, encoding: str) -> TextIO:
    """A regular file as text, bytes that do not fit replaced."""
    return io.TextIOWrapper(open_regular(path), encoding, errors="replace", newline="")


def bounded_lines(file: TextIO, path: Path) -> Iterator[str]:
    """Lines with their ends; a line no person wrote is an error, not a full memory."""
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if len(line) >= MAX_LINE:
            raise UserError(one_line(f"{path} line {number}: longer than {MAX_LINE >> 20} MiB; is it a text file?"))
        yield line


def text_lines(path: Path) -> Iterator[str]:
    """Lines of a text file in the encoding it seems to have, bytes that do not fit replaced."""
    with open_text(path, find_encoding(path)) as file:
        yield from bounded_lines(file, path)


@lru_cache(maxsize=1)
def read_json(path: Path) -> Any:
    """The document in a JSON file. Kept until the next, because finding the kind and reading both need it."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise UserError(
                one_line(
                    f"{path}: {path.stat().st_size >> 20} MiB of JSON in one piece; write it as .jsonl, a row a line"
                )
            )
        return json.loads(read_small(path, MAX_JSON).decode("utf-8-sig"))
    except RecursionError as error:
        raise UserError(one_line(f"{path}: nested too deeply to be a list of captions")) from error
    except ValueError as error:
        raise UserError(one_line(f"{path}: not valid JSON ({error}); write it again or check its end")) from error


def is_image(name: str) -> bool:
    """Whether a file name is that of an image; the shadows macOS leaves (._a.jpg) are not."""
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


def walk_images(root: Path) -> Iterator[str]:
    """Images under a folder as sorted relative names with /; links to folders are not followed."""
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith(".") and name != "__MACOSX")
        inside = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if inside == "." else f"{inside}/"
        yield from (prefix + name for name in sorted(files) if is_image(name))


class ImageFinder:
    """Finds the file a name in a table means: beside the table, or in an image folder there."""

    def __init__(self, folder: Path, more: tuple[str, ...] = ()) -> None:
        names = ("", *more, *_IMAGE_FOLDERS)
        self.bases = [os.fspath(folder / name) for name in names]
        self.bases = [base for base in self.bases if os.path.isdir(base)] or [os.fspath(folder)]

    def find(self, name: str) -> FileImage:
        """The image; where no file is found, the name beside the table, so that it can be reported."""
        for number, base in enumerate(self.bases):
            path = os.path.join(base, name)
            if os.path.isfile(path):
                # The folder that held the last image most likely holds the next.
                self.bases.insert(0, self.bases.pop(number))
                return FileImage(path)
        if "\\" in name:
            return self.find(name.replace("\\", "/"))
        return FileImage(os.path.join(self.bases[0], name))
