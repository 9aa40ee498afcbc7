"""CUDA graphs: capture a step once, then replay it with a single launch.

The step of a small model has a thousand short kernels, which the host launches more slowly than the
GPU runs them. A graph needs fixed shapes (texts are padded to the longest so far in their group),
learning rates on the device, and no synchronization.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.loader import Batch
from m1clip.errors import first_line
from m1clip.hardware.device import Device
from m1clip.hardware.memory import MemoryPressure
from m1clip.hardware.timing import Phases
from m1clip.text.base import LENGTH_MULTIPLE, rounded

# (batch, step, micro_batch, mark, probe) -> a named tuple of tensors on the device
Step = Callable[..., Any]
Mark = Callable[[str], None]
# Before the capture: they create the optimizer state and trigger compilation.
GRAPH_WARMUP_STEPS = 3
# After that, assume that shapes keep changing: images have different numbers of captions.
MAX_CAPTURES = 8
# Fraction of device memory for activations: the graph holds a second set of them.
GRAPH_MEMORY_FRACTION = 0.25


class CapturedStep:
    """Replays a training step as a CUDA graph, from the fourth step with the same shapes on."""

    def __init__(
        self,
        step: Step,
        clear: Callable[[], None],
        device: Device,
        phases: Phases,
        context_length: int,
    ) -> None:
        """`step` is captured, and called for what is not replayed.

        `clear` forgets a capture that failed.
        """
        self.step = step
        self.clear = clear
        self.device = device
        self.phases = phases
        self.context_length = context_length
        self.disabled = ""  # the reason why capturing is disabled
        self.captures = 0
        # Number of captions -> padded length of each group of texts.
        self._lengths: dict[int, list[int]] = {}
        self.reset()

    def reset(self) -> None:
        """Drop the graph, because the tensors it refers to are being replaced."""
        self._shapes: tuple[Any, ...] = ()
        self._steps = 0  # with these shapes
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._result: Any = None  # of the captured step

    @property
    def settled(self) -> bool:
        """Whether steps are being replayed, or capturing is disabled."""
        return self._graph is not None or bool(self.disabled)

    @property
    def pool_id(self) -> tuple[int, int] | None:
        """The memory pool of the graph; None without a graph."""
        return None if self._graph is None else self._graph.pool()

    @property
    def input_bytes(self) -> int:
        """Memory of the copies that the graph reads its batch from."""
        return sum(tensor.nbytes for tensor in self._inputs)

    def accepts(self, batch: Batch, micro_batch: int) -> bool:
        """Whether this step can be replayed: no micro-batches."""
        return not self.disabled and not 0 < micro_batch < len(batch)

    def __call__(
        self, batch: Batch, step: int, micro_batch: int, mark: Mark, probe: Any = None
    ) -> Any:
        """Train on one batch.

        A step whose gradients a `probe` reads, or whose stages are timed, is not replayed.
        """
        if self.accepts(batch, micro_batch):
            batch = self.pad(batch)  # a probed step has the shapes of the others
            replays = probe is None and not self.phases.is_synchronized
            result = self.replay(batch, step, mark) if replays else None
            if result is not None:
                return result
        return self.step(batch, step, micro_batch, mark, probe)

    def replay(self, batch: Batch, step: int, mark: Mark) -> Any:
        """The result of a step with a padded batch; None if it must run without a graph."""
        key = (
            *((name, tuple(t.shape), t.dtype) for name, t in batch.tensors().items()),
            batch.lengths,
        )
        if key != self._shapes:
            self.reset()
            self._shapes = key
        if self._graph is None:
            self._steps += 1
            if self._steps <= GRAPH_WARMUP_STEPS or not self._may_capture():
                return None
        mark("copy")
        batch = batch.to(self.device.torch, non_blocking=True)
        if self._graph is None and not self._capture(batch, step, mark):
            return None
        assert self._graph is not None
        assert self._result is not None
        torch._foreach_copy_(self._inputs, list(batch.tensors().values()))
        mark("step")
        self._graph.replay()
        # The next replay overwrites them.
        result = type(self._result)(*(value.clone() for value in self._result))
        self.phases.stop()
        return result

    def pad(self, batch: Batch) -> Batch:
        """The batch with each group of texts padded to its longest length so far.

        Padding does not affect features.
        """
        if batch.tokens is None or not batch.lengths:
            return batch
        groups = batch.text_rows()
        context = self.context_length
        lengths = [rounded(max(batch.lengths[rows]), context) for rows in groups]
        longest_so_far = self._lengths.get(len(batch.tokens), [0] * len(lengths))
        # One bucket more than needed: whenever a group grows, the step has to be recaptured.
        padded = [
            longest if length <= longest else rounded(length + LENGTH_MULTIPLE, context)
            for length, longest in zip(lengths, longest_so_far, strict=True)
        ]
        # Texts are sorted by length and truncated to the longest of their group: no group may be
        # shorter than the last.
        padded = list(itertools.accumulate(padded, max))
        self._lengths[len(batch.tokens)] = padded
        padded_lengths = tuple(
            length
            for rows, length in zip(groups, padded, strict=True)
            for _ in range(rows.start, rows.stop)
        )
        missing = padded[-1] - batch.tokens.shape[1]
        tokens = F.pad(batch.tokens, (0, missing)) if missing else batch.tokens
        if missing and batch.tokens.is_pinned():
            tokens = tokens.pin_memory()
        return dataclasses.replace(batch, tokens=tokens, lengths=padded_lengths)

    def _may_capture(self) -> bool:
        device = self.device
        if self.captures >= MAX_CAPTURES:
            self.disabled = f"the shapes of the batches changed {MAX_CAPTURES} times"
        elif (
            device.peak_bytes() - device.memory_bytes()
            > GRAPH_MEMORY_FRACTION * device.total_bytes()
        ):
            self.disabled = (
                "the activations of a step use too much device memory to hold them twice"
            )
        return not self.disabled

    def _capture(self, batch: Batch, step: int, mark: Mark) -> bool:
        self.captures += 1
        copies: dict[str, Any] = {name: t.clone() for name, t in batch.tensors().items()}
        batch = dataclasses.replace(batch, **copies)  # the graph reads from these at each replay
        graph = torch.cuda.CUDAGraph()
        self.phases.silent = True
        try:
            # This thread only: another thread may be pinning the memory of the next batch.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = self.step(batch, step, 0, mark)
        except (RuntimeError, MemoryPressure) as error:
            # Out of memory, or a kernel that cannot be captured: the plain step handles both.
            self.disabled = first_line(error)
            self.clear()
            return False
        finally:
            self.phases.silent = False
        self._graph = graph
        self._inputs = list(batch.tensors().values())
        self._result = result
        return True
