"""What is trained on top of a frozen tower: a projection, an MLP, or a projection with a small residual adapter."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HeadKind = Literal["linear", "mlp", "adapter"]
DEAD = 0.01  # of the usual deviation
SHORTEST = 1e-24  # square of a length below which a vector stays shorter than 1


def unit(x: Tensor) -> Tensor:
    """(n, d) -> the same brought to length 1; its gradient takes half the passes of that of `F.normalize`."""
    return x * (x * x).sum(dim=-1, keepdim=True).clamp_min(SHORTEST).rsqrt()


class Head(nn.Module):
    """(n, inputs) features of a tower -> (n, outputs), not yet normed to one.

    Features are first brought to mean 0 and deviation 1 by numbers that are kept with the weights: a tower's
    channels differ by orders of magnitude.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, kind: HeadKind, inputs: int, outputs: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("deviation", torch.ones(inputs))
        self.project = nn.Linear(inputs if kind != "mlp" else hidden, outputs)
        self.up = nn.Linear(inputs, hidden) if kind != "linear" else None
        self.down = nn.Linear(hidden, outputs) if kind == "adapter" else None

    def forward(self, features: Tensor) -> Tensor:
        """Dropout thins the features by a third of what it takes of the hidden layer."""
        x = (features.float() - self.mean).mul_(1 / self.deviation)
        x = self._thinned(x, self.dropout / 3)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))  # once: autocast would do it for each product
        if self.up is None:
            return self.project(x)
        hidden = self._thinned(F.gelu(self.up(x)), self.dropout)
        return self.project(hidden) if self.down is None else self.project(x) + self.down(hidden)

    def _thinned(self, x: Tensor, share: float) -> Tensor:
        """Dropout in steps of 1/256: a random number serves eight places, where torch's own draws one for each."""
        gone = round(256 * share)
        if not self.training or not gone:
            return x
        words = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 8),), device=x.device)
        draws = words.view(torch.uint8)[: x.numel()].view(x.shape)
        # 1 where the draw is at least `gone`, else 0; on a CPU a comparison takes eight times as long.
        kept = draws.clamp(gone - 1, gone).sub_(gone - 1)
        return x * kept.to(x.dtype).mul_(256 / (256 - gone))

    @torch.no_grad()
    def standardise(self, mean: Tensor, deviation: Tensor) -> None:
        """Set the numbers from the training set's features."""
        self.mean.copy_(mean)
        self.deviation.copy_(deviation)
        self.spare_dead_channels()

    @torch.no_grad()
    def spare_dead_channels(self) -> None:
        """A channel that never changes is not blown up: its rounding would shout, and its gradient in the tower too."""
        usual = self.deviation.median().clamp(min=1e-6)
        self.deviation.copy_(torch.where(self.deviation < DEAD * usual, usual, self.deviation))

    @torch.no_grad()
    def initialise(self) -> None:
        """Fan-in everywhere; the adapter's branch begins silent, so that training starts from the projection."""
        for layer in (self.project, self.up):
            if layer is not None:
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
                nn.init.zeros_(layer.bias)
        if self.down is not None:
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.down.bias)
