"""List the photos of a folder, and read and decode them while the caller encodes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Container, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from m1clip import console
from m1clip.data.decode_pool import decode_in_order, decode_processes
from m1clip.data.decode_worker import Late
from m1clip.data.duplicates import appearance
from m1clip.data.images import (
    READ_TIMEOUT,
    SUFFIXES,
    BadImage,
    FileImage,
    Preprocess,
    decode,
    map_with_timeout,
    open_header,
)
from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.hardware.machine_info import decode_threads, usable_cpus
from m1clip.inference.inputs import square
from m1clip.search.location import INDEX_FOLDER

ENCODED_BATCH = 64  # images encoded together
MAX_MTIME_NS = 2**63 - 1  # what SQLite stores: of a wrong clock, a file may be of the year 4147


@dataclass
class Scan:
    """The files of a folder and its subfolders."""

    images: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # path: (bytes, mtime)
    unreadable: list[tuple[bytes, str]] = field(default_factory=list)  # (folder, reason)
    hidden: int = 0
    links: int = 0
    other: int = 0  # files that are not images

    def is_unreadable(self, path: bytes) -> bool:
        """Whether a file is in a folder that cannot be listed, so that it may still be there."""
        return path.startswith(tuple(folder for folder, _ in self.unreadable))


def scan(root: Path) -> Scan:
    """List the files of a folder, by their path in it."""
    result = Scan()
    folders = [b""]
    while folders:
        prefix = folders.pop()
        try:
            with os.scandir(os.path.join(os.fsencode(root), prefix)) as listed:
                entries = list(listed)
        except OSError as error:
            if not prefix:
                raise UserError(f"{root}: {error.strerror}") from None
            result.unreadable.append((prefix, error.strerror or str(error)))
            continue
        for entry in entries:
            if entry.name == INDEX_FOLDER.encode():
                continue
            if entry.name.startswith(b".") or entry.name == b"__MACOSX":
                result.hidden += 1
            elif entry.is_symlink():
                result.links += 1
            elif entry.is_dir(follow_symlinks=False):
                folders.append(prefix + entry.name + b"/")
            elif not entry.is_file() or not _has_image_suffix(entry.name):
                result.other += 1
            else:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    stat = entry.stat(follow_symlinks=False)
                    mtime_ns = min(stat.st_mtime_ns, MAX_MTIME_NS)
                    result.images[prefix + entry.name] = stat.st_size, mtime_ns
    return result


def _has_image_suffix(name: bytes) -> bool:
    return os.path.splitext(os.fsdecode(name))[1].lower() in SUFFIXES


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file that was read: its image unless the content is known already, or why it cannot be
    used.
    """

    path: bytes
    sha256: bytes = b""
    pixels: np.ndarray | None = None  # (size, size, 3) uint8
    facts: tuple[Any, ...] = ()  # columns of the table images
    problem: str | None = None
    kind: str = ""


def read_file(
    root: bytes, path: bytes, indexed: Container[bytes], preprocess: Preprocess
) -> ReadFile:
    """Read a file once: hash its bytes, then decode them, unless an image of this hash has a
    vector.
    """
    where = os.fsdecode(path)
    try:
        data = FileImage(os.fsdecode(os.path.join(root, path)), inside=os.fsdecode(root)).read()
        digest = hashlib.sha256(data).digest()
        if digest in indexed:
            return ReadFile(path, digest)
        with open_header(data, where) as header:
            facts = image_facts(header)
        image = decode(data, preprocess.image_size, where)
        return ReadFile(path, digest, square(image, preprocess), (*facts, *appearance(image)))
    except BadImage as error:
        return ReadFile(path, problem=one_line(error.reason), kind=error.kind)
    # What decoders raise for an unreadable image; the last two for absurd sizes.
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        problem = one_line(str(error) or type(error).__name__)
        return ReadFile(path, problem=problem, kind="unreadable")


def image_facts(header: Image.Image) -> tuple[int, int, str | None, int]:
    """(width, height, time taken, orientation): the size is that of the upright image."""
    taken, orientation = None, 1
    with contextlib.suppress(Exception):  # damaged EXIF data
        exif = header.getexif()
        orientation = exif.get(0x0112, 1)
        orientation = orientation if orientation in range(1, 9) else 1
        text = exif.get_ifd(0x8769).get(0x9003) or exif.get(0x0132) or ""
        taken = datetime.strptime(text.strip("\0 "), "%Y:%m:%d %H:%M:%S").isoformat()
    width, height = header.size if orientation < 5 else header.size[::-1]
    return width, height, taken, orientation


def read_all(
    root: Path,
    names: Sequence[bytes],
    indexed: Container[bytes],
    preprocess: Preprocess,
    moved: bool,
    refresh: console.Refresh,
) -> Iterator[list[ReadFile]]:
    """Read and decode files on half of the cores while the caller encodes, in order.

    `indexed` has the sha256 of the images that have a vector; the caller adds those it encodes.
    Where files were moved, most images have one: threads, which see this, only hash the bytes.
    """
    folder = os.fsencode(root)
    cpus = max(1, usable_cpus() // 2)
    processes = 0 if moved else decode_processes(len(names), cpus)
    if processes:
        reads = _read_in_processes(folder, names, preprocess, processes)
    else:
        reads = map_with_timeout(
            names,
            lambda name: read_file(folder, name, indexed, preprocess),
            READ_TIMEOUT,
            max(2, min(decode_threads(), cpus)),
        )
    late = f"the read did not finish within {READ_TIMEOUT:g} s"
    done = 0
    refresh(done, len(names))
    with closing(reads):
        while chunk := list(itertools.islice(reads, ENCODED_BATCH)):
            chunk_names = names[done : done + len(chunk)]
            yield [
                ReadFile(name, problem=late, kind="unreadable") if read is None else read
                for read, name in zip(chunk, chunk_names, strict=True)
            ]
            done += len(chunk)
            refresh(done, len(names))


@dataclass(frozen=True)
class _ReadPhoto:
    """Work for `DecodePool`: the name of a file -> its pixels, and what else was read."""

    root: bytes
    preprocess: Preprocess

    def __call__(self, path: bytes) -> tuple[np.ndarray | None, ReadFile]:
        read = read_file(self.root, path, (), self.preprocess)
        return read.pixels, replace(read, pixels=None)


def _read_in_processes(
    root: bytes, names: Sequence[bytes], preprocess: Preprocess, processes: int
) -> Generator[ReadFile | None]:
    """What was read from each file, in order; None for one that took too long."""
    side = preprocess.image_size
    work = _ReadPhoto(root, preprocess)
    blocks = decode_in_order(work, names, processes, (side, side, 3), READ_TIMEOUT)
    with closing(blocks):
        for reports, pixels in blocks:
            for report, row in zip(reports, pixels, strict=True):
                if isinstance(report, Late):
                    yield None
                else:
                    yield report if report.problem else replace(report, pixels=row.copy())
