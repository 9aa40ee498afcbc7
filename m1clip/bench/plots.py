"""The plots of the comparison's report: speed, growth with batch and size, time and memory by part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from m1clip.bench import svg
from m1clip.bench.candidate import Candidate
from m1clip.bench.costmodel import CostModel
from m1clip.bench.crossover import Result, plain
from m1clip.bench.html import figure, rate, seconds, size
from m1clip.bench.summary import PHASES
from m1clip.hardware.ledger import COMPONENTS

Document = dict[str, Any]
MEMORY = ("process", "data", *COMPONENTS, "rest")
MOST_BARS = 16


def speed(document: Document) -> str:
    """Pairs a second of each way, a plot for each model and batch."""
    ways = _ways(document["results"])
    plots = []
    for (model, batch), members in _groups(document["results"]).items():
        if len(members) < 3 and len(document["results"]) > 3:
            continue  # a sweep: its lines say it better
        rows = [
            svg.Bar(
                _way(r), r["pairs_per_second"], batch / r["seconds"]["high"], batch / r["seconds"]["low"],
                rate(r["pairs_per_second"]), ways.index((r["candidate"]["device"], r["candidate"]["precision"])),
            )
            for r in sorted(members, key=lambda r: -r["pairs_per_second"])
        ]  # fmt: skip
        plots.append(
            figure(
                svg.bars(rows[:MOST_BARS], f"pairs a second, {model}, batch {batch}"),
                f"{model}, batch {batch}: pairs a second; the mark goes from quartile to quartile.",
            )
        )
    return f'<h2>Speed</h2><div class="plots">{"".join(plots)}</div>' if plots else ""


def growth(document: Document) -> str:
    """Where several batches were measured: seconds a step against the batch, with the cost model's curve."""
    plots, ways = [], _ways(document["results"])
    fits = {(f["device"], f["precision"]): f for f in document["cost_models"]}
    for model in dict.fromkeys(r["candidate"]["model"] for r in document["results"]):
        mine = [r for r in document["results"] if r["candidate"]["model"] == model and plain(r)]
        if len({r["candidate"]["batch"] for r in mine}) < 2:
            continue
        drawn = []
        for way in _ways(mine):
            of_way = sorted(
                _fastest(r for r in mine if (r["candidate"]["device"], r["candidate"]["precision"]) == way),
                key=lambda r: r["candidate"]["batch"],
            )
            points = [
                (r["candidate"]["batch"], *(r["seconds"][k] for k in ("median", "low", "high")))
                for r in of_way
            ]
            drawn.append(
                svg.Line(" ".join(way), points, _curve(fits.get(way), of_way), colour=ways.index(way))
            )
        plots.append(figure(svg.lines(drawn, f"seconds a step, {model}", "batch", "a step", seconds),
                            f"{model}: seconds a step; dashed: the cost model."))  # fmt: skip
    return f'<h2>Batch and size</h2><div class="plots">{"".join(plots)}</div>' if plots else ""


def _ways(results: Iterable[Result]) -> list[tuple[str, str]]:
    """Device and precision of each, in the order in which they first appear: that gives them their colour."""
    return list(dict.fromkeys((r["candidate"]["device"], r["candidate"]["precision"]) for r in results))


def _fastest(results: Iterable[Result]) -> list[Result]:
    """One result for each batch, where several kinds of attention were tried."""
    found: dict[int, Result] = {}
    for r in sorted(results, key=lambda r: -r["seconds"]["median"]):
        found[r["candidate"]["batch"]] = r
    return list(found.values())


def _curve(model: dict[str, Any] | None, results: list[Result]) -> list[tuple[float, float]]:
    if model is None or len(results) < 2:
        return []
    cost = CostModel(model["fixed"], model["per_parameter"], model["per_flop"])
    one, last = results[0], results[-1]
    per_pair = one["flops"] / one["candidate"]["batch"]
    low, high = one["candidate"]["batch"], last["candidate"]["batch"]
    return [(b, cost.seconds(one["parameters"], per_pair * b))
            for b in (low * (high / low) ** (i / 24) for i in range(25))]  # fmt: skip


def shares(document: Document) -> str:
    """Where the time of a step goes, and what its memory is made of."""
    parts = []
    shown = [r for r in document["results"] if r["phases"]]
    if shown:
        rows = [(_short(r, document), r["phases"], seconds(r["seconds"]["median"])) for r in _pick(shown)]
        names = [name for name in (*PHASES, "other") if any(name in values for _, values, _ in rows)]
        parts.append(
            figure(
                svg.stacked(rows, names, "time of a step by phase"),
                "Seconds of a step by phase.",
            )
        )
    shown = [r for r in document["results"] if r["memory"] and r["memory"]["known"]]
    if shown:
        rows = [
            (
                _short(r, document),
                {k: float(v) for k, v in r["memory"]["parts"].items()},
                size(r["memory"]["total"]),
            )
            for r in _pick(shown)
        ]
        names = [name for name in MEMORY if any(name in values for _, values, _ in rows)]
        parts.append(figure(
            svg.stacked(rows, names, "peak memory by component"),
            "Peak memory and what it was made of at that moment; the parts add up to the peak. "
            "Rest: allocator and library workspace.",
        ))  # fmt: skip
    return f'<h2>Time and memory</h2><div class="plots">{"".join(parts)}</div>' if parts else ""


def _groups(items: list[Result]) -> dict[tuple[str, int], list[Result]]:
    found: dict[tuple[str, int], list[Result]] = {}
    for r in items:
        found.setdefault((r["candidate"]["model"], r["candidate"]["batch"]), []).append(r)
    return found


def _pick(items: list[Result]) -> list[Result]:
    """The slowest steps tell most where there are too many."""
    return (
        items if len(items) <= MOST_BARS else sorted(items, key=lambda r: -r["seconds"]["median"])[:MOST_BARS]
    )


def _way(r: Result) -> str:
    return Candidate(**r["candidate"]).way


def _short(r: Result, document: Document) -> str:
    one = len(_groups(document["results"])) == 1
    return _way(r) if one else Candidate(**r["candidate"]).label
