"""A whole training step as one thing: compiled piece by piece, and on CUDA replayed as one graph.

A small model's step is hundreds of short kernels, and the host cannot launch them as fast as the device runs them.
A graph is launched once. It needs fixed shapes (one graph is kept for each), a learning rate that lies on the device
(`Optimizer(..., capturable=True)`), and nothing that the host reads in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from m1clip.model.clip import CLIP

Work = Callable[..., tuple[Tensor, ...]]
WARM = 3  # real steps before the capture: they make the optimizer's state and compile what is compiled


def compile_blocks(model: CLIP, **options: Any) -> None:
    """torch.compile each block in place: blocks of a tower share one compilation, a tenth of the whole model's time."""
    for tower in (model.image_tower.transformer, model.text_tower.transformer):
        *first, last = tower.blocks
        for block in first:
            block.compile(**options)
        for way in ("forward", "at", "mean"):  # the last block is read in one of three ways
            setattr(last, way, torch.compile(getattr(last, way), **options))


class CapturedStep:
    """Calls `work`, and from the fourth call with the same shapes on replays it as a CUDA graph.

    Every call is a real step: nothing is run for the sake of the capture alone. What is returned is overwritten by the
    next call of the same shapes, so it is copied.
    """

    def __init__(self, work: Work, model: nn.Module) -> None:
        self.work, self.model = work, model
        self.graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]] = {}
        self.calls: dict[tuple[Any, ...], int] = {}
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One step with these inputs, all of them tensors on one device."""
        if inputs[0].device.type != "cuda":
            return self.work(*inputs)
        key = tuple((tuple(t.shape), t.dtype) for t in inputs)
        if key not in self.graphs:
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] <= WARM:
                return self._aside(inputs)
            self.graphs[key] = self._capture(inputs)
        graph, places, outputs = self.graphs[key]
        torch._foreach_copy_(places, list(inputs))
        graph.replay()
        return tuple(t.clone() for t in outputs)

    def _aside(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """On another stream, as a capture will be: libraries prepare their workspaces per stream."""
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            outputs = self.work(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        return outputs

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]:
        places = [t.clone() for t in inputs]
        for p in self.model.parameters():
            p.grad = None  # the graph has gradients of its own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = self.work(*places)
        self.pool = self.pool or graph.pool()
        return graph, places, outputs
