"""Gradient checkpointing on the CPU: torch's own would load torch's whole compiler, 130 MB, to save memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def computed_again(module: nn.Module, function: Callable[..., Tensor], x: Tensor, *rest: object) -> Tensor:
    """function(x, *rest), a method of the module, whose inside is computed again in the backward pass, not kept."""
    draws = bool(getattr(module, "dropout", 0.0))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        moving = [p for p in module.parameters() if p.requires_grad]
        return cast("Tensor", _Again.apply(function, draws, rest, x, *moving))
    # The random state is kept only for dropout: to read it has no place in a step that is recorded for replay.
    return cast("Tensor", checkpoint(function, x, *rest, use_reentrant=False, preserve_rng_state=draws))


class _Again(torch.autograd.Function):
    """The function without a graph, and once more with one when its gradient is asked for."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], draws: bool, rest: tuple[object, ...], x: Tensor, *moving: Tensor
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, *moving)
        ctx.function, ctx.rest, ctx.random = function, rest, torch.get_rng_state() if draws else None
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        with _autocast(ctx):
            return function(x, *rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *moving = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[3])
        wanted = [x, *moving] if x.requires_grad else moving
        now = torch.get_rng_state() if ctx.random is not None else None
        try:
            if ctx.random is not None:
                torch.set_rng_state(ctx.random)  # the same dropout
            with torch.enable_grad(), _autocast(ctx):
                y = ctx.function(x, *ctx.rest)
        finally:
            if now is not None:
                torch.set_rng_state(now)
        # torch.autograd.grad, which would load the compiler's symbols to look at the shape of a given gradient.
        found = torch.autograd.graph._engine_run_backward(
            (y,), (grad,), False, False, tuple(wanted), True, accumulate_grad=False
        )
        return None, None, None, *(() if x.requires_grad else (None,)), *found


def _autocast(ctx: Any) -> torch.autocast:
    """As it was; without its cache, in which a weight that was cast without a graph would be found again with one."""
    on, dtype = ctx.autocast
    return torch.autocast("cpu", dtype=dtype, enabled=on, cache_enabled=False)
