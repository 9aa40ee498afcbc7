"""LoRA (arXiv 2106.09685): trainable low-rank updates of the frozen matrices of a tower.

The layers read their weight as before and get the sum, so every kernel, micro-batches and
activation checkpointing work unchanged. `merged_state` gives the weights of the plain model, which
is what a model folder contains.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from m1clip.errors import UserError
from m1clip.model.blocks import tower_layers
from m1clip.model.heads import Projection

ALL_BLOCKS = -1
SCALE = 2.0  # of the product; usually written as alpha = 2 * rank
PARAMETRIZATIONS = "parametrizations"


class LowRank(nn.Module):
    """weight -> weight + SCALE * up @ down; `up` is zero at first, so training starts there."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, columns))
        self.up = nn.Parameter(torch.zeros(rows, rank))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        """(rows, columns) -> the same shape, in the weight's own precision."""
        with torch.autocast(weight.device.type, enabled=False):
            return torch.addmm(weight, self.up, self.down, alpha=SCALE)


def add_lora(tower: nn.Module, count: int, rank: int, option: str) -> None:
    """Freeze a tower and add LoRA to its last `count` blocks (-1: all, 0: none)."""
    tower.requires_grad_(False)
    if count == 0:
        return
    layers = tower_layers(tower)
    if count > len(layers.blocks):
        raise UserError(
            f"{option} {count}: the tower has {len(layers.blocks)} blocks; -1 trains all of it"
        )
    blocks = layers.blocks if count == ALL_BLOCKS else layers.blocks[-count:]
    inside = {name for block in blocks for name, _ in block}
    matrices = [
        (module, key)
        for name, module in tower.named_modules()
        for key in matrix_names(module)
        if f"{name}.{key}" in inside
    ]
    if not matrices:
        raise UserError(
            f"--lora {rank}: this tower has no linear layers, which LoRA needs; freeze it with"
            f" {option} 0, or fine-tune its last blocks without --lora"
        )
    smallest = min(min(getattr(module, key).shape) for module, key in matrices)
    if rank > smallest:
        raise UserError(
            f"--lora {rank}: the smallest matrix of the tower has rank {smallest}; give a lower"
            " rank (usual: 8)"
        )
    for module, key in matrices:
        _add(module, key, rank)


def add_head_lora(head: nn.Module, rank: int) -> None:
    """Freeze the projection of a CLIP and add LoRA to it.

    An adapter head, which is small, is trained as it is.
    """
    if isinstance(head, Projection):
        head.requires_grad_(False)
        rows, columns = head.weight.shape
        _add(head, "weight", min(rank, rows, columns))


def matrix_names(module: nn.Module) -> tuple[str, ...]:
    """The matrices of a module that LoRA is added to."""
    if isinstance(module, nn.Linear):
        return ("weight",)
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        return ("in_proj_weight",)
    return ()


def _add(module: nn.Module, key: str, rank: int) -> None:
    weight = getattr(module, key)
    rows, columns = weight.shape
    low_rank = LowRank(rows, columns, rank).to(device=weight.device)
    # Unsafe: without a trial call, since shapes are right and the weights may be on the meta
    # device.
    parametrize.register_parametrization(module, key, low_rank, unsafe=True)


def has_lora(model: nn.Module) -> bool:
    """Whether any matrix of a model has LoRA."""
    return any(parametrize.is_parametrized(module) for module in model.modules())


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the plain model, with LoRA and other adapters added to its matrices."""
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if PARAMETRIZATIONS not in name.split(".")
    }
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            keys = cast("nn.ModuleDict", module.parametrizations)
            prefix = f"{name}." if name else ""
            state |= {f"{prefix}{key}": getattr(module, key) for key in keys}
    return state
