"""Caches of decoded images and computed features: in RAM, memory-mapped from disk, or on the device.

On disk, `.m1clip-cache/KEY/rows.bin` holds rows of one shape and type, and `names.bin` the 16-byte name of each row.
KEY is a hash of what all rows depend on (image size; or tower weights and preprocessing), a name a hash of what one
row depends on (path, size and time of the image file; or the caption). A changed image gets a new row, so an old row
is never stale. A name is written after its row is on disk: if killed, the next process continues from there.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from filelock import FileLock, Timeout

from m1clip.config import DataConfig
from m1clip.data import randomness as rnd
from m1clip.data.images import READ_TIMEOUT, failure_reason, map_with_timeout, to_square
from m1clip.data.synthetic.source import SyntheticImage
from m1clip.data.types import ImageRef, Sample, Source
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.hardware.facts import decode_threads
from m1clip.io import first_writable, open_for_write, open_regular, user_cache

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FOLDER = ".m1clip-cache"
ROWS, NAMES, LOCK = "rows.bin", "names.bin", "lock"
NAME_BYTES = 16
SAVE_SECONDS = 2.0  # maximum work lost when a process is killed
DISK_MARGIN = 1.05
RAM_FRACTION = 0.3  # of the machine's memory, for decoded images
DISK_FRACTION = 0.5  # of the free disk, unless the user asks for the disk
DEVICE_FRACTION = 0.25  # of the device's free memory; the rest is for training
FEW_IMAGES = 500  # decoded in seconds, so they need no disk
CHUNK = 64  # images decoded together
SHOWN = 10  # failures named on screen; the run log has all
EXAMPLES = 3  # failures named in an error
CHECKED = 256  # training images tried before a run that decodes while it trains
# With a tenth of the images broken, this many in a row fail once in 10^32.
REPLACEMENT_TRIES = 32
TIMED_OUT = "the read did not finish"

Progress = Callable[[int, int], None]  # (done, total)
Warn = Callable[[str], None]
Computed = Generator[tuple[list[int], np.ndarray]]  # places in the list of wanted items, and their rows
Compute = Callable[[list[int], dict[int, str]], Computed]  # adds the places that failed to the dict


class RowTable:
    """Decoded images or computed features: rows of an array in RAM, or of a memory-mapped file.

    `rows[i]` is the row of item i; None: item i is row i. A mapped file is pickled as its path.
    """

    def __init__(self, array: np.ndarray, rows: np.ndarray | None = None, path: Path | None = None) -> None:
        self.array, self.path = array, path
        self.rows = np.arange(len(array)) if rows is None else rows

    @classmethod
    def mapped(cls, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], rows: np.ndarray | None) -> RowTable:
        """Map the rows of a file; OSError for a FIFO or device."""
        if math.prod(shape) == 0:
            return cls(np.zeros(shape, dtype), rows)
        with open_regular(path) as file:
            # A plain view: slices of a np.memmap are memmaps too, which is slow.
            return cls(np.asarray(np.memmap(file, dtype, "r", shape=shape)), rows, path)

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return RowTable, (self.array, self.rows)
        return RowTable.mapped, (self.path, self.array.dtype, self.array.shape, self.rows)

    @property
    def ram_bytes(self) -> int:
        """0 if memory-mapped: the system can drop those pages."""
        return self.array.nbytes if self.path is None else 0

    def read(self, items: np.ndarray) -> np.ndarray:
        return self.array.take(self.rows[items], axis=0)

    def try_read(self, items: np.ndarray) -> tuple[np.ndarray, dict[int, Failure]]:
        """Same as `read`: failed images are not in the cache."""
        return self.read(items), {}

    def to_device(self, device: torch.device, free_bytes: int) -> Tensor | None:
        """All rows on a device, unless they take too much of its memory."""
        shape = (len(self), *self.array.shape[1:])
        if not 0 < math.prod(shape) <= DEVICE_FRACTION * free_bytes:
            return None
        import torch  # not needed by an evaluation in onnxruntime

        images = torch.empty(shape, dtype=torch.uint8, device=device)
        for items in np.array_split(np.arange(len(self)), -(-len(self) // 1024)):
            images[items[0] : items[-1] + 1] = torch.from_numpy(self.read(items)).to(device)
        return images


@dataclass(frozen=True, slots=True)
class Failure:
    """An image that could not be read: its index, where it is, and why."""

    index: int
    where: str
    reason: str


@dataclass(frozen=True)
class LiveImages:
    """Images decoded each time they are read: no memory, more compute."""

    refs: Sequence[ImageRef]
    side: int
    resize: str = "shortest"
    timeout: float = READ_TIMEOUT
    threads: int = 0  # that read at a time; 0: one per core, or one in a worker process
    ram_bytes = 0

    def __len__(self) -> int:
        return len(self.refs)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8; UserError for an image that can no longer be read."""
        pixels, failed = self.try_read(indices)
        for failure in failed.values():
            raise UserError(
                f"{failure.where}: {failure.reason}; it was readable when the run started: "
                f"restore it, then continue with --resume"
            )
        return pixels

    def try_read(self, indices: np.ndarray) -> tuple[np.ndarray, dict[int, Failure]]:
        """(n, side, side, 3) uint8, and the failures by position, whose pixels are 0."""
        # Single-threaded: with many worker processes, threads would only compete for the cores.
        threads = self.threads or (1 if parent_process() is not None else decode_threads())
        pixels, failed = np.zeros((len(indices), self.side, self.side, 3), np.uint8), dict[int, Failure]()
        for place, found in enumerate(self.decode(indices.tolist(), min(threads, len(indices)))):
            if isinstance(found, str):
                failed[place] = Failure(int(indices[place]), str(self.refs[indices[place]]), found)
            else:
                pixels[place] = found
        return pixels, failed

    def decode(self, indices: Sequence[int], threads: int = 1) -> Iterator[np.ndarray | str]:
        """(side, side, 3) uint8 of each image, or why it failed; uses threads, since Pillow releases the GIL."""
        work = functools.partial(_decode, side=self.side, resize=self.resize)
        results = map_with_timeout([self.refs[index] for index in indices], work, self.timeout, threads)
        return (f"{TIMED_OUT} within {self.timeout:g} s" if found is None else found for found in results)

    def to_device(self, device: torch.device, free_bytes: int) -> None:
        """None: the images are not decoded."""


