"""COCO captions: annotations/captions_train2017.json next to train2017/, or one such JSON file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m1clip.data.sources import splits
from m1clip.data.sources.base import DataSource, ImageFolder, Row, user_error
from m1clip.data.sources.tables import read_json


def is_coco(path: Path) -> bool:
    """A JSON file with images and annotations, or a folder with captions_*.json."""
    if path.is_dir():
        return bool(_caption_files(path))
    document = read_json(path) if path.suffix.lower() == ".json" else None
    return isinstance(document, dict) and {"images", "annotations"} <= set(document)


def coco_rows(source: DataSource) -> Iterator[Row]:
    """One row per annotation; the split is in the name of the file."""
    files = _caption_files(source.path)
    if not files:
        raise user_error(f"{source.path}: no captions_*.json there or in annotations/")
    for file in files:
        document = read_json(file)
        images, annotations = (_list(document, name) for name in ("images", "annotations"))
        if images is None or annotations is None:
            raise user_error(f"{file}: not COCO captions: it needs the lists `images` and `annotations`")
        split = splits.from_file_name(file.name)
        folder = ImageFolder(file.parent, _image_folders(file))
        names: dict[Any, Any] = {}
        for image in images:
            if isinstance(image, dict) and isinstance(image.get("id"), int | str):
                names[image["id"]] = image.get("file_name")
        for number, annotation in enumerate(annotations, start=1):
            place = (f"{file.name} annotations", number)
            key = annotation.get("image_id") if isinstance(annotation, dict) else None
            if isinstance(key, int | str) and key in names:
                yield Row(place, annotation.get("caption"), split, names[key], folder)
            else:
                source.problem(place, f"its image_id {str(key)[:40]} is not among the images", "no-image")


def _list(document: Any, name: str) -> list[Any] | None:
    value = document.get(name) if isinstance(document, dict) else None
    return value if isinstance(value, list) else None


def _caption_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(path.glob("annotations/captions_*.json")) or sorted(path.glob("captions_*.json"))


def _image_folders(file: Path) -> tuple[str, ...]:
    """train2017 for captions_train2017.json: next to the file, above it, and in images/."""
    name = file.stem.removeprefix("captions_")
    return (name, f"images/{name}", f"../{name}", f"../images/{name}", "../images", "..")
