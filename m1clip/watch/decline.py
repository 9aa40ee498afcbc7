"""Where the loss fell: how much of the whole decline each phase of the training brought."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

NAMES = ("first third", "middle third", "last third")


@dataclass(frozen=True)
class Phase:
    """A stretch of steps with the loss at its two ends, and its share of the whole decline."""

    name: str
    first: int
    last: int
    before: float
    after: float
    share: float


def decline(points: Sequence[tuple[int, float]], warmup: int) -> list[Phase]:
    """Warm-up, then thirds of the rest. Ends are means of a few points, so that one batch decides nothing."""
    if len(points) < 8:
        return []
    last = points[-1][0]
    edges = [points[0][0], *([warmup] if points[0][0] < warmup < last else [])]
    begin = edges[-1]
    edges += [begin + (last - begin) * third // 3 for third in (1, 2, 3)]
    names = (["warm-up"] if len(edges) == 5 else []) + list(NAMES)
    levels = [_level(points, edge) for edge in edges]
    whole = levels[0] - levels[-1]
    shares = [(before - after) / whole if whole else 0.0 for before, after in pairwise(levels)]
    return [
        Phase(name, edges[i], edges[i + 1], levels[i], levels[i + 1], shares[i])
        for i, name in enumerate(names)
    ]


def _level(points: Sequence[tuple[int, float]], step: int) -> float:
    """The mean loss of the points nearest to a step: one in forty of all, at least one."""
    count = max(1, len(points) // 40)
    near = sorted(points, key=lambda point: abs(point[0] - step))[:count]
    return statistics.mean(value for _, value in near)
