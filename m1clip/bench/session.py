"""Running a comparison: processes, rounds, a time budget, and results written as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from m1clip.bench.candidate import Candidate
from m1clip.bench.document import write_document
from m1clip.bench.pool import Failed, Worker
from m1clip.bench.summary import summarise
from m1clip.hardware.clock import is_settled

Say = Callable[[str], None]
MOST_WARM_STEPS = 4
VISIT_SECONDS = 1.0  # a round stays this long with a candidate: one slow step, or many fast ones
MOST_STEPS = 20  # of one visit


@dataclass
class Open:
    """A candidate with its process, warm and ready."""

    candidate: Candidate
    worker: Worker
    opened: dict[str, Any]
    warm: list[float]
    visits: list[dict[str, Any]] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """The newest time of a step."""
        samples = self.visits[-1]["samples"] if self.visits else None
        return float(samples[-1]["seconds"]) if samples else self.warm[-1]


class Session:
    """What all parts of a comparison share: the document, the clock, the screen."""

    def __init__(self, document: dict[str, Any], folder: Path, seconds: float, show: Say) -> None:
        self.document, self.folder, self.show = document, folder, show
        self.begin, self.seconds = time.monotonic(), seconds
        self.log = folder / "workers.log"
        self.rates: dict[tuple[str, str], float] = {}

    @property
    def used(self) -> float:
        """Share of the time budget that is gone."""
        return (time.monotonic() - self.begin) / self.seconds

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.seconds - (time.monotonic() - self.begin)

    def probe(self, kind: str, precisions: list[str], compile: bool) -> None:
        """Measure a device by itself, in a process of its own."""
        self.show(f"{kind}: arithmetic, memory, overheads")
        try:
            with Worker(self.log) as worker:
                found = worker.ask(
                    "probe",
                    max(60.0, self.left),
                    device=kind,
                    precisions=precisions,
                    compile=compile,
                    budget=0.08 * self.seconds,
                )
        except Failed as error:
            self.document["absent"][kind] = f"it could not be measured ({error.line})"
            return
        self.document["devices"].append(found)
        self.rates.update({(kind, name): rate for name, rate in found["gemm"].items()})
        self.write()

    def open(self, candidate: Candidate, worker: Worker | None = None, pictures: int = 0) -> Open | None:
        """A candidate in its process, warmed up until two steps agree; None, with the reason noted, if it fails."""
        self.show(f"{candidate.label}: first steps")
        fresh = worker is None
        worker = worker or Worker(self.log)
        try:
            limit = max(60.0, self.left)
            opened = worker.ask("open", limit, candidate=candidate.to_dict(), pictures=pictures)
            warm = [opened["first_step_seconds"]]
            # The first step is cold, and says nothing of the second.
            while len(warm) < MOST_WARM_STEPS and not (len(warm) > 2 and is_settled(warm)):
                if len(warm) > 1 and warm[-1] > 0.05 * self.left:
                    break
                warm.append(worker.ask("steps", limit, count=1, seconds=0.0)["samples"][0]["seconds"])
            return Open(candidate, worker, opened, warm)
        except Failed as error:
            self.leave_out(candidate, error.kind, error.line)
            if fresh:
                worker.close()
            return None

    def visit(self, item: Open, seconds: float = VISIT_SECONDS, least: int = 1) -> bool:
        """One round of a candidate; false if it failed."""
        self.show(f"{item.candidate.label}: round {len(item.visits) + 1}")
        count = max(least, min(MOST_STEPS, round(seconds / max(item.step_seconds, 1e-4))))
        limit = max(60.0, 10 * count * item.step_seconds)
        try:
            item.visits.append(
                item.worker.ask("steps", limit, count=count, seconds=seconds if least == 1 else 1e9)
            )
        except Failed as error:
            self.leave_out(item.candidate, error.kind, error.line)
            return False
        return True

    def finish(self, item: Open, memory: bool = True, parity: bool = True) -> dict[str, Any]:
        """The last questions to a candidate, and its line in the document."""
        answers: dict[str, Any] = {"memory": None, "parity": None}
        for name, wanted in (("memory", memory), ("parity", parity)):
            if wanted and item.worker.alive:
                self.show(f"{item.candidate.label}: {name}")
                try:
                    answers[name] = item.worker.ask(name, max(60.0, 60 * item.step_seconds))
                except Failed as error:
                    answers[name] = None
                    self.document["left_out"].append(
                        _entry(item.candidate, error.kind, f"{name}: {error.line}")
                    )
        c = item.candidate
        rate = self.rates.get((c.device, c.precision))
        result = summarise(c.to_dict(), item.opened, item.visits, answers["memory"], answers["parity"], rate)
        self.document["results"].append(result)
        self.write()
        return result

    def leave_out(self, candidate: Candidate, kind: str, why: str) -> None:
        """Note that something was not measured, and why."""
        self.document["left_out"].append(_entry(candidate, kind, why))
        self.write()

    def write(self) -> None:
        """All that is known so far, on disk."""
        write_document(self.document, self.folder / "comparison.json")


def _entry(candidate: Candidate, kind: str, why: str) -> dict[str, Any]:
    return {"candidate": candidate.to_dict(), "label": candidate.label, "kind": kind, "why": why}