Images = RowTable | LiveImages


def _decode(ref: ImageRef, side: int, resize: str) -> np.ndarray | str:
    try:
        return to_square(ref.open(side), side, resize)
    # What decoders raise for an unreadable image; the last two for absurd sizes.
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        return failure_reason(error)


def read_or_replace(
    images: Images, members: np.ndarray, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray, tuple[Failure, ...]]:
    """(members, their pixels, failures): unreadable images are replaced by others.

    The replacement is a function of (seed, epoch, sample), so it is the same for any number of workers.
    """
    pixels, failed = images.try_read(members)
    chosen, failures = members.copy(), list[Failure]()
    for place, failure in failed.items():
        again = {0: failure}
        for tries in range(REPLACEMENT_TRIES):
            failures.append(again[0])
            sample = np.array([int(members[place]) + tries * len(images)])
            chosen[place] = rnd.bits(seed, epoch, sample, rnd.REPLACEMENT)[0] % np.uint64(len(images))
            pixels[place : place + 1], again = images.try_read(chosen[place : place + 1])
            if not again:
                break
        else:
            raise UserError(
                f"{again[0].where}: {again[0].reason}; {REPLACEMENT_TRIES} replacement images cannot be read "
                f"either: is the disk with the images still connected?"
            )
    return chosen, pixels, tuple(failures)


def decode_images(
    refs: Sequence[ImageRef],
    side: int,
    resize: str,
    failures: dict[int, str],
    progress: Progress,
    threads: int = 1,
    timeout: float = READ_TIMEOUT,
) -> Computed:
    """Decode all images in order, in chunks; unreadable ones are added to `failures`."""
    decoded = LiveImages(refs, side, resize, timeout).decode(range(len(refs)), threads)
    done = 0
    progress(done, len(refs))
    while chunk := list(itertools.islice(decoded, CHUNK)):
        good: dict[int, np.ndarray] = {}
        for item, each in enumerate(chunk, start=done):
            if isinstance(each, np.ndarray):
                good[item] = each
            elif each.startswith(TIMED_OUT):  # the disk failed, not the image: do not skip it
                raise UserError(
                    f"{refs[item]}: {each}; is the disk with the images still connected? Run again when it is"
                )
            else:
                failures[item] = each
        if good:
            yield list(good), np.stack(list(good.values()))
        done += len(chunk)
        progress(done, len(refs))


