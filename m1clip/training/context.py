"""What a run has while it trains: the one object that evaluate, save, log and recover take."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m1clip.config import Config
from m1clip.runlog import RunLog
from m1clip.training.checkpoint import SaveTimer, TrainState
from m1clip.training.distributed import Ranks
from m1clip.training.duration import Pacer, StepPlan
from m1clip.training.logger import StepLogger
from m1clip.training.process import StopRequest
from m1clip.training.progress import Screen
from m1clip.training.recovery import StepChecks
from m1clip.training.spec import RunSpec

if TYPE_CHECKING:
    from m1clip.training.setup import Setup
    from m1clip.training.step import TrainStep


@dataclass
class RunContext:
    """A run while it trains. Only the loop changes `state` and `plan`; everything else reads them."""

    spec: RunSpec
    setup: Setup
    train_step: TrainStep
    folder: Path
    log: RunLog
    screen: Screen
    stop: StopRequest = field(default_factory=StopRequest)
    state: TrainState = field(default_factory=TrainState)
    plan: StepPlan = field(init=False)
    pacer: Pacer | None = None  # keeps to the time of --minutes; None: the number of steps is fixed
    step_log: StepLogger = field(init=False)
    checks: StepChecks = field(default_factory=StepChecks)
    save_timer: SaveTimer = field(init=False)
    # On the clock of time.perf_counter, without evaluations.
    training_began: float = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self.spec.plan
        self.step_log = StepLogger(self.setup.device.kind)
        self.save_timer = SaveTimer(self.config.train.save_every)
        self.training_began = time.perf_counter() - self.state.seconds

    @property
    def config(self) -> Config:
        return self.spec.config

    @property
    def ranks(self) -> Ranks:
        return self.setup.ranks

    def update(self, **changes: Any) -> None:
        """Replace some values of the state. Called by the loop only, so that state is written in one place."""
        self.state = dataclasses.replace(self.state, **changes)

    def warn(self, text: str) -> None:
        """Show a warning and write it to the log."""
        self.log.write("warning", step=self.state.step, text=text)
        self.screen.warn(text)
