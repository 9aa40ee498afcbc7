"""Gradient checkpointing on the CPU: torch's own would load torch's whole compiler, 130 MB, to save memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def computed_again(module: nn.Module, function: Callable[..., Tensor], x: Tensor, *rest: object) -> Tensor:
    """function(x, *rest), a method of the module, whose inside is computed again in the backward pass, not kept."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        moving = [p for p in module.parameters() if p.requires_grad]
        return cast("Tensor", _Again.apply(function, rest, x, *moving))
    return cast("Tensor", checkpoint(function, x, *rest, use_reentrant=False))


class _Again(torch.autograd.Function):
    """The function without a graph, and once more with one when its gradient is asked for."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], rest: tuple[object, ...], x: Tensor, *moving: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *moving)
        ctx.function, ctx.rest, ctx.random = function, rest, torch.get_rng_state()
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return function(x, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *moving = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[2])
        wanted = [x, *moving] if x.requires_grad else moving
        on, dtype = ctx.autocast
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random)  # the same dropout
        with torch.enable_grad(), torch.autocast("cpu", dtype=dtype, enabled=on):
            y = ctx.function(x, *ctx.rest)
        torch.set_rng_state(now)
        # torch.autograd.grad, which would load the compiler's symbols to look at the shape of a given gradient.
        found = torch.autograd.graph._engine_run_backward(
            (y,), (grad,), False, False, tuple(wanted), True, accumulate_grad=False
        )
        return None, None, *(() if x.requires_grad else (None,)), *found
