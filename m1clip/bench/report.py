"""comparison.html: one file that asks nothing of the network, light and dark, readable on a phone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from m1clip.bench.candidate import Candidate
from m1clip.bench.doctor import Finding
from m1clip.bench.verdict import BATCHES, PHASES, CostModel, Result, plain, times_faster
from m1clip.runlog import json_safe
from m1clip.training.memory import COMPONENTS


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table that scrolls sideways by itself; cells are HTML already, columns in `numbers` stand right."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if index in numbers else ''}>{cell}</{tag}>" for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells([escape(name) for name in head], "th")}</tr>{body}</table></div>'


def figure(svg: str, caption: str) -> str:
    """A plot with a sentence under it."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def seconds(value: float | None) -> str:
    """Such as 2.57 s, 41.3 ms or 6.20 µs."""
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.0f} ns"


def size(value: float | None) -> str:
    """Such as 1.42 GB."""
    if value is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def percent(value: float | None) -> str:
    """Such as 71%; a difference far below that with two figures."""
    if value is None:
        return "-"
    return f"{value:.0%}" if value >= 0.1 else f"{value:.2g}" if value < 1e-3 else f"{value:.1%}"


def share(value: float | None) -> str:
    """A part of a whole: nobody wants to know how far below a thousandth it is."""
    return "under 0.1%" if value is not None and value < 1e-3 else percent(value)


def rate(value: float) -> str:
    """Pairs a second, or joules, with three figures and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


WIDTH = 480  # user units: narrow, so that text stays readable on a phone
ROW, BAR = 40, 12
COLOURS = 8  # --c0 ... --c7 of the page


@dataclass(frozen=True)
class Bar:
    """One line of a bar chart."""

    label: str
    value: float
    low: float
    high: float
    text: str
    colour: int = 0


def bars(rows: Sequence[Bar], title: str) -> str:
    """Horizontal bars from 0 with a whisker from quartile to quartile; the label stands above its bar."""
    most = max(row.high for row in rows) or 1.0
    scale = (WIDTH - 8) / most
    parts = []
    for index, row in enumerate(rows):
        y = index * ROW
        parts.append(
            f'<text x="0" y="{y + 14}">{escape(row.label)}</text>'
            f'<text class="v" x="{WIDTH}" y="{y + 14}">{escape(row.text)}</text>'
            f'<rect x="0" y="{y + 20}" width="{max(1.5, row.value * scale):.1f}" height="{BAR}" rx="3" '
            f'style="fill:var(--c{row.colour % COLOURS})"><title>{escape(row.label)}: {escape(row.text)}</title></rect>'
            + _whisker(row.low * scale, row.high * scale, y + 20 + BAR / 2)
        )
    return _svg(len(rows) * ROW, title, parts)


def stacked(rows: Sequence[tuple[str, dict[str, float], str]], names: Sequence[str], title: str) -> str:
    """Horizontal bars made of parts: (label, value of each part, text at the right)."""
    most = max(sum(values.values()) for _, values, _ in rows) or 1.0
    scale = WIDTH / most
    parts = []
    for index, (label, values, text) in enumerate(rows):
        y, x = index * ROW, 0.0
        parts.append(f'<text x="0" y="{y + 14}">{escape(label)}</text>')
        parts.append(f'<text class="v" x="{WIDTH}" y="{y + 14}">{escape(text)}</text>')
        for colour, name in enumerate(names):
            width = values.get(name, 0.0) * scale
            if width > 0.2:
                share = values[name] / sum(values.values())
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 20}" width="{max(0.5, width - 1):.1f}" height="{BAR}" '
                    f'style="fill:var(--c{colour % COLOURS})"><title>{escape(name)}: {share:.0%}</title></rect>'
                )
            x += width
    return legend(names) + _svg(len(rows) * ROW, title, parts)


@dataclass(frozen=True)
class Line:
    """One line of a plot: points (x, y, low, high), and a model's curve as (x, y)."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    curve: Sequence[tuple[float, float]] = ()
    colour: int | None = None  # the same thing has one colour in all plots; None: by its place in this one


