"""Rows of an array in RAM or of a memory-mapped file: decoded images or computed features."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from m1clip.data.failures import Failure
from m1clip.formatting import ceil_div
from m1clip.io import open_regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEVICE_FRACTION = 0.25  # of the device's free memory; the rest is for training
ROWS_AT_ONCE, COPY_THREADS = 256, 8  # that are copied to a device


class ArrayView:
    """Decoded images or computed features: rows of an array in RAM, or of a memory-mapped file.

    `rows[i]` is the row of item i; None: item i is row i. A mapped file is pickled as its path.
    """

    in_processes = False  # by processes that only decode: there is nothing to decode
    on_gpu = False

    def __init__(
        self, array: np.ndarray, rows: np.ndarray | None = None, path: Path | None = None
    ) -> None:
        self.array, self.path = array, path
        self.rows = np.arange(len(array)) if rows is None else rows

    @classmethod
    def mapped(
        cls, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], rows: np.ndarray | None
    ) -> ArrayView:
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
            return ArrayView, (self.array, self.rows)
        return ArrayView.mapped, (self.path, self.array.dtype, self.array.shape, self.rows)

    @property
    def ram_bytes(self) -> int:
        """0 if memory-mapped: the system can drop those pages."""
        return self.array.nbytes if self.path is None else 0

    def read(self, items: np.ndarray) -> np.ndarray:
        return self.array.take(self.rows[items], axis=0)

    def subset(self, items: np.ndarray) -> ArrayView:
        """These items in this order."""
        return ArrayView(self.array, self.rows[items], self.path)

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

        def load(items: np.ndarray) -> None:
            images[items[0] : items[-1] + 1] = torch.from_numpy(self.read(items)).to(device)

        blocks = np.array_split(np.arange(len(self)), ceil_div(len(self), ROWS_AT_ONCE))
        # Threads: most of the time is spent on mapping and copying pages of the file.
        with ThreadPoolExecutor(COPY_THREADS) as threads:
            list(threads.map(load, blocks))
        return images
