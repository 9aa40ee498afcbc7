"""Reading what strangers wrote: text in any encoding, JSON of any shape, libraries that may be missing."""

from __future__ import annotations

import codecs
import importlib
import io
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from m1clip.data.images import SUFFIXES, FileImage, one_line
from m1clip.errors import UserError
from m1clip.files import open_regular, read_small

# Longer than any row a person wrote: a binary file read as text must not fill the memory.
MAX_LINE = 2**24
MAX_JSON = 2**30  # ten times the captions of COCO; once parsed it takes some ten times as much memory
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_PICTURE_FOLDERS = (
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
    """Whitespace made single, and what no encoding can hold (half a surrogate pair) replaced."""
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
            raise UserError(
                one_line(f"{path} line {number}: longer than {MAX_LINE >> 20} MiB; is it a text file?")
            )
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
        raise UserError(
            one_line(f"{path}: not valid JSON ({error}); write it again or check its end")
        ) from error


def is_picture(name: str) -> bool:
    """Whether a file name is that of a picture; the shadows macOS leaves (._a.jpg) are not."""
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


def walk_pictures(root: Path) -> Iterator[str]:
    """Pictures under a folder as sorted relative names with /; links to folders are not followed."""
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith(".") and name != "__MACOSX")
        inside = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if inside == "." else f"{inside}/"
        yield from (prefix + name for name in sorted(files) if is_picture(name))


class PictureFinder:
    """Finds the file a name in a table means: beside the table, or in a picture folder there."""

    def __init__(self, folder: Path, more: tuple[str, ...] = ()) -> None:
        names = ("", *more, *_PICTURE_FOLDERS)
        self.bases = [os.fspath(folder / name) for name in names]
        self.bases = [base for base in self.bases if os.path.isdir(base)] or [os.fspath(folder)]

    def find(self, name: str) -> FileImage:
        """The picture; where no file is found, the name beside the table, so that it can be reported."""
        for number, base in enumerate(self.bases):
            path = os.path.join(base, name)
            if os.path.isfile(path):
                # The folder that held the last picture most likely holds the next.
                self.bases.insert(0, self.bases.pop(number))
                return FileImage(path)
        if "\\" in name:
            return self.find(name.replace("\\", "/"))
        return FileImage(os.path.join(self.bases[0], name))