def lines(series: Sequence[Line], title: str, x_name: str, y_name: str, text: Callable[[float], str]) -> str:
    """Both axes logarithmic; points with their quartiles, joined by a line; a model's curve dashed."""
    height, left, bottom = 260, 54, 34
    xs = [p[0] for line in series for p in line.points]
    ys = [value for line in series for p in line.points for value in p[1:]]
    ys += [y for line in series for x, y in line.curve if min(xs) <= x <= max(xs)]
    x_axis, y_axis = _Axis(min(xs), max(xs), left, WIDTH - 8), _Axis(min(ys), max(ys), height - bottom, 8)
    parts = [_grid(x_axis, y_axis, height, left, bottom, text)]
    colours = [place if line.colour is None else line.colour for place, line in enumerate(series)]
    for colour, line in zip(colours, series, strict=True):
        style = f"stroke:var(--c{colour % COLOURS})"
        path = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y, _, _ in line.points)
        parts.append(f'<polyline class="line" points="{path}" style="{style}"/>')
        if line.curve:
            path = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in line.curve)
            parts.append(f'<polyline class="curve" points="{path}" style="{style}"/>')
        for x, y, low, high in line.points:
            parts.append(
                f'<line class="w" x1="{x_axis(x):.1f}" x2="{x_axis(x):.1f}" y1="{y_axis(low):.1f}" '
                f'y2="{y_axis(high):.1f}"/><circle cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="4" '
                f'style="fill:var(--c{colour % COLOURS})"><title>{escape(line.name)}, {x:g}: {escape(text(y))}'
                f"</title></circle>"
            )
    parts.append(f'<text class="a" x="{WIDTH - 8}" y="{height - 2}" text-anchor="end">{escape(x_name)}</text>')
    parts.append(f'<text class="a" x="0" y="-6">{escape(y_name)}</text>')
    return legend([line.name for line in series], colours) + _svg(height, title, parts, top=18)


def legend(names: Sequence[str], colours: Sequence[int] | None = None) -> str:
    """A key of colours, as text that wraps."""
    keys = "".join(
        f'<span class="key"><i style="background:var(--c{index % COLOURS})"></i>{escape(name)}</span>'
        for index, name in zip(colours or range(len(names)), names, strict=True)
    )
    return f'<p class="legend">{keys}</p>'


class _Axis:
    """A logarithmic scale; a span of less than a factor 2 is widened, so that noise does not fill the plot."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if high < 2 * low:
            low, high = low / 1.4, high * 1.4
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + min(1.02, max(-0.02, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """1, 10, 100 ..., with 2 and 5 between where the span is short."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [tick for tick in found if self.low <= tick <= self.high]


