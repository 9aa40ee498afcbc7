"""From raw samples of a candidate to the line of it: pure functions of plain values."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from m1clip.hardware.clock import drift, remarks, timing
from m1clip.train.parity import TOLERANCE

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
        "pairs_per_second": candidate["batch"] / time.median,
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
