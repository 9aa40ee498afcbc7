"""Folders of images: a .txt file next to each image, or class folders or file names that become captions."""

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from m1clip.data.images import FileImage
from m1clip.data.sources import splits
from m1clip.data.sources.base import DataFormat, DataSource, Row, walk_images
from m1clip.data.sources.splits import clean_text
from m1clip.data.sources.tables import text_tables
from m1clip.formatting import plural
from m1clip.io import read_small

TEMPLATE = "a photo of a {}."
MAX_TEXT_BYTES = 2**20
_IMAGES_CHECKED = 100
_CLASSES_SHOWN = 5
_COUNTER = re.compile(r"[\s_.-]*\(?\d*\)?$")  # of files with otherwise equal names


def has_text_files(path: Path) -> bool:
    """Whether one of the first images has a .txt file."""
    return path.is_dir() and any(
        _text_file(path, name) for name in islice(walk_images(path), _IMAGES_CHECKED)
    )


def text_file_rows(source: DataSource) -> Iterator[Row]:
    """a.jpg and a.txt, one caption per line; folders train, val and test at the top are splits."""
    for name in walk_images(source.path):
        text = _text_file(source.path, name)
        if text is None:
            source.problem((name, 0), "no .txt file next to it", "empty-caption")
            continue
        try:
            lines = (
                read_small(source.path / text, MAX_TEXT_BYTES)
                .decode("utf-8-sig", "replace")
                .splitlines()
            )
        except OSError:
            source.problem((name, 0), f"{text} cannot be read as a caption")
            continue
        yield Row(
            (text, 0), lines, _split_of(name), FileImage(os.path.join(source.path, name)), name
        )


def _text_file(root: Path, name: str) -> str | None:
    candidates = (os.path.splitext(name)[0] + ".txt", name + ".txt")
    return next((text for text in candidates if os.path.isfile(os.path.join(root, text))), None)


def _split_of(name: str) -> str | None:
    """The split of a relative name whose first folder is one."""
    top, slash, _ = name.partition("/")
    return splits.from_folder(top) if slash else None


def is_class_folders(path: Path) -> bool:
    """Images in at least two folders that are not splits; a single class has nothing to distinguish."""
    labels = filter(None, map(_class_of, walk_images(path)))
    first = next(labels, None)
    return any(label != first for label in labels)


def class_folder_rows(source: DataSource) -> Iterator[Row]:
    """cats/1.jpg or train/cats/1.jpg: the folder of an image is its class."""
    classes: dict[str, None] = {}
    for name in walk_images(source.path):
        label = _class_of(name)
        if label is None:
            source.problem((name, 0), "not in a class folder")
            continue
        classes[label] = None
        image = FileImage(os.path.join(source.path, name))
        yield Row((name, 0), TEMPLATE.format(label), _split_of(name), image, name)
    names = ", ".join(list(classes)[:_CLASSES_SHOWN]) + (
        ", ..." if len(classes) > _CLASSES_SHOWN else ""
    )
    source.note(
        f"captions are generated from the names of {plural(len(classes), 'folder')}: {names}"
    )
    for table in text_tables(source.path) if classes else ():
        source.note(f"{table} was not read; if it contains the captions, use --data {table}")


def class_name(caption: str) -> str:
    """a photo of a golden retriever. -> golden retriever."""
    before, _, after = TEMPLATE.partition("{}")
    return caption.removeprefix(before).removesuffix(after)


def file_name_rows(source: DataSource) -> Iterator[Row]:
    """two-dogs_on a beach (3).jpg: the file name without its number is the caption."""
    for name in walk_images(source.path):
        image = FileImage(os.path.join(source.path, name))
        yield Row((name, 0), _words(name), _split_of(name), image, name)


def has_words_as_names(path: Path) -> bool:
    """Whether most images have names of two or more words, and different ones."""
    names = list(islice(walk_images(path), _IMAGES_CHECKED))
    texts = {_words(name) for name in names}
    return 2 * sum(
        sum(word.isalpha() and len(word) > 2 for word in text.split()) > 1 for text in texts
    ) > len(names)


def _words(name: str) -> str:
    stem = os.path.splitext(name.rpartition("/")[2])[0]
    return clean_text(re.sub(r"[_-]", " ", _COUNTER.sub("", stem)))


def _class_of(name: str) -> str | None:
    """golden_retriever/1.jpg -> golden retriever."""
    folders = name.split("/")[:-1]
    if _split_of(name):
        folders = folders[1:]
    return clean_text(folders[-1].replace("_", " ").replace("-", " ")) or None if folders else None


TEXT_FILES = DataFormat(
    name="txt",
    help="images with a .txt file next to each, one caption per line",
    read=text_file_rows,
    matches=lambda data: has_text_files(data.path),
    priority=40,
)
CLASS_FOLDERS = DataFormat(
    name="classes",
    help="one folder of images per class; captions are generated from the class names",
    read=class_folder_rows,
    matches=lambda data: is_class_folders(data.path),
    priority=50,
    class_captions=True,
)
FILE_NAMES = DataFormat(
    name="filenames",
    help="images whose file names are the captions; only if you name it",
    read=file_name_rows,
)
