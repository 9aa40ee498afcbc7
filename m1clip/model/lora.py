"""LoRA: a matrix that stands still plus a product of two thin ones that move; merged into one when it is saved.

It is a parametrisation of the weight and not a layer around it, so that code which reads `linear.weight` sees the sum.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from m1clip.errors import UserError

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


STORED = ".parametrizations.weight.original"
ADDED = ".parametrizations.weight.0."


class LowRank(nn.Module):
    """weight -> weight + up @ down * scale; `up` begins at zero, so nothing changes until it is trained."""

    def __init__(self, outputs: int, inputs: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = alpha / rank

    def forward(self, weight: Tensor) -> Tensor:
        """(outputs, inputs) -> the same shape."""
        return weight + (self.up @ self.down) * self.scale


def linears(module: nn.Module, targets: tuple[str, ...]) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers whose name ends in one of the targets; all of them where there are none."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and (not targets or name.endswith(targets)):
            yield name, layer


def add_lora(module: nn.Module, rank: int, alpha: float, targets: tuple[str, ...] = (), count: int = ALL) -> int:
    """Put LoRA on the linear layers of a tower, or of its last `count` blocks, and hold all else in it still.

    Gives how many layers got one. A tower of convolutions alone has nowhere to put it, which is an error.
    """
    every = list(linears(module, ()))
    if not every:
        raise UserError(
            "--lora-rank: this tower has convolutions and no linear layer; hold it still, or train its last "
            "blocks whole: --unfreeze-image (or train-text) 0 or N"
        )
    inside = _names_in_last(module, count)
    chosen = [(name, layer) for name, layer in linears(module, targets) if inside is None or name in inside]
    if not chosen:
        names = sorted({name.rpartition(".")[2] for name, _ in every})
        raise UserError(
            f"--lora-targets {', '.join(targets)}: no linear layer is called so (there: {', '.join(names)})"
        )
    module.requires_grad_(False)
    for _, layer in chosen:
        outputs, inputs = layer.weight.shape
        if rank > min(outputs, inputs):
            raise UserError(f"--lora-rank {rank} is more than a matrix of {outputs} x {inputs} has")
        added = LowRank(outputs, inputs, rank, alpha).to(layer.weight.device)
        parametrize.register_parametrization(layer, "weight", added)
    return len(chosen)


def _names_in_last(module: nn.Module, count: int) -> set[str] | None:
    """Names of the layers in the last `count` blocks and after them; None: all of them."""
    if count == ALL:
        return None
    return {name.rpartition(".")[0] for rung in ladder(module)[-1 - count :] for name, _ in rung}


def open_tower(tower: nn.Module, count: int, what: str, rank: int, alpha: float, targets: tuple[str, ...]) -> None:
    """Let of a tower move what was asked for: nothing (0), its last blocks, all (-1), or LoRA in that part.

    Where LoRA is asked for, a tower without linear layers may still have its last blocks trained whole.
    """
    train_last(tower, count, what)
    if rank and count != 0 and (count == ALL or any(True for _ in linears(tower, ()))):
        add_lora(tower, rank, alpha, targets, count)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as if LoRA had never been there: each sum written out under the plain name."""
    merged: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    for name, tensor in model.state_dict().items():
        if name.endswith(STORED):
            layer = name.removesuffix(STORED)
            merged[f"{layer}.weight"] = modules[layer].weight.detach()
        elif ADDED not in name:
            merged[name] = tensor
    return merged
