"""`m1clip report`: one self-contained HTML file about a run."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import json
import math
import re
import shlex
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from m1clip.errors import UserError
from m1clip.formatting import clock, duration, number, percent, size
from m1clip.io import read_small, write_bytes
from m1clip.monitor.diagnostics import diagnose
from m1clip.monitor.history import PHASES, History, figure_of, numbers, read_snapshot, read_thumbnail, snapshot_steps
from m1clip.monitor.status import elapsed, status_of
from m1clip.runlog import SELECTION

RECALL, BACK = "text_to_image/recall@1", "image_to_text/recall@1"
GRID_BYTES = 900_000  # of the retrieval grid; a larger one is scaled down
MAX_BYTES = 5_000_000  # of the report; beyond it, it is written without images
MAX_GRIDS = 6  # runs whose images fit
COLORS = ("#0b8ba3", "#e8590c", "#7d5fff", "#2f9e44", "#d6336c", "#b58100", "#1c7ed6", "#868e96")
INK = "#76818f"  # text of a plot: readable on white and on the dark theme
NO_PLOTS = "plots need matplotlib: pip install 'm1clip[plot]'"


def html_page(title: str, body: str) -> str:
    """A complete page with an inline stylesheet, without scripts or external requests."""
    style = (resources.files("m1clip.web") / "page" / "style.css").read_text(encoding="utf-8")
    return (
        "<!doctype html>\n<html lang='en' class='report'><head><meta charset='utf-8'><meta name='viewport' "
        "content='width=device-width, initial-scale=1'><meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{body}</body></html>\n"
    )


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A horizontally scrollable table; cells are escaped here."""
    top = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in head)
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body += f"<tr><th scope='row'>{escape(first)}</th>{cells}</tr>"
    return f"<div class='scroll'><table class='values'><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def html_image(data: bytes, kind: str, alt: str, css: str = "") -> str:
    """An inline image."""
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f"<img class='{css}' alt='{escape(alt, quote=True)}' src='{source}'>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


@dataclass(frozen=True)
class Curve:
    """One line of a plot; `band` is (low, high) for each point."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    dashed: bool = False
    band: Sequence[tuple[float, float]] | None = None


@dataclass(frozen=True)
class Plot:
    """A matplotlib figure."""

    title: str
    alt: str  # alternative text
    draw: Callable[[Any], None]
    height: float = 2.5

    @property
    def name(self) -> str:
        """For a file."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def render(self, kind: str) -> bytes:
        """The figure as svg or png."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        style = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
        settings = {"font.size": 8, "svg.fonttype": "none", "axes.axisbelow": True, "text.parse_math": False}
        with rc_context({**style, **settings}):
            figure = Figure(figsize=(4.6, self.height), layout="constrained")
            axes = figure.add_subplot()
            axes.spines[["top", "right"]].set_visible(False)
            self.draw(axes)
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=160, transparent=kind == "svg")
        return buffer.getvalue()

    def html(self) -> str:
        """The figure with its title, for a page."""
        image = html_image(self.render("svg"), "svg+xml", f"{self.title}: {self.alt}")
        return f"<figure class='card'><figcaption>{escape(self.title)}</figcaption>{image}</figure>"


def has_matplotlib() -> bool:
    """Whether the extra `plot` is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def html_plots(plots: Sequence[Plot]) -> str:
    """Plots side by side, or a note if matplotlib is missing."""
    if not has_matplotlib():
        return f"<p class='hint'>{escape(NO_PLOTS)}</p>"
    return f"<div class='grid'>{''.join(plot.html() for plot in plots)}</div>" if plots else ""


def lines(title: str, curves: Sequence[Curve], log: bool = False) -> list[Plot]:
    """A line plot with confidence bands; none if nothing was measured."""
    curves = [curve for curve in curves if any(y > 0 or not log for _, y in curve.points)]

    def draw(axes: Any) -> None:
        for curve in curves:
            xs, ys = zip(*curve.points, strict=True)
            color = COLORS[curve.color % len(COLORS)]
            marker = "o" if len(xs) < 30 else None
            axes.plot(
                xs, ys, "--" if curve.dashed else "-", color=color, label=curve.name, marker=marker, markersize=2.5
            )
            if curve.band and not log:
                axes.fill_between(xs, *zip(*curve.band, strict=True), color=color, alpha=0.15, linewidth=0)
        if log:
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_formatter(lambda value, _: number(value))
            axes.yaxis.set_minor_formatter(lambda value, _: number(value))
        axes.grid(alpha=0.25)
        axes.set_xlabel("step")
        if len(curves) > 1:
            axes.legend(frameon=False)

    alt = "; ".join(f"{c.name} from {number(c.points[0][1])} to {number(c.points[-1][1])}" for c in curves)
    return [Plot(title, alt, draw)] if curves else []


