"""The exact gradient of a large batch in the memory of a small one (GradCache, arXiv 2101.06983).

A contrastive loss needs all features of the batch at once, but features are small: only the towers' activations are
large. So every chunk is encoded without a graph, the loss is taken once over all features, and then each chunk is
encoded again, with a graph, and takes the gradient of its own features back through its tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Side:
    """One tower's part of the work: `encode(rows)` gives the features of those rows of its input.

    It must give the same features each time it is asked: random draws are a function of the rows.
    """

    encode: Callable[[slice], Tensor]
    rows: int
    chunk: int

    def chunks(self) -> list[slice]:
        """All rows in order; the last chunk may be smaller."""
        return [slice(at, min(at + self.chunk, self.rows)) for at in range(0, self.rows, self.chunk)]


@dataclass(frozen=True)
class Plan:
    """How a chunked backward pass runs its towers."""

    context: Callable[[], AbstractContextManager[object]] = nullcontext  # autocast, or nothing
    no_autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # its opposite, for backward passes
    scale: Callable[[Tensor], Tensor] = lambda loss: loss  # what an fp16 scaler does to a loss
    graphs: bool = False  # encode with a graph in the first pass too, where the compiled code would differ
    mark: Callable[[str], None] = lambda phase: None


def chunked_backward(
    sides: Sequence[Side], loss_of: Callable[[list[Tensor]], Tensor], plan: Plan | None = None
) -> Tensor:
    """Add the gradient of `loss_of(features of each side)` to every parameter; gives the loss, detached.

    What `loss_of` reads beside the features (temperature, bias) gets its gradient from the one loss, once.
    """
    plan = plan or Plan()
    plan.mark("forward")
    # One autocast context a pass: its cache of cast weights saves a cast for each chunk, but casts made without a
    # graph must not be met again in the pass that needs one.
    with plan.context(), torch.set_grad_enabled(plan.graphs):
        whole = [torch.cat([side.encode(rows).detach() for rows in side.chunks()]) for side in sides]
    features = [rows.requires_grad_() for rows in whole]
    loss = loss_of(features)
    plan.mark("backward")
    plan.scale(loss).backward()
    with plan.context():
        for side, wanted in zip(sides, features, strict=True):
            for rows, gradient in _gradients(side, wanted):
                plan.mark("forward")
                again = side.encode(rows)
                plan.mark("backward")
                with plan.no_autocast():
                    again.backward(gradient)
    return loss.detach()


def _gradients(side: Side, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    assert features.grad is not None, "the loss does not depend on the features"
    for rows in side.chunks():
        yield rows, features.grad[rows]
