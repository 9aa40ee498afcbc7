"""Choices by measurement that are right on a busy computer too, and the folder they are saved in.

Candidates are timed in alternation, in short rounds, so that a busy moment affects all of them. The
documented default of the hardware wins, unless another candidate is faster in nearly every round.
A choice that was measured while other programs were busy is used once, and not saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch

from m1clip.hardware.device import DTYPES, Device, Kind, Precision, default_precision, rules
from m1clip.hardware.machine_info import MachineInfo
from m1clip.hardware.timing import Load
from m1clip.io import read_small, user_cache, write_json

ROUNDS = 5  # the default can lose only after this many
MIN_WINS = 4  # rounds in which a candidate must be faster than the default
# How many times faster it must be: a smaller difference is not worth leaving the default.
MIN_SPEEDUP = 1.1
# Fraction of CPU time used by other programs above which a choice is not saved.
MAX_OTHERS = 0.1
CONTRADICTED = 1.25  # times slower than a rejected candidate: the run contradicts the choice
CHOICES_FOLDER = "choices"
MATMUL_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
MATMUL_SIZE = 768  # rows and columns
MATMULS = 20  # in one timed call: long enough to see the load of other programs

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Rounds(Generic[Key]):
    """Seconds of each candidate by round, and the load of other programs meanwhile."""

    seconds: Mapping[Key, Sequence[float]]
    others: float | None = None  # fraction of CPU time of other programs; None: not measurable

    @property
    def reliable(self) -> bool:
        """Whether a choice by these rounds may be saved."""
        return self.others is not None and self.others <= MAX_OTHERS


def fastest(rounds: Mapping[Key, Sequence[float]], default: Key) -> Key:
    """Return the candidate to use: the default, unless another one is consistently faster."""
    challengers = [key for key in rounds if key != default and _beats(rounds[key], rounds[default])]
    return min(challengers, key=lambda key: statistics.median(rounds[key]), default=default)


def _beats(candidate: Sequence[float], default: Sequence[float]) -> bool:
    # A candidate that cannot win is not timed to the end.
    pairs = list(zip(candidate, default, strict=False))
    wins = sum(own * MIN_SPEEDUP < other for own, other in pairs)
    return len(pairs) >= ROUNDS and wins >= MIN_WINS


def _can_still_win(candidate: Sequence[float], default: Sequence[float]) -> bool:
    losses = sum(own * MIN_SPEEDUP >= other for own, other in zip(candidate, default, strict=False))
    return losses <= ROUNDS - MIN_WINS


def time_rounds(
    calls: Mapping[Key, Callable[[], object]],
    default: Key,
    seconds: float = float("inf"),
    load: Load | None = None,
) -> Rounds[Key]:
    """Time each call once per round, after one call that warms up; stops when `seconds` are over.

    A candidate that has lost too many rounds to the default is not timed any further. A call must
    wait for its device.
    """
    load = load or Load()
    begin = time.perf_counter()
    for call in calls.values():
        call()
    round_seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key, call in calls.items():
            if key != default and not _can_still_win(round_seconds[key], round_seconds[default]):
                continue
            start = time.perf_counter()
            call()
            round_seconds[key].append(time.perf_counter() - start)
        if time.perf_counter() - begin > seconds:
            break
    return Rounds(round_seconds, load.others())


def matmul_precision(
    kind: Kind,
    facts: MachineInfo,
    measure: Callable[[Device, Precision], Rounds[Precision]] | None = None,
) -> Precision:
    """Return fp32 or bf16, whichever multiplies matrices faster.

    The choice is measured once and saved, so that vectors stay the same.
    """
    default = default_precision(kind, facts)
    if rules(kind, facts).bf16 != "measure":
        return default
    path = folder() / f"matmul-{kind}-{facts.torch}.json"
    values = read(path) or {}
    if values.get("cpu") == facts.cpu and values.get("precision") in MATMUL_PRECISIONS:
        return cast("Precision", values["precision"])
    rounds = (measure or time_matmuls)(Device(kind, facts), default)
    precision = fastest(rounds.seconds, default)
    if rounds.reliable:
        title = f"matmuls on {kind}, for encoding"
        save(
            path,
            title,
            describe(rounds.seconds, precision),
            {"cpu": facts.cpu, "precision": precision},
        )
    return precision


def time_matmuls(device: Device, default: Precision) -> Rounds[Precision]:
    """Time matrix multiplications in fp32 and bf16; takes about a second on a CPU."""

    def multiply(precision: Precision) -> Callable[[], None]:
        a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device.torch).to(DTYPES[precision])

        def call() -> None:
            for _ in range(MATMULS):
                torch.mm(a, a)
            device.synchronize()

        return call

    return time_rounds({precision: multiply(precision) for precision in MATMUL_PRECISIONS}, default)


def describe(seconds: Mapping[Key, Sequence[float]], chosen: Key) -> str:
    """Describe the chosen candidate and its speed, as in "bf16, 1.8x as fast as fp32"."""
    own = statistics.median(seconds[chosen])
    others = [
        f"{statistics.median(values) / own:.1f}x as fast as {key}"
        for key, values in seconds.items()
        if key != chosen and values
    ]
    return ", ".join([str(chosen), *others])


def is_contradicted(seconds: float, rejected: Sequence[float]) -> bool:
    """Whether the seconds per sample of a run show that a rejected candidate would be faster."""
    return any(seconds > CONTRADICTED * other for other in rejected)


def folder() -> Path:
    return user_cache() / CHOICES_FOLDER


def read(path: Path) -> dict[str, Any] | None:
    """Read a saved choice; None if there is none that can be read."""
    try:
        values = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def save(path: Path, title: str, result: str, values: dict[str, Any]) -> None:
    """Save a choice for the next run; `m1clip doctor` shows its `title` and `result`."""
    with contextlib.suppress(OSError):  # the folder is not writable: measure again next time
        write_json(path, {"what": title, "result": result, **values})


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def list_saved() -> list[str]:
    """Describe each saved choice in one line."""
    lines = []
    for path in sorted(folder().glob("*.json")):
        values = read(path) or {}
        title = values.get("what")
        result = values.get("result")
        lines.append(f"{title}: {result}" if title and result else f"{path.name}: cannot be read")
    return lines


def clear() -> int:
    """Remove all saved choices, and return their number."""
    paths = list(folder().glob("*.json"))
    for path in paths:
        os.unlink(path)
    return len(paths)
