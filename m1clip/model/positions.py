"""Where a patch is: fixed 2-D sine-cosine codes, and resizing of learned ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