def _grid(x_axis: _Axis, y_axis: _Axis, height: int, left: int, bottom: int, text: Callable[[float], str]) -> str:
    parts = []
    for tick in x_axis.ticks():
        x = x_axis(tick)
        parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{height - bottom}"/>')
        parts.append(f'<text class="a" x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in y_axis.ticks():
        y = y_axis(tick)
        parts.append(f'<line class="g" x1="{left}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="a" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text(tick))}</text>')
    return "".join(parts)


def _whisker(low: float, high: float, y: float) -> str:
    if high - low < 1:
        return ""
    ends = "".join(f'<line class="w" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + 4}"/>' for x in (low, high))
    return f'<line class="w" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>{ends}'


def _svg(height: float, title: str, parts: Sequence[str], top: int = 0) -> str:
    return (
        f'<svg viewBox="0 {-top} {WIDTH} {height + top}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


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
            Bar(
                _way(r), r["images_per_second"], batch / r["seconds"]["high"], batch / r["seconds"]["low"],
                rate(r["images_per_second"]), ways.index((r["candidate"]["device"], r["candidate"]["precision"])),
            )
            for r in sorted(members, key=lambda r: -r["images_per_second"])
        ]  # fmt: skip
        plots.append(
            figure(
                bars(rows[:MOST_BARS], f"samples a second, {model}, batch {batch}"),
                f"{model}, batch {batch}: samples a second; the mark goes from quartile to quartile.",
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
            points = [(r["candidate"]["batch"], *(r["seconds"][k] for k in ("median", "low", "high"))) for r in of_way]
            drawn.append(Line(" ".join(way), points, _curve(fits.get(way), of_way), colour=ways.index(way)))
        plots.append(figure(lines(drawn, f"seconds a step, {model}", "batch", "a step", seconds),
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
        parts.append(figure(stacked(rows, names, "time of a step by phase"), "Seconds of a step by phase."))
    shown = [r for r in document["results"] if r["memory"] and r["memory"]["known"]]
    if shown:
        rows = [
            (_short(r, document), {k: float(v) for k, v in r["memory"]["parts"].items()}, size(r["memory"]["total"]))
            for r in _pick(shown)
        ]
        names = [name for name in MEMORY if any(name in values for _, values, _ in rows)]
        parts.append(figure(
            stacked(rows, names, "peak memory by component"),
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
    return items if len(items) <= MOST_BARS else sorted(items, key=lambda r: -r["seconds"]["median"])[:MOST_BARS]


def _way(r: Result) -> str:
    return Candidate(**r["candidate"]).way


def _short(r: Result, document: Document) -> str:
    one = len(_groups(document["results"])) == 1
    return _way(r) if one else Candidate(**r["candidate"]).label


SectionsDocument = dict[str, Any]


def verdict(document: SectionsDocument) -> str:
    """The conclusions, in sentences."""
    lines = "".join(f"<li>{escape(line)}</li>" for line in document["verdict"])
    partial = "" if document["complete"] else "<p class='bad'>Not finished: what was measured so far.</p>"
    return f'<div class="verdict">{partial}<ul>{lines}</ul></div>'


def results(document: SectionsDocument) -> str:
    """Every figure."""
    rows = []
    for r in document["results"]:
        t, parity = r["seconds"], r["parity"]
        agrees = (
            "-"
            if parity is None
            else (f'<span class="{"good" if parity["ok"] else "bad"}">{percent(parity["gradient_difference"])}</span>')
        )
        memory = size(r["memory"]["total"]) if r["memory"] and r["memory"]["known"] else "-"
        joules = f"{rate(r['joules_per_step'])} J" if r["joules_per_step"] is not None else "not measured"
        rows.append([
            escape(Candidate(**r["candidate"]).label), seconds(t["median"]),
            f"{seconds(t['low'])} - {seconds(t['high'])}",
            str(t["n"]), rate(r["images_per_second"]), share(r["gemm_share"]), memory, joules, agrees,
            escape("; ".join(r["remarks"])),
        ])  # fmt: skip
    head = ("candidate", "a step", "quartiles", "n", "samples/s", "of GEMM rate", "peak memory", "energy a step",
            "gradient error", "remarks")  # fmt: skip
    note = (
        "<p class='dim'>Gradient error: relative difference of the whole gradient from the CPU's in fp32, on the same "
        "samples. Of GEMM rate: the model's operations a second, as a share of a large matrix product's on that "
        "device.</p>"
    )
    return f"<h2>All figures</h2>{table(head, rows, range(1, 9))}{note}"


def usage(document: SectionsDocument) -> str:
    """When to use which."""
    rows = [[escape(row["size"]), *(escape(cell) for cell in row["cells"])] for row in document["usage"]]
    return "<h2>When to use which</h2>" + table(("parameters", *(name for name, _, _ in BATCHES)), rows)


def models(document: SectionsDocument) -> str:
    """The cost models, with their error on sizes that they had not seen."""
    if not document["cost_models"]:
        return ""
    rows = []
    for f in document["cost_models"]:
        errors = sorted(abs(e) for values in f["left_out"].values() for e in values)
        unseen = f"{errors[len(errors) // 2]:.0%} median, {errors[-1]:.0%} worst" if errors else "one size only"
        rate = f"{1 / f['per_flop'] / 1e12:.3g} TFLOP/s" if f["per_flop"] else "-"
        per = f"{seconds(f['per_parameter'] * 1e8)}" if f["per_parameter"] else "0"
        rows.append([f"{f['device']} {f['precision']}", seconds(f["fixed"]) if f["fixed"] else "0", per, rate,
                     str(f["points"]), f"{f['median_error']:.0%}", unseen])  # fmt: skip
    head = ("way", "fixed", "for 100M weights", "rate", "points", "error of the fit", "error on a size left out")
    words = "<p>seconds of a step = fixed + a cost for each weight (the optimizer) + operations / rate.</p>"
    return f"<h2>Cost model</h2>{words}{table(head, rows, range(1, 7))}"


def devices(document: SectionsDocument) -> str:
    """Each device by itself."""
    rows = []
    for d in document["devices"]:
        rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in d["gemm"].items())
        o = d["overheads"]
        compile_time = (
            seconds(d["first_compile_seconds"]) if d["first_compile_seconds"] else escape(d["compile_obstacle"])
        )
        rows.append(
            [
                escape(f"{d['device']}: {d['name']}"),
                rates,
                f"{d['bandwidth'] / 1e9:,.0f} GB/s",
                *(seconds(o[k]["median"]) for k in ("launch", "synchronize", "round_trip", "allocate")),
                compile_time,
            ]
        )
    head = (
        "device",
        "matrix products",
        "memory copy",
        "launch",
        "synchronise",
        "launch and wait",
        "allocate 4 MB",
        "first compile",
    )
    copies = [
        [escape(d["device"]), size(c["bytes"]),
         *(f"{seconds(c[k]['median'])} ({c['bytes'] / c[k]['median'] / 1e9:.3g} GB/s)"
                                                  for k in ("to_device", "to_host"))]
        for d in document["devices"] for c in d["copies"]
    ]  # fmt: skip
    more = table(("device", "bytes", "to the device", "back"), copies, (1, 2, 3)) if copies else ""
    return f"<h2>Before it computes</h2>{table(head, rows)}{more}"


def micro(document: SectionsDocument) -> str:
    """The prior art's micro-benchmark, and why it misleads."""
    rows = []
    for d in document["devices"]:
        m = d["small_matmul"]
        wait = d["overheads"]["synchronize"]["median"]
        rate = m["flops"] / m["once"]["median"]
        best = max(d["gemm"].values())
        rows.append([escape(d["device"]), seconds(m["each"]["median"]), seconds(m["once"]["median"]), seconds(wait),
                     f"{rate / 1e9:.3g} GFLOP/s ({rate / best:.2%} of the device's rate)"])  # fmt: skip
    words = (
        "<p>A 16 x 512 by 512 x 16 product is 0.26 MFLOP: an accelerator is done with it before the call that "
        "starts it has returned. Timed with a wait after every call, it shows what a launch and a wait cost, and "
        "nothing about training. Timed over many calls with one wait it shows the launch alone. Neither comes near "
        "the device's rate, and the CPU, which has nothing to launch, looks fast in both. The steps above are what "
        "training does.</p>"
    )
    head = ("device", "wait after each call", "one wait after 200 calls", "a wait alone", "rate reached")
    return f"<h2>The micro-benchmark that misled</h2>{words}{table(head, rows, (1, 2, 3, 4))}"


def left_out(document: SectionsDocument) -> str:
    """What was not measured, with the reason."""
    if not document["left_out"]:
        return ""
    rows = [[escape(item["label"]), escape(item["kind"]), escape(item["why"])] for item in document["left_out"]]
    return f"<h2>Left out</h2>{table(('candidate', 'reason', 'in words'), rows)}"


def method() -> str:
    """How it was measured."""
    return (
        "<h2>How it was measured</h2><p>Each figure is the product's own training step: batch from the loader, copy, "
        "forward, backward, clipping, optimizer; on synthetic images, one caption each. The device is "
        "synchronised after each step. Steps repeat until two agree, then candidates take turns in alternating "
        "order. Medians with quartiles. Memory: resident memory of a process of its own on the CPU, the allocator's "
        "peak on an accelerator; one more step, not timed, is watched tensor by tensor to say what it was made of. "
        "</p>"
    )


AgainstDocument = dict[str, Any]


def machine(document: AgainstDocument) -> str:
    """A machine in a few words."""
    facts = document["facts"]
    return f"{facts['cuda']} + {facts['cpu']}" if facts["cuda"] else str(facts["cpu"])


def matched(document: AgainstDocument, other: AgainstDocument) -> list[tuple[Result, Result]]:
    """Results of the same candidate on both machines."""
    there = {Candidate(**r["candidate"]): r for r in other["results"]}
    samples = [(r, there.get(Candidate(**r["candidate"]))) for r in document["results"]]
    return [(here, found) for here, found in samples if found is not None]


def best_of(document: AgainstDocument) -> dict[tuple[str, int], Result]:
    """The fastest result for each model and batch."""
    found: dict[tuple[str, int], Result] = {}
    for r in document["results"]:
        key = (r["candidate"]["model"], r["candidate"]["batch"])
        if key not in found or r["seconds"]["median"] < found[key]["seconds"]["median"]:
            found[key] = r
    return found


def side_by_side(document: AgainstDocument, other: AgainstDocument) -> str:
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


PageDocument = dict[str, Any]


def page(document: PageDocument, other: PageDocument | None = None) -> str:
    """The whole report of a comparison, with another machine's beside it if there is one."""
    facts = document["facts"]
    machine = f"{facts['cuda'] + ', ' if facts['cuda'] else ''}{facts['cpu']}, {facts['cores']} cores"
    style = (resources.files("m1clip") / "bench" / "style.css").read_text(encoding="utf-8")
    body = "\n".join(part for part in (
        f"<h1>Which device, on this machine?</h1><p class='dim'>{escape(machine)}, torch {escape(facts['torch'])}, "
        f"m1clip {escape(document['m1clip'])}, {escape(document['made'])}<br>"
        f"<code>{escape(' '.join(document['command']))}</code></p>",
        verdict(document),
        speed(document),
        growth(document),
        shares(document),
        results(document),
        side_by_side(document, other) if other else "",
        usage(document),
        models(document),
        devices(document),
        micro(document),
        left_out(document),
        method(),
    ) if part)  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>m1clip compare: '
        f"{escape(machine)}</title><style>{style}</style></head>\n<body>{body}</body></html>\n"
    )


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A bar over the time budget; where there is no terminal, a line for each thing measured."""
    console = Console(highlight=False)
    if not console.is_terminal:
        yield lambda text, used: console.print(f"{min(used, 1):4.0%}  {text}", markup=False, soft_wrap=True)
        return
    columns = (SpinnerColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda text, used: bar.update(task, completed=min(used, 1.0), description=text)


def print_table(document: dict[str, Any]) -> None:
    """The figures and the verdict."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    lines = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("candidate", "a step (quartiles), n", "samples/s", "GEMM", "memory", "gradient"):
        lines.add_column(name, justify="left" if name == "candidate" else "right", overflow="fold")
    for r in document["results"]:
        t, parity = r["seconds"], r["parity"]
        memory = size(r["memory"]["total"]) if r["memory"] and r["memory"]["known"] else "-"
        lines.add_row(
            Candidate(**r["candidate"]).label,
            f"{seconds(t['median'])} \\[{seconds(t['low'])}, {seconds(t['high'])}], {t['n']}",
            rate(r["images_per_second"]),
            percent(r["gemm_share"]),
            memory,
            percent(parity["gradient_difference"]) if parity else "-",
        )
    console.print(lines)
    for line in document["verdict"]:
        console.print(f"- {line}", markup=False, soft_wrap=True)
    for r in document["results"]:
        for remark in r["remarks"]:
            console.print(f"warning: {Candidate(**r['candidate']).label}: {remark}", markup=False, soft_wrap=True)
    for item in document["left_out"]:
        console.print(f"left out: {item['label']}: {item['why']}", markup=False, soft_wrap=True)


def doctor_lines(findings: list[Finding]) -> str:
    """One line for each check, and the remedy under what is wrong."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:8} {finding.name}: {finding.text}")
        if finding.remedy:
            lines.append(f"         -> {finding.remedy}")
    counts = {level: sum(f.level == level for f in findings) for level in ("problem", "warning")}
    lines.append(f"{counts['problem']} problems, {counts['warning']} warnings")
    return "\n".join(lines)


def doctor_json(checkup: Any, findings: list[Finding]) -> str:
    """The same for a program, with the facts behind it."""
    values = {"facts": dataclasses.asdict(checkup), "findings": [dataclasses.asdict(f) for f in findings]}
    return json.dumps(json_safe(values), indent=2, ensure_ascii=False)


def plan_lines(found: dict[str, Any]) -> str:
    """A plan in lines."""
    memory, job = found["memory"], found["job"]
    parts = ", ".join(f"{name} {size(value)}" for name, value in memory["parts"].items() if value >= 5e5)
    fits = "fits" if memory["fits"] else "does NOT fit"
    lines = [
        f"model      {job['model']}: {job['parameters']:,} parameters, {job['flops_per_pair'] / 1e9:,.1f} GFLOP each "
        f"({job['text_tokens']} text tokens)",
        f"memory     {size(memory['total'])} at batch {job['batch']} in {job['precision']} with {job['optimizer']}: "
        f"{parts}",
        f"           {fits} in {size(memory['limit'])}; largest batch {memory['largest_batch']:,}, with recomputation "
        f"{memory['largest_batch_recompute']:,}, with --chunk the batch may be any",
        f"time       {seconds(found['step_seconds'])} a step, {found['steps']:,} steps: {_clock(found['seconds'])} "
        f"({found['basis']})",
        f"energy     {found['energy']}",
        "machines   "
        + ", ".join(f"{m['machines']}: {_clock(m['seconds'])} ({m['speedup']:.2f}x)" for m in found["machines"]),
        f"           {size(found['gradient_bytes'])} of gradients a step at {size(found['network'])}/s between "
        f"machines, not hidden behind the backward pass",
    ]
    return "\n".join(lines)


def plan_json(found: dict[str, Any]) -> str:
    """A plan for a program."""
    return json.dumps(json_safe(found), indent=2)


def _clock(value: float) -> str:
    if value < 60:
        return f"{value:.1f} s"
    hours, rest = divmod(round(value), 3600)
    days, hours = divmod(hours, 24)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
