"""Which columns of a table are which, and the rows of a table as images and captions."""

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from m1clip.data.images import FileImage, ImageRef
from m1clip.data.sources import splits
from m1clip.data.sources.base import DataSource, Options, Row, user_error
from m1clip.formatting import plural

# In order of preference; compared in lower case.
IMAGE_NAMES = (
    *(
        "image",
        "image_path",
        "filepath",
        "file_path",
        "file_name",
        "filename",
        "image_name",
        "path",
        "img",
    ),
    *("img_path", "image_file", "file", "picture", "photo", "jpg", "png", "jpeg", "webp"),
)
CAPTION_NAMES = (
    *(
        "captions",
        "caption",
        "text",
        "texts",
        "title",
        "description",
        "sentences",
        "sentence",
        "comment",
    ),
    *("alt_text", "alt", "prompt", "txt", "raw"),
)
IMAGE_FOLDERS = (
    *("", "images", "Images", "image", "imgs", "img", "pictures", "photos", "data"),
    *(
        "Flicker8k_Dataset",
        "Flickr8k_Dataset",
        "flickr8k-images",
        "flickr30k-images",
        "flickr30k_images",
    ),
)
SOURCE_NAME = "source"  # column with who wrote a caption: a person, or model:NAME
GENERATED = "model:"  # how the source of a generated caption begins
SPLIT_NAMES = ("split", "partition", "subset", "set")
_ENDS_AS_IMAGE = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|hei[cf])$")
_NUMBERED = re.compile(r"(captions?|text|title|description|sentence)[_ ]?\d+$")


class Columns(NamedTuple):
    image: str
    captions: tuple[str, ...]
    split: str | None
    source: str | None = None


# Row number, cells (or what is wrong), image in the row.
Record = tuple[int, Mapping[str, Any] | str, ImageRef | None]
Records = Callable[[Columns], Iterator[Record]]


def rows_of(
    source: DataSource,
    table_name: str,
    columns: Columns,
    records: Iterator[Record],
    folders: Sequence[Path],
    table_split: str | None,
    id_prefix: str = "",
) -> Iterator[Row]:
    """The rows of a table, whose images are in the table or in one of the folders."""
    find_image = image_finder(folders)
    generated = 0
    for number, cells, stored in records:
        location = table_name, number
        if isinstance(cells, str):
            source.problem(location, cells)
            continue
        name: Any = cells.get(columns.image)
        fault = _path_problem(name) if stored is None else None
        if fault:
            source.problem(location, fault, "no-image")
            continue
        if is_generated(cells.get(columns.source) if columns.source else None):
            generated += 1
            if source.options.captions == "person":
                continue
        id_ = (
            id_prefix + posixpath.normpath(name.replace("\\", "/"))
            if stored is None
            else f"{table_name}#{number}"
        )
        captions = [cells.get(column) for column in columns.captions]
        split = (
            splits.from_value(cells.get(columns.split) if columns.split else None) or table_split
        )
        yield Row(
            location,
            captions if len(captions) > 1 else captions[0],
            split,
            stored or find_image(name),
            id_,
        )
    if generated:
        skipped = (
            "skipped" if source.options.captions == "person" else "--captions person skips them"
        )
        source.note(
            f"{table_name}: {plural(generated, 'row')} with a caption of a model; {skipped}"
        )


def is_generated(written_by: object) -> bool:
    """Whether the source of a caption says that a model wrote it."""
    return isinstance(written_by, str) and written_by.strip().startswith(GENERATED)


def _path_problem(name: Any) -> str | None:
    """Why a value cannot be the path of an image, or None."""
    if name is None or (isinstance(name, str) and not name.strip()):
        return "no file name of an image"
    if not isinstance(name, str):
        return f"the image's file name is not text but {type(name).__name__}"
    if "\0" in name or len(name) > 4096 or name != name.encode("utf-8", "replace").decode("utf-8"):
        return "the image's file name is not valid Unicode, contains a zero byte or is too long"
    if name.startswith(("http://", "https://", "s3://", "gs://")):
        return f"{name[:80]} is a URL, not a file: download the images first (img2dataset does)"
    return None


def image_finder(folders: Sequence[Path]) -> Callable[[str], FileImage]:
    """Finds an image named in a table in these folders or in their images/.

    Else its path in the first, for errors.
    """
    near = dict.fromkeys(os.fspath(folder / name) for folder in folders for name in IMAGE_FOLDERS)
    bases = list(filter(os.path.isdir, near)) or [os.fspath(folders[0])]
    next_to_table = bases[0]

    @cache  # one object per image, however many captions it has
    def find(name: str) -> FileImage:
        for spelling in dict.fromkeys((name, name.replace("\\", "/"))):
            for number, base in enumerate(bases):
                path = os.path.join(base, spelling)
                if os.path.isfile(path):
                    bases.insert(0, bases.pop(number))  # it most likely has the next image, too
                    return FileImage(path)
        return FileImage(os.path.join(next_to_table, name))

    return find


def choose_columns(header: Sequence[str], options: Options, where: str, hint: str = "") -> Columns:
    """The columns named by the user, else those with common names; an error lists what is there."""
    by_key = {column_key(name): name for name in reversed(header)}

    def find(names: Iterable[str]) -> list[str]:
        return [by_key[column_key(name)] for name in names if column_key(name) in by_key]

    for name in (options.image_column, *options.caption_columns):
        if name is not None and column_key(name) not in by_key:
            raise user_error(f"{where}: no column {name!r}; it has {_listing(header)}")
    image = find([options.image_column] if options.image_column else IMAGE_NAMES)[:1]
    numbered = [name for name in header if _NUMBERED.fullmatch(column_key(name))]
    captions = find(options.caption_columns) or numbered or find(CAPTION_NAMES)[:1]
    if not image and any(_ENDS_AS_IMAGE.search(column_key(name)) for name in header):
        raise user_error(
            f"{where}: the first row is an image, not column names; add a row such as image,caption"
        )
    if missing := [
        name for name, column in (("image", image), ("caption", captions)) if not column
    ]:
        flags = " and ".join(f"--{name}-column" for name in missing)
        fault = f"no {' and no '.join(missing)} column among {_listing(header)}"
        raise user_error(f"{where}: {fault}; specify it with {flags}{hint}")
    split = next(iter(find(SPLIT_NAMES)), None)
    written_by = next(iter(find([SOURCE_NAME])), None)
    return Columns(image[0], tuple(dict.fromkeys(captions)), split, written_by)


def column_key(name: str) -> str:
    return name.strip().lower()


def _listing(header: Sequence[str]) -> str:
    names = ", ".join(name[:40] for name in header[:12])
    return (names or "no columns") + (", ..." if len(header) > 12 else "")
