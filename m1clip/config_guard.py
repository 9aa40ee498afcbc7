"""Settings of what keeps a run alive: numbers that are not finite, saves that fail."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from m1clip.errors import UserError


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What a run does when something goes wrong."""

    skip_limit: int = 8
    "Updates that are not finite are skipped; after so many in a row the run goes back to its last checkpoint."
    rollbacks: int = 3
    "How often a run may go back so; then it stops and says why. 0 = it stops at once."
    rollback_rate: float = 0.5
    "The learning rate is multiplied by this each time the run goes back."
    spike: float = 8.0
    "Warn of a loss that stays so many of its usual deviations above its recent median; 0 = never."
    on_save_error: Literal["stop", "go-on"] = "stop"
    "A checkpoint, best model or log line that cannot be written (disk full): stop, or warn, train on and try again."
    save_aside: Literal["auto", "never"] = "auto"
    "Write checkpoints beside the training where a copy takes little of the free memory (a fiftieth), or never."

    def __post_init__(self) -> None:
        for name, least in (("skip_limit", 1), ("rollbacks", 0)):
            value = getattr(self, name)
            if value < least:
                raise UserError(f"guard.{name} must be at least {least}, not {value}")
        if not 0 < self.rollback_rate <= 1:
            raise UserError(f"guard.rollback_rate must be above 0 and at most 1, not {self.rollback_rate}")
        if not math.isfinite(self.spike) or self.spike < 0:
            raise UserError(f"guard.spike must be 0 or more, not {self.spike}")
