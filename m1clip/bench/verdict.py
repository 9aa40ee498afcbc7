"""The conclusions of a comparison as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from m1clip.bench.configurations import Configuration
from m1clip.bench.cost_model import Result
from m1clip.formatting import duration
from m1clip.training.parity import TOLERANCE

SMALL_DIFFERENCE = 1.03  # below this ratio two medians count as equal, regardless of their quartiles
DETAILED = 4  # models and batch sizes described individually; beyond that, only each model's largest batch


def gradient_is_right(result: Result) -> bool:
    """Whether the gradient matches the CPU's in fp32 within the precision's tolerance, or was not checked."""
    difference = result["gradient_difference"]
    return difference is None or difference <= TOLERANCE[Configuration(**result["configuration"]).precision]


def speedup(slow: Result, fast: Result) -> tuple[float, float, float]:
    """Ratio of the medians, with its lower and upper bounds from the quartiles."""
    a, b = slow["seconds"], fast["seconds"]
    return a["median"] / b["median"], a["low"] / b["high"], a["high"] / b["low"]


def verdict(document: dict[str, Any]) -> list[str]:
    """The conclusions of a comparison."""
    lines = []
    for r in document["results"]:
        if not gradient_is_right(r):
            c = Configuration(**r["configuration"])
            lines.append(
                f"{c.label}: gradients differ from the CPU's in fp32 by {r['gradient_difference']:.1%} "
                f"({TOLERANCE[c.precision]:.0%} allowed), so it is excluded from the verdict."
            )
    results = [r for r in document["results"] if gradient_is_right(r)]
    lines += [_crossover(item) for item in document["crossovers"]]
    jobs = list(dict.fromkeys((r["configuration"]["model"], r["configuration"]["batch_size"]) for r in results))
    if len(jobs) > DETAILED:
        jobs = list({model: (model, batch_size) for model, batch_size in sorted(jobs)}.values())
    for job in jobs:
        lines += _fastest([r for r in results if _job(r) == job])
    lines += [_limit(device, results) for device in document["devices"] if _of_device(device, results)]
    return lines + [f"No {kind} here: {reason}." for kind, reason in document["absent"].items()]


def _job(result: Result) -> tuple[str, int]:
    return result["configuration"]["model"], result["configuration"]["batch_size"]


def _of_device(device: dict[str, Any], results: Sequence[Result]) -> list[Result]:
    return [r for r in results if r["configuration"]["device"] == device["device"]]


def _ratio(slow: Result, fast: Result) -> str:
    middle, low, high = speedup(slow, fast)
    digits = 0 if middle >= 20 else 1 if middle >= 3 else 2
    return f"{middle:.{digits}f} times faster [{low:.{digits}f}, {high:.{digits}f}]"


def _fastest(group: list[Result]) -> list[str]:
    best, *others = sorted(group, key=lambda r: r["seconds"]["median"])
    c, t = Configuration(**best["configuration"]), best["seconds"]
    lines = [
        f"{c.model}, batch {c.batch_size}: {c.variant} is the fastest of {len(group)}, {duration(t['median'])} per "
        f"step [{duration(t['low'])}, {duration(t['high'])}], n={t['n']}, {best['images_per_second']:,.1f} "
        "images/s."
    ]
    rivals = {r["configuration"]["device"]: r for r in reversed(others)}
    rivals.pop(c.device, None)
    for device, r in rivals.items():
        rival = Configuration(**r["configuration"])
        lines.append(f"It is {_ratio(r, best)} than {rival.variant}, the fastest on {device}.")
    return lines + [line for r in others if len(group) > 4 and (line := _one_change(best, r))]


def _one_change(best: Result, other: Result) -> str:
    """The gain from one setting, if two results differ only in that setting."""
    a, b = best["configuration"], other["configuration"]
    changed = [key for key in a if a[key] != b[key]]
    if len(changed) != 1 or changed[0] == "device":
        return ""
    words = {
        "precision": f"{a['precision']} instead of {b['precision']}",
        "attention": f"{a['attention']} attention instead of {b['attention']}",
        "cuda_graph": "a CUDA graph" if a["cuda_graph"] else "no CUDA graph",
        "compile": "compiling" if a["compile"] else "not compiling",
        "threads": f"{best['threads']} threads instead of {other['threads']}",
        "grad_checkpointing": "no gradient checkpointing",
    }[changed[0]]
    middle, low, high = speedup(other, best)
    if middle < SMALL_DIFFERENCE or low < 1:
        return f"There, {words} makes no clear difference ({middle:.2f} times [{low:.2f}, {high:.2f}])."
    return f"There, {words} is {_ratio(other, best)}."


def _crossover(item: dict[str, Any]) -> str:
    """Where the CPU stops being faster than an accelerator."""
    where, device, sizes = f"{item['model']} in {item['precision']}", item["device"], item["batch_sizes"]
    wins, loses, ratios = item["cpu_wins_up_to"], item["cpu_loses_from"], item["ratios"]
    predicted = ""
    if item["predicted"]:
        at = f"batch {item['predicted']:.2g}" if item["predicted"] >= 1 else "less than batch 1"
        predicted = f" (the cost model predicts equal times at {at})"
    if wins is not None and loses is not None:
        return f"{where}: the CPU is faster up to batch {wins}, {device} from batch {loses}{predicted}."
    if wins is not None:
        return f"{where}: the CPU is faster than {device} at every batch size measured, up to {wins}{predicted}."
    if loses is not None:
        return (
            f"{where}: {device} is faster than the CPU at every batch size measured, {ratios[0]:.1f} times at "
            f"{sizes[0]}, {ratios[-1]:.0f} times at {sizes[-1]}{predicted}."
        )
    return f"{where}: no clear difference between the CPU and {device} at the batch sizes measured{predicted}."


def _limit(device: dict[str, Any], results: Sequence[Result]) -> str:
    """How close the fastest step of a device comes to the rate of a large matrix multiplication."""
    best = max(_of_device(device, results), key=lambda r: r["images_per_second"])
    c = Configuration(**best["configuration"])
    return (
        f"On {c.device}, {c.label} reaches {best['gemm_fraction']:.0%} of the measured {c.precision} GEMM "
        f"rate; one kernel launch takes {device['launch_seconds'] * 1e6:.1f} µs."
    )
