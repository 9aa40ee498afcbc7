"""Images that light processes decode ahead of the step, for training without a cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from m1clip.data.decode_pool import IMAGES_PER_BLOCK, DecodePool, SharedRows
from m1clip.data.decoding import DecodeSquare, LazyImages, report_reason
from m1clip.data.failures import Failure


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
