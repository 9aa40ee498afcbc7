"""Two machines side by side, where both have measured the same model, batch and way."""

from __future__ import annotations

from html import escape
from typing import Any

from m1clip.bench.candidate import Candidate
from m1clip.bench.crossover import Result
from m1clip.bench.html import seconds, table
from m1clip.bench.verdict import times_faster

Document = dict[str, Any]


def machine(document: Document) -> str:
    """A machine in a few words."""
    facts = document["facts"]
    return f"{facts['cuda']} + {facts['cpu']}" if facts["cuda"] else str(facts["cpu"])


def matched(document: Document, other: Document) -> list[tuple[Result, Result]]:
    """Results of the same candidate on both machines."""
    there = {Candidate(**r["candidate"]): r for r in other["results"]}
    pairs = [(r, there.get(Candidate(**r["candidate"]))) for r in document["results"]]
    return [(here, found) for here, found in pairs if found is not None]


def best_of(document: Document) -> dict[tuple[str, int], Result]:
    """The fastest result for each model and batch."""
    found: dict[tuple[str, int], Result] = {}
    for r in document["results"]:
        key = (r["candidate"]["model"], r["candidate"]["batch"])
        if key not in found or r["seconds"]["median"] < found[key]["seconds"]["median"]:
            found[key] = r
    return found


def side_by_side(document: Document, other: Document) -> str:
    """The best of each machine for each shared job, then every shared candidate."""
    here, there = best_of(document), best_of(other)
    head = ("job", f"here: {machine(document)}", f"there: {machine(other)}", "there / here")
    rows = [[escape(f"{model}, batch {batch}"), *_cells(here[model, batch], there[model, batch], name=True)]
            for model, batch in here if (model, batch) in there]  # fmt: skip
    more = [[escape(Candidate(**a["candidate"]).label), *_cells(a, b)] for a, b in matched(document, other)]
    if not rows:
        return "<h2>Two machines</h2><p>They have no model and batch in common.</p>"
    best = f"<h2>Two machines</h2><p>The fastest way of each.</p>{table(head, rows, (3,))}"
    return best + (f"<h3>The same way on both</h3>{table(head, more, (3,))}" if more else "")


def _cells(here: Result, there: Result, name: bool = False) -> list[str]:
    ratio, low, high = times_faster(there, here)
    words = [f"{escape(Candidate(**r['candidate']).way)}: " if name else "" for r in (here, there)]
    times = [f"{word}{seconds(r['seconds']['median'])}" for word, r in zip(words, (here, there), strict=True)]
    return [*times, f"{ratio:.3g} [{low:.3g}, {high:.3g}]"]
