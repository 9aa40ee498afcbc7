"""Steps that measure themselves: the memory of one early step, and stages where they cannot be
timed in flight.

Stages are timed in every step where that costs nothing: on the CPU, and with events on CUDA. On MPS
and MLX the host only queues work, and a replayed CUDA graph has no stages: there one step now and
then waits for the device at every stage.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from m1clip.data.loader import Batch
from m1clip.hardware.timing import StageCosts, stages_due
from m1clip.training.memory_parts import MemoryProbe

if TYPE_CHECKING:
    from m1clip.training.context import RunContext

FIRST_STEP = 2  # of a session whose memory is counted: the first creates the optimizer's state
WARMUP_LINES = 1  # lines of the log whose steps are slower than usual
TIMED_LINES = 5  # lines of the log that give the usual time of a step


@dataclass
class StageTimer:
    """Decides which steps are synchronized, and has their stages until they are logged."""

    costs: StageCosts = field(default_factory=StageCosts)
    stages: dict[str, float] = field(default_factory=dict)  # of the newest synchronized step
    _line_seconds: list[float] = field(default_factory=list)  # of a step, by line of the log

    def record_line(self, step_seconds: float) -> None:
        """Record the mean time of the steps of a line."""
        self._line_seconds.append(step_seconds)
        del self._line_seconds[WARMUP_LINES : -TIMED_LINES or None]

    @property
    def usual_seconds(self) -> float:
        """The usual time of a step; 0 before it is known."""
        return statistics.median(self._line_seconds[WARMUP_LINES:] or [0.0])

    def due(self, steps_made: int, total_steps: int) -> bool:
        """Whether to synchronize the next step."""
        return stages_due(steps_made, total_steps, self.usual_seconds, self.costs)

    def add(self, step: int, seconds: float, stages: dict[str, float]) -> None:
        """Record a synchronized step."""
        self.costs = self.costs.with_step(step, seconds, self.usual_seconds)
        self.stages = stages

    def take(self, elapsed: float) -> dict[str, Any]:
        """Fields for the next line of the log: the stages since the last one, and the
        cost so far.
        """
        if not self.stages:
            return {}
        stages = {name: round(value, 6) for name, value in self.stages.items()}
        self.stages = {}
        return {"stages": stages, "stages_cost": round(self.costs.fraction(elapsed), 6)}


@dataclass
class StepMeasurements:
    """What a run measures in some of its steps."""

    memory: MemoryProbe
    stage_timer: StageTimer = field(default_factory=StageTimer)
    _steps: int = 0  # of this session

    @contextlib.contextmanager
    def during(self, run: RunContext, batch: Batch, step: int) -> Iterator[None]:
        """Measure the step in the block, if that is due. The weights it gives do not change."""
        self._steps += 1
        is_last = step + 1 >= run.plan.total_steps
        if not self.memory.done and (self._steps >= FIRST_STEP or is_last):
            with self.memory.watch(batch.tensors().values()):
                yield
        elif self._stages_hidden(run) and self.stage_timer.due(step, run.plan.total_steps):
            with self._synchronized(run, step):
                yield
        else:
            yield

    def _stages_hidden(self, run: RunContext) -> bool:
        """Whether the stages of a step cannot be timed in flight."""
        graph = run.train_step.cuda_graph
        replays = graph is not None and not graph.disabled
        return run.train_step.phases.silent or replays

    @contextlib.contextmanager
    def _synchronized(self, run: RunContext, step: int) -> Iterator[None]:
        device = run.inputs.device
        device.synchronize()
        began = time.perf_counter()
        with run.train_step.phases.synchronized(device.synchronize) as stages:
            yield
        self.stage_timer.add(step + 1, time.perf_counter() - began, stages)
