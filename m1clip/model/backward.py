"""Backward passes that continue from given gradients.

`torch.autograd.backward` and `torch.autograd.grad` do the same, but load torch's compiler to
compare the shapes of given gradients: 480 modules, 40 MB and more than a second at the first step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def backward_from(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add the gradients of the parameters behind some tensors, given the gradients of the tensors.

    A tensor without a graph is skipped: that of a frozen tower without a head.
    """
    pairs = [pair for pair in zip(tensors, gradients, strict=True) if pair[0].requires_grad]
    if not pairs:
        return
    roots, root_gradients = zip(*pairs, strict=True)
    torch.autograd.graph._engine_run_backward(
        roots, root_gradients, False, False, (), True, accumulate_grad=True
    )


def gradients_from(
    tensor: Tensor, gradient: Tensor, inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of some inputs of a tensor, given its own."""
    return torch.autograd.graph._engine_run_backward(
        (tensor,), (gradient,), False, False, tuple(inputs), True, accumulate_grad=False
    )
