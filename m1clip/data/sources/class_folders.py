"""A folder of class folders: captions are made from the names of the classes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from m1clip.data.images import FileImage, one_line
from m1clip.data.sources.base import BaseSource, Row
from m1clip.data.sources.captions_txt import split_of
from m1clip.data.sources.reading import clean_text, walk_pictures

CLASSES_SHOWN = 5


class ClassFolderSource(BaseSource):
    """cats/1.jpg, or train/cats/1.jpg; the folder a picture lies in is its class."""

    kind = "classes"
    by_templates = True

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """Pictures lie in two folders or more that are not splits: one class alone tells nothing."""
        if not path.is_dir():
            return False
        first: str | None = None
        for name in walk_pictures(path):
            label = _class_of(name)
            if label and first and label != first:
                return True
            first = first or label
        return False

    def rows(self) -> Iterator[Row]:
        """A row a picture, a caption a template."""
        classes: dict[str, None] = {}
        for name in walk_pictures(self.path):
            label = _class_of(name)
            if label is None:
                self.problem((name, 0), "lies in no class folder", "row")
                continue
            classes[label] = None
            captions = tuple(template.replace("{}", label) for template in self.options.templates)
            yield Row(FileImage(os.path.join(self.path, name)), captions, name, split_of(name), (name, 0))
        names = ", ".join(list(classes)[:CLASSES_SHOWN]) + (", ..." if len(classes) > CLASSES_SHOWN else "")
        self.notes.append(one_line(f"captions are made from the names of {len(classes):,} folders: {names}"))


def _class_of(name: str) -> str | None:
    """golden_retriever/1.jpg -> golden retriever."""
    folders = name.split("/")[:-1]
    if split_of(name):
        folders = folders[1:]
    return clean_text(folders[-1].replace("_", " ").replace("-", " ")) or None if folders else None
