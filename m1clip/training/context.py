"""What a run has while it trains: the one object that evaluate, save, log and recover take."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m1clip import console
from m1clip.runlog import RunLog
from m1clip.training.checkpoint import SaveTimer, TrainState, is_large
from m1clip.training.distributed import Ranks
from m1clip.training.duration import Pacer, StepPlan
from m1clip.training.logger import StepLogger, TrainingDisplay
from m1clip.training.measured_step import StepMeasurements
from m1clip.training.memory_parts import MemoryProbe
from m1clip.training.process import StopRequest
from m1clip.training.recovery import StepChecks
from m1clip.training.saving import Saver
from m1clip.training.schedule import scheduled_lr_fraction
from m1clip.training.spec import DecidedConfig, RunSpec

if TYPE_CHECKING:
    from m1clip.training.compose import TrainStep
    from m1clip.training.inputs import RunInputs


@dataclass
class RunContext:
    """A run while it trains.

    Only the loop changes `state` and `plan`; everything else reads them.
    """

    inputs: RunInputs
    train_step: TrainStep
    folder: Path
    log: RunLog
    stop: StopRequest = field(default_factory=StopRequest)
    state: TrainState = field(default_factory=TrainState)
    plan: StepPlan = field(init=False)
    pacer: Pacer | None = None  # keeps to the time of --minutes; None: the number of steps is fixed
    display: TrainingDisplay = field(default_factory=TrainingDisplay)
    step_log: StepLogger = field(init=False)
    measurements: StepMeasurements = field(init=False)
    checks: StepChecks = field(default_factory=StepChecks)
    save_timer: SaveTimer = field(init=False)
    saver: Saver = field(init=False)
    # On the clock of time.perf_counter, without evaluations.
    training_began: float = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self.spec.plan
        self.step_log = StepLogger(self.inputs.device.kind)
        self.measurements = StepMeasurements(MemoryProbe(self.inputs, self.train_step))
        self.save_timer = SaveTimer(
            self.config.train.save_every,
            self.inputs.training.plan.steps_per_epoch,
            large=is_large(self.train_step.model),
        )
        self.saver = Saver(in_background=self.inputs.device.kind == "cuda")
        self.training_began = time.perf_counter() - self.state.seconds

    @property
    def spec(self) -> RunSpec:
        return self.inputs.spec

    @property
    def config(self) -> DecidedConfig:
        return self.spec.config

    @property
    def ranks(self) -> Ranks:
        return self.inputs.ranks

    def lr_fraction(self, step: int) -> float:
        """The fraction of the peak learning rates that a step uses; `step` counts from 0."""
        fraction = scheduled_lr_fraction(self.config.optim, self.plan, step)
        return fraction * self.state.lr_factor

    def update(self, **changes: Any) -> None:
        """Replace some values of the state.

        Called by the loop only, so that state is written in one place.
        """
        self.state = dataclasses.replace(self.state, **changes)

    def warn(self, text: str) -> None:
        """Show a warning and write it to the log."""
        self.log.write("warning", step=self.state.step, text=text)
        console.warn(text)
