"""The exact gradient of a large batch in the memory of a micro-batch (GradCache, arXiv 2101.06983).

A contrastive loss needs all features of the batch at once. Features are small; only the towers' activations are large.
So all micro-batches are encoded without a graph, the loss is computed once over all features, and then each micro-batch
is re-encoded with a graph and backpropagates the gradient of its features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tower:
    """One encoder and its input: `encode(rows)` returns the features of those rows and must be deterministic."""

    encode: Callable[[slice], Tensor]
    rows: int
    micro_batch: int

    def micro_batches(self) -> list[slice]:
        """All rows in order; the last slice may be smaller."""
        return [slice(at, min(at + self.micro_batch, self.rows)) for at in range(0, self.rows, self.micro_batch)]


@dataclass(frozen=True)
class GradCache:
    """Runs the two passes; between them, the caller computes the gradient of the features."""

    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    no_autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # disables it for backward passes
    mark: Callable[[str], None] = lambda phase: None
    first_pass_with_graph: bool = False

    def encode(self, towers: Sequence[Tower]) -> list[Tensor]:
        """The features of each tower, without a graph."""
        self.mark("forward")
        # One autocast context per pass: its cache of cast weights saves a cast per micro-batch, but casts made without
        # a graph must not be reused in the pass that needs one.
        with self.autocast(), torch.set_grad_enabled(self.first_pass_with_graph):
            return [torch.cat([t.encode(rows).detach() for rows in t.micro_batches()]) for t in towers]

    def backward(self, towers: Sequence[Tower], gradients: Sequence[Tensor]) -> None:
        """Add to every parameter what follows from the gradients of the features."""
        with self.autocast():
            for tower, gradient in zip(towers, gradients, strict=True):
                for rows in tower.micro_batches():
                    self.mark("forward")
                    encoded = tower.encode(rows)
                    self.mark("backward")
                    with self.no_autocast():
                        encoded.backward(gradient[rows])
