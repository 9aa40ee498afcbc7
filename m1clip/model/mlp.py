"""The block's second half: two linear layers and what stands between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from m1clip.model.shape import Activation


class Mlp(nn.Module):
    """Two linear layers with a GELU, or OpenAI's sigmoid approximation of it, between them."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.quick = activation == "quick_gelu"
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        x = self.up(x)
        if torch.is_grad_enabled() and x.device.type == "cpu":
            # The activation is the block's largest tensor and the cheapest to compute again (docs/speed.md).
            return checkpoint(self._down, x, use_reentrant=False, preserve_rng_state=False)
        return self._down(x)

    def _down(self, x: Tensor) -> Tensor:
        return self.down(x * torch.sigmoid(1.702 * x) if self.quick else F.gelu(x))
