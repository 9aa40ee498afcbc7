"""Decodes images: all of them for a cache, or those of a batch while training."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import TYPE_CHECKING

import numpy as np

from m1clip import console
from m1clip.data import randomness as rnd
from m1clip.data.array_view import ArrayView
from m1clip.data.cache import Computed
from m1clip.data.failures import Failure
from m1clip.data.images import READ_TIMEOUT, failure_reason, map_with_timeout, to_square
from m1clip.data.types import ImageRef
from m1clip.errors import UserError
from m1clip.hardware.machine_info import MachineInfo, decode_threads

if TYPE_CHECKING:
    import torch

DECODED_CHUNK = 64  # images decoded together
# With a tenth of the images broken, this many in a row fail once in 10^32.
REPLACEMENT_TRIES = 32
TIMED_OUT = "the read did not finish"


@dataclass(frozen=True)
class LazyImages:
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
        pixels, failed = (
            np.zeros((len(indices), self.side, self.side, 3), np.uint8),
            dict[int, Failure](),
        )
        for place, found in enumerate(self.decode(indices.tolist(), min(threads, len(indices)))):
            if isinstance(found, str):
                failed[place] = Failure(int(indices[place]), str(self.refs[indices[place]]), found)
            else:
                pixels[place] = found
        return pixels, failed

    def decode(self, indices: Sequence[int], threads: int = 1) -> Iterator[np.ndarray | str]:
        """(side, side, 3) uint8 of each image, or why it failed; uses threads, since Pillow releases the GIL."""
        work = functools.partial(_decode, side=self.side, resize=self.resize)
        results = map_with_timeout(
            [self.refs[index] for index in indices], work, self.timeout, threads
        )
        return (
            f"{TIMED_OUT} within {self.timeout:g} s" if found is None else found
            for found in results
        )

    def to_device(self, device: torch.device, free_bytes: int) -> None:
        """None: the images are not decoded."""


Images = ArrayView | LazyImages


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
            chosen[place] = rnd.bits(seed, epoch, sample, rnd.REPLACEMENT)[0] % np.uint64(
                len(images)
            )
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
    threads: int = 1,
    timeout: float = READ_TIMEOUT,
) -> Computed:
    """Decode all images in order, in chunks; unreadable ones are added to `failures`."""
    refresh = console.current_progress()
    decoded = LazyImages(refs, side, resize, timeout).decode(range(len(refs)), threads)
    done = 0
    refresh(done, len(refs))
    while chunk := list(itertools.islice(decoded, DECODED_CHUNK)):
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
        refresh(done, len(refs))


@dataclass(frozen=True)
class DecodeOptions:
    """How images are decoded: in how many threads, and how much memory the machine has for them."""

    threads: int
    memory_bytes: int


def decode_options(machine: MachineInfo) -> DecodeOptions:
    """Image decoding settings for a machine."""
    return DecodeOptions(decode_threads(), machine.memory_bytes)
