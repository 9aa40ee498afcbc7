"""Which parts of a tower are trained: its last blocks, with learning rates by depth."""

from torch import nn

from m1clip.errors import UserError
from m1clip.model.blocks import tower_layers

ALL_BLOCKS = -1


def layer_lr_factors(model: nn.Module, towers: tuple[str, ...], decay: float) -> dict[str, float]:
    """Parameter name -> factor of the learning rate, which decays from output to input.

    Each layer of a tower has `decay` times the factor of the next one. What follows the blocks,
    and everything outside the towers, has the full learning rate.
    """
    factors = {name: 1.0 for name, _ in model.named_parameters()}
    for tower in towers:
        layers = tower_layers(model.get_submodule(tower)).from_input_to_output()
        for depth, group in enumerate(reversed(layers)):
            factors |= {f"{tower}.{name}": decay**depth for name, _ in group}
    return factors


def unfreeze(tower: nn.Module, count: int, option: str) -> None:
    """Train the last `count` blocks of a tower and what follows them (-1: all, 0: nothing)."""
    layers = tower_layers(tower)
    blocks = len(layers.blocks)
    if count > blocks:
        raise UserError(f"{option} {count}: the tower has {blocks} blocks; -1 trains all of it")
    tower.requires_grad_(count == ALL_BLOCKS)
    if count > 0:
        for group in layers.from_input_to_output()[-1 - count :]:
            for _, parameter in group:
                parameter.requires_grad_(True)
