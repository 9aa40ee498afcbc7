"""The layers of a model by depth (input, blocks, output, heads), and which of them are trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from m1clip.errors import UserError
from m1clip.model.pretrained.concat import ConcatTower

NamedParameters = list[tuple[str, nn.Parameter]]
SIDES = ("image", "text")
SCALE_LAYER = "scale"  # temperature and bias of the logits
ALL_BLOCKS = -1  # as the number of blocks to train


@dataclass(frozen=True)
class TowerLayers:
    """The parameters of a tower by depth; a tower without blocks has only an output."""

    input: NamedParameters = field(default_factory=list)  # before the blocks, such as embeddings
    blocks: list[NamedParameters] = field(default_factory=list)
    output: NamedParameters = field(default_factory=list)  # after the blocks, such as a norm

    def from_input_to_output(self) -> list[NamedParameters]:
        """List all layers, also empty ones."""
        return [self.input, *self.blocks, self.output]


def tower_layers(tower: nn.Module) -> TowerLayers:
    """Find the blocks of a tower, and what precedes and follows them."""
    if isinstance(tower, ConcatTower):
        return _side_by_side(tower)
    block_list = find_blocks(tower)
    if block_list is None:
        return TowerLayers(output=list(tower.named_parameters()))
    list_name, modules = block_list
    numbers = {name: number for number, name in enumerate(modules._modules)}
    layers = TowerLayers(blocks=[[] for _ in numbers])
    is_after = False
    for name, parameter in tower.named_parameters():
        if name.startswith(f"{list_name}."):
            is_after = True
            module_name = name.removeprefix(f"{list_name}.").partition(".")[0]
            layers.blocks[numbers[module_name]].append((name, parameter))
        elif is_after:
            layers.output.append((name, parameter))
        else:
            layers.input.append((name, parameter))
    return layers


def _side_by_side(tower: ConcatTower) -> TowerLayers:
    """Join the layers of all towers, counted from their outputs: the last blocks are side by side."""
    parts = [tower_layers(part) for part in tower.parts]
    depth = max(len(part.blocks) for part in parts)
    joined = TowerLayers(blocks=[[] for _ in range(depth)])
    for number, part in enumerate(parts):
        own = joined.blocks[depth - len(part.blocks) :]
        targets = [joined.input, *own, joined.output]
        for target, layer in zip(targets, part.from_input_to_output(), strict=True):
            target += [(f"parts.{number}.{name}", parameter) for name, parameter in layer]
    return joined


def find_blocks(tower: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential] | None:
    """(name, modules) of the list of modules with most parameters.

    Of two with the same ones, the longer.
    """
    named = [
        (name, part)
        for name, part in tower.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
    ]
    lists = [
        (name, part) for name, part in named if name and len(part) > isinstance(part, nn.Sequential)
    ]
    sizes = [(sum(p.numel() for p in part.parameters()), len(part)) for _, part in lists]
    largest = max(sizes, default=(0, 0))
    return lists[sizes.index(largest)] if largest[0] else None


def model_layers(model: nn.Module) -> dict[str, list[str]]:
    """Layer name -> its parameters: "image/block 1", ..., "text/head", "scale".

    Every parameter is in one layer. A tower without blocks has the layer "image/output".
    """
    layers: dict[str, list[str]] = {}
    for side in SIDES:
        tower_depths = tower_layers(model.get_submodule(f"{side}_tower"))
        titles = [
            "input",
            *(f"block {number}" for number in range(1, len(tower_depths.blocks) + 1)),
            "output",
        ]
        for title, group in zip(titles, tower_depths.from_input_to_output(), strict=True):
            layers[f"{side}/{title}"] = [f"{side}_tower.{name}" for name, _ in group]
        head = model.get_submodule(f"{side}_head")
        layers[f"{side}/head"] = [f"{side}_head.{name}" for name, _ in head.named_parameters()]
    placed = {name for names in layers.values() for name in names}
    layers[SCALE_LAYER] = [name for name, _ in model.named_parameters() if name not in placed]
    return {layer: names for layer, names in layers.items() if names}


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
