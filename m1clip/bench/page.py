"""One self-contained HTML page of a comparison: plots, tables and which device to use when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from m1clip import __version__
from m1clip.bench.overhead import Overhead, matmul_crossover
from m1clip.bench.report import (
    COLUMN_TITLES,
    LOADING_TITLES,
    OVERHEAD_TITLES,
    STABILITY_TITLES,
    THREAD_TITLES,
    Comparison,
    crossovers,
    loading_rows,
    overhead_note,
    overhead_rows,
    overhead_title,
    rows,
    stability_rows,
    thread_rows,
    when_to_use,
)
from m1clip.bench.steps import Result
from m1clip.formatting import duration, number, one_line, percent, size
from m1clip.io import write_bytes
from m1clip.monitor.report import NO_PLOTS, PLOT_COLORS, has_matplotlib, html_page, html_table, plot

PAGE_NAME = "comparison.html"
EQUAL = "equal"  # the line on which a device is as fast as the CPU
STAGE_COLORS = dict(zip(("copy", "forward", "backward", "optimizer"), PLOT_COLORS, strict=False))
OTHER_STAGE_COLOR = PLOT_COLORS[len(STAGE_COLORS)]
NO_ENERGY = (
    "Not measured: no energy counter can be read here (NVML on NVIDIA, RAPL on Linux, often only "
    "as root, zeus-apple-silicon on a Mac)."
)
ONLY_CPU = "Only the CPU was measured: there is no crossover with another device."


def write_page(comparison: Comparison, path: Path) -> Path:
    """Write the page of a comparison."""
    write_bytes(path, comparison_page(comparison))
    return path


def comparison_page(comparison: Comparison) -> bytes:
    """The page of a comparison as HTML."""
    facts = comparison.facts
    machine = ", ".join(part for part in (facts.cuda, facts.cpu, f"{facts.cores} cores") if part)
    about = f"m1clip {__version__}, torch {facts.torch}, {machine}; {comparison.date}"
    body = f"<h1>Comparison of devices</h1><p class='hint'>{escape(about)}</p>"
    body += _section("Verdict", _list(comparison.verdict))
    body += _section("When to use which", _when(comparison.results))
    body += _section("Step time", _plots(step_plots(comparison.results)))
    body += _section("Crossover", _crossover(comparison.results))
    body += _section("Time by stage", stage_bars(comparison.results))
    body += _section("Memory", bars(comparison.results, lambda r: float(r.peak_bytes), size))
    body += _section("Energy", _energy(comparison.results))
    body += _section("Threads and workers", _threads_and_workers(comparison))
    body += _section("Stability", _stability(comparison))
    body += _section("Overhead", _overhead(comparison))
    body += _section("All measurements", _measurements(comparison))
    return html_page("comparison", body)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _hint(text: str) -> str:
    return f"<p class='hint'>{escape(text)}</p>"


def _list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(one_line(line))}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _plots(plots: str) -> str:
    """Plots side by side; they need matplotlib, the rest of the page does not."""
    return f"<div class='grid'>{plots}</div>" if plots else ""


def _when(results: Sequence[Result]) -> str:
    head, table_rows = when_to_use(results)
    note = (
        "The fastest with correct gradients, from the measurements of this machine; n steps each."
    )
    return _hint(note) + html_table(head, table_rows, "values words")


def _defaults(results: Sequence[Result]) -> list[Result]:
    """Results without a changed setting: only model, batch size, device and precision differ."""
    return [r for r in results if r.configuration.is_default]


def _curves(
    results: Sequence[Result], x: Callable[[Result], float]
) -> list[tuple[str, list[tuple[float, float]]]]:
    """Milliseconds of a step for each device and precision."""
    points: dict[str, list[tuple[float, float]]] = {}
    for r in sorted(results, key=x):
        name = f"{r.configuration.device} {r.configuration.precision}"
        points.setdefault(name, []).append((x(r), 1e3 * r.seconds.median))
    return list(points.items())


def step_plots(results: Sequence[Result]) -> str:
    """Step time by batch size for each model, and by model size for each batch size."""
    if not has_matplotlib():
        return escape(NO_PLOTS)
    defaults = _defaults(results)
    plots = ""
    for model in dict.fromkeys(r.configuration.model for r in defaults):
        chosen = [r for r in defaults if r.configuration.model == model]
        curves = _curves(chosen, lambda r: float(r.configuration.batch_size))
        title = f"{model}: milliseconds per step by batch size"
        plots += plot(title, curves, log=True, x_label="images per step", log_x=True)
    if len({r.parameters for r in defaults}) > 1:
        for batch in sorted({r.configuration.batch_size for r in defaults}):
            chosen = [r for r in defaults if r.configuration.batch_size == batch]
            curves = _curves(chosen, lambda r: r.parameters / 1e6)
            title = f"Batch {batch}: milliseconds per step by model size"
            plots += plot(title, curves, log=True, x_label="million parameters", log_x=True)
    return plots


def _crossover(results: Sequence[Result]) -> str:
    """How much faster each accelerator is than the CPU, by batch size."""
    right = [r for r in results if r.gradient_is_right]
    if {r.configuration.device for r in right} <= {"cpu"}:
        return _hint(ONLY_CPU)
    plots = escape(NO_PLOTS)
    if has_matplotlib():
        plots = "".join(
            _speedup_plot(right, model)
            for model in dict.fromkeys(r.configuration.model for r in right)
        )
    return _list(list(crossovers(right))) + _plots(plots)


def _speedup_plot(results: Sequence[Result], model: str) -> str:
    chosen = [r for r in _defaults(results) if r.configuration.model == model]
    cpu = {
        (r.configuration.precision, r.configuration.batch_size): r.seconds.median
        for r in chosen
        if r.configuration.device == "cpu"
    }
    points: dict[str, list[tuple[float, float]]] = {}
    for r in sorted(chosen, key=lambda r: r.configuration.batch_size):
        c = r.configuration
        if c.device != "cpu" and (c.precision, c.batch_size) in cpu:
            ratio = cpu[c.precision, c.batch_size] / r.seconds.median
            points.setdefault(f"{c.device} {c.precision}", []).append((c.batch_size, ratio))
    if not points:
        return ""
    batches = sorted({x for line in points.values() for x, _ in line})
    # Drawn as a gray line: below it, the CPU is faster.
    equal = (EQUAL, [(float(batch), 1.0) for batch in batches])
    title = f"{model}: times as fast as the CPU"
    curves = [*points.items(), equal]
    x_label = "images per step"
    return plot(title, curves, log=True, x_label=x_label, log_x=True, reference=EQUAL)


def stage_bars(results: Sequence[Result]) -> str:
    """A bar for each model and variant at its largest batch size, divided by the stages
    of a step.
    """
    by_batch_size = sorted(results, key=lambda r: r.configuration.batch_size)
    largest = {
        (r.configuration.model, r.configuration.variant): r for r in by_batch_size if r.stages
    }
    measured = [r for r in results if r in largest.values()]
    if not measured:
        return ""
    body = ""
    for r in measured:
        total = sum(r.stages.values())
        parts = ""
        legend = ""
        for name, seconds in r.stages.items():
            color = STAGE_COLORS.get(name, OTHER_STAGE_COLOR)
            width = f"{100 * seconds / total:.2f}%"
            parts += f"<div style='width:{width};background:{color}'></div>"
            words = f"{name} {percent(seconds / total, 0)}, {duration(seconds)}"
            legend += f"<span><i style='background:{color}'></i>{escape(words)}</span>"
        body += (
            f"<h3>{escape(r.configuration.label)}</h3><div class='split'>{parts}</div>"
            f"<div class='legend'>{legend}</div>"
        )
    return _hint("From steps that wait for the device after each stage.") + body


def bars(
    results: Sequence[Result], value_of: Callable[[Result], float], words: Callable[[float], str]
) -> str:
    """A horizontal bar for each configuration."""
    if not results:
        return ""
    highest = max(value_of(r) for r in results) or 1.0
    items = ""
    for r in results:
        value = value_of(r)
        width = f"{100 * value / highest:.1f}%"
        items += (
            f"<span>{escape(r.configuration.label)}</span>"
            f"<div class='track'><div style='width:{width}'></div></div>"
            f"<span>{escape(words(value))}</span>"
        )
    return f"<div class='bars'>{items}</div>"


def _energy(results: Sequence[Result]) -> str:
    measured = [r for r in results if r.joules_per_step is not None]
    if not measured:
        return _hint(NO_ENERGY)

    def joules_per_image(r: Result) -> float:
        return (r.joules_per_step or 0.0) / r.configuration.batch_size

    return bars(measured, joules_per_image, lambda value: f"{number(value)} J per image")


def _threads_and_workers(comparison: Comparison) -> str:
    body = ""
    if threads := thread_rows(comparison.facts, comparison.results):
        body += "<h3>Threads of a step on the CPU</h3>" + html_table(THREAD_TITLES, threads)
    if loading := loading_rows(comparison.loading):
        note = "JPEG files of 224 px, decoded to 112 px. Without workers, threads decode them."
        body += "<h3>Worker processes that load images</h3>" + _hint(note)
        body += html_table(LOADING_TITLES, loading)
    return body


def _stability(comparison: Comparison) -> str:
    if not comparison.stability:
        return ""
    note = (
        "Losses that are not finite or far above the recent ones, and updates that were skipped "
        "because a gradient was not finite. A reduced model has one layer per tower. The spread "
        "of the step time is in the table of all measurements."
    )
    return _hint(note) + html_table(STABILITY_TITLES, stability_rows(comparison.stability))


def _overhead(comparison: Comparison) -> str:
    if not comparison.overheads:
        return ""
    lines = [overhead_note(list(comparison.overheads)), *matmul_crossover(comparison.overheads)]
    body = _list(lines)
    plots = escape(NO_PLOTS)
    if has_matplotlib():
        curves = [
            (f"{kind} {name.removeprefix('matmul ')}", points)
            for kind, overheads in comparison.overheads.items()
            for name, points in _matmul_curves(overheads).items()
        ]
        title = "Matrix multiplication: GFLOP/s by size"
        plots = plot(title, curves, log=True, x_label="rows and columns", log_x=True)
    body += _plots(plots)
    for kind, overheads in comparison.overheads.items():
        body += f"<h3>{escape(overhead_title(comparison.facts, kind))}</h3>"
        body += html_table(OVERHEAD_TITLES, overhead_rows(overheads))
    return body


def _matmul_curves(overheads: Sequence[Overhead]) -> dict[str, list[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for overhead in overheads:
        if overhead.unit == "FLOP/s":
            point = (float(overhead.size), overhead.per_second / 1e9)
            curves.setdefault(overhead.operation, []).append(point)
    return curves


def _measurements(comparison: Comparison) -> str:
    note = "Spread: the distance of the quartiles, as a percentage of the median."
    measured = rows(comparison.results)
    body = _hint(note) + html_table(COLUMN_TITLES[:-1], [row[:-1] for row in measured])
    # Sentences would make the table too wide for a phone.
    notes = [f"{label}: {remark}" for label, *_, remark in measured if remark]
    if notes:
        body += "<h3>Notes</h3>" + _list(notes)
    if comparison.skipped:
        reasons = [f"{label}: {reason}" for label, reason in comparison.skipped.items()]
        body += "<h3>Not measured</h3>" + _list(reasons)
    return body
