"""Decode once: a cache of uint8 images on disk, memory-mapped, built once and shared by every run.

`.m1clip-cache/KEY/pixels.npy` is a plain NumPy file of shape (images, side, side, 3); `about.json` beside it
says what it holds and which images could not be read. KEY is a hash of the names, sizes and times of the
images and of the settings, so a changed image makes another cache and an old one is never wrong.

While it is built it lies in `KEY.building`, with a line in `progress.jsonl` for each finished chunk, written
after the pixels are safe: a killed build continues there. The folder is renamed when it is whole.
Captions are not kept: tokenising 40,000 of them takes half a second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from m1clip.data import randomness as rnd
from m1clip.data.images import PATIENCE, BadImage, patiently, to_square
from m1clip.data.sources.mixture import MixedSource
from m1clip.data.synthetic.source import SyntheticImage
from m1clip.data.types import ImageRef, Sample, Source
from m1clip.errors import UserError
from m1clip.io import locked, read_small, sync_folder, write_json

FOLDER = ".m1clip-cache"


def cache_folder(asked: str | None, beside: Path | None) -> Path:
    """The folder asked for; else beside the data; else, where that cannot be written, the user's cache folder."""
    places = [Path(asked).expanduser()] if asked else [*([beside / FOLDER] if beside else []), user_cache()]
    reason = ""
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            probe = place / f".{os.getpid()}.probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            reason = f"{place}: {error.strerror or error}"
        else:
            return place
    raise UserError(f"no place for the cache of images ({reason}); name one with --data.cache-dir, or --data.cache ram")


def user_cache() -> Path:
    """Where programs of this system keep what they can make again."""
    asked = os.environ.get("XDG_CACHE_HOME")
    if asked and os.path.isabs(asked):
        return Path(asked) / "m1clip"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "m1clip"


def free_bytes(folder: Path) -> int:
    """Room on the disk that a folder is on."""
    return shutil.disk_usage(folder).free


def stay_with_parent() -> None:
    """For the start of a helper: Ctrl-C reaches the whole group, but the parent says when its helpers end.

    A parent that was killed can say nothing, so a thread waits for its end. SIGTERM has its usual effect:
    concurrent.futures ends the others with it when one was killed, and waits for them.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


Progress = Callable[[int, int], None]  # (done, total)
Decoded = tuple[int, np.ndarray, dict[int, str]]  # first index, pixels, reason by index of each that failed
CHUNK = 64
MAX_THREADS = 16  # each holds one decoded image at full size
# With a tenth of the images broken, this many in a row fail once in 10^32.
REPLACEMENT_TRIES = 32
DEVICE_FRACTION = 0.25  # of the device's free memory that images may take; the rest is for training
HUNG = "the read did not end"


class Images(Protocol):
    """A row of square images, all of one size."""

    def __len__(self) -> int: ...

    @property
    def ram_bytes(self) -> int:
        """Memory that the decoded images take in this process."""

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8."""

    def to_device(self, device: torch.device, free_bytes: int) -> Tensor | None:
        """All images on a device, (n, side, side, 3) uint8; None if they are not decoded or take too much memory."""


@dataclass(frozen=True)
class FeatureTable:
    """Features of a frozen tower; `rows[i]` is the row of item i, or (items, views) the row of each view."""

    array: np.ndarray  # (rows, width) float16
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def views(self) -> int:
        """Views of each item."""
        return 1 if self.rows.ndim == 1 else self.rows.shape[1]

    def read(self, items: np.ndarray, views: np.ndarray | int = 0) -> np.ndarray:
        """(n, width) float32 of some items, in the first view or in view `views[i]` of each."""
        rows = self.rows[items] if self.rows.ndim == 1 else self.rows[items, views]
        # torch converts float16 25 times as fast as numpy.
        return torch.from_numpy(self.array.take(rows, axis=0)).float().numpy()


