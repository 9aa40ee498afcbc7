"""Heads that map a tower's features to the shared space: a projection, an adapter, or none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.model.layers import linear
from m1clip.model.presets import HeadConfig

DEAD_CHANNEL = 0.01  # of the median deviation
LARGEST_FEATURE = 8.0  # of a standardized feature; larger ones are outliers
FEATURE_DROPOUT = 0.4  # of the hidden layer's


def build_head(config: HeadConfig, width: int, embed_dim: int) -> Projection | Head | NoHead:
    """The head on a tower of this width."""
    if config.kind == "identity":
        if width != embed_dim:
            raise UserError(f"model: a tower of width {width} needs a head for {embed_dim} numbers")
        return NoHead()
    if config.kind == "projection":
        return Projection(width, embed_dim, config.bias)
    return Head(config, width, embed_dim)


def dropout_threshold(p: float) -> int:
    """A dropout probability in steps of 1/256."""
    return round(256 * p)


def hash64(x: Tensor) -> Tensor:
    """A hash of each int64."""
    x = x * -0x40A7B892E31B1A47
    x ^= x >> 32
    x *= -0x6B2FB644ECCEEE15
    x ^= (x >> 32) & 0xFFFFFFFF
    return x


def dropout_mask(keys: Tensor, width: int, p: float) -> Tensor:
    """(n, width) uint8: 1 to keep, 0 to drop, as a function of the int64 key of each row.

    So the mask of a sample depends neither on the other rows of its batch nor on the number of
    ranks. One hash serves eight elements, which takes half the time of torch's random numbers.
    """
    dropped = dropout_threshold(p)
    words = torch.arange(-(-width // 8), device=keys.device) * -0x61C8864680B583EB
    draws = hash64(keys[:, None] + words).view(torch.uint8)[:, :width]
    # 1 where the draw is at least `dropped`, else 0; on a CPU a comparison takes eight times as
    # long.
    return draws.clamp(dropped - 1, dropped).sub_(dropped - 1)


class Projection(nn.Linear):
    """CLIP's own: one matrix."""

    @torch.no_grad()
    def initialize(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NoHead(nn.Identity):
    """The features as they are: some pretrained towers end in the shared space."""

    def initialize(self) -> None:
        """Nothing to fill."""


class Head(nn.Module):
    """(n, inputs) features of a pretrained tower -> (n, outputs): a projection plus a small MLP.

    Features are standardized first, by statistics that are saved with the weights: a tower's
    channels differ by orders of magnitude.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, config: HeadConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("deviation", torch.ones(inputs))
        self.project = nn.Linear(inputs, outputs)
        self.up = nn.Linear(inputs, config.hidden)
        self.down = nn.Linear(config.hidden, outputs)

    def forward(self, features: Tensor, keys: Tensor | None = None) -> Tensor:
        """With the int64 `keys` of the rows, features and hidden layer have dropout."""
        x = self._dropped(self.standardized(features), FEATURE_DROPOUT * self.dropout, keys)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))  # once: autocast would do it for each matmul
        hidden = linear(x, self.up.weight, self.up.bias, gelu=True)
        hidden = self._dropped(hidden, self.dropout, None if keys is None else ~keys)
        projected = linear(x, self.project.weight, self.project.bias)
        return linear(hidden, self.down.weight, self.down.bias, residual=projected)

    def standardized(self, features: Tensor) -> Tensor:
        """The features with mean 0 and deviation 1 on the training set, without outliers."""
        return (
            (features.float() - self.mean)
            .mul_(1 / self.deviation)
            .clamp_(-LARGEST_FEATURE, LARGEST_FEATURE)
        )

    def _dropped(self, x: Tensor, p: float, keys: Tensor | None) -> Tensor:
        dropped = dropout_threshold(p)
        if keys is None or not dropped:
            return x
        return x * dropout_mask(keys, x.shape[1], p).to(x.dtype).mul_(256 / (256 - dropped))

    @torch.no_grad()
    def standardize(self, mean: Tensor, deviation: Tensor) -> None:
        self.mean.copy_(mean)
        self.deviation.copy_(deviation)
        self.spare_dead_channels()

    @torch.no_grad()
    def spare_dead_channels(self) -> None:
        """Do not scale up constant channels: their rounding error and gradients would dominate."""
        median = self.deviation.median().clamp(min=1e-6)
        self.deviation.copy_(
            torch.where(self.deviation < DEAD_CHANNEL * median, median, self.deviation)
        )

    @torch.no_grad()
    def initialize(self) -> None:
        """Fan-in.

        The adapter's branch starts at zero, so that training starts from the projection.
        """
        for layer in (self.project, self.up):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
