"""One model, many ways: each in a process of its own, all of them measured in turn, round after round."""

from __future__ import annotations

import time

import psutil

from m1clip.bench.candidate import Candidate
from m1clip.bench.session import Open, Session

LEAST_ROUNDS, MOST_ROUNDS = 3, 15
# Memory and parity of one candidate: steps of its own, and a fixed part.
FINISH_STEPS, FINISH_SECONDS = 2.0, 2.0
OPEN_STEPS, OPEN_SECONDS = 3.0, 8.0  # of one more process, before any was opened: a guess
COMPILE_SHARE = 0.3  # of all the time: a compiler may take this much, and is not begun with less left
LEAST_FREE = (
    0.35  # share of the machine's memory that must be free before one more process is opened beside others
)


def run_focus(session: Session, candidates: list[Candidate]) -> None:
    """Measure the candidates, the first ones first if time is short."""
    waiting = list(candidates)
    while waiting:
        group, waiting = _open_group(session, waiting)
        _rounds(session, group)
        for item in group:
            if item.visits:
                # Late after all: the seconds of the steps are what was promised; these two can be had again.
                in_time = session.left > 0
                session.finish(item, memory=in_time, parity=in_time)
            item.worker.close()


def _open_group(session: Session, waiting: list[Candidate]) -> tuple[list[Open], list[Candidate]]:
    """Open as many as time and memory allow side by side; gives them, and who waits for the next group."""
    group: list[Open] = []
    took: dict[str, float] = {}
    late: list[Candidate] = []
    for index, candidate in enumerate(waiting):
        enough = len(group) + len(session.document["results"]) >= 2  # a comparison needs two
        if enough and session.left < needed(session, group, took, candidate):
            late.append(candidate)  # a quicker one may still fit
            continue
        memory = psutil.virtual_memory()
        if group and memory.available < LEAST_FREE * memory.total:
            return group, [*waiting[index:]]
        begin = time.monotonic()
        opened = session.open(candidate)
        if opened is not None:
            group.append(opened)
            if not candidate.compile:
                took[candidate.precision] = time.monotonic() - begin
    for candidate in late:
        session.leave_out(candidate, "time", "no time left for it; give more --minutes")
    return group, []


def needed(session: Session, group: list[Open], took: dict[str, float], candidate: Candidate) -> float:
    """Seconds for opening one more and then measuring and finishing all of them, from what the others took."""
    steps = [item.step_seconds for item in group]
    # Precision changes a step by far more than attention or recomputation do.
    alike = [item.step_seconds for item in group if item.candidate.precision == candidate.precision]
    typical = max(alike or steps, default=1.0)
    opening = took.get(candidate.precision, OPEN_SECONDS + OPEN_STEPS * typical)
    if candidate.compile:
        opening = max(opening, COMPILE_SHARE * session.seconds)
    return opening + sum(_measuring(step) for step in [*steps, typical])


def _measuring(step: float) -> float:
    """Seconds that a candidate takes once it is open: the least number of rounds, memory, parity."""
    return (LEAST_ROUNDS + FINISH_STEPS) * step + FINISH_SECONDS


def _rounds(session: Session, group: list[Open]) -> None:
    """Everyone in turn, in alternating order, until there are enough rounds or only the finish has time left."""
    for turn in range(MOST_ROUNDS):
        finish = sum(FINISH_STEPS * item.step_seconds + FINISH_SECONDS for item in group)
        one_more = sum(max(1.0, item.step_seconds) for item in group)
        if turn >= 1 and session.left < finish + one_more:
            break
        for item in list(group)[:: 1 if turn % 2 == 0 else -1]:
            if not session.visit(item):
                item.worker.close()
                group.remove(item)
