"""The comparison in plain sentences. Each is made from measured figures, or says that something was not measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from m1clip.bench.candidate import Candidate
from m1clip.hardware.timing import drift, remarks, timing
from m1clip.training.parity import TOLERANCE


@dataclass(frozen=True)
class Point:
    """One measured step."""

    size: str
    parameters: float
    flops: float
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """What a step costs, in seconds."""

    fixed: float
    per_parameter: float
    per_flop: float

    def seconds(self, parameters: float, flops: float) -> float:
        """The predicted seconds of a step."""
        return self.fixed + self.per_parameter * parameters + self.per_flop * flops

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def fit(points: Sequence[Point]) -> CostModel | None:
    """The non-negative coefficients with the least relative error; None for fewer than two points."""
    if len(points) < 2:
        return None
    seconds = np.array([p.seconds for p in points])
    columns = np.array([[1.0, p.parameters, p.flops] for p in points])
    scaled = columns / seconds[:, None]  # relative error: a step of 10 ms counts as much as one of 10 s
    size = np.maximum(scaled.max(axis=0), 1e-300)  # the columns differ by 12 orders of magnitude
    best: tuple[float, np.ndarray] | None = None
    for count in range(1, min(3, len(points)) + 1):
        for chosen in itertools.combinations(range(3), count):
            values, *_ = np.linalg.lstsq((scaled / size)[:, chosen], np.ones(len(points)), rcond=None)
            if (values < 0).any():
                continue
            whole = np.zeros(3)
            whole[list(chosen)] = values
            error = float(((scaled / size) @ whole - 1) @ ((scaled / size) @ whole - 1))
            if best is None or error < best[0] - 1e-12:
                best = (error, whole / size)
    assert best is not None  # one column alone always has a non-negative fit: all values are positive
    return CostModel(*(float(value) for value in best[1]))


def left_out_errors(points: Sequence[Point]) -> dict[str, list[float]]:
    """For each size: relative errors of its points as foretold by a fit of all other sizes."""
    found = {}
    for size in dict.fromkeys(p.size for p in points):
        model = fit([p for p in points if p.size != size])
        if model is not None and len({p.size for p in points if p.size != size}) > 1:
            mine = [p for p in points if p.size == size]
            found[size] = [model.seconds(p.parameters, p.flops) / p.seconds - 1 for p in mine]
    return found


def crossing(first: CostModel, second: CostModel, parameters: float, flops_per_pair: float) -> float | None:
    """The batch at which two ways take the same time; None where one is faster at every batch."""
    start = first.seconds(parameters, 0) - second.seconds(parameters, 0)
    slope = (second.per_flop - first.per_flop) * flops_per_pair
    if slope == 0 or start / slope <= 0:
        return None
    return start / slope


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
        f"[{_seconds(t['low'])}, {_seconds(t['high'])}], n={t['n']}, {best['images_per_second']:,.1f} samples/s."
        if len(group) > 1
        else f"For {model} at batch {batch}, {name_of(best)} takes {_seconds(t['median'])} a step, n={t['n']}."
    ]
    others = sorted((r for r in group if r is not best), key=lambda r: r["seconds"]["median"])
    rivals = {r["candidate"]["device"]: r for r in reversed(others)}
    rivals.pop(best["candidate"]["device"], None)
    lines += [f"It is {ratio_words(r, best)} than {name_of(r)}, the best on {kind}." for kind, r in rivals.items()]
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
    wins, loses, first, last = (item["cpu_wins_up_to"], item["cpu_loses_from"], item["batches"][0], item["batches"][-1])
    equal = item["model_batch"]
    foretold = ""
    if equal:
        foretold = f"; the cost model puts equal times {f'at batch {equal:.2g}' if equal >= 1 else 'below batch 1'}"
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
        best = max(mine, key=lambda r: r["images_per_second"])
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
    optimizer = 2 * parts["weights"] + 2 * parts["optimizer"] + 2 * 4 * result["parameters"]  # each read and written
    return float(optimizer + 2 * parts["activations"])


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


SIZES = (("tiny, below 10M", 0, 10e6), ("small, 10-100M", 10e6, 100e6), ("medium, 100-500M", 100e6, 500e6),
         ("large, above 500M", 500e6, float("inf")))  # fmt: skip
BATCHES = (("batch 1-8", 1, 8), ("batch 9-64", 9, 64), ("batch 65-512", 65, 512), ("batch above 512", 513, 10**9))
NOT_MEASURED = "not measured here"


def usage_table(results: list[Result]) -> list[dict[str, Any]]:
    """Rows of cells: the fastest way that was measured there, against the next best device or precision."""
    rows = []
    for title, least, most in SIZES:
        cells = []
        for _, low, high in BATCHES:
            inside = [r for r in results if least <= r["parameters"] < most
                      and low <= r["candidate"]["batch"] <= high and usable(r)]  # fmt: skip
            cells.append(_cell(inside))
        rows.append({"size": title, "cells": cells})
    return rows


def _cell(results: list[Result]) -> str:
    """Ways are compared at one model and batch: the largest measured in the cell."""
    if not results:
        return NOT_MEASURED
    top = max(results, key=lambda r: (r["parameters"], r["candidate"]["batch"]))["candidate"]
    group = [r for r in results if all(r["candidate"][key] == top[key] for key in ("model", "batch"))]
    best = min(group, key=lambda r: r["seconds"]["median"])
    text = f"{name_of(best)} ({top['model']}, batch {top['batch']}"
    others = [r for r in group if r["candidate"]["device"] != best["candidate"]["device"]]
    others = others or [r for r in group if r["candidate"]["precision"] != best["candidate"]["precision"]]
    if others:
        rival = min(others, key=lambda r: r["seconds"]["median"])
        text += f": {ratio_words(rival, best)} than {name_of(rival)}"
    return f"{text})"


# "step": forward, backward and optimizer in one, where the step is replayed
PHASES = ("data", "copy", "forward", "backward", "optimizer", "step")


def summarise(
    candidate: dict[str, Any], opened: dict[str, Any], visits: list[dict[str, Any]], memory: dict[str, Any] | None,
    parity: dict[str, Any] | None, gemm_rate: float | None,
) -> dict[str, Any]:  # fmt: skip
    """One result. `visits` are the answers of `Workload.steps`, one for each round."""
    samples = [sample for visit in visits for sample in visit["samples"]]
    seconds = [sample["seconds"] for sample in samples]
    time = timing(seconds)
    shares = [visit["others"] for visit in visits if visit["others"] is not None]
    joules = [visit["joules"] for visit in visits if visit["joules"] is not None]
    degrees = [visit["temperature"] for visit in visits if visit["temperature"] is not None]
    result = {
        "candidate": candidate,
        "parameters": opened["parameters"],
        "text_tokens": opened["text_tokens"],
        "flops": opened["flops"],
        "threads": opened["threads"],
        "first_step_seconds": opened["first_step_seconds"],
        "replayed": opened.get("replayed", False),
        "seconds": asdict(time),
        "samples": seconds,
        "images_per_second": candidate["batch"] / time.median,
        "gemm_share": opened["flops"] / time.median / gemm_rate if gemm_rate else None,
        "phases": split(samples),
        "joules_per_step": sum(joules) / len(seconds) if joules else None,
        "meter": opened["meter"],
        "temperature": max(degrees) if degrees else None,
        "drift": drift(seconds),
        "others": statistics.median(shares) if shares else None,
        "memory": memory,
        "parity": judged(parity, candidate["precision"]),
    }
    result["remarks"] = remarks(seconds, result["others"])
    return result


def split(samples: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds of each phase, and of what no phase counts; empty where the device cannot tell."""
    if not all("forward" in sample or "step" in sample for sample in samples):
        return {}
    there = [name for name in PHASES if any(name in sample for sample in samples)]
    found = {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in there}
    rest = [s["seconds"] - sum(s.get(name, 0.0) for name in PHASES) for s in samples]
    return {**found, "other": max(0.0, statistics.median(rest))}


def judged(parity: dict[str, Any] | None, precision: str) -> dict[str, Any] | None:
    """With a verdict: the gradients agree with the CPU's fp32 ones within what the precision allows."""
    if parity is None:
        return None
    allowed = TOLERANCE[precision]  # type: ignore[index]
    return {**parity, "allowed": allowed, "ok": parity["gradient_difference"] <= allowed}
