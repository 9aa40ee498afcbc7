"""How deep a parameter lies in a tower, whoever made the tower: what comes before its blocks, the blocks, what follows.

Nothing is known of a tower but its modules. Its blocks are the row of modules that holds most of its parameters, and
modules are registered in the order in which the data meets them.
"""

from __future__ import annotations

from torch import nn

Named = list[tuple[str, nn.Parameter]]


def ladder(tower: nn.Module) -> list[Named]:
    """The parameters from the input to the output: [before the blocks, block 1, ..., block n, after the blocks]."""
    row = blocks_of(tower)
    if row is None:
        return [[], list(tower.named_parameters())]  # no blocks: one piece, which moves whole
    where, blocks = row
    rungs: list[Named] = [[] for _ in range(len(blocks) + 2)]
    inside = f"{where}."
    begun = False
    for name, parameter in tower.named_parameters():
        if name.startswith(inside):
            begun = True
            number = list(blocks._modules).index(name.removeprefix(inside).partition(".")[0])
            rungs[number + 1].append((name, parameter))
        else:
            rungs[-1 if begun else 0].append((name, parameter))
    return rungs


def blocks_of(tower: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential] | None:
    """(name, modules) of the row with most parameters; of two that hold the same ones, the inner, which has more."""
    best: tuple[tuple[int, int], str, nn.ModuleList | nn.Sequential] | None = None
    for name, module in tower.named_modules():
        row = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(module) > 1)
        if not name or not row:
            continue
        assert isinstance(module, nn.ModuleList | nn.Sequential)
        size = (sum(p.numel() for p in module.parameters()), len(module))
        if size[0] and (best is None or size > best[0]):
            best = (size, name, module)
    return None if best is None else (best[1], best[2])


def rate_shares(model: nn.Module, towers: tuple[str, ...], decay: float) -> dict[str, float]:
    """Parameter name -> share of the learning rate: each rung of a tower has `decay` times that of the rung above.

    What follows the blocks, and all that is in no tower, has the full rate.
    """
    shares = {name: 1.0 for name, _ in model.named_parameters()}
    for tower in towers:
        rungs = ladder(model.get_submodule(tower))
        for below, rung in enumerate(reversed(rungs)):
            for name, _ in rung:
                shares[f"{tower}.{name}"] = decay**below
    return shares