def bars(title: str, rows: Sequence[tuple[str, float, str]], top: float | None = None) -> list[Plot]:
    """Horizontal bars of (label, value, text of the value); none without rows."""

    def draw(axes: Any) -> None:
        drawn = axes.barh([_short(label) for label, _, _ in rows], [value for _, value, _ in rows], color=COLORS[0])
        axes.bar_label(drawn, [text for _, _, text in rows], padding=3)
        axes.set_xlim(0, 1.3 * (top or max(value for _, value, _ in rows) or 1.0))
        axes.set_xticks([])
        axes.invert_yaxis()

    alt = "; ".join(f"{label} {text}" for label, _, text in rows)
    return [Plot(title, alt, draw, 0.5 + 0.2 * len(rows))] if rows else []


def heatmap(title: str, labels: Sequence[str], rows: Sequence[Sequence[float]], alt: str) -> list[Plot]:
    """Colors from dark (low) to bright (high); none without values."""

    def draw(axes: Any) -> None:
        image = axes.imshow(rows, aspect="auto", cmap="viridis", interpolation="nearest")
        axes.figure.colorbar(image)
        axes.set_xticks([])
        axes.set_yticks(range(len(labels)), [_short(label) for label in labels])

    found = any(math.isfinite(value) for row in rows for value in row)
    return [Plot(title, alt, draw, max(2.5, 0.5 + 0.16 * len(labels)))] if found else []


def _short(label: str) -> str:
    """A label short enough for a plot."""
    return label if len(label) <= 32 else label[:31] + "…"


def step_curves(histories: Sequence[History], name: str, factor: float = 1.0) -> list[Curve]:
    """A figure of the steps, one curve per run."""
    points = [[(row["step"], factor * row[name]) for row in h.steps if name in row] for h in histories]
    return [Curve(h.name, each, i) for i, (h, each) in enumerate(zip(histories, points, strict=True))]


def evaluation_curve(history: History, name: str, label: str, color: int, factor: float = 100.0) -> Curve:
    """A figure of the evaluations, with its interval where there is one."""
    rows = [(row, value) for row in history.evaluations if (value := figure_of(row, name)) is not None]
    band = None
    if rows and all(f"{name}/low" in row for row, _ in rows):
        band = [(factor * row[f"{name}/low"], factor * row[f"{name}/high"]) for row, _ in rows]
    return Curve(label, [(row["step"], factor * value) for row, value in rows], color, band=band)


def curve_plots(histories: Sequence[History]) -> list[Plot]:
    """Loss, scores, temperature, learning rate, gradients, speed, memory, power."""
    many = list(enumerate(histories))
    metrics = " or ".join(dict.fromkeys(SELECTION[h.metric] for h in histories)).capitalize()
    recall = [evaluation_curve(h, RECALL, h.name, i) for i, h in many]
    if len(histories) == 1:
        recall = [evaluation_curve(histories[0], RECALL, "text to image", 0)]
        recall.append(evaluation_curve(histories[0], BACK, "image to text", 1))
        chance = evaluation_curve(histories[0], f"{RECALL}/chance", "chance", 7)
        recall.append(Curve("chance", chance.points, 7, dashed=True))
    retention = [evaluation_curve(h, "retention", h.name, i) for i, h in many]
    retention += [
        Curve(f"{h.name}, before", evaluation_curve(h, "retention_before", "", i).points, i, dashed=True)
        for i, h in many
    ]
    best = [evaluation_curve(h, h.metric, h.name, i) for i, h in many]
    scores = [
        *lines("Loss", step_curves(histories, "loss"), log=True),
        *lines(f"{metrics} on validation, % (selects the best model)", best),
        *lines("Recall@1 on validation, %", recall),
        *lines("Retention (--retention-data), %", retention),
        *lines("Gradient norm", step_curves(histories, "grad_norm"), log=True),
    ]
    for name, title, factor in STEP_PLOTS:
        scores += lines(title, step_curves(histories, name, factor))
    return scores


