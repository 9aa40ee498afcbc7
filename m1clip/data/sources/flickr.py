"""Flickr8k and Flickr30k as they are distributed: Karpathy's JSON, or .token files with split lists."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m1clip.data.sources import splits
from m1clip.data.sources.base import DataSource, ImageFolder, Row, user_error
from m1clip.data.sources.tables import read_json, text_lines

_TOKEN_LINE = re.compile(r"([^\t#]+)#\d+[ \t]+(.*)")
_SPLIT_LIST = re.compile(r"(train|dev|val|test)(?:_?images)?\.txt$", re.IGNORECASE)


def is_karpathy(path: Path) -> bool:
    """A JSON file whose images have sentences, or a folder with one named dataset*.json."""
    file = _karpathy_file(path)
    images = _images(file) if file else None
    return images is not None and any(isinstance(image, dict) and "sentences" in image for image in images[:100])


def karpathy_rows(source: DataSource) -> Iterator[Row]:
    """One row per image of dataset_flickr8k.json, with Karpathy's split."""
    file = _karpathy_file(source.path)
    images = _images(file) if file else None
    if file is None or images is None:
        raise user_error(f"{source.path}: no list of images as in Karpathy's dataset_flickr8k.json")
    folder = ImageFolder(file.parent)
    for number, image in enumerate(images, start=1):
        if not isinstance(image, dict):
            source.problem((file.name, number), "not a JSON object")
            continue
        name, below = image.get("filename"), image.get("filepath")
        if isinstance(name, str) and isinstance(below, str):
            name = posixpath.join(below, name)
        yield Row((file.name, number), image.get("sentences"), splits.from_value(image.get("split")), name, folder)


def _karpathy_file(path: Path) -> Path | None:
    if path.is_dir():
        return min(path.glob("dataset*.json"), default=None)
    return path if path.suffix.lower() == ".json" else None


def _images(file: Path) -> list[Any] | None:
    document = read_json(file)
    images = document.get("images") if isinstance(document, dict) else None
    return images if isinstance(images, list) else None


def is_token(path: Path) -> bool:
    """A file whose first line is `name#number caption`, or a folder with *.token(.txt)."""
    file = _token_file(path)
    return file is not None and bool(_TOKEN_LINE.match(next(text_lines(file), "")))


def token_rows(source: DataSource) -> Iterator[Row]:
    """One row per line `image.jpg#0<tab>caption` of Flickr8k.token.txt; the official split lists are next to it."""
    file = _token_file(source.path)
    if file is None:
        raise user_error(f"{source.path}: no .token.txt file there")
    split_of = _official_splits(file)
    # The images are often in a folder next to that of the texts.
    siblings = tuple(f"../{folder.name}" for folder in sorted(file.parent.parent.iterdir()) if folder.is_dir())
    folder = ImageFolder(file.parent, siblings if source.path != file else ())
    for number, line in enumerate(text_lines(file), start=1):
        if match := _TOKEN_LINE.match(line):
            name = match.group(1).strip()
            yield Row((file.name, number), match.group(2), split_of.get(name), name, folder)
        elif line.strip():
            source.problem((file.name, number), "not image.jpg#0, a tab, and a caption")


def _token_file(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix.lower() in {".txt", ".token"} else None
    found = [*path.glob("*.token*"), *path.glob("*/*.token*")]
    found = [file for file in found if "lemma" not in file.name.lower() and file.suffix in {".txt", ".token"}]
    return min(found, default=None)


def _official_splits(file: Path) -> dict[str, str | None]:
    """Image -> split from Flickr_8k.trainImages.txt and the other lists."""
    split_of: dict[str, str | None] = {}
    for path in sorted(file.parent.glob("*.txt")):
        match = _SPLIT_LIST.search(path.name)
        if match and path != file:
            split_of |= dict.fromkeys((line.strip() for line in text_lines(path)), splits.from_value(match.group(1)))
    return split_of