def follow_parent() -> None:
    """Initialize a worker process: ignore Ctrl-C, and exit when the parent does."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def row_name(*parts: str) -> bytes:
    """The key of a row in the cache."""
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).digest()[:NAME_BYTES]


def image_names(samples: Sequence[Sample], folders: Sequence[str]) -> list[bytes]:
    """The row name of each image. Paths are relative to the data folders, so that the data may be moved."""
    here, roots = os.getcwd(), [os.path.join(os.path.abspath(folder), "") for folder in folders]
    names = []
    for sample in samples:
        stamp = sample.image.stamp()
        path = os.path.normpath(os.path.join(here, stamp))
        inside = next((path[len(root) :] for root in roots if path.startswith(root)), stamp)
        names.append(row_name(inside))
    return names


class RowCache:
    """Rows of one shape and type on disk, looked up by name and shared by all runs."""

    def __init__(self, folder: Path, kind: str, settings: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        """`settings` is everything that all rows depend on."""
        self.path = folder / f"{kind}-{hashlib.sha256(settings.encode()).hexdigest()[:24]}"
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.row_bytes = math.prod(shape) * self.dtype.itemsize

    def missing(self, names: Sequence[bytes]) -> list[int]:
        """The items whose row is missing, each name once."""
        stored = self._index()
        first = {name: item for item, name in reversed(list(enumerate(names))) if name not in stored}
        return sorted(first.values())

    def fill(self, names: Sequence[bytes], compute: Compute, warn: Warn) -> tuple[np.ndarray, dict[int, str]]:
        """(n,) the row of each name, computing missing ones; and the items that failed, whose row is -1."""
        failed = self._add(names, compute, warn) if self.missing(names) else {}
        stored = self._index()
        rows = np.array([stored.get(name, -1) for name in names], np.int64)
        return rows, {item: failed[names[item]] for item in np.flatnonzero(rows < 0).tolist()}

    def _add(self, names: Sequence[bytes], compute: Compute, warn: Warn) -> dict[bytes, str]:
        """Append rows as they are computed, and return the failures; a second process waits."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._locked(warn):
            wanted = self.missing(names)  # another process may have added some
            self._check_space(len(wanted) * self.row_bytes)
            failed: dict[int, str] = {}
            try:
                with self._open(ROWS) as rows, self._open(NAMES) as keys, closing(compute(wanted, failed)) as blocks:
                    count = self._complete()  # a killed process may have left a partial row
                    rows.truncate(count * self.row_bytes)
                    keys.truncate(count * NAME_BYTES)
                    self._append(rows, keys, [names[item] for item in wanted], blocks)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise UserError(f"{self.path}: the disk is full; free some space and run again to continue") from None
        return {names[wanted[place]]: reason for place, reason in failed.items()}

    def _append(self, rows: BinaryIO, keys: BinaryIO, names: Sequence[bytes], blocks: Computed) -> None:
        unsaved, saved = list[bytes](), time.monotonic()

        def save() -> None:
            _sync(rows)  # before the names: after a power loss each name has its row
            keys.write(b"".join(unsaved))
            _sync(keys)
            unsaved.clear()

        try:
            for items, block in blocks:
                assert block.shape == (len(items), *self.shape)
                rows.write(np.ascontiguousarray(block, self.dtype).data)
                unsaved.extend(names[item] for item in items)
                if time.monotonic() - saved > SAVE_SECONDS:
                    save()
                    saved = time.monotonic()
        finally:
            save()

    def _locked(self, warn: Warn) -> AbstractContextManager[object]:
        lock = FileLock(self.path / LOCK, fallback_to_soft=False)  # a soft lock would outlive a killed process
        try:
            try:
                return lock.acquire(blocking=False)
            except Timeout:
                warn(f"{self.path}: another process is filling this cache; waiting")
                return lock.acquire(poll_interval=0.2)
        except OSError as error:
            if error.filename:  # the file cannot be opened
                raise
            # Without a lock, two processes could assign names to each other's rows.
            raise UserError(
                f"{self.path}: this disk does not support file locks; choose another with --cache-dir"
            ) from None

    def _open(self, name: str) -> BinaryIO:
        # Non-blocking, so that a FIFO is an immediate error.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        return os.fdopen(open_for_write(self.path / name, flags), "ab")

    def table(self, rows: np.ndarray) -> RowTable:
        """These rows, memory-mapped."""
        return RowTable.mapped(self.path / ROWS, self.dtype, (self._complete(), *self.shape), rows)

    def _index(self) -> dict[bytes, int]:
        """The row of each stored name."""
        try:
            with open_regular(self.path / NAMES) as file:
                found = file.read(self._complete() * NAME_BYTES)
        except FileNotFoundError:
            return {}
        starts = range(0, len(found), NAME_BYTES)
        return {found[start : start + NAME_BYTES]: row for row, start in enumerate(starts)}

    def _complete(self) -> int:
        """Number of rows that have a name."""
        try:
            sizes = [(self.path / name).stat().st_size for name in (ROWS, NAMES)]
        except FileNotFoundError:
            return 0
        return min(sizes[0] // self.row_bytes, sizes[1] // NAME_BYTES)

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if needed * DISK_MARGIN > free:
            raise UserError(
                f"the cache needs {needed * DISK_MARGIN / 1e9:.2f} GB, {self.path.parent} has {free / 1e9:.2f} GB "
                f"free: free some space, choose another disk with --cache-dir, or use --cache ram or off"
            )


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def cache_folder(asked: str | None, data: Sequence[str]) -> Path:
    """The requested folder; else next to the data; else, if that is not writable, the user's cache folder."""
    places = [Path(asked).expanduser()] if asked else [*(Path(folder) / FOLDER for folder in data[:1]), user_cache()]
    return first_writable(places, "cache", "choose one with --cache-dir, or use --cache ram")


def data_folders(source: Source) -> tuple[str, ...]:
    """The folders that contain the data; a cache goes next to the first."""
    # A shard pattern is not a file, and a hub dataset (hf:owner/name) has no folder.
    folders = [path if path.is_dir() else path.parent for path in source.paths if not str(path).startswith("hf:")]
    return tuple(str(folder) for folder in folders if folder.is_dir())


def check_failures(
    bad: Mapping[int, str], refs: Sequence[ImageRef], split: str, tried: int, limit: float, warn: Warn
) -> tuple[Failure, ...]:
    """Report the first bad images; UserError if there are too many."""
    found = tuple(Failure(index, str(refs[index]), bad[index]) for index in sorted(bad))
    for failure in found[:SHOWN]:
        warn(f"skipped {failure.where}: {failure.reason}")
    if len(found) > limit * tried:
        raise _too_many_failures(found, plural(tried, f"{split} image"), tried, limit)
    if len(found) > SHOWN:
        warn(f"skipped {len(found):,} of {tried:,} {split} images that cannot be read; run.jsonl lists all of them")
    return found


def _too_many_failures(found: Sequence[Failure], of: str, tried: int, limit: float) -> UserError:
    examples = "; ".join(f"{failure.where}: {failure.reason}" for failure in found[:EXAMPLES])
    return UserError(
        f"{len(found):,} of {of} cannot be read ({len(found) / tried:.0%}, allowed {limit:.0%}), such as {examples}. "
        f"m1clip data lint lists all of them; repair them, or raise --max-unreadable"
    )


class FailureLog:
    """Logs each failed image once; stops the run if too many fail during training."""

    def __init__(
        self, total: int, limit: float, write: Callable[..., Any], warn: Warn, named: Iterable[str] = ()
    ) -> None:
        self.total, self.limit, self.write, self.warn = total, limit, write, warn
        self.named = set(named)  # before a resume
        self.failures: dict[int, Failure] = {}
        self.shown: set[str] = set()

    def record(self, split: str, failures: Iterable[Failure]) -> None:
        """Log those that are new."""
        for failure in failures:
            if failure.where not in self.named:
                self.named.add(failure.where)
                self.write("skipped", split=split, where=failure.where, reason=failure.reason)

    def __call__(self, failures: Sequence[Failure]) -> None:
        """What failed in a training batch."""
        for failure in failures:
            if failure.index not in self.failures:
                self.failures[failure.index] = failure
                if failure.where not in self.shown and len(self.shown) < SHOWN:  # once for a shard
                    self.shown.add(failure.where)
                    self.warn(f"skipped {failure.where}: {failure.reason}; replaced by another image")
        self.record("train", failures)
        if len(self.failures) > self.limit * self.total:
            raise _too_many_failures(
                list(self.failures.values()), plural(self.total, "train image"), self.total, self.limit
            )


Kind = Literal["ram", "disk", "off"]


@dataclass(frozen=True)
class DecodePlan:
    """How images are decoded: in how many threads, with which progress display."""

    threads: int
    memory_bytes: int
    progress: Callable[[str], AbstractContextManager[Progress]]  # by title
    warn: Warn


def choose_kind(asked: str, *, synthetic: bool, images: int, needed: int, total: int, memory: int, free: int) -> Kind:
    """Where to cache a split that needs `needed` more bytes on disk, of a set of `total` bytes.

    Synthetic images and small datasets stay in RAM. Others go to disk, so that the next run starts immediately; if the
    disk is too small they stay in RAM, and if that is too small they are decoded each time.
    """
    if asked not in ("auto", "stream"):
        return asked  # type: ignore[return-value]
    fits_memory = total <= RAM_FRACTION * memory
    if fits_memory and (synthetic or images <= FEW_IMAGES):
        return "ram"
    if not synthetic and needed * DISK_MARGIN <= DISK_FRACTION * free:
        return "disk"
    return "ram" if fits_memory else "off"


def _unreadable(refs: Sequence[ImageRef], tried: Sequence[int], threads: int) -> dict[int, str]:
    """Which of the images that are tried cannot be read, and why."""
    found = LiveImages(refs, side=32).decode(tried, threads)
    return {index: reason for index, reason in zip(tried, found, strict=True) if isinstance(reason, str)}


def stream_images(
    refs: Sequence[ImageRef], side: int, resize: str, config: DataConfig, plan: DecodePlan, threads: int
) -> tuple[LiveImages, tuple[Failure, ...]]:
    """Training images that are read for each batch, and those of a sample that cannot be read."""
    tried = sorted({index * len(refs) // CHECKED for index in range(CHECKED)})
    bad = _unreadable(refs, tried, threads or plan.threads)
    failures = check_failures(bad, refs, "train", len(tried), config.max_unreadable, plan.warn)
    return LiveImages(refs, side, resize, threads=threads), failures


def cache_split(
    source: Source, split: str, side: int, resize: str, config: DataConfig, plan: DecodePlan
) -> tuple[Images, Sequence[Sample], tuple[Failure, ...], Kind]:
    """Cache the images of a split as asked: (images, samples that can be read, failures, where they are cached)."""
    samples, folders = source.cached(split), data_folders(source)
    refs = [sample.image for sample in samples]
    synthetic = all(isinstance(ref, SyntheticImage) for ref in refs)
    total = len(samples) if source.streamed else sum(len(source.samples(name)) for name in source.splits())
    threads = source.threads or plan.threads
    bad: dict[int, str] = {}

    def decode(wanted: Sequence[int], failed: dict[int, str]) -> Computed:
        chosen = [refs[index] for index in wanted]
        with plan.progress(f"preparing {split} images") as show:
            yield from decode_images(chosen, side, resize, failed, show, threads)

    def kind_for(needed: int, free: int) -> Kind:
        size = {"images": total, "total": total * side * side * 3, "memory": plan.memory_bytes}
        return choose_kind(config.cache, synthetic=synthetic, needed=needed, free=free, **size)

    kind = kind_for(0, 0)
    if kind == "disk":
        cache = RowCache(
            cache_folder(config.cache_dir, folders), "images", f"{side}|{resize}", (side, side, 3), np.uint8
        )
        names = image_names(samples, folders)
        kind = kind_for(len(cache.missing(names)) * cache.row_bytes, shutil.disk_usage(cache.path.parent).free)
    images: Images
    tried: Sequence[int] = range(len(samples))
    if kind == "disk":
        rows, bad = cache.fill(names, decode, plan.warn)
        images = cache.table(rows[rows >= 0])
    elif kind == "ram":
        array = np.zeros((len(samples), side, side, 3), np.uint8)
        for items, pixels in decode(tried, bad):
            array[items] = pixels
        images = RowTable(np.delete(array, list(bad), axis=0) if bad else array)
    else:
        # Evaluation images are a fixed set, so try all of them; of the training images, try a sample.
        if split == "train" and len(samples) > CHECKED:
            tried = [index * len(samples) // CHECKED for index in range(CHECKED)]
        bad = _unreadable(refs, tried, threads)
        keep = [ref for index, ref in enumerate(refs) if split == "train" or index not in bad]
        images = LiveImages(keep, side, resize)
    failures = check_failures(bad, refs, split, len(tried), config.max_unreadable, plan.warn)
    if len(images) < len(samples):
        samples = [sample for index, sample in enumerate(samples) if index not in bad]
    return images, samples, failures, kind