STEP_PLOTS = (
    ("temperature", "Temperature", 1.0),
    ("lr", "Learning rate", 1.0),
    ("images_per_second", "Images per second", 1.0),
    ("memory_bytes", "Memory, GB", 1e-9),
    ("watts", "Power, W", 1.0),
    ("celsius", "Temperature of the machine, °C", 1.0),
)
LEVELS = ("easy", "medium", "hard")
GEOMETRY = ("alignment", "uniformity_image", "uniformity_text", "modality_gap")


def analysis_plots(history: History) -> list[Plot]:
    """Difficulty, geometry, groups and layers of one run."""

    def over_time(key: str, names: Sequence[str], factor: float) -> list[Curve]:
        labels = [(i, f"{key}/{name}", name.replace("_", " ")) for i, name in enumerate(names)]
        return [evaluation_curve(history, name, label, i, factor) for i, name, label in labels]

    def fractions(values: dict[str, Any]) -> list[tuple[str, float, str]]:
        return [(name, value, f"{percent(value)} of {n:,}") for name, (value, n) in values.items()]

    analysis = (history.evaluations.last or {}).get("analysis") or {}
    found = [
        *lines("Accuracy by similarity of the wrong caption, %", over_time("analysis/difficulty", LEVELS, 100.0)),
        *lines("Accuracy against generated negatives, %", over_time("analysis/negatives", LEVELS, 100.0)),
        *lines("Alignment, uniformity, modality gap", over_time("analysis", GEOMETRY, 1.0)),
        *bars("Recall@1 by caption length", fractions(analysis.get("length") or {}), 1.0),
    ]
    groups: dict[str, dict[str, Any]] = {}
    for name, value in (analysis.get("groups") or {}).items():
        attribute, _, word = name.partition("/")
        groups.setdefault(attribute, {})[word] = value
    for attribute, values in groups.items():
        found += bars(f"Recall@1 by {attribute}", sorted(fractions(values), key=lambda row: row[1]), 1.0)
    layers = [row["layers"] for row in history.layers if isinstance(row.get("layers"), dict)]
    names = list(layers[-1]) if layers else []
    for which, title in enumerate(("Gradient norm", "Update / weight")):
        rows = [[_log10(row[name][which]) if name in row else math.nan for row in layers] for name in names]
        newest = "; ".join(f"{name} {layers[-1][name][which]}" for name in names)
        found += heatmap(f"{title} by layer over the run, log10", names, rows, newest)
    return found


def _log10(value: Any) -> float:
    return math.log10(value) if numbers([{"value": value}], "value") and value > 0 else math.nan


def machine_plots(history: History) -> list[Plot]:
    """Step time and memory by component."""
    sums = {phase: sum(numbers(history.steps, f"seconds/{phase}")) for phase in PHASES}
    total = sum(sums.values())
    phases = [(phase, value / total, percent(value / total)) for phase, value in sums.items() if value > 0]
    parts = [
        (name, float(value), size(value))
        for name, value in history.memory.items()
        if name not in ("v", "time", "peak") and numbers([history.memory], name) and value > 0
    ]
    return [
        *bars("Step time by phase", phases, 1.0),
        *bars(f"Memory, of a peak of {size(history.memory.get('peak'))}", parts),
    ]


def scores(history: History) -> tuple[str, dict[str, Any]]:
    """The final scores: of the test split if the run has finished, else of its best evaluation."""
    if history.end:
        return f"{history.end.get('split', 'test')} split, after training", history.end
    if (best := history.best()) is not None:
        return f"{best.get('split', 'val')} split, best evaluation so far (step {best['step']:,})", best
    return "no evaluation yet", {}


def summary(histories: Sequence[History]) -> str:
    """Each metric with interval and chance; with several runs, one column per run and the difference to the first."""
    found = [scores(history) for history in histories]
    first = found[0][1]
    names = list(dict.fromkeys(name for _, record in found for name in record if f"{name}/chance" in record))
    note = "; ".join(f"{h.name}: {title}" for h, (title, _) in zip(histories, found, strict=True))
    rows = []
    for name in names:
        with_it = next(record for _, record in found if name in record)
        row = [SELECTION.get(name, name), _score(name, with_it[f"{name}/chance"])]
        if len(found) == 1:
            low, high = (_score(name, first[f"{name}/{end}"]) for end in ("low", "high"))
            rows.append([*row, _score(name, first[name]), f"{low} to {high}", f"{first[f'{name}/n']:,}"])
        else:
            rows.append([*row, *(_difference(name, first, record) for _, record in found)])
    columns = ["value", "95% interval", "n"] if len(found) == 1 else [history.name for history in histories]
    if len(found) > 1:
        note += (
            ". In brackets: the difference to the first run. A star: the 95% intervals do not overlap; "
            "runs on different data or splits cannot be compared."
        )
    return f"<p class='hint'>{escape(note)}</p>" + (html_table(["metric", "chance", *columns], rows) if rows else "")


