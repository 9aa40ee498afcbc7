"""m1clip compare: choose the candidates, run them, draw the conclusions, write document and page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1clip.bench.document import new_document, read_document
from m1clip.bench.focus import run_focus
from m1clip.bench.grid import devices_of, focus, precisions_of, sweep
from m1clip.bench.known import remember
from m1clip.bench.page import page
from m1clip.bench.probe import compile_obstacle
from m1clip.bench.session import Session
from m1clip.bench.sweep import run_sweep
from m1clip.errors import UserError
from m1clip.files import write_text
from m1clip.hardware.facts import Facts, read_facts
from m1clip.model.presets import preset

ABSENT = {"cuda": "no CUDA card that torch can use", "mps": "no Apple GPU (MPS) that torch can use"}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a person wants compared."""

    model: str = "tiny"
    batches: tuple[int, ...] = (64,)
    sizes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    optimizer: str = "muon"
    minutes: float = 4.7
    full: bool = False
    against: Path | None = None

    def __post_init__(self) -> None:
        for name in (self.model, *self.sizes):
            preset(name)  # an unknown one is an error that offers the nearest
        if not self.batches or min(self.batches) < 1:
            raise UserError("--batch: give whole numbers of 1 or more, such as --batch 1,8,64")
        if not self.minutes > 0:
            raise UserError(f"--minutes must be above 0, not {self.minutes:g}")


def compare(ask: Ask, folder: Path, show: Callable[[str, float], None]) -> dict[str, Any]:
    """Run a comparison; `show` is told what is being measured and which share of the time is used."""
    facts = read_facts()
    devices = devices_of(facts, ask.devices)
    other = read_document(ask.against) if ask.against else None  # before minutes are spent
    folder.mkdir(parents=True, exist_ok=True)
    document = new_document(facts.to_dict(), absent(facts, ask.devices))
    document["asked"] = {"model": ask.model, "batches": list(ask.batches), "sizes": list(ask.sizes),
                         "optimizer": ask.optimizer, "minutes": ask.minutes}  # fmt: skip
    session = Session(document, folder, ask.minutes * 60, lambda text: show(text, session.used))
    (folder / "workers.log").write_bytes(b"")
    for kind in devices:
        session.probe(kind, list(precisions_of(facts, kind, ask.precisions)), compile=not ask.sizes)
    measured = [kind for kind in devices if any(probe["device"] == kind for probe in document["devices"])]
    if not measured:
        raise UserError(f"no device could be measured; {folder / 'workers.log'} says why")
    if ask.sizes:
        run_sweep(session, sweep(facts, ask.sizes, ask.batches, measured, ask.precisions, ask.optimizer))
    else:
        run_focus(session, _without_obstacles(session, focus(
            facts, ask.model, ask.batches, measured, ask.precisions, ask.optimizer, ask.full
        )))  # fmt: skip
    if not document["results"]:
        raise UserError(f"nothing could be measured within {ask.minutes:g} minutes: {_reasons(document)}")
    document["complete"] = True
    session.write()
    remember(facts, document["results"])
    write_text(folder / "comparison.html", page(document, other))
    return document


def absent(facts: Facts, asked: Sequence[str]) -> dict[str, str]:
    """Devices that are not there, with the reason; those that were not asked for are no reason."""
    missing = {"cuda": facts.cuda is None, "mps": not facts.mps}
    return {kind: why for kind, why in ABSENT.items() if missing[kind] and not asked}


def _without_obstacles(session: Session, candidates: list[Any]) -> list[Any]:
    """Leave out, with the reason, what is known not to work before it is tried."""
    kept = []
    for candidate in candidates:
        kind = candidate.device if candidate.device != "hybrid" else "cpu"
        why = compile_obstacle(kind) if candidate.compile else ""
        if why:
            session.leave_out(candidate, "user", why)
        else:
            kept.append(candidate)
    return kept


def _reasons(document: dict[str, Any]) -> str:
    return "; ".join(dict.fromkeys(item["why"] for item in document["left_out"])) or "no candidate"
