"""Which part of a tower moves: all of it, its last blocks, or nothing."""

from __future__ import annotations

from torch import nn

from m1clip.errors import UserError
from m1clip.model.depth import ladder

ALL = -1


def train_last(tower: nn.Module, count: int, what: str) -> None:
    """Let only the last `count` blocks and what stands after them move; -1 lets all move, 0 nothing."""
    if count == ALL:
        tower.requires_grad_(True)
        return
    rungs = ladder(tower)
    blocks = len(rungs) - 2
    if count > max(blocks, 0):
        raise UserError(f"{what} {count}: the tower has {max(blocks, 0)} blocks; -1 trains all of it")
    tower.requires_grad_(False)
    for rung in rungs[-1 - count :] if count else []:
        for _, parameter in rung:
            parameter.requires_grad_(True)
