"""Where one device overtakes another: brackets from measured points, and where the cost model puts it."""

from __future__ import annotations

from typing import Any

from m1clip.bench.costmodel import CostModel, Point, crossing, fit, left_out_errors

Result = dict[str, Any]


def plain(result: Result) -> bool:
    """A step without extras, as every device and size has it."""
    c = result["candidate"]
    by_kernel = c["device"] == "cuda" and not c.get("graph", True)  # not what `train` does
    return not (c["compile"] or c["recompute"] or c["threads"] or c["device"] == "hybrid" or by_kernel)


def point_of(result: Result) -> Point:
    """What the cost model sees of a result."""
    name = result["candidate"]["model"]
    return Point(name, result["parameters"], result["flops"], result["seconds"]["median"])


def series(results: list[Result]) -> dict[tuple[str, str, str], list[Result]]:
    """Plain results by device, precision and attention."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    for result in filter(plain, results):
        c = result["candidate"]
        found.setdefault((c["device"], c["precision"], c["attention"]), []).append(result)
    return found


def cost_models(results: list[Result]) -> list[dict[str, Any]]:
    """A fit for each series with three points or more, with its error on sizes that it has not seen."""
    fits = []
    for (device, precision, attention), members in series(results).items():
        points = [point_of(result) for result in members]
        model = fit(points) if len(points) >= 3 else None
        if model is None:
            continue
        inside = sorted(abs(model.seconds(p.parameters, p.flops) / p.seconds - 1) for p in points)
        fits.append({
            "device": device, "precision": precision, "attention": attention, **model.to_dict(),
            "points": len(points), "median_error": inside[len(inside) // 2], "left_out": left_out_errors(points),
        })  # fmt: skip
    return fits


def crossovers(results: list[Result], fits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each size and precision: up to which batch the CPU is faster than an accelerator, and from which it is not.

    Times count as different only where their quartiles do not overlap.
    """
    found = []
    everything = series(results)
    models = {(f["device"], f["precision"]): f for f in fits}
    for (device, precision, _), members in everything.items():
        if device == "cpu":
            continue
        host = [r for (kind, p, _), rs in everything.items() if kind == "cpu" and p == precision for r in rs]
        for size in dict.fromkeys(r["candidate"]["model"] for r in members):
            there = {r["candidate"]["batch"]: r for r in members if r["candidate"]["model"] == size}
            here = {r["candidate"]["batch"]: r for r in host if r["candidate"]["model"] == size}
            shared = sorted(set(there) & set(here))
            if shared:
                bracket = _bracket(here, there, shared)
                foretold = _foretold(models, device, precision, there[shared[0]])
                found.append({"model": size, "precision": precision, "device": device, **bracket, **foretold})
    return found


def _bracket(here: dict[int, Result], there: dict[int, Result], shared: list[int]) -> dict[str, Any]:
    wins = [b for b in shared if here[b]["seconds"]["high"] < there[b]["seconds"]["low"]]
    losses = [b for b in shared if here[b]["seconds"]["low"] > there[b]["seconds"]["high"]]
    ratios = {b: here[b]["seconds"]["median"] / there[b]["seconds"]["median"] for b in shared}
    return {
        "batches": shared,
        "cpu_wins_up_to": max(wins) if wins else None,
        "cpu_loses_from": min(losses) if losses else None,
        "ratios": {str(b): ratio for b, ratio in ratios.items()},
    }


def _foretold(models: dict[tuple[str, str], Any], device: str, precision: str, one: Result) -> dict[str, Any]:
    host, card = models.get(("cpu", precision)), models.get((device, precision))
    if host is None or card is None:
        return {"model_batch": None}
    fits = [CostModel(m["fixed"], m["per_parameter"], m["per_flop"]) for m in (host, card)]
    per_pair = one["flops"] / one["candidate"]["batch"]
    return {"model_batch": crossing(fits[0], fits[1], one["parameters"], per_pair)}
