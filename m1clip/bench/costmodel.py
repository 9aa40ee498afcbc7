"""A step's seconds from its work: a fixed cost, a cost for each weight, and the work over a rate. Fitted, and tested.

seconds = fixed + parameters / weights_rate + flops / rate, all three terms at least 0.
The second term is the optimizer, which reads and writes every weight whatever the batch is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Point:
    """One measured step."""

    size: str
    parameters: float
    flops: float
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """What a step costs, in seconds."""

    fixed: float
    per_parameter: float
    per_flop: float

    def seconds(self, parameters: float, flops: float) -> float:
        """The predicted seconds of a step."""
        return self.fixed + self.per_parameter * parameters + self.per_flop * flops

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def fit(points: Sequence[Point]) -> CostModel | None:
    """The non-negative coefficients with the least relative error; None for fewer than two points."""
    if len(points) < 2:
        return None
    seconds = np.array([p.seconds for p in points])
    columns = np.array([[1.0, p.parameters, p.flops] for p in points])
    scaled = columns / seconds[:, None]  # relative error: a step of 10 ms counts as much as one of 10 s
    size = np.maximum(scaled.max(axis=0), 1e-300)  # the columns differ by 12 orders of magnitude
    best: tuple[float, np.ndarray] | None = None
    for count in range(1, min(3, len(points)) + 1):
        for chosen in itertools.combinations(range(3), count):
            values, *_ = np.linalg.lstsq((scaled / size)[:, chosen], np.ones(len(points)), rcond=None)
            if (values < 0).any():
                continue
            whole = np.zeros(3)
            whole[list(chosen)] = values
            error = float(((scaled / size) @ whole - 1) @ ((scaled / size) @ whole - 1))
            if best is None or error < best[0] - 1e-12:
                best = (error, whole / size)
    assert best is not None  # one column alone always has a non-negative fit: all values are positive
    return CostModel(*(float(value) for value in best[1]))


def left_out_errors(points: Sequence[Point]) -> dict[str, list[float]]:
    """For each size: relative errors of its points as foretold by a fit of all other sizes."""
    found = {}
    for size in dict.fromkeys(p.size for p in points):
        model = fit([p for p in points if p.size != size])
        if model is not None and len({p.size for p in points if p.size != size}) > 1:
            mine = [p for p in points if p.size == size]
            found[size] = [model.seconds(p.parameters, p.flops) / p.seconds - 1 for p in mine]
    return found


def crossing(first: CostModel, second: CostModel, parameters: float, flops_per_pair: float) -> float | None:
    """The batch at which two ways take the same time; None where one is faster at every batch."""
    start = first.seconds(parameters, 0) - second.seconds(parameters, 0)
    slope = (second.per_flop - first.per_flop) * flops_per_pair
    if slope == 0 or start / slope <= 0:
        return None
    return start / slope
