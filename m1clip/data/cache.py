"""Decode once: a cache of uint8 pictures on disk, memory-mapped, built once and shared by every run.

`.m1clip-cache/KEY/pixels.npy` is a plain NumPy file of shape (pictures, side, side, 3); `about.json` beside it
says what it holds and which pictures could not be read. KEY is a hash of the names, sizes and times of the
pictures and of the settings, so a changed picture makes another cache and an old one is never wrong.

While it is built it lies in `KEY.building`, with a line in `progress.jsonl` for each finished chunk, written
after the pixels are safe: a killed build continues there. The folder is renamed when it is whole.
Captions are not kept: tokenising 40,000 of them takes half a second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from m1clip.data.cache_place import free_bytes
from m1clip.data.lock import locked
from m1clip.data.pair import Pair
from m1clip.data.patience import PATIENCE
from m1clip.data.store import CHUNK, MappedPictures, Progress, decode_chunks
from m1clip.errors import UserError
from m1clip.files import read_small, sync_folder, write_json

FORMAT = 1
PIXELS, ABOUT, PROGRESS = "pixels.npy", "about.json", "progress.jsonl"
MAX_ABOUT = 2**28  # bytes: it names every image that cannot be read
ROOM_MARGIN = 1.05
SAVE_SECONDS = 2.0  # work that a killed build may lose


@dataclass(frozen=True)
class CacheSpec:
    """What a cache holds, and where."""

    folder: Path  # that holds the caches
    key: str
    count: int
    side: int
    resize: str

    @property
    def path(self) -> Path:
        """The folder of the finished cache."""
        return self.folder / self.key

    @property
    def building(self) -> Path:
        """The folder of the cache while it is built."""
        return self.folder / f"{self.key}.building"

    @property
    def bytes(self) -> int:
        """Size of the pixels."""
        return self.count * self.side * self.side * 3

    def is_whole(self) -> bool:
        """Whether it is built: it has its name only then."""
        return (self.path / ABOUT).is_file()


def cache_key(pairs: Sequence[Pair], side: int, resize: str, roots: Sequence[str]) -> str:
    """A hash of everything the pixels depend on. Paths count from `roots`, so that the data may be moved."""
    digest = hashlib.sha256(f"m1clip cache {FORMAT}|{side}|{resize}".encode())
    here, folders = os.getcwd(), [os.path.join(os.path.abspath(root), "") for root in roots]
    for pair in pairs:
        stamp = pair.image.stamp()
        whole = os.path.normpath(os.path.join(here, stamp))
        inside = next((whole[len(folder) :] for folder in folders if whole.startswith(folder)), stamp)
        digest.update(f"\x1e{pair.id}\x1f{inside}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def open_cache(spec: CacheSpec) -> tuple[MappedPictures, dict[int, str]]:
    """The pictures of a finished cache, and why some are not in it; ValueError where it is damaged."""
    about = json.loads(read_small(spec.path / ABOUT, MAX_ABOUT))
    bad = {int(index): str(reason) for index, reason in about["bad"].items()}
    rows = np.array([i for i in range(spec.count) if i not in bad], np.int64) if bad else None
    pictures = MappedPictures(spec.path / PIXELS, rows)
    if pictures.array.shape != (spec.count, spec.side, spec.side, 3) or pictures.array.dtype != np.uint8:
        raise ValueError(f"holds {pictures.array.shape} {pictures.array.dtype}")
    return pictures, bad


def cached(
    spec: CacheSpec, pairs: Sequence[Pair], workers: int, start_method: str | None, progress: Progress,
    warn: Callable[[str], None], patience: float = PATIENCE,
) -> tuple[MappedPictures, dict[int, str]]:  # fmt: skip
    """Open the cache, building or finishing it first; of two processes one builds and the other waits for it."""
    if not spec.is_whole():

        def waiting() -> None:
            warn(f"{spec.path}: another process is building this cache; waiting for it")

        lock = spec.folder / f"{spec.key}.lock"
        with locked(lock, waiting) as alone:
            if not spec.is_whole():
                # Without a lock (some network disks have none) each builds for itself, and the first one counts.
                place = spec.building if alone else spec.folder / f"{spec.key}.{os.getpid()}.building"
                _build(spec, place, pairs, workers, start_method, progress, patience)
            # Only now: who still waits for this file, or comes later, finds the cache whole.
            lock.unlink(missing_ok=True)
    try:
        return open_cache(spec)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{spec.path}: a damaged cache ({error}); delete this folder and run again") from None


def _build(
    spec: CacheSpec,
    place: Path,
    pairs: Sequence[Pair],
    workers: int,
    start_method: str | None,
    progress: Progress,
    patience: float,
) -> None:
    place.mkdir(parents=True, exist_ok=True)
    done = _read_progress(place, spec)
    left = [start for start in range(0, spec.count, CHUNK) if start not in done]
    _check_room(spec, len(left) * CHUNK * spec.side * spec.side * 3)
    refs = [pair.image for pair in pairs]
    finished = spec.count - sum(min(CHUNK, spec.count - start) for start in left)
    progress(finished, spec.count)
    try:
        with _opened(place / PIXELS) as pixels, _opened(place / PROGRESS) as lines:
            offset = _write_header(pixels, spec)
            lines.seek(0, os.SEEK_END)
            lines.write(b"\n")  # ends a line that a kill may have torn
            unsaved: dict[int, dict[int, str]] = {}
            saved = time.monotonic()
            for start, block, errors in decode_chunks(
                refs, left, spec.side, spec.resize, workers, start_method, patience
            ):
                pixels.seek(offset + start * spec.side * spec.side * 3)
                pixels.write(block.data)
                unsaved[start] = done[start] = errors
                finished += len(block)
                if time.monotonic() - saved > SAVE_SECONDS:
                    _save(pixels, lines, unsaved)
                    saved = time.monotonic()
                progress(finished, spec.count)
            pixels.truncate(offset + spec.bytes)
            _save(pixels, lines, unsaved)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{place}: the disk became full while the cache was built; make room and run again: it continues there"
        ) from None
    bad = {str(index): reason for errors in done.values() for index, reason in sorted(errors.items())}
    about = {"format": FORMAT, "count": spec.count, "side": spec.side, "resize": spec.resize, "bad": bad}
    write_json(place / ABOUT, about)
    (place / PROGRESS).unlink()
    _publish(place, spec)


def _publish(place: Path, spec: CacheSpec) -> None:
    try:
        place.rename(spec.path)
    except OSError:
        if not spec.is_whole():
            raise
        shutil.rmtree(place)  # another process was first: its cache is as good
    sync_folder(spec.folder)


def _check_room(spec: CacheSpec, needed: int) -> None:
    free = free_bytes(spec.folder)
    if needed * ROOM_MARGIN > free:
        raise UserError(
            f"the cache of pictures needs {needed * ROOM_MARGIN / 1e9:.2f} GB, {spec.folder} has {free / 1e9:.2f} GB "
            f"free: make room, name another disk with --data.cache-dir, or use --data.cache ram or off"
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    path.touch()
    with path.open("r+b") as file:
        yield file


def _write_header(file: BinaryIO, spec: CacheSpec) -> int:
    """The .npy header; gives the place where the pixels begin."""
    shape = (spec.count, spec.side, spec.side, 3)
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.tell()


def _save(pixels: BinaryIO, lines: BinaryIO, unsaved: dict[int, dict[int, str]]) -> None:
    """First the pixels, then the word that they are there: in this order each is true after a power cut."""
    for file in (pixels, lines):
        if file is lines:
            lines.writelines(
                json.dumps({"chunk": c, "bad": bad}).encode() + b"\n" for c, bad in unsaved.items()
            )
        file.flush()
        os.fsync(file.fileno())
    unsaved.clear()


def _read_progress(place: Path, spec: CacheSpec) -> dict[int, dict[int, str]]:
    """The finished chunks of an earlier build, with what could not be read in them."""
    done: dict[int, dict[int, str]] = {}
    try:
        lines = read_small(place / PROGRESS, MAX_ABOUT).splitlines()
    except FileNotFoundError:
        return done
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            entry: dict[str, Any] = json.loads(line)
            if 0 <= entry["chunk"] < spec.count:
                done[entry["chunk"]] = {int(index): str(reason) for index, reason in entry["bad"].items()}
    return done
