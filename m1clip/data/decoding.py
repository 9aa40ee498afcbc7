"""Decodes images: all of them for a cache, or those of a batch while training."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from m1clip import console
from m1clip.data import randomness as rnd
from m1clip.data.array_view import ArrayView
from m1clip.data.cache import Computed, RowWriter
from m1clip.data.decode_pool import (
    BLOCKS_AHEAD,
    IMAGES_PER_BLOCK,
    DecodePool,
    decode_in_order,
    decode_processes,
)
from m1clip.data.decode_worker import Late
from m1clip.data.failures import Failure
from m1clip.data.images import READ_TIMEOUT, failure_reason, map_with_timeout, to_square
from m1clip.data.nvjpeg import (
    DecodeBatch,
    GpuBatches,
    Reports,
    decode_on_gpu,
    gpu_decoder,
    mostly_for_gpu,
)
from m1clip.data.types import ImageRef
from m1clip.errors import UserError
from m1clip.hardware.machine_info import MachineInfo, decode_threads, local_ranks, usable_cpus

if TYPE_CHECKING:
    import torch

DECODED_CHUNK = 64  # images decoded together
# With a tenth of the images broken, this many in a row fail once in 10^32.
REPLACEMENT_TRIES = 32
TIMED_OUT = "the read did not finish"
# (n, side, side, 3) uint8: an array, or a tensor on the GPU that decoded the images.
Pixels: TypeAlias = Any


@dataclass(frozen=True)
class LazyImages:
    """Images decoded each time they are read: no memory, more compute."""

    refs: Sequence[ImageRef]
    side: int
    resize: str = "shortest"
    timeout: float = READ_TIMEOUT
    threads: int = 0  # that read at a time; 0: one per core, or one in a worker process
    on_gpu: bool = False  # whether a GPU may decode batches for training
    ram_bytes = 0

    def __len__(self) -> int:
        return len(self.refs)

    @property
    def in_processes(self) -> bool:
        """Whether processes that only decode can read them; else a worker needs the whole data."""
        return all(ref.in_processes for ref in self.refs)

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
        pixels, failed = (
            np.zeros((len(indices), self.side, self.side, 3), np.uint8),
            dict[int, Failure](),
        )
        for position, decoded in enumerate(
            self.decode(indices.tolist(), min(threads, len(indices)))
        ):
            if isinstance(decoded, str):
                failed[position] = Failure(
                    int(indices[position]), str(self.refs[indices[position]]), decoded
                )
            else:
                pixels[position] = decoded
        return pixels, failed

    def decode(self, indices: Sequence[int], threads: int = 1) -> Iterator[np.ndarray | str]:
        """(side, side, 3) uint8 of each image, or why it failed.

        Uses threads, since Pillow releases the GIL.
        """
        work = decoder_on_cpu(self.side, self.resize)
        results = map_with_timeout(
            [self.refs[index] for index in indices], work, self.timeout, threads
        )
        return (
            f"{TIMED_OUT} within {self.timeout:g} s" if decoded is None else decoded
            for decoded in results
        )

    def to_device(self, device: torch.device, free_bytes: int) -> None:
        """None: the images are not decoded."""


Images = ArrayView | LazyImages


class Readable(Protocol):
    """Images of which some may be unreadable."""

    def __len__(self) -> int: ...

    def try_read(self, indices: np.ndarray) -> tuple[Pixels, dict[int, Failure]]:
        """The pixels of some images, and the failures by position."""
        ...


@dataclass(frozen=True)
class DecodeSquare:
    """Work for `DecodePool`: a reference -> its square and None, or None and why it cannot be read."""

    side: int
    resize: str

    def __call__(self, ref: ImageRef) -> tuple[np.ndarray | None, str | None]:
        decoded = _decode(ref, self.side, self.resize)
        return (None, decoded) if isinstance(decoded, str) else (decoded, None)


def _decode(ref: ImageRef, side: int, resize: str) -> np.ndarray | str:
    try:
        return to_square(ref.open(side), side, resize)
    # What decoders raise for an unreadable image; the last two for absurd sizes.
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        return failure_reason(error)


def decoder_on_cpu(side: int, resize: str) -> Callable[[ImageRef], np.ndarray | str]:
    """What decodes one image to a square: its pixels, or why it failed. Picklable."""
    return functools.partial(_decode, side=side, resize=resize)


def read_or_replace(
    images: Readable, members: np.ndarray, seed: int, epoch: int
) -> tuple[np.ndarray, Pixels, tuple[Failure, ...]]:
    """(members, their pixels, failures): unreadable images are replaced by others.

    The replacement is a function of (seed, epoch, sample), so it is the same for any number of
    workers.
    """
    pixels, failed = images.try_read(members)
    chosen, failures = members.copy(), list[Failure]()
    for position in sorted(failed):  # worker processes report them in any order
        again = {0: failed[position]}
        for tries in range(REPLACEMENT_TRIES):
            failures.append(again[0])
            sample = np.array([int(members[position]) + tries * len(images)])
            chosen[position] = rnd.bits(seed, epoch, sample, rnd.REPLACEMENT)[0] % np.uint64(
                len(images)
            )
            pixels[position : position + 1], again = images.try_read(
                chosen[position : position + 1]
            )
            if not again:
                break
        else:
            raise UserError(
                f"{again[0].where}: {again[0].reason}; {REPLACEMENT_TRIES} replacement images"
                " cannot be read either: is the disk with the images still connected?"
            )
    return chosen, pixels, tuple(failures)


@dataclass(frozen=True)
class DecodeOptions:
    """How images are decoded: in how many threads, or processes, and how much memory the machine has for them."""

    threads: int
    memory_bytes: int
    cpus: int = 1  # for processes
    on_gpu: bool = False  # whether a GPU may decode JPEG; rows decoded by it are cached apart


def decode_options(machine: MachineInfo, device: str = "cpu") -> DecodeOptions:
    """Image decoding settings for a machine, and the kind of device that may decode."""
    cpus = max(1, usable_cpus() // local_ranks())
    return DecodeOptions(decode_threads(), machine.memory_bytes, cpus, device == "cuda")


def gpu_decoder_for(
    refs: Sequence[ImageRef], options: DecodeOptions, side: int
) -> DecodeBatch | None:
    """The decoder of the GPU, if there is one and it should decode nearly all of these images."""
    return gpu_decoder() if options.on_gpu and refs and mostly_for_gpu(refs, side) else None


def processes_for(refs: Sequence[ImageRef], cpus: int | None = None) -> int:
    """How many processes decode these images on so many cores, by default those of this rank.

    0: use threads.
    """
    if not all(ref.in_processes for ref in refs):
        return 0
    return decode_processes(len(refs), cpus or usable_cpus() // local_ranks())


@dataclass(frozen=True)
class DecodeMethod:
    """Where images are decoded: on the GPU (`processes` read them), in processes, or in threads."""

    threads: int = 1
    processes: int = 0  # 0: in threads of this process
    gpu: DecodeBatch | None = None
    timeout: float = READ_TIMEOUT  # seconds for an image


IN_ONE_THREAD = DecodeMethod()


def decode_images(
    refs: Sequence[ImageRef],
    side: int,
    resize: str,
    failures: dict[int, str],
    method: DecodeMethod = IN_ONE_THREAD,
    write: Callable[[Sequence[int], np.ndarray], None] | None = None,
) -> Iterator[tuple[list[int], np.ndarray]]:
    """(indices, their pixels) of all images in order, in chunks; unreadable ones are added to `failures`.

    `write` gets the indices and pixels of each chunk before they are yielded: from a GPU in several
    threads.
    """
    gpu, processes, timeout = method.gpu, method.processes, method.timeout
    refresh = console.current_progress()
    if gpu is not None:
        batches = GpuBatches(side, resize, gpu, decoder_on_cpu(side, resize), write)
        chunks = decode_on_gpu(refs, batches, processes, timeout)
    elif processes:
        work, shape = DecodeSquare(side, resize), (side, side, 3)
        chunks = decode_in_order(work, refs, processes, shape, timeout)
    else:
        chunks = _decode_in_threads(LazyImages(refs, side, resize, timeout), method.threads)
    done = 0
    refresh(done, len(refs))
    with contextlib.closing(chunks):
        for reasons, pixels in chunks:
            readable = []
            for index, reason in enumerate(reasons):
                if reason is None:
                    readable.append(index)
                else:
                    failures[done + index] = _check_reason(reason, refs[done + index])
            if readable:
                # A copy: the next chunk may be decoded to the same memory. The GPU's has its own.
                chosen = pixels if gpu and len(readable) == len(reasons) else pixels[readable]
                indices = [done + index for index in readable]
                if write and not gpu:
                    write(indices, chosen)
                yield indices, chosen
            done += len(reasons)
            refresh(done, len(refs))


def _decode_in_threads(images: LazyImages, threads: int) -> Generator[tuple[Reports, np.ndarray]]:
    """(why each image failed, or None; pixels) of chunks in order."""
    results = images.decode(range(len(images)), threads)
    while chunk := list(itertools.islice(results, DECODED_CHUNK)):
        pixels = np.zeros((len(chunk), images.side, images.side, 3), np.uint8)
        reasons: Reports = [report if isinstance(report, str) else None for report in chunk]
        for index, decoded in enumerate(chunk):
            if isinstance(decoded, np.ndarray):
                pixels[index] = decoded
        yield reasons, pixels


def decode_to_rows(
    refs: Sequence[ImageRef],
    side: int,
    resize: str,
    failures: dict[int, str],
    writer: RowWriter,
    options: DecodeOptions,
    timeout: float = READ_TIMEOUT,
    gpu: DecodeBatch | None = None,
) -> Computed:
    """Write the pixels of all images to their rows, in any order.

    Yields the indices that are written.
    """
    processes = processes_for(refs, options.cpus)
    if gpu or not processes:
        blocks = decode_images(
            refs,
            side,
            resize,
            failures,
            DecodeMethod(options.threads, processes, gpu, timeout),
            writer.write,
        )
        for indices, _ in blocks:
            yield indices
        return
    refresh = console.current_progress()
    refresh(0, len(refs))
    work = DecodeSquare(side, resize)
    row_bytes = side * side * 3
    starts = range(0, len(refs), IMAGES_PER_BLOCK)
    done = 0
    with DecodePool(work, processes, timeout, writer.file, row_bytes) as pool:
        ahead = iter(range(len(starts)))

        def submit(count: int) -> None:
            for number in itertools.islice(ahead, count):
                block = range(starts[number], min(starts[number] + IMAGES_PER_BLOCK, len(refs)))
                rows = [writer.rows[index] for index in block]
                pool.submit(number, [refs[index] for index in block], rows)

        submit((BLOCKS_AHEAD + 1) * processes)
        for _ in starts:
            number, reasons = pool.next_done()
            submit(1)
            readable = []
            for index, reason in enumerate(reasons, starts[number]):
                if reason is None:
                    readable.append(index)
                else:
                    failures[index] = _check_reason(reason, refs[index])
            yield readable
            done += len(reasons)
            refresh(done, len(refs))


def report_reason(report: str | Late) -> str:
    """Why an image failed, from the report of a process."""
    return f"{TIMED_OUT} within {report.seconds:g} s" if isinstance(report, Late) else report


def _check_reason(report: str | Late, ref: ImageRef) -> str:
    """Why an image failed; UserError if the disk failed, not the image: it is not skipped."""
    reason = report_reason(report)
    if reason.startswith(TIMED_OUT):
        raise UserError(
            f"{ref}: {reason}; is the disk with the images still connected? Run again when it is"
        )
    return reason
