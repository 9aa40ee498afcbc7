"""Convolutions in front of the transformer: what a ViT else has to learn about neighbouring pixels is built in.

Each halves the side, until a patch is one position (Xiao et al. 2021, "Early Convolutions Help Transformers See
Better"). On few pictures this gave more than any other change of the model (docs/recipe.md).
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.model.shape import ClipShape, stem_channels


class ConvStem(nn.Module):
    """(n, 3, side, side) pixels -> (n, patches, width); as many halvings as the patch size has powers of two."""

    def __init__(self, shape: ClipShape) -> None:
        super().__init__()
        channels = (3, *stem_channels(shape))
        pairs = list(itertools.pairwise(channels))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, kernel_size=3, stride=2, padding=1) for a, b in pairs)
        self.norms = nn.ModuleList(nn.LayerNorm(b) for _, b in pairs[:-1])

    def forward(self, pixels: Tensor) -> Tensor:
        """All patches of each picture, row by row."""
        x = pixels.contiguous(memory_format=torch.channels_last)
        for conv, norm in zip(self.convs, self.norms, strict=False):
            # Over the channels, which lie next to each other in this format: no copy.
            x = F.gelu(norm(conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return self.convs[-1](x).flatten(2).transpose(1, 2)

    @torch.no_grad()
    def initialise(self) -> None:
        """Fan-in, no bias."""
        for conv in self.convs:
            assert isinstance(conv, nn.Conv2d)
            nn.init.kaiming_uniform_(conv.weight, a=5**0.5)  # torch's own, but from our seed at our time
            assert conv.bias is not None
            nn.init.zeros_(conv.bias)
