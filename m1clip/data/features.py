"""Features in the place of pixels and tokens: what the loader, the loop and the evaluators already know how to use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from m1clip.data import randomness as rnd
from m1clip.data.augment import draw_views, whole_views
from m1clip.data.cache import Failure, Images, read_or_replace
from m1clip.data.captions import CaptionTable
from m1clip.data.loader import Batch, TrainingSet
from m1clip.errors import UserError
from m1clip.io import locked, open_regular

VIEW = 1 << 8  # a stream of random numbers of its own


@dataclass(frozen=True)
class FeatureImages:
    """Images whose features are known; the pixels are read only to show them to a person."""

    pixels: Images
    table: np.ndarray  # (rows, width) float16
    at: np.ndarray  # (images, views) the row of each

    def __len__(self) -> int:
        return len(self.at)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8."""
        return self.pixels.read(indices)

    def features(self, indices: np.ndarray, views: np.ndarray | int = 0) -> np.ndarray:
        """(n, width) float32: the plain view, or view `views[i]` of each."""
        return _widened(self.table.take(self.at[indices, views], axis=0))

    @property
    def views(self) -> int:
        """Views of each image."""
        return self.at.shape[1]


@dataclass(frozen=True)
class FeatureCaptions(CaptionTable):
    """Captions whose features are known."""

    table: np.ndarray  # (rows, width) float16
    at: np.ndarray  # (captions,) the row of each

    def features(self, captions: np.ndarray) -> np.ndarray:
        """(n, width) float32."""
        return _widened(self.table.take(self.at[captions], axis=0))


class FeatureSet(TrainingSet):
    """Makes the batch of a step where a tower stands still: that side carries features, the other what it always does.

    An image with features is seen in one of its views; a tower that moves sees pixels, and tokens, anew each time.
    """

    def __getitem__(self, step: int) -> Batch:
        epoch, members = self.plan.members(step)
        seed, images, captions = self.plan.seed, self.images, self.captions
        failed: tuple[Failure, ...] = ()
        shown = None
        if isinstance(images, FeatureImages):
            views = rnd.bits(seed, epoch, members, VIEW) % np.uint64(images.views)
            seen = images.features(members, views.astype(np.int64))
            drawn = whole_views(len(members))  # features are not rendered any more
        else:
            members, seen, failed = read_or_replace(images, members, seed, epoch)
            shown, drawn = self.shown_of(members, epoch), draw_views(self.augmentation, seed, epoch, members)
        lengths: tuple[int, ...] = ()
        if isinstance(captions, FeatureCaptions):
            draws = rnd.bits(seed, epoch, members, rnd.CAPTION)
            image_index, chosen = captions.pick(members, draws, self.several)
            told = captions.features(chosen)
        else:
            told, image_index, chosen, lengths = self.texts_of(members, epoch)
        return Batch(
            pixels=torch.from_numpy(seen),
            tokens=torch.from_numpy(told),
            images=torch.from_numpy(self._identities(members).astype(np.int64)),
            captions=torch.from_numpy(captions.keys[chosen]),
            image_index=torch.from_numpy(image_index),
            views=drawn,
            patches=shown,
            lengths=lengths,
            failed=failed,
        )


def _widened(rows: np.ndarray) -> np.ndarray:
    """float16 -> float32 by the processor's own conversion, which torch uses and numpy does not: 25 times as fast."""
    return torch.from_numpy(rows).float().numpy()


NAME_BYTES = 16
DTYPE = np.dtype(np.float16)
ROWS, NAMES, LOCK = "rows.bin", "names.bin", "lock"
Computed = Generator[tuple[list[int], np.ndarray]]  # places in what was asked for, and their rows


def name_of(*words: str) -> bytes:
    """The hash under which a row is found."""
    digest = hashlib.sha256("\x1f".join(words).encode("utf-8", "surrogatepass"))
    return digest.digest()[:NAME_BYTES]


class FeatureStore:
    """The rows of one tower and preprocessing; `width` numbers a row."""

    def __init__(self, folder: Path, key: str, width: int) -> None:
        self.path, self.width = folder / f"features-{key}", width
        self.path.mkdir(parents=True, exist_ok=True)

    def missing(self, names: Sequence[bytes]) -> list[int]:
        """Places of the names that have no row yet, each name once."""
        known = self._index()
        first: dict[bytes, int] = {}
        for place, name in enumerate(names):
            if name not in known:
                first.setdefault(name, place)
        return sorted(first.values())

    def fill(
        self, names: Sequence[bytes], compute: Callable[[list[int]], Computed], waiting: Callable[[], None]
    ) -> None:
        """Have `compute` make what is missing and add it as it comes; of two processes one waits for the other."""
        if not self.missing(names):
            return
        with locked(self.path / LOCK, waiting) as alone:
            if not alone:  # two at once could give each other's names to their rows
                raise UserError(f"{self.path}: this disk has no file locks; name another with --data.cache-dir")
            wanted = self.missing(names)  # again: another process may have been at it
            self._cut_to_whole_rows()
            with (
                (self.path / ROWS).open("ab") as rows,
                (self.path / NAMES).open("ab") as keys,
                closing(compute(wanted)) as computed,  # ends its progress lines when a write fails
            ):
                for places, block in computed:
                    assert block.shape == (len(places), self.width)
                    rows.write(np.ascontiguousarray(block, DTYPE).tobytes())
                    _safe(rows.fileno(), rows.flush)
                    keys.write(b"".join(names[place] for place in places))
                    _safe(keys.fileno(), keys.flush)

    def rows(self, names: Iterable[bytes]) -> np.ndarray:
        """(n,) the row of each name; -1 where there is none."""
        known = self._index()
        return np.array([known.get(name, -1) for name in names], np.int64)

    def mapped(self) -> np.ndarray:
        """(rows, width) float16, mapped from the disk."""
        count = self._whole()
        if count == 0:
            return np.zeros((0, self.width), DTYPE)
        # A plain view: pieces taken from a np.memmap are memmaps again, which costs time.
        return np.asarray(np.memmap(self.path / ROWS, DTYPE, "r", shape=(count, self.width)))

    def _index(self) -> dict[bytes, int]:
        try:
            with open_regular(self.path / NAMES) as file:
                found = file.read()
        except FileNotFoundError:
            return {}
        ends = range(0, self._whole() * NAME_BYTES, NAME_BYTES)
        return {found[start : start + NAME_BYTES]: row for row, start in enumerate(ends)}

    def _whole(self) -> int:
        """Rows that are there with their name."""
        sizes = [_size(self.path / ROWS) // self._row_bytes, _size(self.path / NAMES) // NAME_BYTES]
        return min(sizes)

    def _cut_to_whole_rows(self) -> None:
        """Remove what a killed build left behind the last whole row, or the next one would be added askew."""
        count = self._whole()
        for name, size in ((ROWS, self._row_bytes), (NAMES, NAME_BYTES)):
            if (self.path / name).exists():
                os.truncate(self.path / name, count * size)

    @property
    def _row_bytes(self) -> int:
        return self.width * DTYPE.itemsize


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _safe(handle: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(handle)
