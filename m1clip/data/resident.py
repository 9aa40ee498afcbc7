"""Pictures that lie on the training device as a whole: of each step only their rows travel there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m1clip.data.store import ArrayPictures, MappedPictures, Pictures

SHARE = 0.25  # of the device's free memory that pictures may take; the rest is for training


@dataclass(frozen=True)
class ResidentPictures:
    """All pictures in one tensor on a device."""

    store: Tensor  # (pictures, side, side, 3) uint8

    def __len__(self) -> int:
        return len(self.store)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """(n, side, side, 3) uint8, brought back to the host."""
        return self.store[torch.from_numpy(indices).to(self.store.device)].cpu().numpy()


def resident(pictures: Pictures, device: torch.device, free_bytes: int) -> Pictures:
    """The same pictures on the device where they are decoded already and leave room; else as they are."""
    if not isinstance(pictures, ArrayPictures | MappedPictures) or len(pictures) == 0:
        return pictures
    one = pictures.read(np.zeros(1, np.int64))
    if one.nbytes * len(pictures) > SHARE * free_bytes:
        return pictures
    store = torch.empty((len(pictures), *one.shape[1:]), dtype=torch.uint8, device=device)
    for start in range(0, len(pictures), 1024):  # a copy on the host of some at a time
        rows = np.arange(start, min(start + 1024, len(pictures)))
        store[start : start + len(rows)] = torch.from_numpy(pictures.read(rows)).to(device)
    return ResidentPictures(store)
