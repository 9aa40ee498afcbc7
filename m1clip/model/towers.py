"""Our own towers: each maps a batch to (n, width) features and knows nothing of the other."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.model.layers import AttentionPool, Transformer
from m1clip.model.presets import TextTowerConfig, VisionTowerConfig


class Tower(nn.Module):
    """A module from a batch to (n, width) features."""

    width: int
    tokens_per_image = 1  # rows of a linear layer for one image
    capturable = False  # whether a CUDA graph of a step with this tower is right

    def initialize(self) -> None:
        """Fill every parameter from torch's random state.

        A pretrained tower's weights are loaded instead.
        """

    def reset_buffers(self) -> None:
        """Fill buffers that are not saved, after the tower left the meta device."""


FILTER_SIZE = 3  # of a conv stem
WHITENING_EPS = 1e-2  # added to the variances, or filters for noise would be the largest


def stem_groups(channels: int) -> int:
    """How many groups of channels a stem normalizes: 8 or fewer of equal size."""
    return max(
        (groups for groups in (2, 4, 8) if channels % groups == 0 and channels > groups), default=1
    )


class ConvStem(nn.Module):
    """(n, 3, side, side) pixels -> (n, patches, width).

    As many halvings as the patch size has powers of two.
    """

    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        sizes = list(itertools.pairwise((3, *config.stem_channels)))
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, FILTER_SIZE, stride=2, padding=1) for a, b in sizes
        )
        # Over all positions: a norm of each position alone would remove the contrast between
        # positions.
        self.group_norms = nn.ModuleList(nn.GroupNorm(stem_groups(b), b) for _, b in sizes[:-1])

    def forward(self, pixels: Tensor) -> Tensor:
        """All patches of each image, row by row."""
        x = pixels.contiguous(memory_format=torch.channels_last)
        for conv, norm in zip(self.convs, self.group_norms, strict=False):
            x = F.gelu(norm(conv(x)))
        return self.convs[-1](x).flatten(2).transpose(1, 2)

    @torch.no_grad()
    def initialize(self) -> None:
        for conv in self.convs:
            assert isinstance(conv, nn.Conv2d)
            nn.init.kaiming_uniform_(conv.weight, a=5**0.5)  # torch's default
            assert conv.bias is not None
            nn.init.zeros_(conv.bias)


@torch.no_grad()
def whitening_filters(pixels: Tensor, count: int) -> Tensor:
    """(at most `count`, 3, 3, 3): principal components of the 3 x 3 patches of some images.

    Each is scaled to unit variance and included with both signs, because the activation that
    follows is one-sided. As the first layer of a stem, they give a higher recall after the same
    number of steps (docs/recipe.md).
    """
    # (n * places, 27).
    patches = F.unfold(pixels, FILTER_SIZE, stride=5).transpose(1, 2).flatten(0, 1).double()
    variances, directions = torch.linalg.eigh(patches.T.cov())
    filters = (directions / (variances + WHITENING_EPS).sqrt()).T.flip(0)[: count // 2]
    # The sign of an eigenvector is arbitrary: choose the same on every machine.
    filters = filters * filters.gather(1, filters.abs().argmax(dim=1, keepdim=True)).sign()
    return torch.cat([filters, -filters]).view(-1, 3, FILTER_SIZE, FILTER_SIZE).float()


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
        raise ValueError(
            f"{count} positions are neither a square grid nor a square grid and a class token"
        )
    if old == grid:
        return positions
    table = positions[prefix:].reshape(1, old, old, width).permute(0, 3, 1, 2)
    table = F.interpolate(
        table, size=(grid, grid), mode="bicubic", antialias=True, align_corners=False
    )
    table = table.permute(0, 2, 3, 1).reshape(grid * grid, width)
    return torch.cat([positions[:prefix], table])


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the residual stream: autocast's where it is on, else the weights' own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class VisionTower(Tower):
    """ViT: patches, positions, transformer; a class token, the mean, or attention pooling."""

    capturable = True

    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.width = width
        self.tokens_per_image = config.tokens
        self.patch: nn.Conv2d | ConvStem = (
            ConvStem(config)
            if config.stem == "conv"
            else nn.Conv2d(3, width, config.patch_size, config.patch_size, bias=config.patch_bias)
        )
        self.cls = nn.Parameter(torch.empty(width)) if config.pooling == "cls" else None
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.tokens, width))
        else:
            # Not persistent: it follows from the config, so weights of another image size still
            # load.
            self.register_buffer("positions", torch.empty(config.tokens, width), persistent=False)
            self.reset_buffers()
        self.norm_pre = nn.LayerNorm(width, config.norm_eps) if config.pre_norm else nn.Identity()
        self.transformer = Transformer(config, causal=False)
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.pool = AttentionPool(config) if config.pooling == "map" else None

    def forward(self, pixels: Tensor, kept_patches: Tensor | None = None) -> Tensor:
        """(n, 3, size, size) normalized pixels -> (n, width), from all or the kept patches."""
        x = self._patches(pixels, kept_patches)  # (n, patches, width)
        positions = self.positions.to(x.dtype)
        prefix = 0 if self.cls is None else 1
        x = x + (positions[prefix:] if kept_patches is None else positions[prefix:][kept_patches])
        if self.cls is not None:
            x = torch.cat(
                [(self.cls.to(x.dtype) + positions[0]).expand(x.shape[0], 1, -1), x], dim=1
            )
        x = self.norm_pre(x).to(compute_dtype(x))
        if self.pool is not None:
            return self.pool(self.norm(self.transformer(x)).to(x.dtype))
        return self.norm(self.transformer(x, 0 if self.cls is not None else "mean"))

    def _patches(self, pixels: Tensor, kept_patches: Tensor | None) -> Tensor:
        if isinstance(self.patch, ConvStem):
            x = self.patch(pixels)  # convolutions read neighboring patches: compute all, then drop
            return (
                x
                if kept_patches is None
                else x[torch.arange(len(x), device=x.device)[:, None], kept_patches]
            )
        # A matmul instead of the convolution: same numbers, faster on every device we
        # measured.
        size = self.config.patch_size
        grid = self.config.grid
        n = pixels.shape[0]  # not len(): it would be a constant in an exported graph
        if grid * size < self.config.image_size:
            pixels = pixels[:, :, : grid * size, : grid * size]
        x = pixels.reshape(n, 3, grid, size, grid, size)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, 3 * size * size)
        if kept_patches is not None:
            x = x[torch.arange(n, device=x.device)[:, None], kept_patches]
        # 2-D: without a bias, a 3-D input in half precision gives other results in each call on an
        # M5 (pytorch#180776).
        return F.linear(x.flatten(0, 1), self.patch.weight.flatten(1), self.patch.bias).view(
            n, -1, self.width
        )

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Fill fixed positions; learned ones stay as they are."""
        if self.config.positions == "sincos" and not self.positions.is_meta:
            self.positions.zero_()
            self.positions[-self.config.patches :] = sincos_2d(self.config.grid, self.width)

    @torch.no_grad()
    def set_stem_filters(self, filters: Tensor) -> None:
        """Replace the first filters of a conv stem's first layer."""
        assert isinstance(self.patch, ConvStem)
        first_conv = self.patch.convs[0]
        assert isinstance(first_conv, nn.Conv2d)
        first_conv.weight[: len(filters)] = filters

    @torch.no_grad()
    def initialize(self) -> None:
        """Fan-in for the patches, small for class token and learned positions."""
        if isinstance(self.patch, ConvStem):
            self.patch.initialize()
        else:
            nn.init.normal_(self.patch.weight, std=(3 * self.config.patch_size**2) ** -0.5)
            if self.patch.bias is not None:
                nn.init.zeros_(self.patch.bias)
        for extra in (self.cls, self.positions):
            if isinstance(extra, nn.Parameter):
                nn.init.normal_(extra, std=self.width**-0.5)
        self.transformer.initialize(self.config.init)
        if self.pool is not None:
            self.pool.initialize()


