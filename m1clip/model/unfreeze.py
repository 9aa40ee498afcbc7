"""Which parts of a tower are trained: its last blocks, with learning rates by depth."""

from torch import nn

from m1clip.errors import UserError
from m1clip.model.pretrained.efficientnet import ConcatTower

NamedParameters = list[tuple[str, nn.Parameter]]
ALL = -1


def layer_groups(tower: nn.Module) -> list[NamedParameters]:
    """The parameters from the input to the output: [before the blocks, block 1, ..., block n, after the blocks]."""
    if isinstance(tower, ConcatTower):  # the same depth of both
        sides = [layer_groups(part) for part in (tower.first, tower.second)]
        return [
            [
                (f"{part}.{name}", p)
                for part, group in zip(("first", "second"), depth, strict=True)
                for name, p in group
            ]
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


def layer_lr_factors(model: nn.Module, towers: tuple[str, ...], decay: float) -> dict[str, float]:
    """Parameter name -> factor of the learning rate: each group of a tower has `decay` times that of the next one.

    What follows the blocks, and everything outside the towers, has the full learning rate.
    """
    factors = {name: 1.0 for name, _ in model.named_parameters()}
    for tower in towers:
        for depth, group in enumerate(reversed(layer_groups(model.get_submodule(tower)))):
            factors |= {f"{tower}.{name}": decay**depth for name, _ in group}
    return factors


def unfreeze(tower: nn.Module, count: int, option: str) -> None:
    """Train the last `count` blocks of a tower and what follows them (-1: all, 0: nothing)."""
    groups = layer_groups(tower)
    blocks = max(len(groups) - 2, 0)
    if count > blocks:
        raise UserError(f"{option} {count}: the tower has {blocks} blocks; -1 trains all of it")
    trained = groups if count == ALL else groups[-1 - count :] if count else []
    tower.requires_grad_(False)
    for group in trained:
        for _, parameter in group:
            parameter.requires_grad_(True)
