"""Which parts of a tower are trained: its last blocks, LoRA on its linear layers, learning rates by depth.

LoRA is a parametrization of the weight and not a layer around it, so that code that reads `linear.weight` sees the
sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from m1clip.errors import UserError
from m1clip.model.pretrained import SideBySide

NamedParameters = list[tuple[str, nn.Parameter]]
ALL = -1
STORED = ".parametrizations.weight.original"
ADDED = ".parametrizations.weight.0."


def layer_groups(tower: nn.Module) -> list[NamedParameters]:
    """The parameters from the input to the output: [before the blocks, block 1, ..., block n, after the blocks]."""
    if isinstance(tower, SideBySide):  # the same depth of both
        sides = [layer_groups(part) for part in (tower.first, tower.second)]
        return [
            [(f"{part}.{name}", p) for part, group in zip(("first", "second"), depth, strict=True) for name, p in group]
            for depth in zip(*sides, strict=True)
        ]
    found = find_blocks(tower)
    if found is None:
        return [[], list(tower.named_parameters())]  # no blocks: one group
    prefix, blocks = f"{found[0]}.", found[1]
    groups: list[NamedParameters] = [[] for _ in range(len(blocks) + 2)]
    after = False
    for name, parameter in tower.named_parameters():
        if name.startswith(prefix):
            after = True
            number = list(blocks._modules).index(name.removeprefix(prefix).partition(".")[0])
            groups[number + 1].append((name, parameter))
        else:
            groups[-1 if after else 0].append((name, parameter))
    return groups


def find_blocks(tower: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential] | None:
    """(name, modules) of the list of modules with most parameters; of two with the same ones, the longer."""
    best: tuple[tuple[int, int], str, nn.ModuleList | nn.Sequential] | None = None
    for name, module in tower.named_modules():
        if (
            name
            and isinstance(module, nn.ModuleList | nn.Sequential)
            and len(module) > isinstance(module, nn.Sequential)
        ):
            size = (sum(p.numel() for p in module.parameters()), len(module))
            if size[0] and (best is None or size > best[0]):
                best = (size, name, module)
    return None if best is None else (best[1], best[2])


def layer_lr_factors(model: nn.Module, towers: tuple[str, ...], decay: float) -> dict[str, float]:
    """Parameter name -> factor of the learning rate: each group of a tower has `decay` times that of the next one.

    What follows the blocks, and everything outside the towers, has the full learning rate.
    """
    factors = {name: 1.0 for name, _ in model.named_parameters()}
    for tower in towers:
        for depth, group in enumerate(reversed(layer_groups(model.get_submodule(tower)))):
            factors |= {f"{tower}.{name}": decay**depth for name, _ in group}
    return factors


class LowRank(nn.Module):
    """weight -> weight + up @ down * scale; `up` starts at zero, so nothing changes until it is trained."""

    def __init__(self, outputs: int, inputs: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = alpha / rank

    def forward(self, weight: Tensor) -> Tensor:
        """(outputs, inputs) -> the same shape."""
        return weight + (self.up @ self.down) * self.scale


def linear_layers(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """All linear layers with their names."""
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]


def unfreeze(tower: nn.Module, count: int, option: str, rank: int = 0, alpha: float = 16.0) -> None:
    """Train the last `count` blocks of a tower and what follows them (-1: all, 0: nothing), or LoRA in that part.

    In a tower without linear layers, the last blocks are trained in full even if LoRA is requested.
    """
    groups = layer_groups(tower)
    blocks = max(len(groups) - 2, 0)
    if count > blocks:
        raise UserError(f"{option} {count}: the tower has {blocks} blocks; -1 trains all of it")
    trained = groups if count == ALL else groups[-1 - count :] if count else []
    tower.requires_grad_(False)
    for group in trained:
        for _, parameter in group:
            parameter.requires_grad_(True)
    if rank and count and (count == ALL or linear_layers(tower)):
        add_lora(tower, rank, alpha, {name.rpartition(".")[0] for group in trained for name, _ in group})


def add_lora(tower: nn.Module, rank: int, alpha: float, inside: set[str] | None = None) -> int:
    """Add LoRA to the linear layers of a tower, or to those in `inside`, and freeze the rest; returns their number."""
    chosen = [(name, layer) for name, layer in linear_layers(tower) if inside is None or name in inside]
    if not chosen:
        raise UserError(
            "--lora-rank: this tower has convolutions and no linear layer; freeze it, or train its last blocks: "
            "--unfreeze-image (or --unfreeze-text) 0 or N"
        )
    tower.requires_grad_(False)
    for _, layer in chosen:
        outputs, inputs = layer.weight.shape
        if rank > min(outputs, inputs):
            raise UserError(f"--lora-rank {rank} is more than the rank of a matrix of {outputs} x {inputs}")
        added = LowRank(outputs, inputs, rank, alpha).to(layer.weight.device)
        parametrize.register_parametrization(layer, "weight", added)
    return len(chosen)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with LoRA merged into the weights."""
    merged: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    for name, tensor in model.state_dict().items():
        if name.endswith(STORED):
            layer = name.removesuffix(STORED)
            merged[f"{layer}.weight"] = modules[layer].weight.detach()
        elif ADDED not in name:
            merged[name] = tensor
    return merged
