"""Step time as a function of model and batch size, fitted to measured steps; and the store of measured steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.bench.configurations import Configuration, Result
from m1clip.data.cache import user_cache
from m1clip.hardware.facts import Facts
from m1clip.hardware.timing import Timing
from m1clip.io import read_small, write_json


@dataclass(frozen=True)
class CostModel:
    """seconds = fixed + per_parameter * parameters + per_flop * operations."""

    fixed: float
    per_parameter: float
    per_flop: float

    def seconds(self, parameters: float, flops: float) -> float:
        """The predicted seconds of a step."""
        return self.fixed + self.per_parameter * parameters + self.per_flop * flops


def fit(results: Sequence[Result]) -> CostModel | None:
    """Non-negative coefficients with a small relative error; None for fewer than three measured steps."""
    if len(results) < 3:
        return None
    columns = np.array([[1.0, r.parameters, r.flops] for r in results])
    columns /= np.array([[r.seconds.median] for r in results])  # relative error: 10 ms count as much as 10 s
    size = columns.max(axis=0)  # the columns differ by 12 orders of magnitude
    used = [0, 1, 2]
    while True:
        values = np.linalg.lstsq(columns[:, used] / size[used], np.ones(len(results)), rcond=None)[0]
        if (values >= 0).all():
            break
        used.pop(int(values.argmin()))  # a negative cost makes no sense: fit without it
    found = np.zeros(3)
    found[used] = values / size[used]
    return CostModel(*found.tolist())


def by_device(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """Default configurations by device and precision, in the order measured: the fastest of each model and batch."""
    found: dict[tuple[str, str], dict[tuple[str, int], Result]] = {}
    for r in results:
        c = r.configuration
        if c.is_default:
            members = found.setdefault((c.device, c.precision), {})
            known = members.setdefault((c.model, c.batch_size), r)
            if r.seconds.median < known.seconds.median:
                members[c.model, c.batch_size] = r
    return {key: list(members.values()) for key, members in found.items()}


def crossing(first: CostModel, second: CostModel, parameters: float, flops_per_image: float) -> float | None:
    """The batch size at which two devices take the same time; None if one is faster at every batch size."""
    start = first.seconds(parameters, 0) - second.seconds(parameters, 0)
    slope = (second.per_flop - first.per_flop) * flops_per_image
    return start / slope if slope and start / slope > 0 else None


def save_measured(facts: Facts, results: Sequence[Result], folder: Path | None = None) -> None:
    """Save steps measured on this machine; a newer measurement of the same configuration replaces the older one."""
    kept = {r.configuration: r for r in [*load_measured(facts, folder), *results]}
    try:
        write_json(_path(facts, folder), [asdict(r) for r in kept.values()])
    except OSError:
        return  # the cache folder is not writable; comparison.json has the results


def load_measured(facts: Facts, folder: Path | None = None) -> list[Result]:
    """The steps measured on this machine with this torch version."""
    try:
        values = json.loads(read_small(_path(facts, folder), 2**26))
        return [_result(**value) for value in values]
    except (OSError, ValueError, TypeError):
        return []


def _result(configuration: dict[str, Any], seconds: dict[str, Any], **rest: Any) -> Result:
    return Result(Configuration(**configuration), seconds=Timing(**seconds), **rest)


def _path(facts: Facts, folder: Path | None) -> Path:
    values = json.dumps({**facts.to_dict(), "python": ""}, sort_keys=True)
    return (folder or user_cache()) / "compare" / f"{hashlib.sha256(values.encode()).hexdigest()[:16]}.json"
