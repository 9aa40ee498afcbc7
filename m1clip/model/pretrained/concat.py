"""Towers side by side: their features, one after the other."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.model.towers import Tower


class ConcatTower(Tower):
    """Several towers; the features of the first, then those of the second, ..."""

    def __init__(self, parts: Sequence[Tower]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.width = sum(part.width for part in parts)
        self.tokens_per_image = max(part.tokens_per_image for part in parts)

    def forward(self, inputs: Tensor) -> Tensor:
        """The input of each tower -> (n, width)."""
        return torch.cat([part(inputs) for part in self.parts], dim=1)

    def reset_buffers(self) -> None:
        """Fill the buffers of every part."""
        for part in self.parts:
            cast("Tower", part).reset_buffers()


class ConcatImageTower(ConcatTower):
    """Each tower sees the image in its own size."""

    def __init__(self, parts: Sequence[Tower], sizes: Sequence[int]) -> None:
        """`sizes` are sides of the images; the largest is that of the images given."""
        super().__init__(parts)
        self.sizes = tuple(sizes)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalized pixels -> (n, width)."""
        largest = max(self.sizes)
        features = []
        for part, size in zip(self.parts, self.sizes, strict=True):
            sides = [round(side * size / largest) for side in pixels.shape[2:]]
            features.append(
                part(pixels if size == largest else F.interpolate(pixels, sides, mode="bilinear"))
            )
        # Some compute in half precision.
        return torch.cat([part.float() for part in features], dim=1)
