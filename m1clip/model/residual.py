"""Residual adapters on the heads of a trained model, merged when the model is saved.

They begin as the identity. What is trained is added to the matrices of a head, and weight decay
pulls it to zero: towards the initial model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from m1clip.model.heads import Head, Projection

# Where an adapter is: behind the projection of a CLIP, on its embeddings, or before it, on the
# features of the towers.
ResidualKind = Literal["embeddings", "features"]


class EmbeddingResidual(nn.Module):
    """weight -> weight + adapter @ weight: a residual linear layer after a projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.adapter = nn.Parameter(torch.zeros(width, width))

    def forward(self, weight: Tensor) -> Tensor:
        """(width, features) -> the same shape, in the weight's own precision."""
        with torch.autocast(weight.device.type, enabled=False):
            return torch.addmm(weight, self.adapter, weight)


class FeatureResidual(nn.Module):
    """weight -> weight + change: a residual linear layer on the input of a head."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.change = nn.Parameter(torch.zeros(shape))

    def forward(self, weight: Tensor) -> Tensor:
        """(outputs, inputs) -> the same shape."""
        return weight + self.change


def residual_kinds(head: nn.Module) -> tuple[ResidualKind, ...]:
    """The adapters that a head can have."""
    return ("embeddings", "features") if isinstance(head, Projection) else ("features",)


def add_residual(head: nn.Module, kind: ResidualKind) -> None:
    """Freeze the matrices of a head and add adapters to them; biases are trained as they are."""
    if isinstance(head, Head):
        layers: list[nn.Linear] = [head.project, head.up, head.down]
    else:
        layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        residual: nn.Module
        if kind == "embeddings":
            residual = EmbeddingResidual(layer.weight.shape[0])
        else:
            residual = FeatureResidual(layer.weight.shape)
        layer.weight.requires_grad_(False)
        # Unsafe: without a trial call, since shapes are right and the weights may be on the meta
        # device.
        parametrize.register_parametrization(
            layer, "weight", residual.to(layer.weight.device), unsafe=True
        )
