"""A folder of pictures with a .txt of the same name beside each: a line a caption."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from m1clip.data.images import FileImage
from m1clip.data.sources import splits
from m1clip.data.sources.base import BaseSource, Row
from m1clip.data.sources.reading import clean_text, walk_pictures
from m1clip.files import read_small

_PICTURES_LOOKED_AT = 100
MAX_TEXT_BYTES = 2**20


class TextBesideSource(BaseSource):
    """a.jpg and a.txt; folders train, val and test at the top are splits."""

    kind = "txt"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """One of the first pictures has its text."""
        if not path.is_dir():
            return False
        first = (name for name, _ in zip(walk_pictures(path), range(_PICTURES_LOOKED_AT), strict=False))
        return any(_text_of(path, name) for name in first)

    def rows(self) -> Iterator[Row]:
        """A row a picture."""
        for name in walk_pictures(self.path):
            place = (name, 0)
            text = _text_of(self.path, name)
            if text is None:
                self.problem(place, "no .txt beside it", "empty-caption")
                continue
            data = _read_text(os.path.join(self.path, text))
            if data is None:
                self.problem(place, f"{text} cannot be read, or is not a caption", "row")
                continue
            captions = tuple(line for line in map(clean_text, data.splitlines()) if line)
            if captions:
                yield Row(FileImage(os.path.join(self.path, name)), captions, name, split_of(name), (text, 0))
            else:
                self.problem((text, 0), "no caption", "empty-caption")


def split_of(name: str) -> str | None:
    """The split a relative name lies in, if its first folder is one."""
    top, slash, _ = name.partition("/")
    return splits.known(top) if slash else None


def _text_of(root: Path, name: str) -> str | None:
    candidates = (os.path.splitext(name)[0] + ".txt", name + ".txt")
    return next((text for text in candidates if os.path.isfile(os.path.join(root, text))), None)


def _read_text(path: str) -> str | None:
    try:
        return read_small(Path(path), MAX_TEXT_BYTES).decode("utf-8-sig", "replace")
    except OSError:
        return None
