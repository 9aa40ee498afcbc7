"""Folders of images: a .txt file next to each image, or class folders or file names that become
captions.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from m1clip.data.sources import splits
from m1clip.data.sources.base import (
    MAX_TEXT_BYTES,
    DataFormat,
    DataSource,
    Row,
    first_images,
    walk_images,
)
from m1clip.data.sources.plain_text import NOT_UTF8, NOT_UTF8_NOTE, decode_text
from m1clip.data.sources.splits import clean_text
from m1clip.data.sources.tables import text_tables
from m1clip.formatting import plural
from m1clip.io import read_small

TEMPLATE = "a photo of a {}."
_CLASSES_NOTED = 5
_YEAR = r"(?:19|20)\d\d"
_SEASONS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|spring|summer|autumn|fall|winter"
# A year at the end of other words is no album: classes of cars are named so.
_ALBUM = re.compile(
    rf"(?:photos from )?{_YEAR}(?:$|[-_. ])|"  # 2023, 2023-05-12 Birthday, Photos from 2023 (Google)
    rf"{_YEAR}(?:0[1-9]|1[0-2])(?!\d{{3}})|"  # 202305, 20230512
    rf"(?:\d\d?[-_. ]){{1,2}}{_YEAR}$|"  # 12.05.2023
    rf"(?:{_SEASONS})[a-z]*[-_. ]*{_YEAR}$|"  # May 2023, Summer 2023
    r"\d{3}[A-Z0-9_]{5}$|DCIM$",  # 100CANON and DCIM (cameras)
    re.IGNORECASE,
)
_COUNTER = re.compile(r"[\s_.-]*\(?\d*\)?$")  # of files with otherwise equal names


def has_text_files(path: Path) -> bool:
    """Whether one of the first images has a .txt file."""
    return path.is_dir() and any(_text_file(path, name) for name in first_images(path))


def text_file_rows(source: DataSource) -> Iterator[Row]:
    """a.jpg and a.txt (or a.jpg.txt), one caption per line.

    Folders train, val and test at the top are splits.
    """
    others: list[str] = []  # in another encoding
    for name in walk_images(source.path):
        text = _text_file(source.path, name)
        if text is None:
            source.problem((name, 0), "no .txt file next to it", "empty-caption")
            continue
        try:
            caption, encoding = decode_text(read_small(source.path / text, MAX_TEXT_BYTES))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            source.problem((name, 0), f"{text} cannot be read as a caption ({reason})")
            continue
        if encoding == NOT_UTF8:
            others.append(text)
        lines = caption.splitlines()
        yield Row((text, 0), lines, splits.from_path(name), source.image_file(name), name)
    if others:
        source.note(f"{plural(len(others), 'text file')}, such as {others[0]}, {NOT_UTF8_NOTE}")


def _text_file(root: Path, name: str) -> str | None:
    candidates = (os.path.splitext(name)[0] + ".txt", name + ".txt")
    return next((text for text in candidates if os.path.isfile(os.path.join(root, text))), None)


def is_class_folders(path: Path) -> bool:
    """Images in at least two folders that are not splits.

    A single class has nothing to distinguish.

    Albums, such as 2023/, are not classes unless the user says so.
    """
    names = (name for name in walk_images(path) if not any(map(_ALBUM.match, _folders(name))))
    labels = filter(None, map(_class_of, names))
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
        split = splits.from_path(name)
        yield Row((name, 0), TEMPLATE.format(label), split, source.image_file(name), name)
    names = ", ".join(list(classes)[:_CLASSES_NOTED]) + (
        ", ..." if len(classes) > _CLASSES_NOTED else ""
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
        split = splits.from_path(name)
        yield Row((name, 0), _words(name), split, source.image_file(name), name)


def has_words_as_names(path: Path) -> bool:
    """Whether most images have names of two or more words, and different ones."""
    names = first_images(path)
    texts = {_words(name) for name in names}
    return 2 * sum(
        sum(word.isalpha() and len(word) > 2 for word in text.split()) > 1 for text in texts
    ) > len(names)


def _words(name: str) -> str:
    stem = os.path.splitext(name.rpartition("/")[2])[0]
    return clean_text(re.sub(r"[_-]", " ", _COUNTER.sub("", stem)))


def _class_of(name: str) -> str | None:
    """golden_retriever/1.jpg -> golden retriever."""
    folders = _folders(name)
    return _readable(folders[-1]) or None if folders else None


def category_of(name: str) -> str:
    """animals/golden_retriever/1.jpg -> animals; "" if the class folder is in no other folder."""
    folders = _folders(name)
    return _readable(folders[-2]) if len(folders) > 1 else ""


def _folders(name: str) -> list[str]:
    """The folders of an image, without that of its split."""
    folders = name.split("/")[:-1]
    return folders[1:] if splits.from_path(name) else folders


def _readable(folder: str) -> str:
    return clean_text(folder.replace("_", " ").replace("-", " "))


TEXT_FILES = DataFormat(
    name="txt",
    help="images with a .txt file next to each (as for Stable Diffusion), one caption per line",
    read=text_file_rows,
    item="image",
    matches=lambda data: has_text_files(data.path),
)
CLASS_FOLDERS = DataFormat(
    name="classes",
    help="one folder of images per class; captions are generated from the class names",
    read=class_folder_rows,
    item="image",
    matches=lambda data: is_class_folders(data.path),
    class_captions=True,
    hidden_by_table=False,
    category_of=category_of,
)
FILE_NAMES = DataFormat(
    name="filenames",
    help="images whose file names are the captions; only if you name it",
    read=file_name_rows,
    item="image",
    hidden_by_table=False,
)
