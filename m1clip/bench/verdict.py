"""The comparison in plain sentences. Each is made from measured figures, or says that something was not measured."""

from __future__ import annotations

from typing import Any

from m1clip.bench.candidate import Candidate
from m1clip.bench.crossover import Result

MOST_JOBS = 4  # that each get a sentence of their own
SMALL_DIFFERENCE = 1.03  # below this two medians are called equal, whatever the quartiles say


def name_of(result: Result) -> str:
    """How the candidate of a result is called in a sentence."""
    return Candidate(**result["candidate"]).way


def usable(result: Result) -> bool:
    """Parity was not checked, or it was and holds."""
    return result["parity"] is None or bool(result["parity"]["ok"])


def times_faster(slow: Result, fast: Result) -> tuple[float, float, float]:
    """Ratio of the medians, and the least and the most that the quartiles allow."""
    a, b = slow["seconds"], fast["seconds"]
    return a["median"] / b["median"], a["low"] / b["high"], a["high"] / b["low"]


def ratio_words(slow: Result, fast: Result) -> str:
    """Such as: 2.4 times faster [2.3, 2.5]."""
    middle, low, high = times_faster(slow, fast)
    digits = 0 if middle >= 20 else 1 if middle >= 3 else 2
    return f"{middle:.{digits}f} times faster [{low:.{digits}f}, {high:.{digits}f}]"


def sentences(document: dict[str, Any]) -> list[str]:
    """The verdict of a comparison."""
    results = [r for r in document["results"] if usable(r)]
    lines = []
    for result in document["results"]:
        if not usable(result):
            p = result["parity"]
            lines.append(
                f"{Candidate(**result['candidate']).label} computes other gradients than the CPU in fp32 "
                f"({p['gradient_difference']:.1%} apart, {p['allowed']:.0%} allowed): left out of the verdict."
            )
    jobs = list(dict.fromkeys((r["candidate"]["model"], r["candidate"]["batch"]) for r in results))
    lines += [_crossover(item) for item in document["crossovers"]]
    if len(jobs) > MOST_JOBS:  # a sweep: one sentence for each size, at its largest batch
        jobs = [job for job in jobs if job[1] == max(batch for model, batch in jobs if model == job[0])]
    for model, batch in jobs:
        group = [r for r in results if (r["candidate"]["model"], r["candidate"]["batch"]) == (model, batch)]
        lines += _group(model, batch, group, detail=len(group) > 4)
    lines += _why(results, document)
    lines += [f"No {kind} here: {why}." for kind, why in document["absent"].items()]
    return lines


def _group(model: str, batch: int, group: list[Result], detail: bool) -> list[str]:
    best = min(group, key=lambda r: r["seconds"]["median"])
    t = best["seconds"]
    lines = [
        f"For {model} at batch {batch}, {name_of(best)} is the fastest of {len(group)}: {_seconds(t['median'])} a step "
        f"[{_seconds(t['low'])}, {_seconds(t['high'])}], n={t['n']}, {best['pairs_per_second']:,.1f} pairs/s."
        if len(group) > 1
        else f"For {model} at batch {batch}, {name_of(best)} takes {_seconds(t['median'])} a step, n={t['n']}."
    ]
    others = sorted((r for r in group if r is not best), key=lambda r: r["seconds"]["median"])
    rivals = {r["candidate"]["device"]: r for r in reversed(others)}
    rivals.pop(best["candidate"]["device"], None)
    lines += [
        f"It is {ratio_words(r, best)} than {name_of(r)}, the best on {kind}." for kind, r in rivals.items()
    ]
    if detail:
        lines += [line for r in others if (line := _one_change(best, r))]
    return lines


def _one_change(best: Result, other: Result) -> str:
    """What one setting is worth, where two results differ in that alone."""
    a, b = best["candidate"], other["candidate"]
    changed = [key for key in a if a[key] != b[key]]
    if len(changed) != 1 or changed[0] == "device":
        return ""
    middle, low, high = times_faster(other, best)
    words = {"precision": f"{a['precision']} instead of {b['precision']}",
             "attention": f"attention by {a['attention']} instead of {b['attention']}",
             "graph": "replaying the step as a graph" if a.get("graph") else "launching kernel by kernel",
             "compile": "compiling" if a["compile"] else "not compiling",
             "threads": f"{best['threads']} threads instead of {other['threads']}",
             "recompute": "keeping activations instead of recomputing them"}.get(changed[0])  # fmt: skip
    if words is None:
        return ""
    if middle < SMALL_DIFFERENCE or low < 1:
        return f"On it, {words} makes no clear difference ({middle:.2f} times [{low:.2f}, {high:.2f}])."
    return f"On it, {words} is {ratio_words(other, best)}."


def _crossover(item: dict[str, Any]) -> str:
    where = f"{item['model']} in {item['precision']}"
    wins, loses, first, last = (
        item["cpu_wins_up_to"],
        item["cpu_loses_from"],
        item["batches"][0],
        item["batches"][-1],
    )
    equal = item["model_batch"]
    foretold = ""
    if equal:
        foretold = (
            f"; the cost model puts equal times {f'at batch {equal:.2g}' if equal >= 1 else 'below batch 1'}"
        )
    ratio = item["ratios"][str(last)]
    if wins is None and loses is not None:
        if first == last:
            return (f"{where}: {item['device']} beats the CPU {ratio:.1f} times at batch {first}, the only one "
                    "measured on both.")  # fmt: skip
        return (f"{where}: {item['device']} beats the CPU at every batch measured, from {first} "
                f"({item['ratios'][str(first)]:.1f} times) to {last} ({ratio:.0f} times){foretold}.")  # fmt: skip
    if wins is not None and loses is None:
        return f"{where}: the CPU beats {item['device']} at every batch measured, up to {wins}{foretold}."
    if wins is None:
        return f"{where}: CPU and {item['device']} cannot be told apart at the batches measured{foretold}."
    return f"{where}: the CPU is faster up to batch {wins}, {item['device']} from batch {loses}{foretold}."


def _why(results: list[Result], document: dict[str, Any]) -> list[str]:
    """What the fastest step of each device is bound by: arithmetic, memory, or neither."""
    lines = []
    probes = {probe["device"]: probe for probe in document["devices"]}
    for kind, probe in probes.items():
        mine = [r for r in results if r["candidate"]["device"] == kind and r["gemm_share"] is not None]
        if not mine:
            continue
        best = max(mine, key=lambda r: r["pairs_per_second"])
        moved = traffic(best)
        share = moved / probe["bandwidth"] / best["seconds"]["median"] if moved else None
        memory = ""
        if share is not None:
            memory = (f"; moving its weights and activations once each way takes {share:.0%} of the step at the "
                      f"measured {probe['bandwidth'] / 1e9:,.0f} GB/s of memory")  # fmt: skip
        launch = probe["overheads"]["launch"]["median"]
        lines.append(
            f"Why, on {kind}: {Candidate(**best['candidate']).label} computes at {best['gemm_share']:.0%} of the "
            f"measured {best['candidate']['precision']} matrix product rate{memory}; handing over one "
            f"operation costs {launch * 1e6:.1f} µs."
        )
    return lines


def traffic(result: Result) -> float | None:
    """Bytes that a step must move at least: weights, gradient and moments by the optimizer, activations twice."""
    memory = result["memory"]
    if not memory or "activations" not in memory["parts"]:
        return None
    parts = memory["parts"]
    optimizer = (
        2 * parts["weights"] + 2 * parts["optimizer"] + 2 * 4 * result["parameters"]
    )  # each read and written
    return float(optimizer + 2 * parts["activations"])


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
