"""The surroundings of the real processes that these tests start, kill and watch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import small_run


def environment() -> dict[str, str]:
    """As for the small run, but with the packages of the tests themselves: they need not be installed."""
    return {**small_run.environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}


def command(*words: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "m1clip", *words],
        cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
