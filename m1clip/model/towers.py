"""The two towers: each takes a batch to (n, width) features and knows nothing of the other."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.model.layers import Transformer
from m1clip.model.presets import ClipShape, stem_channels


class ConvStem(nn.Module):
    """(n, 3, side, side) pixels -> (n, patches, width); as many halvings as the patch size has powers of two."""

    def __init__(self, shape: ClipShape) -> None:
        super().__init__()
        channels = (3, *stem_channels(shape))
        samples = list(itertools.pairwise(channels))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, kernel_size=3, stride=2, padding=1) for a, b in samples)
        self.norms = nn.ModuleList(nn.LayerNorm(b) for _, b in samples[:-1])

    def forward(self, pixels: Tensor) -> Tensor:
        """All patches of each image, row by row."""
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


def sincos_2d(grid: int, width: int) -> Tensor:
    """(grid * grid, width): half of the channels code the row, half the column."""
    quarter = width // 4
    omega = 10000.0 ** -(torch.arange(quarter, dtype=torch.float32) / quarter)
    angle = torch.arange(grid, dtype=torch.float32)[:, None] * omega  # (grid, quarter)
    axis = torch.cat([angle.sin(), angle.cos()], dim=1)  # (grid, width / 2)
    rows = axis[:, None, :].expand(grid, grid, -1)
    columns = axis[None, :, :].expand(grid, grid, -1)
    return torch.cat([rows, columns], dim=2).reshape(grid * grid, width)


def resize_positions(positions: Tensor, grid: int) -> Tensor:
    """Interpolate learned positions (with or without a class token first) to another grid."""
    count, width = positions.shape
    old = int(count**0.5)
    prefix = count - old * old  # 0 or 1 class token; a square plus 1 is never itself a square here
    if prefix not in (0, 1):
        raise ValueError(f"{count} positions are neither a square grid nor a square grid and a class token")
    if old == grid:
        return positions
    table = positions[prefix:].reshape(1, old, old, width).permute(0, 3, 1, 2)
    table = F.interpolate(table, size=(grid, grid), mode="bicubic", antialias=True, align_corners=False)
    table = table.permute(0, 2, 3, 1).reshape(grid * grid, width)
    return torch.cat([positions[:prefix], table])


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the residual stream runs: autocast's where it is on, else the weights' own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class VisionTower(nn.Module):
    """ViT: patches, positions, transformer, class token or mean."""

    def __init__(self, shape: ClipShape) -> None:
        super().__init__()
        width = shape.vision_width
        self.width, self.pooling = width, shape.pooling
        self.patch: nn.Conv2d | ConvStem = (
            ConvStem(shape)
            if shape.stem == "conv"
            else nn.Conv2d(3, width, shape.patch_size, shape.patch_size, bias=shape.patch_bias)
        )
        self.cls = nn.Parameter(torch.empty(width)) if shape.pooling == "cls" else None
        if shape.positions == "learned":
            self.positions = nn.Parameter(torch.empty(shape.image_tokens, width))
        else:
            # Not persistent: it follows from the shape, so weights of another image size still load.
            self.register_buffer("positions", torch.empty(shape.image_tokens, width), persistent=False)
            self.reset_positions(shape)
        self.norm_pre = nn.LayerNorm(width) if shape.vision_pre_norm else nn.Identity()
        self.transformer = Transformer(
            width, shape.vision_layers, shape.vision_heads, shape.mlp_ratio, False, shape.activation, shape.dropout
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, pixels: Tensor, patches: Tensor | None = None) -> Tensor:
        """(n, 3, size, size) normalised pixels -> (n, width); of each image only `patches` (n, kept), or all."""
        x = self._patches(pixels, patches)  # (n, patches, width)
        positions = self.positions.to(x.dtype)
        prefix = 0 if self.cls is None else 1
        x = x + (positions[prefix:] if patches is None else positions[prefix:][patches])
        if self.cls is not None:
            x = torch.cat([(self.cls.to(x.dtype) + positions[0]).expand(len(x), 1, -1), x], dim=1)
        x = self.norm_pre(x).to(_compute_dtype(x))
        return self.norm(self.transformer(x, 0 if self.cls is not None else "mean"))

    def _patches(self, pixels: Tensor, chosen: Tensor | None = None) -> Tensor:
        if isinstance(self.patch, ConvStem):
            x = self.patch(pixels)  # a convolution sees the neighbours, so all are made before some are left out
            return x if chosen is None else x[torch.arange(len(x), device=x.device)[:, None], chosen]
        # A matrix product instead of the convolution: same numbers, faster on every device we measured.
        n, _, height, width = pixels.shape
        size = self.patch.kernel_size[0]
        x = pixels.view(n, 3, height // size, size, width // size, size)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, 3 * size * size)
        if chosen is not None:
            x = x[torch.arange(n, device=x.device)[:, None], chosen]
        return F.linear(x, self.patch.weight.flatten(1), self.patch.bias)

    @torch.no_grad()
    def reset_positions(self, shape: ClipShape) -> None:
        """Fill fixed positions again, after the tower was made without memory; learned ones stay as they are."""
        if shape.positions == "sincos" and not self.positions.is_meta:
            self.positions.zero_()
            self.positions[-(shape.grid**2) :] = sincos_2d(shape.grid, self.width)

    @torch.no_grad()
    def initialise(self, shape: ClipShape) -> None:
        """Start values: fan-in for the patches, small for class token and learned positions."""
        if isinstance(self.patch, ConvStem):
            self.patch.initialise()
        else:
            nn.init.normal_(self.patch.weight, std=(3 * shape.patch_size**2) ** -0.5)
            if self.patch.bias is not None:
                nn.init.zeros_(self.patch.bias)
        for extra in (self.cls, self.positions):
            if isinstance(extra, nn.Parameter):
                nn.init.normal_(extra, std=self.width**-0.5)
        self.transformer.initialise(shape.init)


class TextTower(nn.Module):
    """Causal transformer over token ids; the feature is read at the end-of-text mark."""

    def __init__(self, shape: ClipShape, eot_id: int) -> None:
        super().__init__()
        width = shape.text_width
        self.width, self.eot_id = width, eot_id
        # Without memory torch draws no start, but would load its whole compiler to see what one would look like.
        table = torch.empty(shape.vocab_size, width)
        self.tokens = nn.Embedding(shape.vocab_size, width, _weight=table if table.is_meta else None)
        self.positions = nn.Parameter(torch.empty(shape.context_length, width))
        self.transformer = Transformer(
            width, shape.text_layers, shape.text_heads, shape.mlp_ratio, True, shape.activation, shape.dropout
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """(n, length) token ids, length <= context -> (n, width). What stands after the end mark has no effect."""
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        end = (ids == self.eot_id).int().argmax(dim=1)  # the first end mark
        return self.norm(self.transformer(x.to(_compute_dtype(x)), end))

    @torch.no_grad()
    def initialise(self, shape: ClipShape) -> None:
        """CLIP's start values."""
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        self.transformer.initialise(shape.init)
