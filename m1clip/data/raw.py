"""The preview in a RAW file: DNG, CR2, NEF, ARW and the like are TIFF containers with one or more
JPEG images.
"""

import io
import struct
from collections.abc import Iterator
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

RAW_SUFFIXES = frozenset({".dng", ".cr2", ".nef", ".nrw", ".arw", ".srw"})
# Limits for hostile files: cameras write fewer than 10 directories of fewer than 200 entries.
MAX_DIRECTORIES, MAX_ENTRIES, MAX_VALUES, MAX_PREVIEW_BYTES = 32, 1000, 64, 2**26
SUBFILE, STRIP, ORIENTATION, STRIP_BYTES, DATE_TAG = 254, 273, 274, 279, 306
CHILDREN, JPEG, JPEG_BYTES, EXIF, DNG, TAKEN_TAG = 330, 513, 514, 0x8769, 50706, 0x9003
# Other TIFF types are not needed.
TIFF_TYPES = {1: ("B", 1), 2: ("B", 1), 3: ("H", 2), 4: ("I", 4), 13: ("I", 4)}

Directory = dict[int, tuple[int, ...]]  # {tag: values}


def open_preview(stream: BinaryIO) -> Image.Image | None:
    """The largest JPEG in a RAW file, with the rotation and date of the file.

    None if there is none.
    """
    head, length = stream.read(10), stream.seek(0, io.SEEK_END)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(head[:4]) if len(head) == 10 else None
    directories = list(_directories(stream, order, head[4:8])) if order else []
    if not directories or not (
        head[8:] == b"CR" or DNG in directories[0] or directories[0].get(SUBFILE) == (1,)
    ):
        return None
    pairs = ((JPEG, JPEG_BYTES), (STRIP, STRIP_BYTES))
    spans = {
        directory.get(start, ()) + directory.get(size, ())
        for directory in directories
        for start, size in pairs
    }
    usable = [
        span
        for span in spans
        if len(span) == 2 and span[1] <= MAX_PREVIEW_BYTES and sum(span) <= length
    ]
    for at, size in sorted(usable, key=lambda span: (-span[1], span[0])):
        stream.seek(at)
        try:
            image = Image.open(io.BytesIO(stream.read(size)), formats=("JPEG",))
        except (
            UnidentifiedImageError
        ):  # pixels without compression, or the sensor's values as a lossless JPEG
            continue
        exif = image.getexif()
        exif.setdefault(
            ORIENTATION,
            next(
                (
                    directory[ORIENTATION][0]
                    for directory in directories
                    if directory.get(ORIENTATION)
                ),
                1,
            ),
        )
        date = next(
            (
                directory[tag]
                for tag in (TAKEN_TAG, DATE_TAG)
                for directory in directories
                if tag in directory
            ),
            (),
        )
        exif.setdefault(DATE_TAG, bytes(byte & 255 for byte in date).decode("ascii", "replace"))
        return image
    return None


def _directories(stream: BinaryIO, order: str, first: bytes) -> Iterator[Directory]:
    """All directories of a TIFF file, as far as they can be read."""
    offsets, visited = [*struct.unpack(f"{order}I", first)], set[int]()
    while offsets and len(visited) < MAX_DIRECTORIES:
        if (at := offsets.pop(0)) in visited or at == 0:
            continue
        visited.add(at)
        try:
            directory, following = _directory(stream, order, at)
        except struct.error:  # truncated
            continue
        yield directory
        offsets += [*directory.get(CHILDREN, ()), *directory.get(EXIF, ()), following]


def _directory(stream: BinaryIO, order: str, at: int) -> tuple[Directory, int]:
    """The directory at an offset in the file, and the offset of the next."""
    directory: Directory = {}
    stream.seek(at)
    (count,) = struct.unpack(f"{order}H", stream.read(2))
    if count > MAX_ENTRIES:
        return directory, 0
    entries = stream.read(12 * count)
    (following,) = struct.unpack(f"{order}I", stream.read(4))
    for tag, kind, number, value in struct.iter_unpack(f"{order}HHI4s", entries):
        if kind not in TIFF_TYPES or number > MAX_VALUES:
            continue
        letter, size = TIFF_TYPES[kind]
        inside = number * size <= 4
        stream.seek(0 if inside else struct.unpack(f"{order}I", value)[0])
        stored = value[: number * size] if inside else stream.read(number * size)
        directory[tag] = struct.unpack(f"{order}{number}{letter}", stored)
    return directory, following
