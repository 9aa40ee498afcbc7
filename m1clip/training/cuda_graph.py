"""CUDA graphs: capture a step once, then replay it with a single launch.

The step of a small model has a thousand short kernels, which the host launches more slowly than the GPU runs them. A
graph needs fixed shapes (texts are padded to the longest so far in their group), learning rates on the
device, and no synchronization.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.loader import Batch
from m1clip.errors import first_line
from m1clip.text.base import BUCKET, rounded
from m1clip.training.oom import MemoryPressure

if TYPE_CHECKING:
    from m1clip.training.step import StepResult, TrainStep

WARMUP_STEPS = 3  # before the capture: they create the optimizer state and trigger compilation
MAX_CAPTURES = (
    8  # after that, assume that shapes keep changing: images have different numbers of captions
)
MAX_MEMORY = 0.25  # fraction of device memory for activations: the graph holds a second set of them


class CapturedStep:
    """Replays the steps of a TrainStep, starting with the fourth step of the same shapes."""

    def __init__(self, train_step: TrainStep) -> None:
        self.train_step = train_step
        self.disabled = ""  # the reason why capturing is disabled
        self.captures = 0
        self._lengths: dict[
            int, list[int]
        ] = {}  # number of captions -> padded length of each group
        self.reset()

    def reset(self) -> None:
        """Drop the graph, because the tensors it refers to are being replaced."""
        self._shapes: tuple[Any, ...] = ()
        self._steps = 0  # with these shapes
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._result: tuple[Tensor, Tensor] | None = None  # loss and gradient norm

    @property
    def settled(self) -> bool:
        """Whether steps are being replayed, or capturing is disabled."""
        return self._graph is not None or bool(self.disabled)

    def accepts(self, batch: Batch) -> bool:
        """Whether this step can be replayed: no micro-batches."""
        return not self.disabled and not 0 < self.train_step.micro_batch < len(batch)

    def replay(self, batch: Batch, step: int) -> StepResult | None:
        """Loss and gradient norm of a padded batch, on the device; None if it must run without a graph."""
        from m1clip.training.step import StepResult

        train_step = self.train_step
        key = (
            *((name, tuple(t.shape), t.dtype) for name, t in batch.tensors().items()),
            batch.lengths,
        )
        if key != self._shapes:
            self.reset()
            self._shapes = key
        if self._graph is None:
            self._steps += 1
            if self._steps <= WARMUP_STEPS or not self._may_capture():
                return None
        train_step.phases.mark("copy")
        batch = batch.to(train_step.device.torch, non_blocking=True)
        if self._graph is None and not self._capture(batch, step):
            return None
        assert self._graph is not None
        assert self._result is not None
        torch._foreach_copy_(self._inputs, list(batch.tensors().values()))
        train_step.phases.mark("step")
        self._graph.replay()
        # The next replay overwrites them.
        loss, grad_norm = (value.clone() for value in self._result)
        train_step.phases.stop()
        return StepResult(loss, grad_norm)

    def pad(self, batch: Batch) -> Batch:
        """The batch with each group of texts padded to its longest length so far; padding does not affect features."""
        if batch.tokens is None or not batch.lengths:
            return batch
        groups, context = batch.text_rows(), self.train_step.model.config.context_length
        lengths = [rounded(max(batch.lengths[rows]), context) for rows in groups]
        known = self._lengths.get(len(batch.tokens), [0] * len(lengths))
        # One bucket more than needed: whenever a group grows, the step has to be recaptured.
        padded = [
            most if length <= most else rounded(length + BUCKET, context)
            for length, most in zip(lengths, known, strict=True)
        ]
        # Texts are sorted by length and truncated to the longest of their group: no group may be shorter than the last.
        padded = list(itertools.accumulate(padded, max))
        self._lengths[len(batch.tokens)] = padded
        each = tuple(
            length
            for rows, length in zip(groups, padded, strict=True)
            for _ in range(rows.start, rows.stop)
        )
        missing = padded[-1] - batch.tokens.shape[1]
        tokens = F.pad(batch.tokens, (0, missing)) if missing else batch.tokens
        if missing and batch.tokens.is_pinned():
            tokens = tokens.pin_memory()
        return dataclasses.replace(batch, tokens=tokens, lengths=each)

    def _may_capture(self) -> bool:
        device = self.train_step.device
        if self.captures >= MAX_CAPTURES:
            self.disabled = f"the shapes of the batches changed {MAX_CAPTURES} times"
        elif device.peak_bytes() - device.memory_bytes() > MAX_MEMORY * device.total_bytes():
            self.disabled = (
                "the activations of a step use too much device memory to hold them twice"
            )
        return not self.disabled

    def _capture(self, batch: Batch, step: int) -> bool:
        train_step = self.train_step
        self.captures += 1
        copies: dict[str, Any] = {name: t.clone() for name, t in batch.tensors().items()}
        batch = dataclasses.replace(batch, **copies)  # the graph reads from these at each replay
        graph = torch.cuda.CUDAGraph()
        train_step.phases.silent = True
        try:
            # This thread only: another thread may be pinning the memory of the next batch.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = train_step.compute_gradients(batch, step)
                grad_norm = train_step.update_weights(loss)
        except (RuntimeError, MemoryPressure) as error:
            # Out of memory, or a kernel that cannot be captured: the step without a graph handles both.
            self.disabled = first_line(error)
            train_step.clear()
            return False
        finally:
            train_step.phases.silent = False
        self._graph = graph
        self._inputs = list(batch.tensors().values())
        self._result = (loss, grad_norm)
        return True
