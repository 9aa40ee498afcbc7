"""COCO captions: annotations/captions_train2017.json beside train2017/, or one such JSON file."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m1clip.data.images import FileImage, one_line
from m1clip.data.sources import splits
from m1clip.data.sources.base import BaseSource, ImageFinder, Row, clean_text, read_json
from m1clip.data.sources.tables import wrong_path
from m1clip.errors import UserError


class CocoSource(BaseSource):
    """Images and annotations with `caption`, joined by image id; the split is in the name of the file."""

    kind = "coco"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A JSON file with images and annotations, or a folder with captions_*.json."""
        if path.is_dir():
            return bool(_caption_files(path))
        if path.suffix.lower() != ".json":
            return False
        document = read_json(path)
        return isinstance(document, dict) and {"images", "annotations"} <= set(document)

    def rows(self) -> Iterator[Row]:
        """A row a caption, file by file."""
        files = _caption_files(self.path)
        if not files:
            raise UserError(one_line(f"{self.path}: no captions_*.json there, nor in annotations/"))
        for file in files:
            yield from self._rows_of(file)

    def _rows_of(self, file: Path) -> Iterator[Row]:
        document = read_json(file)
        images = document.get("images") if isinstance(document, dict) else None
        annotations = document.get("annotations") if isinstance(document, dict) else None
        if not isinstance(images, list) or not isinstance(annotations, list):
            raise UserError(one_line(f"{file}: not COCO captions: it needs the lists `images` and `annotations`"))
        split = splits.from_file_name(file.name)
        finder = ImageFinder(file.parent, _image_folders(file))
        known: dict[Any, tuple[FileImage, str]] = {}
        for number, image in enumerate(images, start=1):
            name = image.get("file_name") if isinstance(image, dict) else None
            key = image.get("id") if isinstance(image, dict) else None
            wrong = wrong_path(name)
            if wrong or not isinstance(name, str) or not isinstance(key, (int, str)):
                self.problem((f"{file.name} images", number), wrong or "no id", "no-image")
            else:
                known[key] = finder.find(name), posixpath.normpath(name)
        for number, annotation in enumerate(annotations, start=1):
            place = (f"{file.name} annotations", number)
            key = annotation.get("image_id") if isinstance(annotation, dict) else None
            caption = annotation.get("caption") if isinstance(annotation, dict) else None
            if not isinstance(key, (int, str)) or key not in known:
                self.problem(place, f"its image_id {str(key)[:40]} is not among the images", "no-image")
            elif not isinstance(caption, str) or not clean_text(caption):
                self.problem(place, "no caption", "empty-caption")
            else:
                image_ref, id_ = known[key]
                yield Row(image_ref, (clean_text(caption),), id_, split, place)


def _caption_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for folder in (path / "annotations", path):
        if found := sorted(folder.glob("captions_*.json")):
            return found
    return []


def _image_folders(file: Path) -> tuple[str, ...]:
    """train2017 for captions_train2017.json: beside the file, above it, and in images/."""
    name = file.stem.removeprefix("captions_")
    return (name, f"images/{name}", f"../{name}", f"../images/{name}", "../images", "..")