@dataclass(frozen=True)
class ArrayImages:
    """Images decoded once and held in memory."""

    array: np.ndarray

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8."""
        return self.array.take(indices, axis=0)

    @property
    def ram_bytes(self) -> int:
        """All of it."""
        return self.array.nbytes

    def to_device(self, device: torch.device, free_bytes: int) -> Tensor | None:
        """All images on a device where they leave room."""
        return _to_device(self, device, free_bytes)


class MappedImages:
    """Images decoded once and mapped from a .npy file; to a worker process only the path travels."""

    def __init__(self, path: Path, rows: np.ndarray | None = None) -> None:
        self.path, self.rows = path, rows
        array = np.lib.format.open_memmap(path, mode="r")
        # A plain view: np.memmap makes each piece taken from it a memmap again, which costs time.
        self.array = np.asarray(array)

    def __len__(self) -> int:
        return len(self.array) if self.rows is None else len(self.rows)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8, copied out of the map."""
        return self.array.take(indices if self.rows is None else self.rows[indices], axis=0)

    @property
    def ram_bytes(self) -> int:
        """None: the system drops mapped pages when it needs memory."""
        return 0

    def to_device(self, device: torch.device, free_bytes: int) -> Tensor | None:
        """All images on a device where they leave room."""
        return _to_device(self, device, free_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedImages, (self.path, self.rows)


def _to_device(images: Images, device: torch.device, free_bytes: int) -> Tensor | None:
    if len(images) == 0:
        return None
    one = images.read(np.zeros(1, np.int64))
    if one.nbytes * len(images) > DEVICE_FRACTION * free_bytes:
        return None
    stored = torch.empty((len(images), *one.shape[1:]), dtype=torch.uint8, device=device)
    for start in range(0, len(images), 1024):
        rows = np.arange(start, min(start + 1024, len(images)))
        stored[start : start + len(rows)] = torch.from_numpy(images.read(rows)).to(device)
    return stored


@dataclass(frozen=True, slots=True)
class Failure:
    """An image that could not be read: its index, where it is, and why."""

    index: int
    where: str
    reason: str


@dataclass(frozen=True)
class LiveImages:
    """Images decoded each time they are asked for: no memory, more work."""

    refs: Sequence[ImageRef]
    side: int
    resize: str = "shortest"
    patience: float = PATIENCE  # seconds for one image
    ram_bytes: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self.refs)

    def to_device(self, device: torch.device, free_bytes: int) -> None:
        """They are not decoded."""

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8; an image that has gone since the run began stops it."""
        squares = self.squares(indices)
        for found in squares:
            if isinstance(found, Failure):
                raise UserError(
                    f"{found.where}: {found.reason}; it could be read when the run began: "
                    f"bring it back, then continue with --resume"
                )
        return np.stack([square for square in squares if not isinstance(square, Failure)])

    def squares(self, indices: np.ndarray) -> list[np.ndarray | Failure]:
        """The images in the order asked for, decoded by threads: Pillow lets go of the interpreter."""
        # A worker process is one of many already: threads in each would only fight for the cores.
        threads = 1 if parent_process() is not None else min(MAX_THREADS, os.cpu_count() or 1)
        return patiently(indices.tolist(), self.square, self.hung, self.patience, threads, self.where)

    def square(self, index: int) -> np.ndarray | Failure:
        """(side, side, 3) uint8, or why there is none."""
        ref = self.refs[index]
        try:
            return to_square(ref.open(self.side), self.side, self.resize)
        # What decoders raise for an image they cannot read; the last two for one of an absurd size.
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            return Failure(index, str(ref), reason_of(error))

    def where(self, index: int) -> str:
        """Which image it is, for a person."""
        return str(self.refs[index])

    def hung(self, index: int) -> np.ndarray | Failure:
        """The failure of an image whose read does not come back."""
        return Failure(index, self.where(index), f"{HUNG} within {self.patience:g} s")


def reason_of(error: Exception) -> str:
    """Why an image could not be read, without its name, which the caller knows."""
    if isinstance(error, BadImage):
        return error.reason
    if isinstance(error, MemoryError | OverflowError):
        return "too large for the memory"
    return str(error) or type(error).__name__


def read_or_replace(
    images: Images, members: np.ndarray, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray, tuple[Failure, ...]]:
    """(members, their pixels, what failed): an image that fails live gives its place to another one.

    Which one is a function of (seed, epoch, sample), so it is the same for any number of workers.
    """
    if not isinstance(images, LiveImages):
        return members, images.read(members), ()
    chosen, squares, failures = members.copy(), [], []
    first_read = images.squares(members)
    for place, member in enumerate(members):
        found = first_read[place]
        tries = 0
        while isinstance(found, Failure):
            failures.append(found)
            if tries == REPLACEMENT_TRIES:
                raise UserError(
                    f"{found.where}: {found.reason}; {tries} others tried in its place cannot be read either: "
                    f"is the disk with the images still there?"
                )
            chosen[place] = _replacement(seed, epoch, int(member), tries, len(images))
            found = images.squares(chosen[place : place + 1])[0]
            tries += 1
        squares.append(found)
    return chosen, np.stack(squares), tuple(failures)


def _replacement(seed: int, epoch: int, sample: int, tries: int, count: int) -> int:
    draw = rnd.bits(seed, epoch, np.array([sample + tries * count]), rnd.REPLACEMENT)
    return int(draw[0] % np.uint64(count))


def decode_chunks(
    refs: Sequence[ImageRef],
    starts: Iterable[int],
    side: int,
    resize: str,
    workers: int,
    start_method: str | None,
    patience: float = PATIENCE,
) -> Iterator[Decoded]:
    """Decode the chunks that begin at `starts`, in order; by threads, or by processes where a method is given.

    Threads are right for files: Pillow lets go of the interpreter while it decodes, nothing is pickled, and none
    is left behind when the process is killed. Drawn images are Python throughout and need processes.
    """
    jobs = ((start, refs[start : start + CHUNK], side, resize, patience) for start in starts)
    if workers < 2:
        yield from map(_decode_chunk, jobs)
        return
    pool: Executor
    if start_method is None:
        pool = ThreadPoolExecutor(workers)
    else:
        pool = ProcessPoolExecutor(workers, get_context(start_method), stay_with_parent)
    waiting: deque[Any] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(_decode_chunk, job))
            # A bounded queue: a slow disk must not fill the memory with decoded images.
            if len(waiting) > 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a process that decodes images was killed; the system may be out of memory: "
            "close other programs and run again, a cache on disk continues where it stopped"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def decode_all(
    refs: Sequence[ImageRef],
    side: int,
    resize: str,
    workers: int,
    start_method: str | None,
    progress: Progress,
    patience: float = PATIENCE,
) -> tuple[np.ndarray, dict[int, str]]:
    """Decode every image; gives the array and, for each image that could not be read, the reason."""
    array = np.zeros((len(refs), side, side, 3), np.uint8)
    bad: dict[int, str] = {}
    few = len(refs) < 4 * CHUNK  # then starting processes takes longer than the work
    starts = range(0, len(refs), CHUNK)
    progress(0, len(refs))
    for start, block, errors in decode_chunks(
        refs, starts, side, resize, 1 if few else workers, start_method, patience
    ):
        array[start : start + len(block)] = block
        bad.update(errors)
        progress(start + len(block), len(refs))
    return array, bad


def find_bad(
    refs: Sequence[ImageRef], indices: Sequence[int], workers: int, patience: float = PATIENCE
) -> dict[int, str]:
    """Decode these images only to see whether they can be: the reason for each that cannot."""
    live = LiveImages(refs, side=32, patience=patience)
    found = patiently(list(indices), live.square, live.hung, patience, max(1, workers), live.where)
    return {failure.index: failure.reason for failure in found if isinstance(failure, Failure)}


def _decode_chunk(job: tuple[int, Sequence[ImageRef], int, str, float]) -> Decoded:
    start, refs, side, resize, patience = job
    block = np.zeros((len(refs), side, side, 3), np.uint8)
    errors = {}
    live = LiveImages(refs, side, resize, patience)
    squares = patiently(range(len(refs)), live.square, live.hung, patience, name=live.where)
    for offset, square in enumerate(squares):
        if isinstance(square, Failure):
            if square.reason.startswith(HUNG):
                # It may be there again tomorrow: what is kept for all runs must not say that it cannot be read.
                raise UserError(
                    f"{square.where}: {square.reason}; is the disk with the images still there? Run again when it is"
                )
            errors[start + offset] = square.reason
        else:
            block[offset] = square
    return start, block, errors


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


def cache_key(samples: Sequence[Sample], side: int, resize: str, roots: Sequence[str]) -> str:
    """A hash of everything the pixels depend on. Paths count from `roots`, so that the data may be moved."""
    digest = hashlib.sha256(f"m1clip cache {FORMAT}|{side}|{resize}".encode())
    here, folders = os.getcwd(), [os.path.join(os.path.abspath(root), "") for root in roots]
    for sample in samples:
        stamp = sample.image.stamp()
        whole = os.path.normpath(os.path.join(here, stamp))
        inside = next((whole[len(folder) :] for folder in folders if whole.startswith(folder)), stamp)
        digest.update(f"\x1e{sample.id}\x1f{inside}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def open_cache(spec: CacheSpec) -> tuple[MappedImages, dict[int, str]]:
    """The images of a finished cache, and why some are not in it; ValueError where it is damaged."""
    about = json.loads(read_small(spec.path / ABOUT, MAX_ABOUT))
    bad = {int(index): str(reason) for index, reason in about["bad"].items()}
    rows = np.array([i for i in range(spec.count) if i not in bad], np.int64) if bad else None
    images = MappedImages(spec.path / PIXELS, rows)
    if images.array.shape != (spec.count, spec.side, spec.side, 3) or images.array.dtype != np.uint8:
        raise ValueError(f"holds {images.array.shape} {images.array.dtype}")
    return images, bad


def cached(
    spec: CacheSpec, samples: Sequence[Sample], workers: int, start_method: str | None, progress: Progress,
    warn: Callable[[str], None], patience: float = PATIENCE,
) -> tuple[MappedImages, dict[int, str]]:  # fmt: skip
    """Open the cache, building or finishing it first; of two processes one builds and the other waits for it."""
    if not spec.is_whole():

        def waiting() -> None:
            warn(f"{spec.path}: another process is building this cache; waiting for it")

        lock = spec.folder / f"{spec.key}.lock"
        with locked(lock, waiting) as alone:
            if not spec.is_whole():
                # Without a lock (some network disks have none) each builds for itself, and the first one counts.
                place = spec.building if alone else spec.folder / f"{spec.key}.{os.getpid()}.building"
                _build(spec, place, samples, workers, start_method, progress, patience)
            # Only now: who still waits for this file, or comes later, finds the cache whole.
            lock.unlink(missing_ok=True)
    try:
        return open_cache(spec)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{spec.path}: a damaged cache ({error}); delete this folder and run again") from None


def _build(
    spec: CacheSpec,
    place: Path,
    samples: Sequence[Sample],
    workers: int,
    start_method: str | None,
    progress: Progress,
    patience: float,
) -> None:
    place.mkdir(parents=True, exist_ok=True)
    done = _read_progress(place, spec)
    left = [start for start in range(0, spec.count, CHUNK) if start not in done]
    _check_room(spec, len(left) * CHUNK * spec.side * spec.side * 3)
    refs = [sample.image for sample in samples]
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
            f"the cache of images needs {needed * ROOM_MARGIN / 1e9:.2f} GB, {spec.folder} has {free / 1e9:.2f} GB "
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
            lines.writelines(json.dumps({"chunk": c, "bad": bad}).encode() + b"\n" for c, bad in unsaved.items())
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


SHOWN = 10  # named on screen; all are in the run log
SAMPLE = 256  # looked at before training where not all are decoded
SURE = 2.0  # standard errors


def too_many(bad: int, looked: int, total: int, limit: float) -> bool:
    """Whether the bad share of the whole set is above the limit: exact where all were looked at, else beyond doubt."""
    if bad == 0:
        return False
    if looked >= total or bad > limit * total:
        return bad > limit * total
    share = bad / looked
    return share - SURE * math.sqrt(share * (1 - share) / looked) > limit and looked >= 32


def evenly(total: int, count: int) -> list[int]:
    """Indices spread over the whole set."""
    return list(range(total)) if total <= count else [i * total // count for i in range(count)]


def judge(
    bad: Mapping[int, str], refs: Sequence[ImageRef], split: str, looked: int, limit: float, warn: Callable[[str], None]
) -> tuple[Failure, ...]:
    """Name the first of the bad images; a UserError when they are too many to train without them."""
    found = tuple(Failure(index, str(refs[index]), bad[index]) for index in sorted(bad))
    for failure in found[:SHOWN]:
        warn(f"skipped {failure.where}: {failure.reason}")
    if too_many(len(found), looked, len(refs), limit):
        raise _refusal(found, f"{looked:,} {split} images", looked, limit)
    if len(found) > SHOWN:
        warn(f"skipped {len(found):,} of {looked:,} {split} images that cannot be read; run.jsonl names them all")
    return found


def _refusal(found: Sequence[Failure], of: str, looked: int, limit: float) -> UserError:
    places: dict[str, list[str]] = {}  # by reason: one that all share is given once
    for failure in found[:SHOWN]:
        places.setdefault(failure.reason, []).append(failure.where)
    listed = "; ".join(f"{', '.join(where)}: {reason}" for reason, where in places.items())
    more = f"; and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
    return UserError(
        f"{len(found):,} of {of} cannot be read ({len(found) / looked:.0%}, allowed {limit:.0%}): {listed}{more}. "
        f"m1clip data lint lists them all; mend them, or raise --data.max-bad"
    )


class Ledger:
    """Each image that fails is written down once; too many that fail while training stop the run."""

    def __init__(
        self,
        total: int,
        limit: float,
        write: Callable[..., Any],
        warn: Callable[[str], None],
        named: Iterable[str] = (),
    ) -> None:
        self.total, self.limit, self.write, self.warn = total, limit, write, warn
        self.named = set(named)  # by an earlier part of the run, before a resume
        self.known: dict[int, Failure] = {}
        self.asked = 0

    def record(self, split: str, failures: Iterable[Failure]) -> None:
        """Write down those that are not yet there."""
        for failure in failures:
            if failure.where not in self.named:
                self.named.add(failure.where)
                self.write("skipped", split=split, where=failure.where, reason=failure.reason)

    def __call__(self, failures: Sequence[Failure], asked: int) -> None:
        """What failed in a training batch of `asked` images."""
        self.asked = min(self.total, self.asked + asked + len(failures))
        for failure in failures:
            if failure.index not in self.known:
                self.known[failure.index] = failure
                if len(self.known) <= SHOWN:
                    self.warn(f"skipped {failure.where}: {failure.reason}; another image takes its place")
        self.record("train", failures)
        looked = max(self.asked, len(self.known))
        if too_many(len(self.known), looked, self.total, self.limit):
            raise _refusal(list(self.known.values()), f"{looked:,} train images read so far", looked, self.limit)


Kind = Literal["ram", "disk", "off"]
RAM_LIMIT_SHARE = 0.3  # of the machine's memory, for decoded images
DISK_LIMIT_SHARE = 0.5  # of the free disk, unless the person asks for the disk by name
QUICK_IMAGES = 500  # so few are decoded before a person grows impatient


@dataclass(frozen=True)
class DecodePlan:
    """How images are decoded: by how many processes, started how, shown to whom."""

    workers: int
    start_method: str
    memory_bytes: int
    progress: Callable[[str], AbstractContextManager[Progress]]  # by what is being done
    warn: Callable[[str], None]


@dataclass(frozen=True)
class CachePlace:
    """What the person asked for, and where the data lies."""

    wish: Literal["auto", "ram", "disk", "off"]
    cache_dir: str | None
    roots: tuple[str, ...]
    beside: Path | None
    in_all: int  # images of all splits, which share the memory
    patience: float = PATIENCE  # seconds for the read of one image


@dataclass(frozen=True)
class Stored:
    """The images of a split that can be read, with their samples, and those that cannot."""

    images: Images
    samples: Sequence[Sample]
    failures: tuple[Failure, ...]
    kind: Kind


def choose_kind(wish: str, *, drawn: bool, images: int, needed: int, total: int, memory: int, free: int) -> Kind:
    """What to do with `needed` bytes of a split of a set of `total` bytes, if the person leaves it open.

    Drawn images and small sets stay in memory. Others go to disk, so that the second run starts at once;
    where the disk has no room they stay in memory, and where that has none they are decoded each time.
    """
    if wish != "auto":
        return wish  # type: ignore[return-value]
    fits_memory = total <= RAM_LIMIT_SHARE * memory
    if fits_memory and (drawn or images <= QUICK_IMAGES):
        return "ram"
    if not drawn and needed * ROOM_MARGIN <= DISK_LIMIT_SHARE * free:
        return "disk"
    return "ram" if fits_memory else "off"


def data_folders(source: Source) -> tuple[tuple[str, ...], Path | None]:
    """(the folders the data lies in, the one that a cache may lie beside)."""
    parts: Sequence[Any] = [part for part, _ in source.parts] if isinstance(source, MixedSource) else [source]
    paths = [part.path for part in parts if isinstance(getattr(part, "path", None), Path)]
    # A pattern of shards is no file, and a dataset of the hub (hf:owner/name) has no folder at all.
    folders = [path if path.is_dir() else path.parent for path in paths if not str(path).startswith("hf:")]
    folders = [folder for folder in folders if folder.is_dir()]
    return tuple(map(str, folders)), folders[0] if folders else None


def store_split(
    samples: Sequence[Sample], split: str, side: int, resize: str, place: CachePlace, max_bad: float, plan: DecodePlan
) -> Stored:
    """Keep the images of a split as asked, without those that cannot be read."""
    row = side * side * 3
    drawn = all(isinstance(sample.image, SyntheticImage) for sample in samples)
    facts = {"drawn": drawn, "images": place.in_all, "needed": len(samples) * row, "total": place.in_all * row}
    start_method = plan.start_method if drawn else None
    spec, kind = None, choose_kind(place.wish, **facts, memory=plan.memory_bytes, free=2**62)  # type: ignore[arg-type]
    if kind == "disk":
        key = cache_key(samples, side, resize, place.roots)
        spec = CacheSpec(cache_folder(place.cache_dir, place.beside), key, len(samples), side, resize)
        if not spec.is_whole():
            kind = choose_kind(place.wish, **facts, memory=plan.memory_bytes, free=free_bytes(spec.folder))  # type: ignore[arg-type]
    images: Images
    refs = [sample.image for sample in samples]
    looked: Sequence[int] = range(len(samples))
    if spec is not None and kind == "disk":
        with plan.progress(f"preparing {split} images") as show:
            images, bad = cached(spec, samples, plan.workers, start_method, show, plan.warn, place.patience)
    elif kind == "ram":
        with plan.progress(f"preparing {split} images") as show:
            array, bad = decode_all(refs, side, resize, plan.workers, start_method, show, place.patience)
        images = ArrayImages(array)
    else:
        # Images to evaluate with are a fixed set, so each is tried; of those to train on a sample shows the share.
        looked = evenly(len(samples), SAMPLE) if split == "train" else looked
        bad = find_bad(refs, looked, plan.workers, place.patience)
        images = LiveImages(refs, side, resize, place.patience)
    failures = judge(bad, refs, split, len(looked), max_bad, plan.warn)
    if not bad or (kind == "off" and split == "train"):
        return Stored(images, samples, failures, kind)
    good = [index for index in range(len(samples)) if index not in bad]
    if isinstance(images, ArrayImages):
        images = ArrayImages(images.array[good])
    elif isinstance(images, LiveImages):
        images = LiveImages([refs[index] for index in good], side, resize, place.patience)
    return Stored(images, [samples[index] for index in good], failures, kind)
