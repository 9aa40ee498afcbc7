"""Which part of a tower moves: all of it, its last blocks, or nothing."""

from __future__ import annotations

from torch import nn

from m1clip.errors import UserError

ALL = -1


def train_last(tower: nn.Module, blocks: nn.ModuleList, count: int, what: str) -> None:
    """Let only the last `count` blocks and what stands after them move; -1 lets all move, 0 nothing."""
    if count == ALL:
        return
    if count > len(blocks):
        raise UserError(f"{what} {count}: the tower has {len(blocks)} blocks; -1 trains all of it")
    tower.requires_grad_(False)
    if count == 0:
        return
    for block in list(blocks)[-count:]:
        block.requires_grad_(True)
    norm = getattr(tower, "norm", None)
    if isinstance(norm, nn.Module):
        norm.requires_grad_(True)
