"""LoRA: a matrix that stands still plus a product of two thin ones that move; merged into one when it is saved.

It is a parametrisation of the weight and not a layer around it, so that code which reads `linear.weight` sees the sum.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from m1clip.errors import UserError

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


def add_lora(module: nn.Module, rank: int, alpha: float, targets: tuple[str, ...] = ()) -> int:
    """Put LoRA on the linear layers of a tower and hold everything else in it still; gives how many got one."""
    chosen = list(linears(module, targets))
    if not chosen:
        names = sorted({name.rpartition(".")[2] for name, _ in linears(module, ())})
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
