"""Images that light processes decode ahead of the step, for training without a cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from m1clip.data.decode_pool import IMAGES_PER_BLOCK, DecodePool, SharedRows
from m1clip.data.decoding import DecodeSquare, LazyImages, decoder_on_cpu, report_reason
from m1clip.data.failures import Failure
from m1clip.data.nvjpeg import (
    GPU_BATCH,
    GPU_THREADS,
    READ_PROCESSES,
    DecodeBatch,
    Encoded,
    GpuBatches,
    InSharedRow,
    Read,
    ReadForGpu,
    Reports,
    gpu_decoder,
    images_per_block,
    largest_file,
    on_own_stream,
)

MAX_ROW_BYTES = 2**20  # of an image file in shared memory


@dataclass
class _Request:
    """The members of a batch that are being decoded, in one of the slots of the shared memory."""

    members: np.ndarray
    slot: int
    remaining: int  # blocks
    failed: dict[int, Failure] = field(default_factory=dict)


class ReadAhead:
    """Reads like `LazyImages`; the images of requested batches are decoded in processes meanwhile.

    The processes import neither torch nor the data: they start in a moment, and get the names of a
    few images at a time. Used by one thread at a time.
    """

    ram_bytes = 0
    in_processes = False
    on_gpu = False

    def __init__(
        self,
        images: LazyImages,
        processes: int,
        batch: int,
        slots: int,
        on_restart: Callable[[str], None],
    ) -> None:
        """For batches of at most `batch` images.

        `slots` of them may be requested and not yet copied.
        """
        self.images = images
        self.side = images.side
        self.batch = batch
        self.slots = slots
        # Small blocks, so that all processes work on the first batch.
        self.block = max(1, min(IMAGES_PER_BLOCK, batch // (2 * processes)))
        self.shared = SharedRows(slots * batch, (images.side, images.side, 3), np.uint8)
        self.requests: deque[_Request] = deque()
        self._blocks: dict[
            int, tuple[_Request, int]
        ] = {}  # by number: its batch, its first position
        self._requested = 0
        self._block_count = 0
        self.pool = DecodePool(
            DecodeSquare(images.side, images.resize),
            processes,
            images.timeout,
            self.shared.file,
            self.shared.row_bytes,
            on_restart,
        )

    def __len__(self) -> int:
        return len(self.images)

    def request(self, members: np.ndarray) -> None:
        """Begin to decode a batch; batches are read in the order of their requests."""
        slot = self._requested % self.slots
        self._requested += 1
        starts = range(0, len(members), self.block)
        request = _Request(members, slot, len(starts))
        self.requests.append(request)
        for start in starts:
            positions = range(start, min(start + self.block, len(members)))
            self._blocks[self._block_count] = request, start
            self.pool.submit(
                self._block_count,
                [self.images.refs[int(members[index])] for index in positions],
                [slot * self.batch + index for index in positions],
            )
            self._block_count += 1

    def try_read(self, indices: np.ndarray) -> tuple[np.ndarray, dict[int, Failure]]:
        """(n, side, side, 3) uint8, and the failures by position: of the oldest requested batch, or
        read here.
        """
        if not self.requests or not np.array_equal(self.requests[0].members, indices):
            return self.images.try_read(indices)
        request = self.requests.popleft()
        while request.remaining:
            number, reports = self.pool.next_done()
            owner, start = self._blocks.pop(number)
            owner.remaining -= 1
            for position, report in enumerate(reports, start):
                if report is not None:
                    index = int(owner.members[position])
                    reason = report_reason(report)
                    owner.failed[position] = Failure(index, str(self.images.refs[index]), reason)
        first = request.slot * self.batch
        pixels = self.shared.array[first : first + len(indices)]
        for position in request.failed:
            pixels[position] = 0
        return pixels, request.failed

    def stop(self) -> None:
        """End the processes; a thread that waits for them gets an error."""
        self.pool.stop()

    def close(self) -> None:
        """Release everything; no other thread may read now."""
        self.pool.close()
        self.shared.close()


@dataclass
class _Chunk:
    """Images of a batch that the GPU decodes together."""

    members: np.ndarray
    first_row: int  # in shared memory
    read: list[Read | None]  # what the processes have read of each image
    left: int  # blocks
    decoded: Future[tuple[Reports, Tensor]] | None = None


@dataclass
class _GpuRequest:
    """The members of a batch that are being decoded."""

    members: np.ndarray
    chunks: list[_Chunk]


class GpuReadAhead:
    """Reads like `ReadAhead`, but the pixels are decoded on a GPU and stay there.

    Processes read the files, and decode what the GPU cannot. Used by one thread at a time.
    """

    ram_bytes = 0
    in_processes = False
    on_gpu = False

    def __init__(
        self,
        images: LazyImages,
        decode: DecodeBatch,
        processes: int,
        batch: int,
        slots: int,
        on_restart: Callable[[str], None],
    ) -> None:
        """As for `ReadAhead`; only a few processes read files, which are faster than the GPU."""
        self.images = images
        self.batch = batch
        self.slots = slots
        fallback = decoder_on_cpu(images.side, images.resize)
        self.batches = GpuBatches(images.side, images.resize, decode, fallback, None)
        self.block = images_per_block(images.refs)
        self._requested = 0
        self.requests: deque[_GpuRequest] = deque()
        self._blocks: dict[int, tuple[_Chunk, int]] = {}  # by number: its chunk, its first place
        self._block_count = 0
        self.threads = ThreadPoolExecutor(GPU_THREADS, "nvjpeg")
        # Bytes that came through a pipe would cost Python's lock more time than the GPU needs.
        row_bytes = min(MAX_ROW_BYTES, 2 * largest_file(images.refs))
        self.shared = SharedRows(slots * batch, (row_bytes,), np.uint8)
        self.pool = DecodePool(
            ReadForGpu(fallback, row_bytes),
            max(1, min(processes, READ_PROCESSES)),
            images.timeout,
            self.shared.file,
            row_bytes,
            on_restart,
        )

    def __len__(self) -> int:
        return len(self.images)

    def request(self, members: np.ndarray) -> None:
        """Begin to decode a batch; batches are read in the order of their requests."""
        request = _GpuRequest(members, [])
        self.requests.append(request)
        slot = self._requested % self.slots * self.batch
        self._requested += 1
        for start in range(0, len(members), GPU_BATCH):
            part = members[start : start + GPU_BATCH]
            starts = range(0, len(part), self.block)
            chunk = _Chunk(part, slot + start, [None] * len(part), len(starts))
            request.chunks.append(chunk)
            for first in starts:
                self._blocks[self._block_count] = chunk, first
                refs = [self.images.refs[int(index)] for index in part[first : first + self.block]]
                row = chunk.first_row + first
                self.pool.submit(self._block_count, refs, range(row, row + len(refs)))
                self._block_count += 1

    def try_read(self, indices: np.ndarray) -> tuple[Tensor, dict[int, Failure]]:
        """(n, side, side, 3) uint8 on the GPU, and the failures by position: of the oldest
        requested batch, or read here.
        """
        if not self.requests or not np.array_equal(self.requests[0].members, indices):
            pixels, failed = self.images.try_read(indices)
            return torch.from_numpy(pixels), failed
        request = self.requests.popleft()
        parts: list[Tensor] = []
        failed = {}
        for chunk in request.chunks:
            # Blocks of later chunks, too, so that the GPU has work while this one is decoded.
            while chunk.decoded is None or (self._blocks and not chunk.decoded.done()):
                self._receive()
            reports, part = chunk.decoded.result()
            parts.append(part)
            for position, report in enumerate(reports, sum(map(len, parts[:-1]))):
                if report is not None:
                    index = int(indices[position])
                    reason = report_reason(report)
                    failed[position] = Failure(index, str(self.images.refs[index]), reason)
        return _joined(parts), failed

    def _receive(self) -> None:
        """Take a block that has been read; a chunk that is complete is decoded."""
        number, reports = self.pool.next_done()
        chunk, first = self._blocks.pop(number)
        chunk.read[first : first + len(reports)] = reports
        chunk.left -= 1
        if not chunk.left:
            chunk.decoded = self.threads.submit(self._decode, chunk)

    def _decode(self, chunk: _Chunk) -> tuple[Reports, Tensor]:
        refs = [self.images.refs[int(index)] for index in chunk.members]
        read = [
            self._with_bytes(image, row)
            for row, image in enumerate(chunk.read, chunk.first_row)
            if image is not None
        ]
        with on_own_stream():
            reports, pixels = self.batches.on_gpu(refs, read)
        if pixels.is_cuda:  # the stream of the steps reads them
            pixels.record_stream(torch.cuda.default_stream())
        return reports, pixels

    def _with_bytes(self, read: Read, row: int) -> Read:
        if isinstance(read, InSharedRow):
            return Encoded(self.shared.array[row, : read.length].data, read.pixels)
        return read

    def stop(self) -> None:
        """End the processes; a thread that waits for them gets an error."""
        self.pool.stop()

    def close(self) -> None:
        """Release everything; no other thread may read now."""
        self.pool.close()
        self.shared.close()
        self.threads.shutdown(wait=True, cancel_futures=True)


def _joined(parts: list[Tensor]) -> Tensor:
    """All rows, on the GPU if some are: a part without an image for it is on the host."""
    device = next((part.device for part in parts if part.is_cuda), parts[0].device)
    return torch.cat([part.to(device) for part in parts])


def read_ahead(
    images: LazyImages, processes: int, batch: int, slots: int, on_restart: Callable[[str], None]
) -> ReadAhead | GpuReadAhead:
    """Decode batches of at most `batch` images ahead, on the GPU if it can decode them."""
    decode = gpu_decoder() if images.on_gpu else None
    if decode is not None:
        return GpuReadAhead(images, decode, processes, batch, slots, on_restart)
    return ReadAhead(images, processes, batch, slots, on_restart)
