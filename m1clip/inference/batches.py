"""Run towers of torch over images and texts, in batches that use the device well."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from m1clip.data.augment import render
from m1clip.data.decoding import DecodeMethod, decode_images, processes_for
from m1clip.data.images import Preprocess
from m1clip.data.nvjpeg import DecodeBatch
from m1clip.data.types import ImageRef
from m1clip.hardware.device import DTYPES, Precision
from m1clip.hardware.machine_info import decode_threads
from m1clip.hardware.memory import keep_freed_memory
from m1clip.text.base import rounded

Tower = Callable[[Tensor], Tensor]

# Images and tokens of a batch. On a CPU each core computes a batch of its own, which should fit
# into its cache.
CPU_IMAGES = 4
CPU_TOKENS = 2048
CUDA_IMAGES = 512
GPU_IMAGES = 256
GPU_TOKENS = 32768
FEW_TOKENS = 64  # a smaller batch takes nearly as long

Item = TypeVar("Item")
Result = TypeVar("Result")


@functools.cache
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """Start threads with one core each.

    If all cores computed one batch, each operation would wait for the slowest core.
    """
    ready = threading.Barrier(workers + 1)

    def start() -> None:
        # Initializes the thread: its first operation would, and undo the next line.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.wait()

    keep_freed_memory()  # every batch needs the same blocks
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "encode", start)
    for _ in range(workers):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(threads)  # what a thread sets is also the default of threads to come
    return pool


def parallel(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """`work` of each item, in order.

    A single item is computed by all cores, more by one core each.
    """
    remaining = iter(items)
    beginning = list(itertools.islice(remaining, 2))
    if workers == 1 or len(beginning) < 2:
        yield from map(work, itertools.chain(beginning, remaining))
        return
    pool = _pool(workers, os.getpid())
    running: deque[Future[Result]] = deque()
    try:
        for item in itertools.chain(beginning, remaining):
            running.append(pool.submit(work, item))
            if len(running) > 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    remaining = iter(items)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk


@dataclass(frozen=True)
class TowerRunner:
    """Runs an image tower and a text tower, with or without their heads, over images and texts."""

    image: Tower  # (n, 3, size, size) normalized pixels -> (n, width)
    text: Tower  # (n, length) token ids -> (n, width)
    preprocess: Preprocess
    device: torch.device
    precision: Precision = "fp32"
    max_batch: int | None = None  # images or texts
    tokens_per_image: int = 1  # 1: the image tower has no tokens
    text_device: torch.device | None = None  # of the text tower; None: `device`

    @torch.inference_mode()
    def pixels(self, pixels: np.ndarray) -> Tensor:
        """(n, side, side, 3) uint8 -> (n, width) float32 on the CPU, as one batch."""
        with self.autocast():
            sent = torch.from_numpy(pixels).to(self.device, non_blocking=self.device.type == "cuda")
            return self.image(render(sent, None, self.preprocess)).float().cpu()

    def images(self, images: Iterable[np.ndarray], count: int) -> Iterator[Tensor]:
        """Vectors of `count` images of (side, side, 3), batch by batch."""
        return parallel(
            lambda batch: self.pixels(self._stack(batch)),
            chunks(images, self.batch(count)),
            self.workers,
        )

    def _stack(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """(n, side, side, 3); for CUDA in pinned memory, which is copied twice as fast."""
        if self.device.type != "cuda":
            return np.stack(images)
        pinned = torch.empty((len(images), *images[0].shape), dtype=torch.uint8, pin_memory=True)
        return np.stack(images, out=pinned.numpy())

    def files(
        self, refs: Sequence[ImageRef], failures: dict[int, str], gpu: DecodeBatch | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(indices into `refs`, their vectors), in chunks.

        Unreadable images are added to `failures`; `gpu` decodes JPEG.
        """
        size = self.batch(len(refs))
        blocks = decode_images(
            refs,
            self.preprocess.image_size,
            self.preprocess.resize,
            failures,
            DecodeMethod(decode_threads(), processes_for(refs), gpu=gpu),
        )
        batches = (
            (items[at : at + size], block[at : at + size])
            for items, block in blocks
            for at in range(0, len(items), size)
        )
        return parallel(lambda batch: (batch[0], self.pixels(batch[1])), batches, self.workers)

    def tokens(
        self, tokens: np.ndarray, lengths: np.ndarray
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """(rows of `tokens`, their vectors), batch by batch, from short to long.

        Equal rows are encoded once.
        """
        equal = dict[bytes, list[int]]()  # the rows of each text
        for number, row in enumerate(tokens):
            equal.setdefault(row.tobytes(), []).append(number)
        rows = {same[0]: same for same in equal.values()}

        @torch.inference_mode()
        def encode(texts: np.ndarray) -> tuple[np.ndarray, Tensor]:
            cut = tokens[texts, : rounded(int(lengths[texts].max()), tokens.shape[1])]
            device = self.text_device or self.device
            with self.autocast(device):
                sent = torch.from_numpy(cut.astype(np.int64)).to(device)
                vectors = self.text(sent).float().cpu()
            members = [rows[text] for text in texts.tolist()]
            repeats = torch.tensor([len(equal_rows) for equal_rows in members])
            return np.concatenate(members), vectors.repeat_interleave(repeats, dim=0)

        texts = np.array([*rows])
        order = texts[np.argsort(lengths[texts], kind="stable")]
        return parallel(encode, self._text_batches(order, lengths[order]), self.workers)

    def _text_batches(self, order: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
        """Texts, sorted by length, with about the same number of tokens in each batch."""
        limit = CPU_TOKENS if self.device.type == "cpu" else GPU_TOKENS
        limit = max(FEW_TOKENS, self._even(int(lengths.sum()), limit))
        ends = np.cumsum(lengths)
        start = 0
        while start < len(order):
            end = int(
                np.searchsorted(ends, (ends[start - 1] if start else 0) + limit, side="right")
            )
            end = min(max(end, start + 1), start + (self.max_batch or len(order)))
            yield order[start:end]
            start = end

    def batch(self, count: int) -> int:
        """How many of `count` images to encode at a time."""
        per_core = (
            CPU_IMAGES
            if self.tokens_per_image == 1
            else max(CPU_IMAGES, CPU_TOKENS // self.tokens_per_image)
        )
        limit = {"cpu": per_core, "cuda": CUDA_IMAGES}.get(self.device.type, GPU_IMAGES)
        return self._even(count, min(limit, self.max_batch or limit))

    def _even(self, total: int, limit: int) -> int:
        """The size of a batch, at most `limit`, with which each worker gets as many."""
        batches = self.workers * max(1, -(-total // (self.workers * limit)))
        return max(1, -(-total // batches))

    @property
    def workers(self) -> int:
        """Batches at the same time.

        With CUDA, one is assembled and copied while the GPU computes the other.
        """
        return (
            torch.get_num_threads()
            if self.device.type == "cpu"
            else 1 + (self.device.type == "cuda")
        )

    def autocast(self, device: torch.device | None = None) -> AbstractContextManager[object]:
        """The autocast context of the precision, by default on the device of the image tower."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast((device or self.device).type, DTYPES[self.precision])


def in_order(parts: Iterable[tuple[np.ndarray, Tensor]]) -> Tensor:
    """All vectors of `TowerRunner.tokens` in the order of the texts."""
    rows, vectors = zip(*parts, strict=True)
    vectors_by_length = torch.cat(vectors)
    ordered = torch.empty_like(vectors_by_length)
    ordered[torch.from_numpy(np.concatenate(rows))] = vectors_by_length
    return ordered
