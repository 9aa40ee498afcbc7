"""Step time as a function of model and batch size, fitted to measured steps; and the store of measured steps."""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.bench.configurations import Configuration
from m1clip.data.cache import user_cache
from m1clip.hardware.facts import Facts
from m1clip.io import read_small, write_json

Result = dict[str, Any]  # one measured configuration, as stored in comparison.json
SAVED = ("configuration", "parameters", "flops", "seconds", "joules_per_step")


@dataclass(frozen=True)
class CostModel:
    """seconds = fixed + per_parameter * parameters + per_flop * operations."""

    fixed: float
    per_parameter: float
    per_flop: float

    def seconds(self, parameters: float, flops: float) -> float:
        """The predicted seconds of a step."""
        return self.fixed + self.per_parameter * parameters + self.per_flop * flops


def fit(results: Sequence[Result]) -> CostModel | None:
    """The non-negative coefficients with the least relative error; None for fewer than three measured steps."""
    if len(results) < 3:
        return None
    columns = np.array([[1.0, r["parameters"], r["flops"]] for r in results])
    scaled = columns / np.array(
        [[r["seconds"]["median"]] for r in results]
    )  # relative error: 10 ms count as much as 10 s
    size = np.maximum(scaled.max(axis=0), 1e-300)  # the columns differ by 12 orders of magnitude
    scaled /= size
    best, least = np.zeros(3), float("inf")
    subsets = (chosen for count in (1, 2, 3) for chosen in itertools.combinations(range(3), count))
    for chosen in map(list, subsets):
        values, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(results)), rcond=None)
        error = float(((scaled[:, chosen] @ values - 1) ** 2).sum())
        if (values >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(3), error
            best[chosen] = values
    return CostModel(*(float(value) for value in best / size))


def errors(model: CostModel, results: Sequence[Result]) -> list[float]:
    """Relative errors of a model's predictions."""
    return [model.seconds(r["parameters"], r["flops"]) / r["seconds"]["median"] - 1 for r in results]


def cost_models(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One fit per device and precision, with its error and its leave-one-model-out error."""
    found = []
    for (device, precision), members in by_device(results).items():
        model = fit(members)
        if model is None:
            continue
        held_out = {}
        for size in dict.fromkeys(r["configuration"]["model"] for r in members):
            others = [r for r in members if r["configuration"]["model"] != size]
            other = fit(others) if len({r["configuration"]["model"] for r in others}) > 1 else None
            if other is not None:
                held_out[size] = errors(other, [r for r in members if r["configuration"]["model"] == size])
        median = statistics.median(map(abs, errors(model, members)))
        found.append(
            {
                "device": device,
                "precision": precision,
                **asdict(model),
                "points": len(members),
                "median_error": median,
                "held_out_errors": held_out,
            }
        )
    return found


def by_device(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results of default configurations by device and precision; the fastest one for each model and batch size."""
    found: dict[tuple[str, str], dict[tuple[str, int], Result]] = {}
    for r in sorted(results, key=lambda r: -r["seconds"]["median"]):
        c = Configuration(**r["configuration"])
        if c.is_default:
            found.setdefault((c.device, c.precision), {})[c.model, c.batch_size] = r
    order = {id(r): index for index, r in enumerate(results)}
    return {key: sorted(fastest.values(), key=lambda r: order[id(r)]) for key, fastest in found.items()}


def crossovers(results: Sequence[Result], models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The batch size up to which the CPU is faster than each accelerator, by model and precision.

    Times count as different only where their quartiles do not overlap; `predicted` is where the cost models intersect.
    """
    found = []
    series = by_device(results)
    fits = {(m["device"], m["precision"]): CostModel(m["fixed"], m["per_parameter"], m["per_flop"]) for m in models}
    for (device, precision), members in series.items():
        for model in dict.fromkeys(r["configuration"]["model"] for r in members if device != "cpu"):
            gpu, cpu = (
                {r["configuration"]["batch_size"]: r for r in those if r["configuration"]["model"] == model}
                for those in (members, series.get(("cpu", precision), []))
            )
            shared = sorted(set(gpu) & set(cpu))
            if not shared:
                continue
            wins = [b for b in shared if cpu[b]["seconds"]["high"] < gpu[b]["seconds"]["low"]]
            losses = [b for b in shared if cpu[b]["seconds"]["low"] > gpu[b]["seconds"]["high"]]
            predicted = None
            if ("cpu", precision) in fits and (device, precision) in fits:
                one = gpu[shared[0]]
                per_image = one["flops"] / shared[0]
                predicted = crossing(fits["cpu", precision], fits[device, precision], one["parameters"], per_image)
            found.append(
                {
                    "model": model,
                    "precision": precision,
                    "device": device,
                    "batch_sizes": shared,
                    "cpu_wins_up_to": max(wins, default=None),
                    "cpu_loses_from": min(losses, default=None),
                    "ratios": [cpu[b]["seconds"]["median"] / gpu[b]["seconds"]["median"] for b in shared],
                    "predicted": predicted,
                }
            )
    return found


def crossing(first: CostModel, second: CostModel, parameters: float, flops_per_image: float) -> float | None:
    """The batch size at which two devices take the same time; None if one is faster at every batch size."""
    start = first.seconds(parameters, 0) - second.seconds(parameters, 0)
    slope = (second.per_flop - first.per_flop) * flops_per_image
    return start / slope if slope and start / slope > 0 else None


def save_measured(facts: Facts, results: Sequence[Result], folder: Path | None = None) -> None:
    """Save steps measured on this machine; a newer measurement of the same configuration replaces the older one."""
    kept = {json.dumps(r["configuration"], sort_keys=True): r for r in load_measured(facts, folder)}
    for r in results:
        kept[json.dumps(r["configuration"], sort_keys=True)] = {key: r[key] for key in SAVED}
    try:
        write_json(_path(facts, folder), list(kept.values()))
    except OSError:
        return  # the cache folder is not writable; comparison.json has the results


def load_measured(facts: Facts, folder: Path | None = None) -> list[Result]:
    """The steps measured on this machine with this torch version."""
    try:
        values = list(json.loads(read_small(_path(facts, folder), 2**26)))
    except (OSError, ValueError, TypeError):
        return []
    return [value for value in values if isinstance(value, dict) and value.keys() >= set(SAVED)]


def _path(facts: Facts, folder: Path | None) -> Path:
    values = json.dumps({**facts.to_dict(), "python": ""}, sort_keys=True)
    return (folder or user_cache()) / "compare" / f"{hashlib.sha256(values.encode()).hexdigest()[:16]}.json"
