"""Features in the place of pixels and tokens: what the loader, the loop and the evaluators already know how to use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from m1clip.data import randomness as rnd
from m1clip.data.augment import draw_views, whole_views
from m1clip.data.captions import CaptionTable
from m1clip.data.loader import Batch, TrainingSet
from m1clip.data.store import Failure, Pictures, read_or_replace

VIEW = 1 << 8  # a stream of random numbers of its own


@dataclass(frozen=True)
class FeaturePictures:
    """Pictures whose features are known; the pixels are read only to show them to a person."""

    pixels: Pictures
    table: np.ndarray  # (rows, width) float16
    at: np.ndarray  # (pictures, views) the row of each

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
        """Views of each picture."""
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

    A picture with features is seen in one of its views; a tower that moves sees pixels, and tokens, anew each time.
    """

    def __getitem__(self, step: int) -> Batch:
        epoch, members = self.plan.members(step)
        seed, pictures, captions = self.plan.seed, self.pictures, self.captions
        failed: tuple[Failure, ...] = ()
        shown = None
        if isinstance(pictures, FeaturePictures):
            views = rnd.bits(seed, epoch, members, VIEW) % np.uint64(pictures.views)
            seen = pictures.features(members, views.astype(np.int64))
            drawn = whole_views(len(members))  # features are not rendered any more
        else:
            members, seen, failed = read_or_replace(pictures, members, seed, epoch)
            shown, drawn = self.shown_of(members, epoch), draw_views(self.augmentation, seed, epoch, members)
        lengths: tuple[int, ...] = ()
        if isinstance(captions, FeatureCaptions):
            draws = rnd.bits(seed, epoch, members, rnd.CAPTION)
            owners, chosen = captions.pick(members, draws, self.several)
            told = captions.features(chosen)
        else:
            told, owners, chosen, lengths = self.texts_of(members, epoch)
        return Batch(
            pixels=torch.from_numpy(seen),
            tokens=torch.from_numpy(told),
            pictures=torch.from_numpy(self._identities(members).astype(np.int64)),
            captions=torch.from_numpy(captions.keys[chosen]),
            owners=torch.from_numpy(owners),
            views=drawn,
            patches=shown,
            lengths=lengths,
            failed=failed,
        )


def _widened(rows: np.ndarray) -> np.ndarray:
    """float16 -> float32 by the processor's own conversion, which torch uses and numpy does not: 25 times as fast."""
    return torch.from_numpy(rows).float().numpy()