def _score(name: str, value: float) -> str:
    return number(value) if name.endswith("rank") else percent(value)


def _difference(name: str, first: dict[str, Any], record: dict[str, Any]) -> str:
    if name not in record:
        return "-"
    if record is first or name not in first:
        return _score(name, record[name])
    change = record[name] - first[name]
    apart = record[f"{name}/low"] > first[f"{name}/high"] or record[f"{name}/high"] < first[f"{name}/low"]
    words = f"{change:+g}" if name.endswith("rank") else f"{100 * change:+.1f}"
    return f"{_score(name, record[name])} ({words}{' *' if apart else ''})"


def costs(histories: Sequence[History]) -> str:
    """State, steps, time, speed, memory, energy: one column per run."""

    def median(history: History, name: str, words: Callable[[float], str]) -> str:
        values = numbers(history.steps, name)
        return words(statistics.median(values)) if values else "not measured"

    def ends(history: History, name: str) -> str:
        values = numbers(history.steps, name)
        return f"{number(values[0])} to {number(values[-1])}" if values else "-"

    def energy(history: History, name: str, unit: str) -> str:
        values = numbers([history.end], name)
        return f"{values[0]:,.4g} {unit}" if values else "not measured"

    rows: dict[str, Callable[[History], str]] = {
        "state": lambda h: status_of(h).message,
        "steps": lambda h: f"{h.step:,} of {h.total:,}",
        "training time": lambda h: clock(elapsed(h)),
        "images per second, median": lambda h: median(h, "images_per_second", lambda value: f"{value:,.0f}"),
        "step, median": lambda h: median(h, "step_seconds", duration),
        "fraction of a step spent on data, median": lambda h: median(h, "data_fraction", percent),
        "loss, first to last": lambda h: ends(h, "loss"),
        "temperature, first to last": lambda h: ends(h, "temperature"),
        "peak memory": lambda h: size(h.end.get("peak_bytes") or h.memory.get("peak")),
        "power, median": lambda h: median(h, "watts", lambda value: f"{value:.1f} W"),
        "energy per epoch": lambda h: energy(h, "joules_per_epoch", "J"),
        "mean recall per watt-hour": lambda h: energy(h, "recall_per_watt_hour", "points"),
    }
    table = [[name, *(words(history) for history in histories)] for name, words in rows.items()]
    return html_table(["", *(history.name for history in histories)], table)


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Read the runs and write the page."""
    histories = [History(run).poll() for run in runs]
    for history in histories:
        if not history.start:
            raise UserError(f"{history.run}: has not started yet: its log is empty")
    page = _page(histories, images=True)
    if len(page) > MAX_BYTES:
        page = _page(histories, images=False)
    write_bytes(out, page)
    return out


def write_images(runs: Sequence[Path], folder: Path) -> list[Path]:
    """Write each plot as a PNG file; skips what was not measured."""
    if not has_matplotlib():
        raise UserError(f"--png: {NO_PLOTS}, or remove --png")
    histories = [History(run).poll() for run in runs]
    plots = {plot.name: plot for plot in curve_plots(histories)}
    for history in histories:
        plots |= {f"{history.name}-{plot.name}": plot for plot in analysis_plots(history) + machine_plots(history)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in plots.items():
        write_bytes(folder / f"{name}.png", plot.render("png"))
    return [folder / f"{name}.png" for name in plots]


def _page(histories: Sequence[History], images: bool) -> bytes:
    names = ", ".join(history.name for history in histories)
    version = escape(str(histories[0].start.get("version", "")))
    found = [(h, each) for h in histories for each in diagnose(h, 0.0, "finished")]
    several = len(histories) > 1
    items = "".join(
        f"<li class='{each.level}'>{escape(f'{h.name}: ' if several else '')}{escape(each.message)}</li>"
        for h, each in found
    )
    body = f"<h1>{escape(names)}</h1><p class='hint'>m1clip {version}, {time.strftime('%d %B %Y, %H:%M')}</p>"
    diagnostics = f"<ul class='diagnostics'>{items}</ul>" if items else ""
    body += _section("Summary", diagnostics + summary(histories) + "<h3>Cost</h3>" + costs(histories))
    body += _section("Curves", html_plots(curve_plots(histories)))
    for place, history in enumerate(histories):
        mark = f": {history.name}" if several else ""
        body += _section(f"Analysis{mark}", html_plots(analysis_plots(history)))
        body += _section(f"Time and memory{mark}", html_plots(machine_plots(history)))
        if images and place < MAX_GRIDS:
            body += _section(f"Examples{mark}", _retrieval_grid(history) + _snapshot(history))
        body += _section(f"Settings{mark}", _settings(history))
    return html_page(f"m1clip: {names}", body).encode("utf-8", "replace")  # a folder name may be invalid UTF-8


def _retrieval_grid(history: History) -> str:
    try:
        data = read_small(history.run / "retrieval.png", inside=history.run)
        return _embedded(data, "Captions and the images they retrieve, correct and wrong ones marked", "wide")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"<p class='hint'>retrieval.png left out: {escape(getattr(error, 'strerror', None) or str(error))}</p>"


def _embedded(data: bytes, alt: str, css: str = "") -> str:
    """An image of a run folder: checked, and scaled down until it is small. ValueError for a damaged or huge one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as opened:
                kind, image = str(opened.format).lower(), opened.convert("RGB")
    except Exception as error:  # the decoders raise many kinds
        raise ValueError(f"cannot be decoded: {error}") from error
    for width in (1200, 900, 700, 500):
        if len(data) <= GRID_BYTES:
            break
        image.thumbnail((width, 4 * width))
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=80)
        data, kind = buffer.getvalue(), "jpeg"
    return html_image(data, kind, alt, css)


