"""Many sizes and batches: one process a device, from small to large, without what takes too long or does not fit."""

from __future__ import annotations

import statistics
from pathlib import Path

import psutil

from m1clip.bench.candidate import Candidate
from m1clip.bench.pool import Worker
from m1clip.bench.session import Open, Session
from m1clip.config import ModelConfig
from m1clip.model.build import shape_of
from m1clip.model.clip import count_parameters
from m1clip.model.shape import flops_per_pair

STEPS = 7  # timed steps of a candidate, where they are fast
LEAST_STEPS = 3
ASSUMED_SHARE = 0.3  # of the matrix product rate, before a size was measured
BYTES_PER_PARAMETER = (
    20  # weights, gradient, two moments, and a half-precision copy: before anything was measured
)
MEMORY_SHARE = 0.85
FAIR_SHARE = 2.0  # a candidate may take this many times what each gets of the time of its size
ALWAYS = 2.0  # seconds that any candidate gets as long as there is time at all
MEMORY_BELOW = 3.0  # seconds: one more, watched step is worth it only where steps are short

Seen = tuple[Candidate, float, float]  # what was measured: seconds of a step, bytes at the peak
Known = dict[tuple[str, str], list[Seen]]  # by size and way, from small batches to large


def run_sweep(session: Session, groups: list[list[Candidate]]) -> None:
    """Measure groups of the same size and batch; within each the devices take turns."""
    workers: dict[str, Worker] = {}
    known: Known = {}
    clock = SizeClock(session, groups)
    try:
        for group in groups:
            opened: list[Open] = []
            for candidate in group:
                why = obstacle(session, candidate, known, clock.share(candidate))
                if why:
                    session.leave_out(candidate, *why)
                    continue
                # Two precisions on one device share a process, so one is finished before the other is opened.
                if any(item.candidate.device == candidate.device for item in opened):
                    _finish(session, opened, known)
                    opened = []
                worker = _worker(session.log, workers, candidate.device)
                item = session.open(candidate, worker, pictures=min(1024, max(c[0].batch for c in groups)))
                if item is not None:
                    opened.append(item)
                else:
                    known.setdefault((candidate.model, candidate.way), []).append(
                        (candidate, float("inf"), float("inf"))
                    )
            _finish(session, opened, known)
    finally:
        for worker in workers.values():
            worker.close()


class SizeClock:
    """Each size gets the same part of the time, so that the last ones are not starved by the first."""

    def __init__(self, session: Session, groups: list[list[Candidate]]) -> None:
        self._session = session
        names = [candidate.model for group in groups for candidate in group]
        self._waiting = {name: names.count(name) for name in names}
        self._end: dict[str, float] = {}  # seconds of the session that must be left when a size is done

    def share(self, candidate: Candidate) -> float:
        """Seconds that this candidate may take; counts it as handled."""
        name, left = candidate.model, self._session.left
        if name not in self._end:
            sizes = sum(count > 0 for count in self._waiting.values())
            self._end[name] = left - left / max(1, sizes)
        fair = FAIR_SHARE * (left - self._end[name]) / max(1, self._waiting[name])
        self._waiting[name] -= 1
        return max(fair, min(ALWAYS, left))


def obstacle(session: Session, candidate: Candidate, known: Known, allowed: float) -> tuple[str, str] | None:
    """Why a candidate is not even tried: (kind, words), from what smaller batches of its size have taken."""
    before = known.get((candidate.model, candidate.way), [])
    if before and before[-1][1] == float("inf"):
        return "memory", f"batch {before[-1][0].batch} already failed"
    seconds, size = foretold(session, candidate, before)
    limit = MEMORY_SHARE * _memory(session, candidate.device)
    if size > limit:
        return "memory", f"would need about {size / 1e9:.0f} GB of {limit / MEMORY_SHARE / 1e9:.0f} GB"
    if seconds * (LEAST_STEPS + 2) > allowed:
        return "time", f"about {seconds:.1f} s a step: too long within --minutes"
    return None


def foretold(session: Session, candidate: Candidate, before: list[Seen]) -> tuple[float, float]:
    """Seconds and bytes of a step, scaled up from the last batch, or from first principles for the first one."""
    if before:
        last, seconds, size = before[-1]
        grow = candidate.batch / last.batch
        fixed = min(size, BYTES_PER_PARAMETER * _parameters(candidate))
        if (
            len(before) > 1 and before[-2][0].batch < last.batch
        ):  # two points: a line, for much of a small step is fixed
            slope = max(0.0, seconds - before[-2][1]) / (last.batch - before[-2][0].batch)
            return seconds + slope * (candidate.batch - last.batch), fixed + (size - fixed) * grow
        # One point: what one more pair takes is a guess; a step of a GPU at batch 1 is nearly all fixed cost.
        more = (candidate.batch - last.batch) * _pair_seconds(session, candidate)
        return min(seconds * grow, seconds + more), fixed + (size - fixed) * grow
    return _pair_seconds(session, candidate) * candidate.batch, BYTES_PER_PARAMETER * _parameters(candidate)


def _pair_seconds(session: Session, candidate: Candidate) -> float:
    """Seconds of one pair by its operations alone, at a usual share of the measured matrix product rate."""
    shape = shape_of(_model_config(candidate))
    rate = session.rates.get((candidate.device, candidate.precision), 1e11) * ASSUMED_SHARE
    return flops_per_pair(shape, shape.context_length) / rate


def _finish(session: Session, opened: list[Open], known: Known) -> None:
    """The devices of a group in turn: several short rounds each."""
    for turn in range(LEAST_STEPS):
        for item in list(opened)[:: 1 if turn % 2 == 0 else -1]:
            fast = item.step_seconds < 0.5
            if not session.visit(item, 0.3 if fast else 0.0):
                opened.remove(item)
    for item in opened:
        first = (item.candidate.model, item.candidate.way) not in known
        cheap = item.step_seconds < MEMORY_BELOW or first
        result = session.finish(item, memory=cheap, parity=_parity_is_due(item, known))
        peak = float(result["memory"]["total"]) if result["memory"] else 0.0
        key = (item.candidate.model, item.candidate.way)
        seconds = statistics.median(result["samples"])
        known.setdefault(key, []).append(
            (item.candidate, seconds, peak or _last_bytes(known, key, item.candidate))
        )


def _parity_is_due(item: Open, known: Known) -> bool:
    """Once for each size and way, at its first batch of two or more."""
    done = [c for c, seconds, _ in known.get((item.candidate.model, item.candidate.way), []) if c.batch > 1]
    return item.candidate.batch > 1 and not done


def _last_bytes(known: Known, key: tuple[str, str],
                candidate: Candidate) -> float:  # fmt: skip
    before = known.get(key, [])
    return before[-1][2] * candidate.batch / before[-1][0].batch if before else 0.0


def _memory(session: Session, device: str) -> float:
    for probe in session.document["devices"]:
        if probe["device"] == device:
            return float(
                min(probe["memory_bytes"], psutil.virtual_memory().available if device == "cpu" else 1e18)
            )
    return float(psutil.virtual_memory().available)


def _worker(log: Path, workers: dict[str, Worker], device: str) -> Worker:
    if device not in workers or not workers[device].alive:
        workers[device] = Worker(log)
    return workers[device]


def _parameters(candidate: Candidate) -> float:
    return float(count_parameters(shape_of(_model_config(candidate))))


def _model_config(candidate: Candidate) -> ModelConfig:
    return ModelConfig(preset=candidate.model)
