"""One model, many ways: each in a process of its own, all of them measured in turn, round after round."""

from __future__ import annotations

import psutil

from m1clip.bench.candidate import Candidate
from m1clip.bench.session import Open, Session

# Shares of the time budget: opening ends, rounds end; what is left goes to memory and parity.
OPEN_UNTIL, LAST_OPEN, ROUNDS_UNTIL = 0.5, 0.7, 0.78
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
LEAST_FREE = (
    0.35  # share of the machine's memory that must be free before one more process is opened beside others
)


def run_focus(session: Session, candidates: list[Candidate]) -> None:
    """Measure the candidates, the first ones first if time is short."""
    waiting = list(candidates)
    while waiting:
        group, waiting = _open_group(session, waiting)
        _rounds(session, group, last=not waiting)
        for item in group:
            if item.visits:
                session.finish(item)
            item.worker.close()


def _open_group(session: Session, waiting: list[Candidate]) -> tuple[list[Open], list[Candidate]]:
    """Open as many as time and memory allow side by side; gives them, and who waits for the next group."""
    group: list[Open] = []
    for index, candidate in enumerate(waiting):
        enough = len(group) + len(session.document["results"]) >= 2  # a comparison needs two
        if session.used > (OPEN_UNTIL if enough else LAST_OPEN) and (group or session.document["results"]):
            for late in waiting[index:]:
                session.leave_out(late, "time", "no time left for it; give more --minutes")
            return group, []
        memory = psutil.virtual_memory()
        if group and memory.available < LEAST_FREE * memory.total:
            return group, waiting[index:]
        opened = session.open(candidate)
        if opened is not None:
            group.append(opened)
    return group, []


def _rounds(session: Session, group: list[Open], last: bool) -> None:
    """Everyone in turn, in alternating order, until there are enough rounds or the time is up."""
    until = ROUNDS_UNTIL if last else OPEN_UNTIL
    for turn in range(MOST_ROUNDS):
        if turn >= LEAST_ROUNDS and session.used > until:
            break
        if turn >= 1 and session.used > 0.9:  # better two rounds and a result than none
            break
        for item in list(group)[:: 1 if turn % 2 == 0 else -1]:
            if not session.visit(item):
                item.worker.close()
                group.remove(item)
