"""Several small models side by side, trained together: their embeddings, one after the other.

Each member starts from other random weights and has its own loss, so they make different mistakes.
With as many steps, the embeddings of two or three models of the preset `tiny` reach a higher recall
than one model that is trained two or three times as long (docs/recipe.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from m1clip.model.heads import Projection
from m1clip.model.pretrained.concat import ConcatTower
from m1clip.model.towers import Tower, VisionTower


class MemberTowers(ConcatTower):
    """The towers of all members on one side; each sees the same images or tokens."""

    def __init__(self, parts: Sequence[Tower]) -> None:
        super().__init__(parts)
        self.capturable = all(part.capturable for part in parts)

    def forward(self, inputs: Tensor, kept_patches: Tensor | None = None) -> Tensor:
        """Images, of which members may see only some patches, or tokens -> (n, width)."""
        extra = () if kept_patches is None else (kept_patches,)
        return torch.cat([part(inputs, *extra) for part in self.parts], dim=1)

    def initialize(self) -> None:
        """Fill the parameters of one member after the other, so that they differ."""
        for part in self.parts:
            cast("Tower", part).initialize()

    def set_stem_filters(self, filters: Tensor) -> None:
        """Replace the first filters of each member."""
        for part in self.parts:
            cast("VisionTower", part).set_stem_filters(filters)


class MemberHeads(nn.Module):
    """(n, width) features of all members -> (n, embed_dim), a unit vector of each member."""

    def __init__(self, heads: Sequence[Projection]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Tensor) -> Tensor:
        """Project the features of each member by its own head."""
        parts = features.chunk(len(self.heads), dim=1)
        vectors = [head(part).float() for head, part in zip(self.heads, parts, strict=True)]
        return torch.cat([nn.functional.normalize(v, dim=1) for v in vectors], dim=1)

    def initialize(self) -> None:
        """Fill the parameters of one head after the other."""
        for head in self.heads:
            cast("Projection", head).initialize()


def vectors_by_member(vectors: Tensor, members: int) -> list[Tensor]:
    """(n, embed_dim) unit vectors of a model -> the unit vectors of each member."""
    return [part * members**0.5 for part in vectors.chunk(members, dim=1)]
