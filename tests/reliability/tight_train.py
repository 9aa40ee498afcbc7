"""`m1clip train` that really gets short of memory in its third and fourth step: HOW, then the usual words.

near   it takes memory, and holds it, until more than --memory allows is in use between forward and backward
fail   the system gives it less than the steps before have used, so that allocations fail
plain  nothing is changed
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import numpy as np
import psutil
import torch

from m1clip.cli.main import main
from m1clip.hardware.memory import NEAR, return_freed_memory
from m1clip.training.oom import OOMHandler
from m1clip.training.step import TrainStep

THIRD, FIFTH = 2, 4
MIB = 2**20
BEYOND = 16 * MIB  # more than what counts as near; half of a chunk gives back several times as much
GIVEN = 0.4  # of what a step has used, beside what lies free in the process: too little for a whole batch
MOST = 2 * 2**30  # that is ever taken: the machine itself is to live on
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class Squeeze:
    """Stands around the training step and takes its memory away for a while."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.most = 0  # bytes in use between forward and backward, in the steps so far
        self.begin, self.wanted = 0, 0  # address space before the step, and what it has added to it by then
        self.held: Any = None

    def install(self) -> None:
        """From now on each step, and each look at the memory, goes through here."""
        usual_step, usual_look = TrainStep.__call__, OOMHandler.check

        def step(update: TrainStep, batch: Any, number: int, *rest: Any, **named: Any) -> Any:
            self.before(number, update)
            return usual_step(update, batch, number, *rest, **named)

        def look(room: OOMHandler) -> None:
            self.most = max(self.most, room.used_bytes())
            self.wanted = max(self.wanted, address_space() - self.begin)
            usual_look(room)

        TrainStep.__call__ = step  # type: ignore[method-assign]
        OOMHandler.check = look  # type: ignore[method-assign]
        if self.how == "fail":  # oneDNN says of memory that it cannot have: "could not create a primitive"
            torch.backends.mkldnn.set_flags(_enabled=False)

    def before(self, number: int, update: TrainStep) -> None:
        """Take memory, have the system refuse more, or give it all back."""
        return_freed_memory()  # or else a run near its limit finds enough of it to go on
        wanted, self.wanted, self.begin = self.wanted, 0, address_space()
        if number == THIRD and self.how == "near":
            assert update.oom is not None
            assert update.oom.limit is not None
            missing = int(NEAR * update.oom.limit) - self.most + BEYOND
            assert 0 < missing < MOST, "near before anything was taken, or no small --memory was given"
            self.held = taken(missing)
        if number == THIRD and self.how == "fail":
            limit = self.begin + int(GIVEN * wanted)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        if number == FIFTH:
            self.held = None
            resource.setrlimit(resource.RLIMIT_AS, NO_LIMIT)


def taken(size: int) -> Any:
    """Memory that is written to, or else the system would not really give it."""
    return np.ones(size, np.uint8)


def address_space() -> int:
    """Bytes that this process has asked the system for."""
    return int(psutil.Process().memory_info().vms)


if __name__ == "__main__":
    Squeeze(sys.argv[1]).install()
    main(sys.argv[2:])
