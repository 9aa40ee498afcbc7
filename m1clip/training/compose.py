"""The training step of a run: the plain step, and around it what a run needs.

`compose_step` is the only place that puts them together:

- `train_step` (training/step.py), on CUDA in a `CapturedStep` (cuda/graph.py) that replays it as a CUDA graph where
  it can, or the step of MLX (mlx/step.py),
- `StepAttempts` (training/oom.py), with which the loop repeats it with a smaller micro-batch when memory runs out.

Time is measured through the `mark` of the plain step, gradients through its `probe`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from m1clip.cuda.graph import CapturedStep
from m1clip.data.loader import Batch
from m1clip.hardware.memory import map_large_blocks
from m1clip.hardware.timing import Phases
from m1clip.model.clip import CLIP
from m1clip.training.encode import Mark
from m1clip.training.muon import orthogonalize
from m1clip.training.oom import StepAttempts
from m1clip.training.optim import Optimizer
from m1clip.training.step import (
    PlainStep,
    Probe,
    StepParts,
    StepResult,
    parts_for_check,
    train_step,
)

NOT_ON_RANKS = "the ranks exchange the sizes of their batches on the host in each step"


class Step(Protocol):
    """One attempt at a step, as the loop makes it."""

    def __call__(
        self, batch: Batch, step: int, micro_batch: int, mark: Mark, probe: Probe | None
    ) -> StepResult: ...


@dataclass
class TrainStep:
    """The training step of a run: `attempt` trains the model, or runs out of memory.

    `attempts` repeats it.
    """

    parts: StepParts
    attempt: Step
    attempts: StepAttempts
    phases: Phases
    cuda_graph: CapturedStep | None = None

    def run(self, batch: Batch, step: int, probe: Probe | None = None) -> StepResult:
        """Train on one batch, as the loop does."""
        return self.attempts.repeat(self.attempt, batch, step, probe)

    @property
    def model(self) -> CLIP:
        """The model with its current weights."""
        return self.parts.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer with its current state."""
        return self.parts.update.optimizer

    def reset(self) -> None:
        """Forget what refers to weights and optimizer state, because they are being replaced."""
        if self.cuda_graph is not None:
            self.cuda_graph.reset()

    def clear(self) -> None:
        """Forget everything of a step that is repeated."""
        self.reset()
        drop_gradients(self.parts)

    def for_check(self, model: CLIP) -> GradientCheck:
        """The gradients of a copy of the model, to be compared."""
        parts = parts_for_check(self.parts, model)
        return GradientCheck(parts, partial(train_step, parts))

    def orthogonalize(self, x: Tensor) -> Tensor:
        """Muon's matmuls (k, m, n) as this device computes them.

        The result is float32 on the CPU.
        """
        return orthogonalize(x.to(self.parts.device.torch)).float().cpu()


@dataclass
class GradientCheck:
    """Computes gradients without updating anything, for comparisons between devices."""

    parts: StepParts
    plain: PlainStep  # leaves the gradients in the parameters

    def compute_gradients(self, batch: Batch, step: int, micro_batch: int | None = None) -> Tensor:
        """The loss of a batch; its gradients are in the parameters."""
        return self.plain(batch, step, micro_batch).loss

    def without_teacher(self) -> GradientCheck:
        """The same check of the loss without distillation."""
        if self.parts.loss.teacher is None:
            return self
        parts = replace(self.parts, loss=replace(self.parts.loss, teacher=None))
        return GradientCheck(parts, partial(train_step, parts))


def drop_gradients(parts: StepParts) -> None:
    """Forget the gradients of a step that is repeated, and free the memory of the device."""
    parts.update.optimizer.zero_grad()
    parts.world.drop_gradients()
    parts.device.release()


def compose_step(parts: StepParts, reuse_memory: bool = True) -> TrainStep:
    """The step of a run from its parts.

    On the CPU, later steps `reuse_memory` that the first one freed.
    """
    if parts.device.kind == "mlx":
        from m1clip.mlx.step import compose_mlx_step

        return compose_mlx_step(parts)
    on_cpu = parts.device.kind == "cpu"
    if on_cpu:
        map_large_blocks()
    # With activation checkpointing, freed memory is returned instead.
    reuse_memory = reuse_memory and on_cpu and not parts.config.model.grad_checkpointing
    phases = Phases(parts.device.kind)

    attempts = StepAttempts(
        parts.config.train.micro_batch,
        clear=partial(drop_gradients, parts),
        mark=phases.mark,
        reuse_memory=reuse_memory,
    )
    attempts.checks_limit = parts.world.shards is None
    composed = TrainStep(parts, partial(train_step, parts), attempts, phases)
    if parts.capturable:
        composed.cuda_graph = CapturedStep(
            composed.attempt,
            clear=composed.clear,
            device=parts.device,
            phases=phases,
            context_length=parts.model.config.context_length,
        )
        if parts.world.ranks.size > 1:
            composed.cuda_graph.disabled = NOT_ON_RANKS
        composed.attempt = composed.cuda_graph
        attempts.clear = composed.clear
    return composed