def fill_after_eot(tokens: Tensor, eot_id: int, fill_id: int, context_length: int) -> Tensor:
    """(n, length) token ids -> (n, context_length), with `fill_id` after the first EOT token."""
    length = tokens.shape[1]
    eot = (tokens == eot_id).int().argmax(dim=1, keepdim=True)
    index = torch.arange(length, device=tokens.device)
    filled = torch.where(index > eot, fill_id, tokens)
    return F.pad(filled, (0, context_length - length), value=fill_id)


def embedding(vocab_size: int, width: int) -> nn.Embedding:
    """A table of tokens.

    On the meta device it is not filled: torch would import its compiler to find the shape.
    """
    table = torch.empty(vocab_size, width)
    return nn.Embedding(vocab_size, width, _weight=table if table.is_meta else None)


class TextTower(Tower):
    """Transformer over token ids; the feature is read at the EOT token, plus an optional mean.

    With pooling "last", texts are filled up to the context length and read at its end.
    """

    capturable = True

    def __init__(self, config: TextTowerConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.tokens = embedding(config.vocab_size, config.width)
        self.positions = nn.Parameter(torch.empty(config.context_length, config.width))
        self.transformer = Transformer(config, config.causal)
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.norm_mean = nn.LayerNorm(config.width) if config.pooling == "eot+mean" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, length) token ids, length <= context -> (n, width).

        What follows the EOT token has no effect.
        """
        if self.config.pooling == "last":
            return self._at_the_end(tokens)
        length = tokens.shape[1]
        embedded = self.tokens(tokens)
        x = embedded + self.positions[:length]
        eot = (tokens == self.config.eot_id).int().argmax(dim=1)  # the first one
        x = self.norm(self.transformer(x.to(compute_dtype(x)), eot))
        if self.norm_mean is None:
            return x
        # (n, length, 1).
        inside = (torch.arange(length, device=tokens.device) <= eot[:, None])[:, :, None]
        mean = (embedded * inside).sum(dim=1) / (eot + 1)[:, None]
        return x + self.norm_mean(mean).to(x.dtype)

    def _at_the_end(self, tokens: Tensor) -> Tensor:
        """The feature at the last position of texts filled up to the context length."""
        filled = fill_after_eot(
            tokens, self.config.eot_id, self.config.fill_id, self.config.context_length
        )
        x = self.tokens(filled) + self.positions
        return self.norm(self.transformer(x.to(compute_dtype(x)), -1))

    @torch.no_grad()
    def initialize(self) -> None:
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        self.transformer.initialize(self.config.init)
