"""Flickr8k and Flickr30k as they are handed round: Karpathy's JSON, or .token files with split lists."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m1clip.data.images import one_line
from m1clip.data.sources import splits
from m1clip.data.sources.base import BaseSource, ImageFinder, Row, clean_text, read_json, text_lines
from m1clip.data.sources.tables import captions_of, wrong_path
from m1clip.errors import UserError

_TOKEN_LINE = re.compile(r"([^\t#]+)#\d+[ \t]+(.*)")
_SPLIT_LIST = re.compile(r"(train|dev|val|test)(?:_?images)?\.txt$", re.IGNORECASE)


class KarpathySource(BaseSource):
    """dataset_flickr8k.json: images with their sentences and the split Karpathy gave them."""

    kind = "karpathy"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A JSON file whose images carry sentences, or a folder with one called dataset*.json."""
        file = _karpathy_file(path)
        if file is None:
            return False
        document = read_json(file)
        images = document.get("images") if isinstance(document, dict) else None
        return isinstance(images, list) and any(isinstance(i, dict) and "sentences" in i for i in images[:100])

    def rows(self) -> Iterator[Row]:
        """A row an image."""
        file = _karpathy_file(self.path)
        document = read_json(file) if file else None
        images = document.get("images") if isinstance(document, dict) else None
        if file is None or not isinstance(images, list):
            raise UserError(one_line(f"{self.path}: no list of images as in Karpathy's dataset_flickr8k.json"))
        finder = ImageFinder(file.parent)
        for number, image in enumerate(images, start=1):
            row = _row(image, finder, (file.name, number))
            if isinstance(row, str):
                self.problem((file.name, number), row, "empty-caption" if row == "no caption" else "row")
            else:
                yield row


def _row(image: Any, finder: ImageFinder, place: tuple[str, int]) -> Row | str:
    if not isinstance(image, dict):
        return "not a JSON object"
    name, folder, split = image.get("filename"), image.get("filepath"), image.get("split")
    wrong = wrong_path(name)
    if wrong or not isinstance(name, str):
        return wrong or "not a file name"
    if isinstance(folder, str) and not wrong_path(folder):
        name = posixpath.join(folder, name)
    captions, what = captions_of(image.get("sentences"))
    if not captions:
        return what or "no caption"
    given = splits.normalise(clean_text(split)) if isinstance(split, str) and split.strip() else None
    return Row(finder.find(name), tuple(captions), posixpath.normpath(name), given, place)


def _karpathy_file(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix.lower() == ".json" else None
    return next(iter(sorted(path.glob("dataset*.json"))), None) if path.is_dir() else None


class TokenSource(BaseSource):
    """Flickr8k.token.txt or results_20130124.token: `image.jpg#0<tab>caption`, official lists beside it."""

    kind = "token"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A file whose first line is `name#number caption`, or a folder with *.token(.txt)."""
        file = _token_file(path)
        if file is None:
            return False
        return bool(_TOKEN_LINE.match(next(text_lines(file), "")))

    def rows(self) -> Iterator[Row]:
        """A row a caption."""
        file = _token_file(self.path)
        if file is None:
            raise UserError(one_line(f"{self.path}: no .token.txt file there"))
        split_of = _official_splits(file)
        # The images are often in a folder beside that of the texts.
        beside = tuple(f"../{folder.name}" for folder in sorted(file.parent.parent.iterdir()) if folder.is_dir())
        finder = ImageFinder(file.parent, beside if self.path != file else ())
        for number, line in enumerate(text_lines(file), start=1):
            match = _TOKEN_LINE.match(line)
            place = (file.name, number)
            if match is None:
                if line.strip():
                    self.problem(place, "not image.jpg#0, a tab, and a caption")
                continue
            name, caption = match.group(1).strip(), clean_text(match.group(2))
            if wrong := wrong_path(name):
                self.problem(place, wrong, "no-image")
            elif not caption:
                self.problem(place, "no caption", "empty-caption")
            else:
                yield Row(finder.find(name), (caption,), posixpath.normpath(name), split_of.get(name), place)


def _token_file(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix.lower() in {".txt", ".token"} else None
    found = [*path.glob("*.token*"), *path.glob("*/*.token*")]
    found = [file for file in found if "lemma" not in file.name.lower() and file.suffix in {".txt", ".token"}]
    return min(found, default=None)


def _official_splits(file: Path) -> dict[str, str]:
    """ImageInput -> split from Flickr_8k.trainImages.txt and its siblings."""
    split_of: dict[str, str] = {}
    for path in sorted(file.parent.glob("*.txt")):
        match = _SPLIT_LIST.search(path.name)
        if match and path != file:
            split = splits.normalise(match.group(1))
            split_of.update((name.strip(), split) for name in text_lines(path) if name.strip())
    return split_of