def _snapshot(history: History) -> str:
    """Similarity matrix and confusions of the last evaluation."""
    last = read_snapshot(history.run, max(snapshot_steps(history.run), default=0))
    if last is None:
        return ""
    values, captions, step = last["matrix"]["values"], last["matrix"]["captions"], f"validation, step {last['step']:,}"
    correct = sum(captions[row.index(max(row))] == captions[i] for i, row in enumerate(values))
    alt = f"{correct} of {len(values)} images are closest to their own caption"
    title = f"Similarity of images (rows) and captions (columns), {step}"
    confusions = "".join(_confusion(history.run, each) for each in last["confusions"])
    confusions = confusions or "<p class='hint'>none: every caption finds its own image first</p>"
    return (
        f"{html_plots(heatmap(title, [], values, alt))}<p class='hint'>{alt}</p>"
        f"<h3>Nearest confusions, {step}</h3>{confusions}"
    )


def _confusion(run: Path, each: dict[str, Any]) -> str:
    images = ""
    for kind, index in (("right", each["right"]), ("found", each["found"])):
        with contextlib.suppress(ValueError):
            image = _embedded(read_thumbnail(run, index) or b"", kind)
            images += f"<figure class='thumb {kind}'>{image}{kind}</figure>"
    words = f"“{escape(each['caption'])}” <span class='hint'>retrieved instead: “{escape(each['truth'])}”</span>"
    return f"<div class='confusion'><div class='thumbs'>{images}</div><p>{words}</p></div>"


def _settings(history: History) -> str:
    try:
        config = read_small(history.run / "config.toml", inside=history.run).decode("utf-8", "replace")
    except OSError as error:
        config = f"no config.toml: {error.strerror}"
    environment = json.dumps(history.environment, indent=2, ensure_ascii=False)
    again = f"m1clip train --config {shlex.quote(str(history.run / 'config.toml'))} --run runs/again"
    words = history.environment.get("command")
    command = shlex.join(["m1clip", *map(str, words[1:])]) if isinstance(words, list) and words else "unknown"
    return (
        f"<p>Reproduce: <code>{escape(again)}</code><br>Command: <code>{escape(command)}</code></p>"
        f"<div class='grid'><div><h3>config.toml</h3><pre>{escape(config)}</pre></div>"
        f"<div><h3>environment.json</h3><pre>{escape(environment)}</pre></div></div>"
    )
