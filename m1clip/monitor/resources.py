"""What a run used of its machine, as rows of text for the page and the report: time, memory, cores,
energy, heat.

What was not measured is a row too, with the reason that the run has logged.
"""

from __future__ import annotations

from typing import Any

from m1clip.formatting import number, percent, plural, size
from m1clip.monitor.history import PHASES, History, numbers
from m1clip.resource_use import energy_figures, mean_by_kind
from m1clip.runlog import SELECTION

Rows = list[tuple[str, str]]  # name, value
NOT_MEASURED = "not measured"
KNOWN_PARTS = (  # of a memory record, in the order in which they are shown
    *("weights", "gradients", "optimizer", "activations", "temporary", "data"),
    *("before", "libraries", "caches", "workspaces", "graph", "allocator", "rest"),
)


def reasons(history: History) -> dict[str, str]:
    """Why quantities were not measured, by their name."""
    reason_of: dict[str, str] = {}
    for record in (history.sensors, history.memory):
        reason_of.update(record.get("not_measured") or {})
    return reason_of


def _missing(history: History, name: str) -> str:
    reason = reasons(history).get(name)
    return f"{NOT_MEASURED}: {reason}" if reason else NOT_MEASURED


def stage_seconds(history: History) -> dict[str, float]:
    """Seconds of each stage of a step: of the newest synchronized step, else of the newest line."""
    seconds = history.latest.stages.get("stages") or history.newest.get("seconds") or {}
    return {name: seconds[name] for name in PHASES if name in seconds}


def stage_note(history: History) -> str:
    """Where the stages come from, and what measuring them has cost."""
    if not history.latest.stages:
        return ""
    cost = percent(history.latest.stages.get("stages_cost"), 2)
    return (
        f"one synchronized step, at step {history.latest.stages['step']:,}; all such steps: {cost} of"
        " the run"
    )


def memory_rows(history: History) -> list[tuple[str, float]]:
    """Bytes of each component, without those of 0."""
    return [
        (name, value)
        for name in KNOWN_PARTS
        for value in numbers([history.memory], name)
        if value > 0
    ]


def memory_table(history: History) -> Rows:
    """The components of the peak, each with its fraction of it, and what was not measured."""
    peak = history.memory.get("peak")
    if not peak:
        return []
    rows = [(name, f"{size(v)}, {percent(v / peak, 0)}") for name, v in memory_rows(history)]
    missing = history.memory.get("not_measured") or {}
    return [
        *rows,
        *((name, f"{NOT_MEASURED}: {reason}") for name, reason in missing.items()),
        ("peak", size(peak)),
    ]


def core_kinds(history: History) -> list[str]:
    """The kind of each core; `core` where they do not differ or the log does not say."""
    kinds = history.sensors.get("core_kinds") or []
    count = len(history.use.core_use)
    return list(kinds) if len(kinds) == count else ["core"] * count


def core_rows(history: History) -> list[dict[str, Any]]:
    """Each core with its kind, its use in the newest line and its mean, in percent."""
    mean = history.use.core_use
    now = history.newest.get("cores") or []
    kinds = core_kinds(history)
    return [
        {
            "name": f"{kinds[index]} {index}",
            "kind": kinds[index],
            "now": now[index] if index < len(now) else None,
            "mean": mean[index],
        }
        for index in range(len(mean))
    ]


def core_table(history: History) -> Rows:
    """Mean use of each kind of core, and of each core."""
    use = history.use.core_use
    kinds = core_kinds(history)
    by_kind = mean_by_kind(use, kinds)
    groups = [
        (plural(kinds.count(kind), "core" if kind == "core" else f"{kind} core"), value)
        for kind, value in by_kind.items()
    ]
    cores = [(row["name"], row["mean"]) for row in core_rows(history)]
    return [(name, f"{value:.0f}%") for name, value in [*groups, *cores]]


def energy_rows(history: History) -> Rows:
    """Power before and during the run, energy by epoch, the score for a watt-hour, the battery."""
    use = history.use
    rows: Rows = []
    if use.joules:
        epochs = (numbers([history.newest], "epoch") or [0.0])[0]
        scores = numbers([history.end, history.best()], history.metric)
        score = scores[0] if scores else None
        figures = {**energy_figures(use, epochs, score), **_logged(history)}
        watts = {
            "idle power, before the run": history.sensors.get("idle_watts"),
            "mean power": figures.get("mean_watts"),
            "peak power": figures.get("peak_watts"),
        }
        rows = [
            (name, f"{value:.1f} W" if value is not None else NOT_MEASURED)
            for name, value in watts.items()
        ]
        rows.append(("energy of training", f"{use.joules:,.4g} J"))
        if "joules_per_epoch" in figures:
            rows.append(("energy per epoch", f"{figures['joules_per_epoch']:,.4g} J"))
        if "recall_per_watt_hour" in figures:
            points = f"{number(100 * figures['recall_per_watt_hour'])} percentage points"
            rows.append((f"{SELECTION[history.metric]} per watt-hour", points))
        rows.append(("meter", str(history.sensors.get("meter") or "unknown")))
    else:
        rows.append(("energy", _missing(history, "energy")))
    battery = use.battery
    if battery:
        rows.append(("battery", f"{battery[0]:.0f}% at first, {battery[-1]:.0f}% now"))
    else:
        rows.append(("battery", _missing(history, "battery")))
    return rows


def _logged(history: History) -> dict[str, float]:
    """The figures that the run itself has written at its end."""
    names = ("joules_per_epoch", "mean_watts", "peak_watts", "recall_per_watt_hour")
    return {name: value for name in names for value in numbers([history.end], name)}


def heat_rows(history: History) -> Rows:
    """Temperature, throttling and fan."""
    use = history.use
    rows: Rows = []
    now = numbers([history.newest], "celsius")
    if use.peak_celsius is not None:
        current = f", now {now[0]:.0f} °C" if now else ""
        rows.append(("temperature", f"highest {use.peak_celsius:.0f} °C{current}"))
    else:
        rows.append(("temperature", _missing(history, "temperature")))
    if use.throttled_lines:
        fraction = percent(use.throttled_lines / use.lines, 0)
        rows.append(("throttling", f"yes, in {fraction} of the lines of the log"))
    elif use.reads_throttling:
        rows.append(("throttling", "none"))
    else:
        rows.append(("throttling", _missing(history, "throttling")))
    if use.peak_fan is not None:
        unit = "%" if numbers([history.newest], "fan_percent") else " rpm"
        rows.append(("fan", f"highest {use.peak_fan:,.0f}{unit}"))
    else:
        rows.append(("fan", _missing(history, "fan")))
    return rows


def page_values(history: History) -> dict[str, Any]:
    """What the page of runs shows in its cards about the machine."""
    return {
        "stages": stage_seconds(history),
        "stage_note": stage_note(history),
        "memory": memory_rows(history),
        "memory_reasons": history.memory.get("not_measured") or {},
        "cores": core_rows(history),
        "core_kinds": mean_by_kind(history.use.core_use, core_kinds(history)),
        "energy": energy_rows(history),
        "heat": heat_rows(history),
    }
