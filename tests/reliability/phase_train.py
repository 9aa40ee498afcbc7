"""`m1clip train` that dwells in one phase: PHASE MARK SECONDS, then the usual words.

It touches the file MARK when the phase is entered and sleeps there, so that a test can send its signal inside it.
While it is inside, the file MARK.inside is there.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Patched before anything of ours is imported that takes these by name.
PHASES = {
    "caching": ("m1clip.data.images", "to_square"),
    "evaluating": ("m1clip.evaluation.retrieval", "retrieval"),
    "saving": ("safetensors.torch", "save_file"),
    "stepping": ("m1clip.training.schedule", "lr_fraction"),
}


def dwell(phase: str, mark: Path, seconds: float) -> None:
    """Make the function of a phase slow, and have it tell when it is entered."""
    module = importlib.import_module(PHASES[phase][0])
    inside = mark.with_suffix(".inside")
    usual: Callable[..., Any] = getattr(module, PHASES[phase][1])

    def slow(*args: Any, **named: Any) -> Any:
        inside.touch()
        mark.touch()
        until = time.monotonic() + seconds
        while time.monotonic() < until:  # in short naps, as real work is: a signal is seen between two
            time.sleep(0.01)
        try:
            return usual(*args, **named)
        finally:
            inside.unlink(missing_ok=True)

    setattr(module, PHASES[phase][1], slow)


if __name__ == "__main__":
    dwell(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
    from m1clip.cli.main import main

    main(sys.argv[4:])
